"""GPFL's network: class embeddings, and a layer that changes features by a condition made of them.

Shapes: B samples, F features, K classes.
"""

from __future__ import annotations

from torch import Tensor, nn

from hpcfl.models.networks import Network


class ConditionalValve(nn.Module):
    """Features [B, F] and a condition u [F] to relu((gamma(u) + 1) f + beta(u)), [B, F]."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.gamma = self._map(num_features)
        self.beta = self._map(num_features)

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        return ((self.gamma(condition) + 1) * features + self.beta(condition)).relu()

    @staticmethod
    def _map(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))


class GuidedNetwork(nn.Module):
    """A body, class embeddings [K, F], a conditional valve and a head."""

    def __init__(self, network: Network, num_classes: int) -> None:
        super().__init__()
        self.body = network.body
        self.embeddings = nn.Embedding(num_classes, network.num_features)
        self.valve = ConditionalValve(network.num_features)
        self.head = network.head

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        """Return logits [B, K] under the condition that class shares [K] make of the embeddings."""
        logits: Tensor = self.head(self.valve(self.body(x), shares @ self.embeddings.weight))
        return logits


class OfShares(nn.Module):
    """A guided network for one client's class shares [K]."""

    parts = (
        "features are (network.valve.gamma(u) + 1) * body(x) + network.valve.beta(u), then ReLU, where u is "
        "shares @ network.embeddings.weight; the head follows"
    )

    def __init__(self, network: GuidedNetwork, shares: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("shares", shares)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x, self.get_buffer("shares"))
        return logits
