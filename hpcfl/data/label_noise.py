"""Wrong labels of training samples (`data.label_noise`): symmetric noise, the same on any number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpcfl.config.keys import DataConfig
from hpcfl.randomness import numpy_stream


@dataclass(frozen=True)
class LabelNoise:
    """The noise of a run. A client's wrong labels depend on seed and client only."""

    share: float
    """Share of a client's training labels that are wrong."""
    clients: frozenset[int]
    """Clients that have wrong labels."""
    num_classes: int
    seed: int

    @staticmethod
    def from_config(data: DataConfig, seed: int, num_clients: int, num_classes: int) -> LabelNoise | None:
        """Return the noise of a run with N clients, unseen ones included; None if it has none."""
        if data.label_noise is None or num_classes < 2:
            return None
        count = num_clients
        if data.label_noise_clients is not None:
            count = max(1, math.floor(data.label_noise_clients * num_clients + 0.5))
        order = numpy_stream(seed, "label noise clients").permutation(num_clients)
        return LabelNoise(data.label_noise, frozenset(order[:count].tolist()), num_classes, seed)

    def noisy(self, y: np.ndarray, client: int) -> np.ndarray:
        """Return the training labels [n] that a client sees, given the right ones."""
        if client not in self.clients:
            return y
        stream = numpy_stream(self.seed, "label noise", client=client)
        wrong = stream.permutation(len(y))[: math.floor(self.share * len(y) + 0.5)]
        found = y.copy()
        found[wrong] = (y[wrong] + stream.integers(1, self.num_classes, len(wrong))) % self.num_classes
        return found
