"""Private gradients of a client's mini-batch: DP-SGD.

Abadi et al., Deep learning with differential privacy, CCS 2016, Algorithm 1. For a mini-batch that has each
of a client's n samples with probability q, clip C and noise multiplier z:

    g_j  <- grad CE_j min(1, C / ||grad CE_j||)
    g    <- (sum_j g_j + N(0, (z C)^2)) / (q n)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from hpcfl.parameters import ParameterLayout
from hpcfl.training.batches import Batch
from hpcfl.training.engines import training_copy
from hpcfl.training.forward import Forward

SAMPLES_AT_ONCE = 64
"""Samples whose gradients are held at once."""


class PrivateGradients:
    """Gradients of single samples of one network, clipped, added up and noised."""

    def __init__(
        self,
        network: nn.Module,
        layout: ParameterLayout,
        clip: float,
        noise: float,
        label_smoothing: float = 0.0,
    ) -> None:
        self._network, self._layout, self._label_smoothing = training_copy(network), layout, label_smoothing
        self._clip, self._noise = clip, noise

    def gradient(
        self, theta: Tensor, batch: Batch, expected: Sequence[float], streams: Sequence[torch.Generator]
    ) -> tuple[Tensor, Tensor]:
        """Return private gradients of models [C, P] on a batch, and mean losses [C], 0 of an empty batch.

        `expected` are the mini-batches' mean sizes q n, `streams` what the noise is drawn from, by client.
        """
        pairs = [
            self._of_client(theta[position], batch.x[position], batch.y[position], size, stream)
            for position, (size, stream) in enumerate(zip(expected, streams, strict=True))
        ]
        return torch.stack([gradient for gradient, _ in pairs]), torch.stack([loss for _, loss in pairs])

    def _of_client(
        self, theta: Tensor, x: Tensor, y: Tensor, expected: float, stream: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        noise = torch.randn(theta.shape, generator=stream, dtype=theta.dtype).to(theta.device)
        total, losses = noise * (self._noise * self._clip), theta.new_zeros(0)
        for part in range(0, len(y), SAMPLES_AT_ONCE):
            some = slice(part, part + SAMPLES_AT_ONCE)
            of_sample = vmap(grad_and_value(self._loss), (None, 0, 0), randomness="different")
            of_samples, found = of_sample(theta, x[some], y[some])
            factors = (self._clip / of_samples.norm(dim=1)).clamp(max=1.0)
            total = total + factors @ of_samples
            losses = torch.cat([losses, found.detach()])
        return total / expected, losses.mean() if len(losses) else losses.sum()

    def _loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        nothing = theta.new_empty(0)
        forward = Forward(self._network, self._layout, nothing, label_smoothing=self._label_smoothing)
        return forward.cross_entropy(forward.logits(theta, x.unsqueeze(0)), y.unsqueeze(0))
