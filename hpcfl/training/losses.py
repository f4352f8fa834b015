"""Losses of one client on a mini-batch, and functions that evaluate a network.

Shapes: B samples of a mini-batch, n samples, K classes, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from hpcfl.parameters import Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.forward import Forward

Loss = Callable[[Forward, Tensors, Batch], Tensor]
"""A client's mean loss on a mini-batch, from the forward pass, the client's tensors and the batch."""


def cross_entropy_loss(forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of `theta`: the loss of plain local training."""
    return forward.cross_entropy(forward.logits(tensors["theta"], batch.x), batch.y)


def distillation_loss(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return the mean over a batch of KL(softmax teacher || softmax student), both [B, K].

    Both are divided by the temperature before softmax, and the loss is multiplied by its square.
    """
    known = (teacher / temperature).softmax(dim=1)
    return temperature**2 * kl_div((student / temperature).log_softmax(dim=1), known, reduction="batchmean")


def discrepancy(one: Tensor, other: Tensor, bandwidths: Sequence[float]) -> Tensor:
    """Return the squared maximum mean discrepancy of two samples [B, F], summed over Gaussian kernels.

    The biased statistic of Gretton et al., A kernel two-sample test, 2012; exp(-||a - b||^2 / 2 width).
    """
    # one quadratic form of both samples together: a step has three times fewer operations
    both = torch.cat([one, other])
    shares = torch.cat([x.new_full((len(x),), sign / len(x)) for sign, x in ((1, one), (-1, other))])
    # needs no tensor [B, B, F]; for large features, rounding errors stay far below the widths
    squares = both.square().sum(dim=1)
    squared = (squares.unsqueeze(1) + squares - 2 * both @ both.T).clamp(min=0)
    kernels = torch.stack([(-squared / (2 * width)).exp() for width in bandwidths]).sum(dim=0)
    return shares @ kernels @ shares


def class_probabilities(network: nn.Module, x: Tensor) -> Tensor:
    """Return class probabilities [n, K] of a network that gives logits."""
    return network(x).softmax(dim=1)


def sample_losses(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of each sample [n]."""
    return cross_entropy(network(x), y, reduction="none")


def body_features(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the features [n, F] that a network's body gives; for `ClientGroup.outputs`."""
    features: Tensor = network.get_submodule("body")(x)
    return features
