"""kNN-Per. Marfoq et al., Personalized federated learning through local memorization, ICML 2022.

    w    <- FedAvg
    p_i   = lambda_i q_i + (1 - lambda_i) softmax h(phi(x)),  w = (phi, h)
    q_i(c) proportional to the sum of exp(-||phi(x) - phi(x_k)||^2 / (sigma F)) over those of the k nearest
             samples x_k of the client's training set, in the F features, whose label is c

Training and messages are FedAvg's. A client's evaluated model is the newest w with the features and labels of
its training set by this w, and its lambda_i.

Choices the paper leaves open:
  lambda_i    the one of 0, 0.1, .., 1 with the least loss on the client's validation samples, which
              `data.val_fraction` cuts off. A client without such samples takes the least loss on its training
              set, where no sample is a neighbour of its own; w has seen these samples, and lambda_i is rather
              too small. With `run.eval_split=val` or `train.patience` the scored samples are those that chose
              lambda_i, and accuracies are rather too high. (The authors' script tries such a grid on the test
              samples.)
  kernel      the squared distance divided by sigma F, as in the authors' code; the paper's text has the
              distance itself
  few         of fewer than k samples, all are the neighbours
  BatchNorm   running statistics are averaged like parameters, so that all clients have the same features
  unseen      a client that takes no part in training makes its store and lambda_i like any other, without
              a training step
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from hpcfl.communication.messages import BUFFERS, Message
from hpcfl.methods.base import Params
from hpcfl.methods.fedavg import FedAvg
from hpcfl.models.networks import Network
from hpcfl.parameters import Tensors
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.engines import EVALUATION_BATCH

GRID = 11
"""Values that lambda_i is chosen among: from 0 to 1 in equal steps."""


class KnnPerParams(Params):
    neighbours: int = Field(10, ge=1)
    """Number k of neighbours (paper: 10); very many are the client's class shares, weighed by the kernel."""
    scale: float = Field(1.0, gt=0)
    """Width sigma of the kernel (authors: 1); a small one trusts the nearest neighbour alone, a large one
    counts the neighbours."""
    weight: float | None = Field(None, ge=0, le=1)
    """Share lambda of the neighbours, of every client; 0 is FedAvg, 1 neighbours alone. Default: each client
    chooses its own."""


