"""Local optimisers on the flat vectors of a group of clients: SGD, Adam and AdamW.

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
    """The run's optimiser on theta [C, ...] of a group, whose momentum or moments start from zero.

    `trained` limits the update to one slice of the last axis; the rest stays frozen.
    """

    def __init__(self, theta: Tensor, lr: float, train: TrainConfig, trained: slice = slice(None)) -> None:
        self.theta = theta.clone(memory_format=torch.contiguous_format)
        self._lr, self._train, self._trained = lr, train, trained
        self._velocity = torch.zeros_like(theta) if train.momentum else None
        self._moments = Moments(theta, train) if train.optimiser else None

    def step(self, members: slice | Tensor, gradient: Tensor) -> None:
        """Move the group's clients `members` against their gradient [len(members), ...]."""
        weights, decay = self.theta[members], self._train.weight_decay
        moved = weights[..., self._trained]
        if self._train.clip is not None:
            gradient = clipped(gradient, self._train.clip, self._trained)
        if decay and self._train.optimiser == "adamw":
            moved.mul_(1 - self._lr * decay)
        elif decay:
            gradient = gradient.add(weights, alpha=decay)
        if self._velocity is not None:
            gradient = self._velocity[members].mul_(self._train.momentum).add_(gradient)
            if not isinstance(members, slice):
                self._velocity[members] = gradient
        if self._moments is not None:
            gradient = self._moments.direction(members, gradient)
        moved.add_(gradient[..., self._trained], alpha=-self._lr)
        if not isinstance(members, slice):
            self.theta[members] = weights


def clipped(gradient: Tensor, largest: float, trained: slice) -> Tensor:
    """Return gradients [C, ..., P], each of which is at most this long in its trained part.

    The formula is that of torch.nn.utils.clip_grad_norm_.
    """
    norms = gradient[..., trained].flatten(start_dim=1).norm(dim=1)
    factors = (largest / (norms + 1e-6)).clamp(max=1)
    return gradient * factors.view(-1, *[1] * (gradient.dim() - 1))


class Moments:
    """Adam's moving averages of gradients and of their squares, for theta [C, ...], as torch.optim has them.

    Kingma and Ba, Adam: a method for stochastic optimization, ICLR 2015, Algorithm 1. Each client counts its
    own steps.
    """

    def __init__(self, theta: Tensor, train: TrainConfig) -> None:
        self._beta1, self._beta2, self._epsilon = train.adam_constants
        self._first, self._second = torch.zeros_like(theta), torch.zeros_like(theta)
        self._steps = theta.new_zeros((len(theta), *[1] * (theta.dim() - 1)), dtype=torch.float64)

    def direction(self, members: slice | Tensor, gradient: Tensor) -> Tensor:
        """Take in the gradient of `members` [len(members), ...], and return the direction of their step."""
        first = self._first[members].lerp_(gradient, 1 - self._beta1)
        second = self._second[members].mul_(self._beta2).addcmul_(gradient, gradient, value=1 - self._beta2)
        steps = self._steps[members] + 1
        # moments that start from zero are too small at first
        bias1, bias2 = (1 - beta**steps for beta in (self._beta1, self._beta2))
        self._first[members], self._second[members], self._steps[members] = first, second, steps
        return first / (second.sqrt() / bias2.sqrt().to(second) + self._epsilon) / bias1.to(first)
