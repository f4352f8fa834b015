"""GPFL. Zhang et al., GPFL: simultaneously learning global and personalized feature information for
personalized federated learning, ICCV 2023.

Class embeddings g_c and the conditional valve V(f, u) = relu((gamma(u) + 1) f + beta(u)) stand between body
and head; gamma and beta are linear layers with ReLU and LayerNorm. With the received g, for client i,

    u_G = mean over c of g_c,   u_i = sum over c of (share of class c at client i) g_c
    f, g, V, h_i <- SGD on CE(h_i(V(f(x), u_i)), y) + CE(cos(V(f(x), u_G), g_c) for all c, y)
                    + lambda ||V(f(x), u_G) - g_y|| + mu/2 ||g, V||^2
    f, g, V      <- weighted mean of the clients'

The head h_i stays with the client. The evaluated model is h_i(V(f(x), u_i)) with the newest f, g and V.

Choices: u_G, u_i and the g_y of the third term are made of the received g and constant in a round; the
cosines are of the g that learns, and have no temperature (both as in the authors' code). The third term is
a mean over samples (the authors' code has the norm of the whole mini-batch, which grows with its size). u_G
and u_i come from the g that was just received (in the authors' code from the client's g before). g starts
from N(0, 1), and all heads from the common initial one. Running statistics are averaged with the body.
Label smoothing acts on the first term alone. The last term is one of the loss (authors' code: the
optimiser's weight decay), so that `train.clip` counts it. Fine-tuning before an evaluation has no mu. A
client that takes no part in training learns a head beside f, g and V as they are.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from hpcfl.communication.messages import BUFFERS, Message
from hpcfl.methods.base import Context, Params
from hpcfl.methods.fedper import FedPer
from hpcfl.models.networks import Network
from hpcfl.parameters import Tensors
from hpcfl.randomness import seeded_generators
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup, GradientOf
from hpcfl.training.forward import Forward

EMBEDDINGS = "embeddings.weight"


class GPFLParams(Params):
    magnitude: float = Field(0.01, ge=0)
    """Weight lambda of the distance to the class's embedding (authors: 0.01 for CNNs, 0.0001 for ResNets);
    0 leaves the guidance by angles."""
    decay: float = Field(0.1, ge=0)
    """Weight decay mu of embeddings and valve, besides `train.weight_decay` (authors: 0.1 for CNNs, 0 for
    ResNets, 1 for sensor data); 0 is none."""


class GPFL(FedPer):
    summary = "shared class embeddings guide features, each client's own head reads its version of them"
    Params = GPFLParams
    traits = FedPer.traits.replace(linear_head=True, predicts_by="module")
    params: GPFLParams
    network: GuidedNetwork

    def __init__(self, context: Context, params: GPFLParams) -> None:
        super().__init__(context, params)
        start = next(slot.start for slot in self.layout.parameters if slot.name == EMBEDDINGS)
        self._decayed = slice(start, self.layout.head.start)

    def make_network(self) -> GuidedNetwork:
        with seeded_generators(self.context.seed, "guided network"):
            return GuidedNetwork(self.context.build_network(-1), self.context.num_classes)

    def local_training(self, clients: ClientGroup, theta: Tensor) -> Tensor:
        def decay(theta: Tensor, members: slice | Tensor) -> Tensor:
            pull = torch.zeros_like(theta)
            pull[:, self._decayed] = self.params.decay * theta[:, self._decayed]
            return pull

        return clients.sgd(
            theta,
            gradient=self.training_gradient(clients, self._with_shares(clients, theta)),
            extra_gradient=decay if self.params.decay else None,
        ).theta

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return self._with_shares(clients, self.merged(clients, down))

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        return self._with_shares(clients, up.per_client["theta"])

    def predict(self, clients: ClientGroup, model: Message, position: int, x: Tensor) -> Tensor:
        shares = model["shares"][position]
        return clients.outputs(model, position, lambda network, x: network(x, shares).softmax(dim=1), x)

    def as_module(self, model: Tensors) -> nn.Module:
        network = self.layout.filled(self.network, model["theta"], model[BUFFERS])
        assert isinstance(network, GuidedNetwork)
        return OfShares(network, model["shares"])

    def shares(self, clients: ClientGroup) -> Tensor:
        """Return the share of each class in each client's training set, [C, K]."""
        counts = clients.class_counts(self.context.num_classes)
        return counts / counts.sum(dim=1, keepdim=True)

    def _with_shares(self, clients: ClientGroup, theta: Tensor) -> Message:
        return Message(per_client={"theta": theta, "shares": self.shares(clients)})

    def training_gradient(self, clients: ClientGroup, model: Message) -> GradientOf:
        # the conditions are made of the embeddings received
        received, shares = model["theta"], model["shares"]
        start, stop = self._decayed.start, self._decayed.start + self.network.embeddings.weight.numel()
        embeddings = received[:, start:stop].unflatten(1, (self.context.num_classes, -1))
        return clients.gradient_with_constants(
            self._loss,
            lambda batch: {"embeddings": embeddings[batch.members], "shares": shares[batch.members]},
        )

    def _loss(self, forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        theta, received = tensors["theta"], tensors["embeddings"].detach()
        features = forward.features(theta, batch.x)
        own = forward.call("valve", theta, features, tensors["shares"].detach() @ received)
        guided = forward.call("valve", theta, features, received.mean(dim=0))
        embeddings = self.layout.views(theta)[EMBEDDINGS]
        cosines = normalize(guided, dim=1) @ normalize(embeddings, dim=1).T
        away = (guided - received[batch.y]).norm(dim=1).mean()
        return (
            forward.cross_entropy(forward.head(theta, own), batch.y)
            + cross_entropy(cosines, batch.y)
            + self.params.magnitude * away
        )


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
