"""A network as a function of one flat vector.

Shapes: P trainable numbers, U running statistics, B samples of a mini-batch, K classes, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from hpcfl.config.keys import Precision
from hpcfl.parameters import ParameterLayout, Tensors, under


def in_precision(precision: Precision, call: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return call(*inputs), in which a CPU rounds the factors of products according to `train.precision`.

    Weights, running statistics, gradients and outputs keep their own type.
    """
    if precision == "float32":
        return call(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return call(*inputs).float()


class Forward:
    """A network as a function of a flat vector, as losses see it: one client, no client axis.

    BatchNorm uses the batch's statistics and updates `buffers` [U] in place.
    """

    def __init__(
        self,
        network: nn.Module,
        layout: ParameterLayout,
        buffers: Tensor,
        precision: Precision = "float32",
        label_smoothing: float = 0.0,
    ) -> None:
        self._network, self._layout, self._buffers = network, layout, buffers
        self._precision, self._label_smoothing = precision, label_smoothing

    def logits(self, theta: Tensor, x: Tensor, buffers: Tensor | None = None) -> Tensor:
        """Return logits [B, K] of the model theta [P]; `buffers` [U] replace the client's own."""
        return self.call("", theta, x, buffers=buffers)

    def features(self, theta: Tensor, x: Tensor, buffers: Tensor | None = None) -> Tensor:
        """Return the body's features [B, F]."""
        return self.call("body", theta, x, buffers=buffers)

    def head(self, theta: Tensor, features: Tensor) -> Tensor:
        """Return the head's logits [B, K] for given features."""
        return self.call("head", theta, features)

    def logits_of_parts(self, lower: Tensor, upper: Tensor, x: Tensor) -> Tensor:
        """Return logits [B, K] of a model cut between two layers, lower [p] and upper [P - p].

        Where `lower` has no gradient, its layers are left out of the backward pass.
        """
        named = self._layout.views(lower) | self._layout.views(upper, len(lower))
        return self._apply("", named, x)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits [B, K], with `train.label_smoothing`.

        It is that of local training; torch's own function is for other losses.
        """
        return cross_entropy(logits, y, label_smoothing=self._label_smoothing)

    def buffers_copy(self) -> Tensor:
        """Return a copy of the client's running statistics [U], for a forward pass whose update is
        discarded."""
        return self._buffers.clone()

    def call(self, part: str, theta: Tensor, *inputs: Any, buffers: Tensor | None = None) -> Tensor:
        """Return the output of one part of the model theta [P]; "" is the whole network."""
        return self._apply(part, self._layout.views(theta), *inputs, buffers=buffers)

    def _apply(self, part: str, weights: Tensors, *inputs: Any, buffers: Tensor | None = None) -> Tensor:
        kept = self._layout.buffer_views(self._buffers if buffers is None else buffers)
        # under vmap, BatchNorm's update of a view into a longer row does not reach the row, so it gets copies
        statistics = {k: v.clone(memory_format=torch.contiguous_format) for k, v in kept.items()}
        named = weights | statistics
        module = self._network.get_submodule(part)
        if part:
            named = under(named, f"{part}.")
        output = in_precision(self._precision, lambda *x: functional_call(module, named, x), *inputs)
        for name, tensor in kept.items():
            tensor.copy_(statistics[name])
        return output