class KnnPer(FedAvg):
    summary = "FedAvg's model mixed with the nearest neighbours in each client's training set"
    privacy_units = ("client",)
    Params = KnnPerParams
    traits = FedAvg.traits.replace(
        has_global_model=False, needs_body=True, buffers=("average",), predicts_by="module"
    )
    params: KnnPerParams

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return self._with_memory(clients, down.only("theta"))

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        return self.eval_model(clients, down)

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        return self._with_memory(clients, up.only("theta"))

    def finetune(self, clients: ClientGroup, down: Message, epochs: int) -> Message:
        theta = clients.sgd(down["theta"], epochs=epochs, purpose="finetune").theta
        return self._with_memory(clients, Message(per_client={"theta": theta}))

    def predict(self, clients: ClientGroup, model: Message, position: int, x: Tensor) -> Tensor:
        """Return the mixture's probabilities [n, K]; see `_with_memory` for the parts of the model."""

        def probabilities(network: nn.Module, x: Tensor) -> Tensor:
            parts = {name: model[name][position] for name in ("store", "labels", "weight")}
            return self._mixture(network, parts).probabilities(x)

        return clients.outputs(model, position, probabilities, x)

    def as_module(self, model: Tensors) -> nn.Module:
        return self._mixture(self.layout.filled(self.network, model["theta"], model[BUFFERS]), model)

    def _mixture(self, network: nn.Module, parts: Tensors) -> WithNeighbours:
        """Return the module of one client's model."""
        assert isinstance(network, Network)
        labels = self._one_hot(parts["labels"], parts["store"])
        neighbours, scale = self.params.neighbours, self.params.scale
        return WithNeighbours(network, parts["store"], labels, parts["weight"], neighbours, scale)

    def _with_memory(self, clients: ClientGroup, models: Message) -> Message:
        """Return models `theta` with what each client adds to its own.

        These are the features `store` [C, most, F] and `labels` [C, most] of its training set, and lambda_i,
        `weight` [C]. Stores are filled up to the size of the largest one, with infinite features, whose votes
        are 0.
        """
        models, context = models.with_clients(len(clients)), self.context
        model = {"theta": models["theta"], BUFFERS: clients.buffers}
        most = int(torch.cat([context.num_samples, context.num_samples_of_unseen]).max())
        rows: dict[str, list[Tensor]] = {"store": [], "labels": [], "weight": []}
        for position in range(len(clients)):
            x, y = clients.samples("train", position)
            outputs = clients.outputs(model, position, _features_and_logits, x)
            weight = self._weight(clients, model, position, outputs)
            missing = most - len(y)
            rows["store"].append(pad(outputs[:, : -context.num_classes], (0, 0, 0, missing), value=torch.inf))
            rows["labels"].append(pad(y, (0, missing)))
            rows["weight"].append(weight)
        return models | Message(per_client={name: torch.stack(found) for name, found in rows.items()})

    def _weight(self, clients: ClientGroup, model: Tensors, position: int, outputs: Tensor) -> Tensor:
        """Return lambda_i [] of a client whose training samples have features and logits [n, F + K]."""
        if self.params.weight is not None:
            return outputs.new_full((), self.params.weight)
        classes, labels = self.context.num_classes, clients.labels("train", position)
        store = outputs[:, :-classes]
        x, y = clients.samples("val", position)
        alone = not len(y)
        if alone:
            y = labels
        else:
            outputs = clients.outputs(model, position, _features_and_logits, x)
        grid = torch.linspace(0, 1, GRID, dtype=outputs.dtype, device=outputs.device)
        if alone and len(labels) == 1:
            return grid[0]
        by_label = self._one_hot(labels, store)
        # the distances of all samples to all others would need much memory
        parts = [
            neighbour_probabilities(
                part,
                store,
                by_label,
                self.params.neighbours,
                self.params.scale,
                number * EVALUATION_BATCH if alone else None,
            )
            for number, part in enumerate(outputs[:, :-classes].split(EVALUATION_BATCH))
        ]
        nearest = torch.cat(parts)
        of_class = y.unsqueeze(1)
        of_model = outputs[:, -classes:].softmax(dim=1).gather(1, of_class)
        mixed = torch.lerp(of_model, nearest.gather(1, of_class), grid)
        losses = -mixed.clamp(min=torch.finfo(torch.float32).tiny).log().mean(dim=0)
        return grid[losses.argmin()]

    def _one_hot(self, labels: Tensor, like: Tensor) -> Tensor:
        """Return labels [n] as rows [n, K] of zeros and ones, in the type of another tensor."""
        return one_hot(labels, self.context.num_classes).to(like.dtype)


def _features_and_logits(network: nn.Module, x: Tensor) -> Tensor:
    """Return a network's features and logits side by side, [n, F + K]."""
    assert isinstance(network, Network)
    features = network.body(x)
    return torch.cat([features, network.head(features)], dim=1)


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
    features: Tensor, store: Tensor, labels: Tensor, neighbours: int, scale: float, first: int | None = None
) -> Tensor:
    """Return class probabilities [B, K] of samples with features [B, F], by their nearest neighbours.

    The neighbours vote for their labels, rows of `labels` [n, K], with weights in proportion to
    exp(-||difference||^2 / (scale F)). With `first`, the samples are those of the store from this one on, and
    none is a neighbour of its own; n must be 2 or more then.
    """
    # without products of matrices, which lose the digits of small distances
    distances = torch.cdist(features, store, compute_mode="donot_use_mm_for_euclid_dist").square()
    if first is not None:
        distances.diagonal(first).fill_(torch.inf)
    nearest = distances.topk(min(neighbours, len(store) - (first is not None)), dim=1, largest=False)
    votes = (-nearest.values / (scale * store.shape[1])).softmax(dim=1)
    return (votes.unsqueeze(2) * labels[nearest.indices]).sum(dim=1)
