"""A mixture of networks, whose class probabilities are averaged."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Mixture(nn.Module):
    """Networks with weights [M] that sum to 1; logits are the logarithm of the mixed probabilities."""

    parts = (
        "class probabilities are the sum over m of weights[m] * softmax(components.m(x)); the logits are "
        "their logarithm"
    )

    def __init__(self, components: Iterable[nn.Module], weights: Tensor) -> None:
        super().__init__()
        self.components = nn.ModuleList(components)
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.stack([component(x).softmax(dim=1) for component in self.components])
        return torch.einsum("m,mnk->nk", self.get_buffer("weights"), scores).log()
