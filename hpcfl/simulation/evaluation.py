"""Evaluation: every client's model on its own samples; changes no state and counts no bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message, SameKinds
from hpcfl.methods.base import Method, State
from hpcfl.simulation.federation import Federation, stack
from hpcfl.storage.ledger import ClientMetrics, Evaluation
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.metrics import CLIENT_METRICS, confusion, metrics_of
from hpcfl.training.scoring import correctness_and_loss


class Evaluator:
    """Scores models of this rank's clients."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._method, self._adapter = federation.method, federation.adapter
        train = self._method.context.train
        self._scores_the_download = (
            self._method.traits.eval_after == "download"
            and train.finetune_epochs == 0
            and type(self._method).model_after_download is Method.model_after_download
        )
        self._split, self._scores_val = federation.experiment.run.eval_split, train.patience is not None

    def evaluate(self, server: State, done: int) -> Evaluation:
        """Score every client after `done` rounds, unseen ones too. Collective."""
        found = Evaluation.zeros(self._federation.num_clients + self._federation.num_unseen)
        for cohort in self._everyone(done):
            # frees each group's models before the next are made; a loop variable would keep them
            deque(self.models(server, cohort, found), maxlen=0)
        return found

    def _everyone(self, done: int) -> Iterator[Cohort]:
        federation = self._federation
        parts = federation.in_training, federation.unseen
        return chain.from_iterable(federation.cohorts(done, clients) for clients in parts)

    def models(self, server: State, cohort: Cohort, found: Evaluation | None = None) -> Iterator[Message]:
        """Yield the evaluated models of this rank's members of a cohort, group by group.

        Clients that take no part in training adapt first, each time as new clients. When the iteration ends,
        the server's `found` holds the scores; None: they are not scored. Collective: every rank must iterate
        to the end.
        """
        rows = [torch.zeros(0, 4, dtype=torch.float64)]
        is_unseen = self._federation.is_unseen(cohort)
        make = self._adapter.new_client_model if is_unseen else self._adapter.eval_model
        is_same = is_unseen or self._scores_the_download
        scores_val = self._scores_val and not is_unseen
        same = SameKinds()
        for clients, down in self._federation.downloads(server, cohort):
            before = None
            if found is not None and not is_same:
                before = self.scores(clients, self._adapter.model_after_download(clients, down))
            model = make(clients, down)
            same.check(clients.ids[0], model.row_kinds())
            if found is not None:
                scores = self.scores(clients, model)
                first = (scores if before is None else before)[:, :1]
                of_val = self.scores(clients, model if scores_val else Message(), "val")[:, :1]
                rows.append(torch.cat([scores, first, of_val], dim=1))
            yield model
            del model
        if found is None:
            return
        figures = self._federation.channel.collect(cohort, torch.cat(rows))
        if figures is not None:
            ids = list(cohort.clients)
            for of_all, figure in zip(found.columns, figures.T.numpy(), strict=True):
                of_all[ids] = figure

    def client_metrics(self, server: State, done: int) -> ClientMetrics:
        """Return the CLIENT_METRICS of every client's evaluated model after `done` rounds. Collective.

        On ranks other than the server there are only zeros.
        """
        federation = self._federation
        figures = np.zeros((federation.num_clients + federation.num_unseen, len(CLIENT_METRICS)))
        cells = [np.zeros((0, 4), np.int64)]
        for cohort in self._everyone(done):
            found, own_cells = self._metrics_here(cohort, self.models(server, cohort))
            collected = federation.channel.collect(cohort, found)
            if collected is not None:
                figures[list(cohort.clients)] = collected.numpy()
            gathered = federation.world.gather_bytes(own_cells.tobytes())
            cells += [np.frombuffer(part, np.int64).reshape(-1, 4) for part in gathered or ()]
        lines = np.concatenate(cells)
        return ClientMetrics(figures, lines[np.lexsort(lines.T[::-1])])

    def _metrics_here(self, cohort: Cohort, models: Iterator[Message]) -> tuple[Tensor, np.ndarray]:
        """Return CLIENT_METRICS [own members, F] and lines of `ClientMetrics.confusion` of a cohort's members
        on this rank. Collective, as `models` is."""
        rows = [torch.zeros(0, len(CLIENT_METRICS), dtype=torch.float64)]
        cells = [np.zeros((0, 4), np.int64)]

        def score(model: Message, group: tuple[slice, ClientGroup]) -> None:
            _, clients = group
            for position, client in enumerate(clients.ids):
                probabilities, y = self._adapter.predict(clients, model, position, self._split)
                scored = probabilities.double().cpu().numpy(), y.cpu().numpy()
                rows.append(torch.tensor([metrics_of(*scored)], dtype=torch.float64))
                counts = confusion(*scored)
                places = np.nonzero(counts)
                ids = np.full(len(places[0]), client)
                cells.append(np.column_stack([ids, *places, counts[places]]))

        # without a loop variable, as in `evaluate`; models first, so that they are iterated to their end
        deque(map(score, models, self._federation.groups(cohort)), maxlen=0)
        return torch.cat(rows), np.concatenate(cells)

    def try_new_client_download(self, server: State) -> None:
        """Call `new_client_download` once before the first round, so that a method without it fails early.
        Collective."""
        cohort = next(self._federation.cohorts(0, self._federation.unseen), None)
        if cohort is not None:
            self._federation.on_server(partial(self._adapter.new_client_download, server, cohort))

    def scores(self, clients: ClientGroup, model: Message, split: str | None = None) -> Tensor:
        """Return (accuracy, mean loss) of each client's model as float64 [C, 2]; nan where a client has none.

        `split` defaults to `run.eval_split`.
        """
        split = split or self._split
        if not model:
            return torch.full((len(clients), 2), torch.nan, dtype=torch.float64)
        if self._method.traits.predicts_by == "network":
            together = clients.scores(model, split)
            if together is not None:
                return together
        return torch.cat([self._score(clients, model, position, split) for position in range(len(clients))])

    def client_diagnostics(self, done: int) -> State:
        """Bring the diagnostics of all clients to the server, one tensor [N, ...] per name. Collective."""
        federation, method = self._federation, self._method
        kept = federation.worker_context.state
        if not any(one.of_clients or one.name in kept for one in method.diagnostics):
            return {}
        cohort = federation.cohort_of(done, range(federation.num_clients))
        rows = [
            Message(per_client=self._adapter.client_diagnostics(clients), num_clients=len(clients))
            for _, clients in federation.groups(cohort)
        ]
        return federation.channel.up(stack(rows, federation.own(cohort)), cohort).collect()

    def _score(self, clients: ClientGroup, model: Message, position: int, split: str) -> Tensor:
        """Return (accuracy, mean loss) of one client as float64 [1, 2]."""
        is_right, loss = correctness_and_loss(*self._adapter.predict(clients, model, position, split))
        return torch.stack([is_right.mean(), loss.mean()]).cpu().unsqueeze(0)
