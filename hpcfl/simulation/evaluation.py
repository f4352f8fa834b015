"""Evaluation: every client's model on its own samples; changes no state and counts no bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message
from hpcfl.methods.base import Method, State
from hpcfl.simulation.federation import Federation, stack
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.scoring import verdicts


@dataclass(frozen=True)
class Evaluation:
    """Figures of each client [N]: zero before an evaluation, and on ranks other than the server."""

    accuracy: np.ndarray
    loss: np.ndarray
    after_download: np.ndarray
    """Accuracy of the model right after a download; nan where a client has none."""

    @staticmethod
    def zeros(num_clients: int) -> Evaluation:
        """Return the evaluation of `num_clients` clients before any of them is scored: all zeros."""
        return Evaluation(*np.zeros((3, num_clients)))


class Evaluator:
    """Scores models of this rank's clients."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._method, self._adapter = federation.method, federation.adapter
        self._finetunes = federation.config.train.finetune_epochs > 0
        self._split = federation.config.run.eval_split
        self._sampled: set[int] = set()
        self._counted_rounds = 0

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
        rows = [torch.zeros(0, 3, dtype=torch.float64)]
        is_same = self._method.traits.eval_after == "download" and not self._finetunes
        for clients, down in self._federation.evaluation_downloads(server, cohort):
            before = None
            if found is not None and not is_same:
                before = self.scores(clients, self._adapter.model_after_download(clients, down))
            model = self._adapter.eval_model(clients, down)
            if found is not None:
                scores = self.scores(clients, model)
                rows.append(torch.cat([scores, (scores if before is None else before)[:, :1]], dim=1))
            yield model
            del model
        figures = None if found is None else self._federation.channel.collect(cohort, torch.cat(rows))
        if found is not None and figures is not None:
            everyone = list(cohort.clients)
            found.accuracy[everyone], found.loss[everyone], found.after_download[everyone] = figures.T.numpy()

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

    def try_new_client_download(self, server: State) -> None:
        """Call `new_client_download` once before the first round, so that a method without it fails early.
        Collective."""
        cohort = next(self._federation.unseen(0), None)
        if cohort is not None:
            self._federation.on_server(partial(self._adapter.new_client_download, server, cohort))

    def scores(self, clients: ClientGroup, model: Message) -> Tensor:
        """Return (accuracy, mean loss) of each client's model as float64 [C, 2]; nan where a client has
        none."""
        if not model:
            return torch.full((len(clients), 2), torch.nan, dtype=torch.float64)
        if type(self._method).predict is Method.predict:
            together = clients.scores(model, self._split)
            if together is not None:
                return together
        return torch.cat([self._score(clients, model, position) for position in range(len(clients))])

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

    def coverage(self, done: int) -> float:
        """Return the share of clients that were sampled at least once in `done` rounds."""
        while self._counted_rounds < done and len(self._sampled) < self._federation.num_clients:
            self._sampled.update(self._federation.cohort(self._counted_rounds).clients)
            self._counted_rounds += 1
        return len(self._sampled) / self._federation.num_clients

    def _score(self, clients: ClientGroup, model: Message, position: int) -> Tensor:
        """Return (accuracy, mean loss) of one client as float64 [1, 2]."""
        x, y = clients.samples(self._split, position)
        probabilities = self._method.predict(clients, model, position, x)
        is_right, loss = verdicts(probabilities, y)
        return torch.stack([is_right.mean(), loss.mean()]).cpu().unsqueeze(0)
