"""Evaluation: every client's model on its own samples; changes no state and counts no bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.messages import Message
from hpcfl.methods.base import State
from hpcfl.simulation.federation import Federation, stack
from hpcfl.training.clients import Clients


@dataclass(frozen=True)
class Evaluation:
    """What the server knows after an evaluation, by client [N]."""

    accuracy: np.ndarray
    loss: np.ndarray
    after_download: np.ndarray
    """Accuracy of the model right after a download; nan where a client has none."""


class Evaluator:
    """Scores models of this rank's clients."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._method, self._driver, self._config = federation.method, federation.driver, federation.config
        self._sampled: set[int] = set()
        self._counted_rounds = 0

    def evaluate(self, server: State, done: int) -> Evaluation | None:
        """Score every client after `done` rounds; None on other ranks than the server. Collective."""
        federation = self._federation
        accuracy, loss, after_download = np.zeros((3, federation.num_clients))
        for cohort in federation.everyone(done):
            rows = [torch.zeros(0, 3, dtype=torch.float64)]
            for clients, down in federation.evaluation_downloads(server, cohort):
                rows.append(self._figures(clients, down))
            figures = federation.collect(cohort, torch.cat(rows))
            if figures is not None:
                everyone = list(cohort.clients)
                accuracy[everyone], loss[everyone], after_download[everyone] = figures.T.numpy()
        return Evaluation(accuracy, loss, after_download) if federation.world.is_server else None

    def scores(self, clients: Clients, model: Message) -> Tensor:
        """Return (accuracy, mean loss) of each client's model as float64 [C, 2]; nan where there is none."""
        if not model:
            return torch.full((len(clients), 2), torch.nan, dtype=torch.float64)
        return torch.cat([self._score(clients, model, position) for position in range(len(clients))])

    def client_history(self, done: int) -> State:
        """Bring what clients keep for the history to the server, [N, ...] a name. Collective."""
        federation = self._federation
        cohort = federation.cohort_of(done, range(federation.num_clients))
        rows = [
            Message(rows=self._method.client_history(clients), num_clients=len(clients))
            for _, clients in federation.groups(cohort)
        ]
        return federation.channel.up(stack(rows), cohort).collect()

    def coverage(self, done: int) -> float:
        """Return the share of clients that were sampled at least once in `done` rounds."""
        while self._counted_rounds < done:
            self._sampled.update(self._federation.cohort(self._counted_rounds).clients)
            self._counted_rounds += 1
        return len(self._sampled) / self._federation.num_clients

    def _figures(self, clients: Clients, down: Message) -> Tensor:
        """Return accuracy and mean loss of a group's evaluated models, and accuracy after download [C, 3]."""
        is_scored = self._method.scored_moment == "download" and not self._config.train.finetune_epochs
        before = None if is_scored else self.scores(clients, self._driver.after_download(clients, down))
        scores = self.scores(clients, self._driver.evaluated(clients, down))
        return torch.cat([scores, (scores if before is None else before)[:, :1]], dim=1)

    def _score(self, clients: Clients, model: Message, position: int) -> Tensor:
        """Return (accuracy, mean loss) of one client as float64 [1, 2]."""
        x, y = clients.samples(self._config.run.eval_split, position)
        probabilities = self._method.predict(clients, model, position, x)
        accuracy = (probabilities.argmax(dim=1) == y).double().mean()
        chosen = probabilities.gather(1, y.unsqueeze(1)).clamp(min=torch.finfo(probabilities.dtype).tiny)
        return torch.stack([accuracy, -chosen.double().log().mean()]).cpu().unsqueeze(0)
