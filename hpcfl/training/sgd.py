"""SGD on the flat vectors of a group of clients.

Shapes: C clients of the group, P trainable numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcfl.config.keys import TrainConfig


class Trained(NamedTuple):
    """The end of a local training pass: theta [C, ..., P] and, on the CPU, the number of steps [C]."""

    theta: Tensor
    steps: Tensor


class Descent:
    """SGD on theta [C, ...] of a group, with the run's momentum (from zero) and weight decay.

    `trained` limits the update to one slice of the last axis; the rest stays frozen.
    """

    def __init__(self, theta: Tensor, lr: float, train: TrainConfig, trained: slice = slice(None)) -> None:
        self.theta = theta.clone(memory_format=torch.contiguous_format)
        self._lr, self._train, self._trained = lr, train, trained
        self._velocity = torch.zeros_like(theta) if train.momentum else None

    def step(self, members: slice | Tensor, gradient: Tensor) -> None:
        """Move the group's clients `members` against their gradient [len(members), ...]."""
        weights = self.theta[members]
        if self._train.weight_decay:
            gradient = gradient.add(weights, alpha=self._train.weight_decay)
        if self._velocity is not None:
            gradient = self._velocity[members].mul_(self._train.momentum).add_(gradient)
            if not isinstance(members, slice):
                self._velocity[members] = gradient
        weights[..., self._trained].add_(gradient[..., self._trained], alpha=-self._lr)
        if not isinstance(members, slice):
            self.theta[members] = weights
