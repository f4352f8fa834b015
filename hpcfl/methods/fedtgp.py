"""FedTGP. Zhang et al., FedTGP: trainable global prototypes with adaptive-margin-enhanced contrastive
learning for data and model heterogeneity in federated learning, AAAI 2024.

    theta_i <- E epochs of SGD on CE + lambda mean (f_i(x) - Pbar_y)^2
    P_i,c    = mean of f_i(x) over the client's samples of class c
    Pbar_c   = A2 relu(A1 e_c + b1) + b2, a network on the server with an embedding e_c of each class
    e, A, b <- SGD on the mean of CE over all P_i,c of the round's cohort; the logit of class c' is
               -||P_i,c - Pbar_c'||, and that of the true class c is delta less
    delta    = min(tau, largest distance of two Q_c),  Q_c = mean of P_i,c over the clients that hold c
    prediction: the class c with the least ||f_i(x) - Pbar_c||

Prototypes travel, and no weights. Clients are those of FedProto, and so are the choices about them: when
P_i,c are computed, the distance in their loss, the softmax that predicts, and which model is evaluated.

Differs from the authors' code:
  margin       it takes the distance of each Q_c to the nearest other one, and the largest of these

Choices the paper leaves open:
  start        e_c is drawn from N(0, 1), and the layers as PyTorch draws linear ones, as in the authors' code
  steps        the server does `method.server_epochs` over the prototypes of the round, in mini-batches of
               `train.batch_size` in random order, without momentum, weight decay or decay of the learning
               rate. Each prototype counts the same, whatever its number of samples
  rate         `train.lr` is 0.01 by default, as the authors have it. Prototypes move away from each other
               round by round, up to tau, and features must follow: with 0.05 a run on the digits diverged
  absent       a class that no client of the round holds is still among the c' of the others. A class that no
               client has sent so far has no Pbar_c for the clients: none is pulled to it or predicts it
               (in the authors' code they are, and do)
  upload       it has K rows, with what came down for classes that the client does not hold, and a byte for
               each class. (The paper's has rows only for the classes that the client holds.)
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, one_hot

from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods._prototypes import prototypes, trained_on_prototypes
from hpcfl.methods.base import State
from hpcfl.methods.fedproto import FedProto, FedProtoParams
from hpcfl.parameters import Tensors, under
from hpcfl.randomness import draw_linear, torch_stream
from hpcfl.training.client_group import ClientGroup

GENERATOR = "generator/"
"""Where the server's state has the network that makes prototypes."""


class FedTGPParams(FedProtoParams):
    alignment: float = Field(10.0, ge=0)
    """Strength lambda of the pull of features towards prototypes (authors: 10); 0 is local training,
    evaluated by the nearest prototype."""
    margin: float = Field(100.0, ge=0)
    """Largest margin tau (authors: 100); 0 trains prototypes without a margin."""
    server_lr: float = Field(0.01, ge=0)
    """Learning rate of the server (authors: 0.01, as that of clients); 0 keeps the prototypes drawn first."""
    server_epochs: int = Field(100, ge=0)
    """Passes of the server over the prototypes of a round (authors' scripts: 100); 0 as for `server_lr`."""


class FedTGP(FedProto):
    summary = "own models whose features lean towards prototypes that the server trains to be apart"
    Params = FedTGPParams
    traits = FedProto.traits.replace(train_defaults={"lr": 0.01})
    params: FedTGPParams

    def server_state(self) -> State:
        classes, features = self.context.num_classes, self.context.network.num_features
        stream = torch_stream(self.context.seed, "fedtgp generator")
        generator = {"embeddings": torch.randn(classes, features, generator=stream)}
        for layer in ("hidden", "output"):
            generator[f"{layer}.weight"] = draw_linear((features, features), features, stream)
            generator[f"{layer}.bias"] = draw_linear((features,), features, stream)
        return super().server_state() | {GENERATOR + name: tensor for name, tensor in generator.items()}

    def train(self, clients: ClientGroup, down: Message) -> Message:
        clients["theta"] = self._trained(clients, down)
        found = prototypes(clients, clients["theta"], self.context.num_classes)
        return Message(per_client={"prototypes": found.uploaded(down["prototypes"]), "held": found.is_held})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        rows = up.collect("prototypes", "held")
        held = rows["held"] == 1  # [S, K]
        found, y = rows["prototypes"][held], held.nonzero()[:, 1]
        margin = margin_of(found, y).clamp(max=self.params.margin)
        weights = under(server, GENERATOR)

        def loss(weights: Tensors, part: Tensor, y: Tensor) -> Tensor:
            return contrastive_loss(part, y, generated(weights), margin)

        generator = trained_on_prototypes(self, cohort.round, weights, loss, found, y)
        server |= {GENERATOR + name: tensor for name, tensor in generator.items()}
        server["prototypes"] = generated(generator)
        server["is_known"] = server["is_known"] | rows["held"].amax(dim=0)


def generated(generator: Tensors) -> Tensor:
    """Return the prototypes Pbar [K, F] that the server's network makes of its embeddings."""
    hidden = linear(generator["embeddings"], generator["hidden.weight"], generator["hidden.bias"]).relu()
    return linear(hidden, generator["output.weight"], generator["output.bias"])


def contrastive_loss(found: Tensor, y: Tensor, made: Tensor, margin: Tensor) -> Tensor:
    """Return the mean loss of Pbar [K, F], of prototypes [n, F], their classes y [n] and delta."""
    away = distances(found, made)
    return cross_entropy(-(away + margin * one_hot(y, len(made))), y)


def margin_of(found: Tensor, y: Tensor) -> Tensor:
    """Return the largest distance between class means of prototypes [n, F] whose classes are y [n]."""
    means = torch.stack([found[y == label].mean(dim=0) for label in y.unique()])
    return distances(means, means).max()


def distances(one: Tensor, other: Tensor) -> Tensor:
    """Return the distances [n, m] of rows [n, F] and [m, F]; the gradient of a distance 0 is 0."""
    # the other modes lose the digits of small distances
    return torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist")
