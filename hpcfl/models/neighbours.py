"""A network whose class probabilities are mixed with those of a sample's nearest neighbours in a store.

Shapes: B samples of a mini-batch, n stored samples, F features, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcfl.models.networks import Network


class WithNeighbours(nn.Module):
    """A network with stored features [n, F] and one-hot labels [n, K]; logits are log probabilities.

    `weight` [] is the share of the neighbours in the mixture, `neighbours` how many of the store are looked
    at, at most, and `scale` the width of the kernel (see `neighbour_probabilities`).
    """

    parts = (
        "class probabilities are weight * those of the neighbours, the rows of store that are nearest to "
        "body(x), + (1 - weight) * softmax(head(body(x))); the logits are their logarithm"
    )

    def __init__(
        self, network: Network, store: Tensor, labels: Tensor, weight: Tensor, neighbours: int, scale: float
    ) -> None:
        super().__init__()
        self.network = network
        self.neighbours, self.scale = neighbours, scale
        self.register_buffer("store", store)
        self.register_buffer("labels", labels)
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        # a class of no neighbour has probability 0, and logits are finite
        return self.probabilities(x).clamp(min=torch.finfo(torch.float32).tiny).log()

    def probabilities(self, x: Tensor) -> Tensor:
        """Return class probabilities [B, K]."""
        features = self.network.body(x)
        of_model = self.network.head(features).softmax(dim=1)
        nearest = neighbour_probabilities(
            features, self.get_buffer("store"), self.get_buffer("labels"), self.neighbours, self.scale
        )
        return torch.lerp(of_model, nearest, self.get_buffer("weight"))


def neighbour_probabilities(
    features: Tensor, store: Tensor, labels: Tensor, neighbours: int, scale: float, alone: bool = False
) -> Tensor:
    """Return class probabilities [B, K] of samples with features [B, F], by their nearest neighbours.

    The neighbours vote for their labels, rows of `labels` [n, K], with weights in proportion to
    exp(-||difference||^2 / (scale F)). `alone`: the samples are those of the store, and none is a neighbour
    of its own; n must be 2 or more then.
    """
    # without products of matrices, which lose the digits of small distances
    distances = torch.cdist(features, store, compute_mode="donot_use_mm_for_euclid_dist").square()
    if alone:
        distances = distances.fill_diagonal_(torch.inf)
    nearest = distances.topk(min(neighbours, store.shape[0] - alone), dim=1, largest=False)
    votes = (-nearest.values / (scale * store.shape[1])).softmax(dim=1)
    return (votes.unsqueeze(2) * labels[nearest.indices]).sum(dim=1)
