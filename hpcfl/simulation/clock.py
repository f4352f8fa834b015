"""A simulated clock: how long clients of different speeds take for a round (`clients.step_s` and others).

Shapes: C clients of a group, N clients of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hpcfl.config.keys import ClientsConfig
from hpcfl.randomness import torch_stream


class Clock:
    """Seconds of clients and rounds; a client's speed depends on the seed and its id only."""

    def __init__(self, settings: ClientsConfig, seed: int) -> None:
        """Take settings that have a clock."""
        assert settings.step_s is not None
        self._step_s, self._sigma, self._seed = settings.step_s, settings.slowness or 0.0, seed
        self._bytes_per_s = settings.bytes_per_s or math.inf
        self._deadline_s = settings.deadline_s or math.inf

    def factor(self, client: int) -> float:
        """Return how many times as long as one of speed 1 a client takes for a mini-batch."""
        stream = torch_stream(self._seed, "slowness", client=client)
        return math.exp(self._sigma * float(torch.randn((), dtype=torch.float64, generator=stream)))

    def seconds(self, clients: Sequence[int], steps: Tensor, moved: Tensor) -> Tensor:
        """Return the seconds of some clients, float64 [C], for their steps and their bytes both ways [C]."""
        factors = torch.tensor([self.factor(client) for client in clients], dtype=torch.float64)
        return steps.double() * self._step_s * factors + moved.double() / self._bytes_per_s

    def are_late(self, seconds: Tensor) -> Tensor:
        """Return which clients miss the deadline, bool [C]."""
        return seconds > self._deadline_s

    def round_s(self, counted: Tensor, has_lost: bool) -> float:
        """Return the seconds of a round, given those of the members that are not left out.

        The server waits until the deadline for a member that it has lost; a round without deadline in which
        all are lost takes no time.
        """
        if has_lost and self._deadline_s < math.inf:
            return self._deadline_s
        return float(counted.max()) if len(counted) else 0.0
