"""Gradients and probabilities of many clients' models: the loop engine and the batched engine.

Shapes: C clients, P trainable numbers, U running statistics, B samples of a mini-batch, K classes.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, kl_div

from hpcfl.parameters import ParameterLayout, Tensors

EVALUATION_BATCH = 512

BufferPolicy = Literal["local", "average", "mixed"]
LastBatch = Literal["even", "drop", "keep"]


class TrainConfig(BaseModel):
    """The keys under `train.*`: how long and how clients train."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    rounds: int = Field(30, ge=1)
    """Communication rounds."""
    participation: float = Field(1.0, gt=0, le=1)
    """Share p of the N clients in a round: a cohort of max(1, floor(p N + 0.5))."""
    local_epochs: int = Field(5, ge=1)
    """Passes over a client's training data in a round."""
    batch_size: int = Field(16, ge=2)
    """Samples a mini-batch, at most but for one; see `train.last_batch`."""
    last_batch: LastBatch = "even"
    """How n samples are cut in mini-batches of B.

    even: ceil(n / B), whose sizes differ by one at most. drop: n mod B samples are left out in each epoch; a
    client with fewer than B keeps its only mini-batch. keep: they are a smaller last one, whose step is as
    long as the others' and the last before a model is sent or scored. One sample alone always joins the
    mini-batch before it."""
    lr: float = Field(0.05, gt=0)
    """Step size of local SGD, with a fresh optimiser each round."""
    lr_decay: float = Field(1.0, gt=0, le=1)
    """Factor on the step size after each round; 1 keeps it constant."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of local SGD, starting from zero each round."""
    weight_decay: float = Field(0.0, ge=0)
    """L2 penalty's factor in the gradient."""
    finetune_epochs: int = Field(0, ge=0)
    """Local epochs before each evaluation, on a copy that is thrown away; 0 is none."""
    buffers: BufferPolicy | None = None
    """Running statistics of BatchNorm: kept by the client, averaged like parameters, or (pFedLA) mixed with
    the weights of their BatchNorm layer; default: the method's."""

    def cohort_size(self, num_clients: int) -> int:
        """Return how many of N clients take part in a round."""
        return max(1, math.floor(self.participation * num_clients + 0.5))


@dataclass(frozen=True, slots=True)
class Batch:
    """One mini-batch of some clients: rows of the group, x [C, B, ...], y [C, B], sample index [C, B].

    Inside a loss the client axis is gone: x [B, ...], y [B], index [B].
    """

    rows: slice | Tensor
    x: Tensor
    y: Tensor
    index: Tensor

    def pick(self, table: Tensor) -> Tensor:
        """Return what a table [clients of the group, samples, ...] says of these samples, [C, B, ...]."""
        chosen = table[self.rows]
        clients = torch.arange(len(chosen), device=chosen.device).unsqueeze(1)
        return chosen[clients, self.index]


class Forward:
    """A network as a function of a flat vector, as losses see it: one client, no client axis.

    BatchNorm uses the batch's statistics and updates `buffers` [U] in place.
    """

    def __init__(self, network: nn.Module, layout: ParameterLayout, buffers: Tensor) -> None:
        self._network, self._layout, self._buffers = network, layout, buffers

    def logits(self, theta: Tensor, x: Tensor, buffers: Tensor | None = None) -> Tensor:
        """Return logits [B, K] of the model theta [P]; `buffers` [U] stand in for the client's own."""
        return self.call("", theta, x, buffers=buffers)

    def features(self, theta: Tensor, x: Tensor, buffers: Tensor | None = None) -> Tensor:
        """Return the body's features [B, F]."""
        return self.call("body", theta, x, buffers=buffers)

    def head(self, theta: Tensor, features: Tensor) -> Tensor:
        """Return the head's logits [B, K] for given features."""
        return self.call("head", theta, features)

    def logits_of_parts(self, lower: Tensor, upper: Tensor, x: Tensor) -> Tensor:
        """Return logits [B, K] of a model cut between two layers, lower [p] and upper [P - p].

        Where `lower` has no gradient, its layers are left out of the backward pass.
        """
        named = self._layout.views(lower) | self._layout.views(upper, len(lower))
        return self._apply("", named, x)

    def statistics(self) -> Tensor:
        """Return a copy of the client's running statistics [U], for a pass whose update nobody keeps."""
        return self._buffers.clone()

    def call(self, part: str, theta: Tensor, *inputs: Any, buffers: Tensor | None = None) -> Tensor:
        """Return the output of one part of the model theta [P]; "" is the whole network."""
        return self._apply(part, self._layout.views(theta), *inputs, buffers=buffers)

    def _apply(self, part: str, weights: Tensors, *inputs: Any, buffers: Tensor | None = None) -> Tensor:
        kept = self._layout.buffer_views(self._buffers if buffers is None else buffers)
        # under vmap, BatchNorm updates a view into a longer row only in a copy of its own
        statistics = {k: v.clone(memory_format=torch.contiguous_format) for k, v in kept.items()}
        named = weights | statistics
        module = self._network.get_submodule(part)
        if part:
            named = {k.removeprefix(f"{part}."): v for k, v in named.items() if k.startswith(f"{part}.")}
        output: Tensor = functional_call(module, named, inputs)
        for name, tensor in kept.items():
            tensor.copy_(statistics[name])
        return output


