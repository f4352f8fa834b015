"""FedCP's network: two heads, and a policy that says which part of the features each of them reads.

Shapes: B samples, F features, K classes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict

from torch import Tensor, nn
from torch.nn.functional import normalize

from hpcfl.models.networks import Network


class PolicyNetwork(nn.Module):
    """A shared head, a body, a policy network and a client's own head."""

    parts = (
        "a, b are the halves of policy(f * u), where f is body(x) and u the sum of the head's rows, divided "
        "by its length; the logits are head(r * f) + shared_head((1 - r) * f) with r = sigmoid(a - b)"
    )

    def __init__(self, network: Network) -> None:
        super().__init__()
        width = network.num_features
        self.shared_head = copy.deepcopy(network.head)
        self.body = network.body
        self.policy = nn.Sequential(
            OrderedDict(linear=nn.Linear(width, 2 * width), norm=nn.LayerNorm(2 * width), relu=nn.ReLU())
        )
        self.head = network.head

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        (head,) = self.head.children()
        assert isinstance(head, nn.Linear)
        relevance = relevant(self.policy(features * context_of(head.weight)))
        logits: Tensor = self.head(relevance * features) + self.shared_head((1 - relevance) * features)
        return logits


def context_of(weight: Tensor) -> Tensor:
    """Return the sum of a head's rows [..., K, F], divided by its length: [..., F]."""
    return normalize(weight.sum(dim=-2), dim=-1)


def relevant(scores: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Return how much the own head reads of each feature [B, F], by a policy's scores [B, 2 F].

    This is the first number of the softmax of a feature's two scores. `noise` [B, F] is the difference of two
    draws from the Gumbel distribution.
    """
    own, shared = scores.chunk(2, dim=1)
    return (own - shared + noise).sigmoid()
