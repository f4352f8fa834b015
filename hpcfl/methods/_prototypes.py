"""Prototypes: the mean features of each class at a client, and what methods that send them have in common.

Shapes: C clients of a group, S clients of a cohort, K classes, F features, B samples of a mini-batch, P
trainable numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hpcfl.communication.aggregation import layer_means
from hpcfl.communication.messages import BUFFERS
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import Method, State
from hpcfl.parameters import Layer, Tensors
from hpcfl.randomness import torch_stream
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup, GradientOf
from hpcfl.training.forward import Forward
from hpcfl.training.losses import Loss, body_features


class Prototypes(NamedTuple):
    """The class means of each client's training samples; those of a class without samples are zero."""

    means: Tensor
    """Mean features of each class [C, K, F]."""
    counts: Tensor
    """Samples of each class, int32 [C, K]."""
    mean_square: Tensor
    """Mean of ||features||^2 over all samples [C]."""

    @property
    def is_held(self) -> Tensor:
        """1 for each class that a client has samples of, uint8 [C, K]."""
        return (self.counts > 0).to(torch.uint8)

    def uploaded(self, received: Tensor) -> Tensor:
        """Return the means [C, K, F], with those `received` for classes without samples.

        The server does not use them, and they are no difference to what was received: a mean of 0 would be a
        large one, which sets the scale of `comm.codec=int8`.
        """
        return torch.where((self.counts > 0).unsqueeze(2), self.means, received)


def prototypes(clients: ClientGroup, theta: Tensor, num_classes: int) -> Prototypes:
    """Compute the prototypes of models [C, P], with the group's running statistics, in evaluation mode."""
    model = {"theta": theta, BUFFERS: clients.buffers}
    means, counts, squares = [], [], []
    for position, features in enumerate(clients.training_outputs(model, body_features)):
        y = clients.labels("train", position)
        is_class = y == torch.arange(num_classes, device=y.device).unsqueeze(1)  # [K, n]
        count = is_class.sum(dim=1)
        # a product and no index_add_, whose order of additions is random on a GPU
        means.append(is_class.to(features) @ features / count.clamp(min=1).unsqueeze(1))
        counts.append(count.int())
        squares.append(features.square().sum(dim=1).mean())
    return Prototypes(torch.stack(means), torch.stack(counts), torch.stack(squares))


# the server's prototypes: `prototypes` [K, F], and `is_known` [K], 1 for each class that a client has sent


def server_prototypes(classes: int, features: int) -> State:
    """Return the server's prototypes before the first round: none is known."""
    return {
        "prototypes": torch.zeros(classes, features),
        "is_known": torch.zeros(classes, dtype=torch.uint8),
    }


def average_prototypes(server: State, up: Upload, counts: Tensor) -> None:
    """Move the server's prototypes to the means over a cohort of uploaded `prototypes`, by counts [S, K].

    A class that nobody in the cohort holds keeps its prototype. Collective through the upload.
    """
    features = Layer("features", 0, server["prototypes"].shape[1], 0, 0)
    old = {"prototypes": server["prototypes"]}
    server |= layer_means(up, {"prototypes": counts.unsqueeze(2)}, [features], old)
    server["is_known"] = server["is_known"] | counts.any(dim=0).to(torch.uint8)


def trained_on_prototypes(
    method: Method,
    round: int,
    weights: Tensors,
    loss: Callable[[Tensors, Tensor, Tensor], Tensor],
    features: Tensor,
    y: Tensor,
) -> Tensors:
    """Return weights by name after plain SGD on clients' prototypes, on the server.

    The prototypes are features [n, F] of classes y [n], in mini-batches in random order; the loss is a
    function of weights, features and classes. The method has `server_epochs` and `server_lr`.
    """
    params, stream = method.params, torch_stream(method.context.seed, method.name, round)
    for _ in range(params.server_epochs):
        for part in torch.randperm(len(y), generator=stream).split(method.context.train.batch_size):
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
            slopes = torch.autograd.grad(loss(leaves, features[part], y[part]), list(leaves.values()))
            weights = {
                name: tensor - params.server_lr * slope
                for (name, tensor), slope in zip(weights.items(), slopes, strict=True)
            }
    return weights


# training towards prototypes


def distance(features: Tensor, y: Tensor, targets: Tensor, is_known: Tensor) -> Tensor:
    """Return the mean over samples and features of (features - the prototype of the sample's class)^2.

    Features are [B, F], targets [K, F], `is_known` [K]. Samples of classes that are not known add 0.
    """
    return ((features - targets[y]).square().mean(dim=1) * is_known[y]).mean()


def aligned_gradient(clients: ClientGroup, strength: float, targets: Tensor, is_known: Tensor) -> GradientOf:
    """Return the `gradient` for `ClientGroup.sgd` of cross-entropy + strength * `distance`.

    Targets are [C, K, F], `is_known` [C, K].
    """

    def loss(forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        features = forward.features(tensors["theta"], batch.x)
        towards = tensors["targets"].detach(), tensors["is_known"].detach()
        away = distance(features, batch.y, *towards)
        return forward.cross_entropy(forward.head(tensors["theta"], features), batch.y) + strength * away

    return gradient_towards(clients, loss, targets, is_known)


def gradient_towards(clients: ClientGroup, loss: Loss, targets: Tensor, is_known: Tensor) -> GradientOf:
    """Return the `gradient` for `ClientGroup.sgd` of a loss that reads `theta`, `targets` and `is_known`."""
    is_known = is_known.to(targets)
    return clients.gradient_with_constants(
        loss, lambda batch: {"targets": targets[batch.members], "is_known": is_known[batch.members]}
    )
