"""Evaluation: every client's model on its own samples; changes no state and counts no bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message
from hpcfl.methods.base import Method, State
from hpcfl.simulation.federation import Federation, stack
from hpcfl.storage.ledger import ClientMetrics, Evaluation
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.metrics import CLIENT_METRICS, confusion, metrics_of
from hpcfl.training.scoring import verdicts


class Evaluator:
    """Scores models of this rank's clients."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._method, self._adapter = federation.method, federation.adapter
        self._finetunes = federation.config.train.finetune_epochs > 0
        self._split = federation.config.run.eval_split
        self._scores_val = federation.config.train.patience is not None

    def evaluate(self, server: State, done: int) -> Evaluation:
        """Score every client after `done` rounds. Collective."""
        found = Evaluation.zeros(self._federation.num_clients)
        for cohort in self._federation.everyone(done):
            # frees each group's models before the next are made; a loop variable would keep them
            deque(self.models(server, cohort, found), maxlen=0)
        return found

    def models(self, server: State, cohort: Cohort, found: Evaluation | None = None) -> Iterator[Message]:
        """Yield the evaluated models of this rank's members of a cohort, group by group.

        When the iteration ends, the server's `found` holds their scores; None: they are not scored.
        Collective: every rank must iterate to the end.
        """
        rows = [torch.zeros(0, 4, dtype=torch.float64)]
        is_same = self._method.traits.eval_after == "download" and not self._finetunes
        for clients, down in self._federation.evaluation_downloads(server, cohort):
            before = None
            if found is not None and not is_same:
                before = self.scores(clients, self._adapter.model_after_download(clients, down))
            model = self._adapter.eval_model(clients, down)
            if found is not None:
                scores = self.scores(clients, model)
                first = (scores if before is None else before)[:, :1]
                of_val = self.scores(clients, model if self._scores_val else Message(), "val")[:, :1]
                rows.append(torch.cat([scores, first, of_val], dim=1))
            yield model
            del model
        figures = None if found is None else self._federation.channel.collect(cohort, torch.cat(rows))
        if found is not None and figures is not None:
            everyone = list(cohort.clients)
            of_each = (found.accuracy, found.loss, found.after_download, found.accuracy_val)
            for of_all, figure in zip(of_each, figures.T.numpy(), strict=True):
                of_all[everyone] = figure

    def evaluate_unseen(self, server: State, done: int) -> Evaluation:
        """Let every client that takes no part in training adapt after `done` rounds; score it. Collective.

        Every evaluation starts from new clients and keeps only the scores. The first client is number 0.
        """
        found = Evaluation.zeros(self._federation.num_unseen)
        for cohort in self._federation.unseen(done):
            deque(self.adapted(server, cohort, found), maxlen=0)
        return found

    def adapted(self, server: State, cohort: Cohort, found: Evaluation | None = None) -> Iterator[Message]:
        """Yield the models as `models` does, for clients that take no part in training. Collective."""
        rows = [torch.zeros(0, 2, dtype=torch.float64)]
        for clients, down in self._federation.new_client_downloads(server, cohort):
            model = self._adapter.new_client_model(clients, down)
            if found is not None:
                rows.append(self.scores(clients, model))
            yield model
            del model
        figures = None if found is None else self._federation.channel.collect(cohort, torch.cat(rows))
        if found is not None and figures is not None:
            numbers = [client - self._federation.num_clients for client in cohort.clients]
            found.accuracy[numbers], found.loss[numbers] = figures.T.numpy()

    def client_metrics(self, server: State, done: int) -> ClientMetrics:
        """Return the CLIENT_METRICS of every client's evaluated model after `done` rounds. Collective.

        On ranks other than the server there are only zeros.
        """
        federation = self._federation
        figures = np.zeros((federation.num_clients + federation.num_unseen, len(CLIENT_METRICS)))
        cells = [np.zeros((0, 4), np.int64)]
        for models_of, cohorts in (
            (self.models, federation.everyone(done)),
            (self.adapted, federation.unseen(done)),
        ):
            for cohort in cohorts:
                found, own_cells = self._metrics_here(cohort, models_of(server, cohort))
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
                probabilities, y = self._predictions(clients, model, position, self._split)
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
        cohort = next(self._federation.unseen(0), None)
        if cohort is not None:
            self._federation.on_server(partial(self._adapter.new_client_download, server, cohort))

    def scores(self, clients: ClientGroup, model: Message, split: str | None = None) -> Tensor:
        """Return (accuracy, mean loss) of each client's model as float64 [C, 2]; nan where a client has none.

        `split` defaults to `run.eval_split`.
        """
        split = split or self._split
        if not model:
            return torch.full((len(clients), 2), torch.nan, dtype=torch.float64)
        if type(self._method).predict is Method.predict:
            together = clients.scores(model, split)
            if together is not None:
                return together
        return torch.cat([self._score(clients, model, position, split) for position in range(len(clients))])

    def client_diagnostics(self, done: int) -> State:
        """Bring the diagnostics of all clients to the server, one tensor [N, ...] per name. Collective."""
        federation, method = self._federation, self._method
        is_default = type(method).client_diagnostics is Method.client_diagnostics
        if is_default and not any(one.name in federation.worker_context.state for one in method.diagnostics):
            return {}
        cohort = federation.cohort_of(done, range(federation.num_clients))
        rows = [
            Message(per_client=method.client_diagnostics(clients), num_clients=len(clients))
            for _, clients in federation.groups(cohort)
        ]
        return federation.channel.up(stack(rows), cohort).collect()

    def _score(self, clients: ClientGroup, model: Message, position: int, split: str) -> Tensor:
        """Return (accuracy, mean loss) of one client as float64 [1, 2]."""
        is_right, loss = verdicts(*self._predictions(clients, model, position, split))
        return torch.stack([is_right.mean(), loss.mean()]).cpu().unsqueeze(0)

    def _predictions(
        self, clients: ClientGroup, model: Message, position: int, split: str
    ) -> tuple[Tensor, Tensor]:
        """Return the class probabilities [n, K] of one client's samples of a split, and their classes [n]."""
        x, y = clients.samples(split, position)
        return self._method.predict(clients, model, position, x), y
