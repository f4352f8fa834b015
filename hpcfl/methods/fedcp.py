"""FedCP. Zhang et al., FedCP: separating feature information for personalized federated learning via
conditional policy, KDD 2023.

With features f = f_i(x), client i's head h_i, the received head h_g and the policy network V,

    [a, b] = V(f * u_i),  V = ReLU(LayerNorm(linear)),  u_i = the sum of the rows of h_i, of length 1
    r      = the first of softmax([a, b] + Gumbel noise), feature by feature;  s = 1 - r
    logits = h_i(r * f) + h_g(s * f)
    f_i, V, h_i   <- SGD on CE(logits, y) + lambda MMD(f_i(x), f_g(x)) from f_g, V and the client's own h_i
    f_g, V        <- weighted mean of the clients'
    h_g           <- weighted mean of (h_i + h_g) / 2

f_g is the received body; it and h_g are frozen while clients train. h_i stays with the client.

Choices: u_i is of h_i before the round's training, and constant in it. The temperature of the softmax is 1,
and MMD has Gaussian kernels of widths 10, 15, 20 and 50 (both as in the authors' code; see FedPHP). f_g(x) is
of evaluation mode. Noise is drawn anew in each step; evaluations have none, so that they can be repeated (the
authors' code draws it there, too). All heads start from the common initial one. Body, V and h_g go to every
client of a round and to all for evaluation (in the authors' code V and h_g reach only those who trained).
Running statistics are averaged with the body. A client that takes no part in training learns h_i beside all
else as it is.
"""

from __future__ import annotations

import copy
from collections import OrderedDict

from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from hpcfl.communication.messages import BUFFERS, Message
from hpcfl.methods.base import Context, Params
from hpcfl.methods.fedper import FedPer
from hpcfl.models.networks import Network
from hpcfl.parameters import Tensors
from hpcfl.randomness import seeded_generators
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup, GradientOf
from hpcfl.training.forward import Forward
from hpcfl.training.losses import body_features, discrepancy

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)


class FedCPParams(Params):
    alignment: float = Field(5.0, ge=0)
    """Weight lambda of the discrepancy to the received body's features (authors: 5); 0 is without."""


class FedCP(FedPer):
    summary = "a policy divides features, sample by sample, between the client's own head and a shared one"
    Params = FedCPParams
    traits = FedPer.traits.replace(
        linear_head=True, refuses={"augment": "whose teachers see the images themselves"}
    )
    params: FedCPParams

    def __init__(self, context: Context, params: FedCPParams) -> None:
        super().__init__(context, params)
        head = self.layout.head
        self._shared_head = slice(0, head.stop - head.start)
        self.trained_part = slice(self._shared_head.stop, self.layout.size)
        self._num_features = context.network.num_features

    def make_network(self) -> PolicyNetwork:
        with seeded_generators(self.context.seed, "policy network"):
            return PolicyNetwork(self.context.build_network(-1))

    def local_training(self, clients: ClientGroup, theta: Tensor) -> Tensor:
        theta = super().local_training(clients, theta)
        theta[:, self._shared_head] = (theta[:, self._shared_head] + theta[:, self.layout.head]) / 2
        return theta

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        theta = up.per_client["theta"].clone()
        theta[:, self._shared_head] = down["theta"][:, self._shared_head]
        return Message(per_client={"theta": theta})

    def training_gradient(self, clients: ClientGroup, model: Message) -> GradientOf:
        received = model["theta"]
        weight = received[:, self.layout.head.start :][:, : self.context.num_classes * self._num_features]
        context = context_of(weight.unflatten(1, (self.context.num_classes, self._num_features)))
        taught = None
        if self.params.alignment:
            frozen = {"theta": received, BUFFERS: clients.buffers}
            taught = clients.over_training_set(frozen, body_features)
        uniform = clients.uniform("policy")

        def known(batch: Batch) -> Tensors:
            # the difference of two Gumbel draws has the logistic distribution
            noise = uniform(batch, self._num_features).to(received).logit()
            tensors = {"context": context[batch.members], "noise": noise}
            return tensors if taught is None else tensors | {"taught": batch.pick(taught)}

        return clients.gradient_with_constants(self._loss, known)

    def _loss(self, forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        theta = tensors["theta"]
        features = forward.features(theta, batch.x)
        scores = forward.call("policy", theta, features * tensors["context"].detach())
        relevance = relevant(scores, tensors["noise"].detach())
        logits = forward.head(theta, relevance * features)
        logits = logits + forward.call("shared_head", theta, (1 - relevance) * features)
        loss = forward.cross_entropy(logits, batch.y)
        if "taught" in tensors:
            away = discrepancy(features, tensors["taught"].detach(), BANDWIDTHS)
            loss = loss + self.params.alignment * away
        return loss


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