Loss = Callable[[Forward, Tensors, Batch], Tensor]
"""A client's mean loss on a mini-batch, from the forward pass, the client's tensors and the batch."""


def cross_entropy_loss(forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of `theta`: the loss of plain local training."""
    return cross_entropy(forward.logits(tensors["theta"], batch.x), batch.y)


def distillation_loss(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return the mean over a batch of KL(softmax teacher || softmax student), both [B, K].

    Both are divided by the temperature before softmax, and the loss is multiplied by its square.
    """
    known = (teacher / temperature).softmax(dim=1)
    return temperature**2 * kl_div((student / temperature).log_softmax(dim=1), known, reduction="batchmean")


class Engine(Protocol):
    """What a method's training needs: gradients of per-client losses, for C clients at a time."""

    clients_at_once: int

    def gradient(self, loss: Loss, tensors: Tensors, buffers: Tensor, batch: Batch) -> tuple[Tensors, Tensor]:
        """Differentiate each client's loss with respect to each of its tensors.

        Takes tensors [C, ...] and buffers [C, U] (updated in place); returns gradients of the same
        names and shapes, and the losses [C].
        """


class LoopEngine:
    """One client at a time with plain autograd: the reference, and the fastest choice on a CPU."""

    clients_at_once = 1

    def __init__(self, network: nn.Module, layout: ParameterLayout) -> None:
        self._layout = layout
        self._network = _prepare(network)
        # a working copy whose parameters and gradients are views of one flat vector each
        self._working = _prepare(network)
        theta, self._buffers = layout.flatten(self._working)
        self._theta, self._gradient = theta, torch.zeros_like(theta)
        views, gradients = layout.views(self._theta), layout.views(self._gradient)
        for name, parameter in self._working.named_parameters():
            parameter.data = views[name]
            parameter.grad = gradients[name]
        for name, view in layout.buffer_views(self._buffers).items():
            module, _, buffer = name.rpartition(".")
            self._working.get_submodule(module).register_buffer(buffer, view)

    def gradient(self, loss: Loss, tensors: Tensors, buffers: Tensor, batch: Batch) -> tuple[Tensors, Tensor]:
        """See Engine; C is 1. The returned gradient of `theta` is overwritten by the next call."""
        one = Batch(batch.rows, _fastest_order(batch.x[0]), batch.y[0], batch.index[0])
        if loss is cross_entropy_loss:
            return self._plain_gradient(tensors["theta"], buffers, one)
        leaves = {name: tensor[0].detach().requires_grad_() for name, tensor in tensors.items()}
        value = loss(Forward(self._network, self._layout, buffers[0]), leaves, one)
        gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        return {n: g.unsqueeze(0) for n, g in zip(leaves, gradients, strict=True)}, value.detach().view(1)

    def _plain_gradient(self, theta: Tensor, buffers: Tensor, batch: Batch) -> tuple[Tensors, Tensor]:
        self._load(theta[0], buffers[0])
        self._gradient.zero_()
        value = cross_entropy(self._working(batch.x), batch.y)
        value.backward()
        buffers[0].copy_(self._buffers)
        return {"theta": self._gradient.unsqueeze(0)}, value.detach().view(1)

    @torch.no_grad()
    def outputs(
        self, theta: Tensor, buffers: Tensor, call: Callable[..., Tensor], *samples: Tensor
    ) -> Tensor:
        """Return call(network, *samples) [n, ...] for one model theta [P] in evaluation mode.

        Samples [n, ...] come in parts.
        """
        self._load(theta, buffers)
        self._working.eval()
        parts = zip(*(tensor.split(EVALUATION_BATCH) for tensor in samples), strict=True)
        outputs = [call(self._working, *map(_fastest_order, part)) for part in parts]
        self._working.train()
        return torch.cat(outputs)

    def probabilities(self, theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
        """Return class probabilities [n, K] of one model theta [P] in evaluation mode."""
        return self.outputs(theta, buffers, class_probabilities, x)

    def _load(self, theta: Tensor, buffers: Tensor) -> None:
        self._theta.copy_(theta)
        self._buffers.copy_(buffers)


class BatchedEngine:
    """Many clients as one computation, `torch.func.vmap` over the client axis: for GPUs."""

    def __init__(self, network: nn.Module, layout: ParameterLayout, clients_at_once: int) -> None:
        self._network, self._layout = _prepare(network), layout
        self.clients_at_once = clients_at_once

    def gradient(self, loss: Loss, tensors: Tensors, buffers: Tensor, batch: Batch) -> tuple[Tensors, Tensor]:
        """See Engine."""

        def client_loss(
            tensors: Tensors, buffers: Tensor, x: Tensor, y: Tensor, index: Tensor
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            statistics = buffers.clone()
            forward = Forward(self._network, self._layout, statistics)
            value = loss(forward, tensors, Batch(batch.rows, x, y, index))
            return value, (value.detach(), statistics)

        per_client = vmap(grad(client_loss, has_aux=True), randomness="error")
        gradients, (values, statistics) = per_client(tensors, buffers, batch.x, batch.y, batch.index)
        buffers.copy_(statistics)
        return gradients, values


def class_probabilities(network: nn.Module, x: Tensor) -> Tensor:
    """Return class probabilities [n, K] of a network that gives logits."""
    return network(x).softmax(dim=1)


def sample_losses(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of each sample [n]."""
    return cross_entropy(network(x), y, reduction="none")


def minibatches(num_samples: int, batch_size: int, last_batch: LastBatch = "even") -> list[tuple[int, int]]:
    """Cut an epoch into (start, stop), as `TrainConfig.last_batch` says."""
    if last_batch == "even":
        count = math.ceil(num_samples / batch_size)
        if count > 1 and num_samples // count == 1:
            count -= 1
        small, larger = divmod(num_samples, max(1, count))
        sizes = [small + 1] * larger + [small] * (count - larger)
        stops = list(itertools.accumulate(sizes))
        return list(zip([0, *stops[:-1]], stops, strict=True)) if stops else []
    starts = list(range(0, num_samples, batch_size))
    if last_batch == "drop" and num_samples >= batch_size:
        num_samples -= num_samples % batch_size
        starts = starts[: num_samples // batch_size]
    if len(starts) > 1 and num_samples - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], num_samples], strict=True)) if starts else []


def same_size_groups(sizes: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield (size, positions) for each distinct non-zero size, largest first."""
    for size in sorted(set(sizes) - {0}, reverse=True):
        yield size, [position for position, other in enumerate(sizes) if other == size]


def _fastest_order(x: Tensor) -> Tensor:
    """Return images [B, channels, height, width] in the memory order that suits a CPU's convolutions.

    Whatever else a network is given comes back as it is.
    """
    if x.dim() != 4 or x.device.type != "cpu":
        return x
    return x.contiguous(memory_format=torch.channels_last)


def _prepare(network: nn.Module) -> nn.Module:
    working = copy.deepcopy(network).train()
    for module in working.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.num_batches_tracked = None
    return working
