"""The flat vector of a network's parameters: where each tensor, layer, body and head is in it.

Shapes: P trainable numbers, U running statistics of BatchNorm, L layers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import torch
from torch import Tensor, nn

Granularity = Literal["module", "block", "tensor"]

Tensors = dict[str, Tensor]
"""Tensors by name."""

COLUMNS_AT_ONCE = 4096
"""Columns that a product over all models reads at once: few enough for the CPU's cache."""

_BATCHNORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Slot:
    """One tensor's place in a flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    module: str


@dataclass(frozen=True)
class Layer:
    """A contiguous piece of the flat vector that is aggregated, masked and counted as one.

    `buffer_start:buffer_stop` are the running statistics that belong to it (empty without BatchNorm).
    """

    name: str
    start: int
    stop: int
    buffer_start: int
    buffer_stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class ParameterLayout:
    """Names, shapes and offsets of a network's flat parameter vector [P] and statistics vector [U].

    `body` and `head` are the two parts of a network that has them. Running statistics have a vector of their
    own. Buffers that are not floating-point numbers, such as masks, stay in the network's module, and
    BatchNorm's `num_batches_tracked` is not kept at all.
    """

    def __init__(self, network: nn.Module) -> None:
        self._order = {name: number for number, (name, _) in enumerate(network.named_modules())}
        parameters = {name: p.shape for name, p in network.named_parameters()}
        statistics = {name: b.shape for name, b in network.named_buffers() if b.is_floating_point()}
        short = _short_names([name.rpartition(".")[0] for name in (*parameters, *statistics)])
        self.parameters, self.buffers = _slots(parameters, short), _slots(statistics, short)
        self.size = self.parameters[-1].stop
        self.buffer_size = self.buffers[-1].stop if self.buffers else 0
        head = (slot.start for slot in self.parameters if slot.name.startswith("head."))
        head_start = next(head, self.size)
        self.body = slice(0, head_start)
        self.head = slice(head_start, self.size)
        self.batchnorm_modules = frozenset(
            short[name]
            for name, module in network.named_modules()
            if isinstance(module, _BATCHNORM) and name in short
        )

    @property
    def slots(self) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
        """The tensors of both vectors, in their order: trainable numbers and running statistics."""
        return self.parameters, self.buffers

    def layers(self, granularity: Granularity | Literal["child"] = "module") -> tuple[Layer, ...]:
        """Split [0, P) into layers, in order.

        "module": weight and bias together, a BatchNorm module by itself (as pFedLA's table 3 has it);
        "block": a BatchNorm module joins the layer before it; "tensor": every tensor by itself; "child": all
        that is in the same child of the network.
        """
        keys: list[str] = []
        for slot in self.parameters:
            if granularity == "tensor":
                keys.append(f"{slot.module}.{slot.name.rpartition('.')[2]}".removeprefix("."))
            elif granularity == "child":
                keys.append(slot.name.partition(".")[0])
            elif granularity == "block" and slot.module in self.batchnorm_modules and keys:
                keys.append(keys[-1])
            else:
                keys.append(slot.module)
        pairs = groupby(zip(keys, self.parameters, strict=True), key=lambda pair: pair[0])
        of_layers = [(key, [slot for _, slot in members]) for key, members in pairs]
        # statistics of a module without weights are of the layer before it; of a BatchNorm module split in
        # two tensors, the weight carries the statistics
        stops = [self._buffers_before(slots, after[0]) for (_, slots), (_, after) in pairwise(of_layers)]
        starts = [0, *stops]
        return tuple(
            Layer(key, slots[0].start, slots[-1].stop, start, stop)
            for (key, slots), start, stop in zip(of_layers, starts, [*stops, self.buffer_size], strict=True)
        )

    def _buffers_before(self, slots: Sequence[Slot], after: Slot) -> int:
        """Return where the statistics end of modules before that of the tensor `after`, in the network's
        order; those of its own module are before it, if `slots` have another tensor of the module."""
        number = self._place(after) + (slots[-1].module == after.module)
        return sum(slot.stop - slot.start for slot in self.buffers if self._place(slot) < number)

    def _place(self, slot: Slot) -> int:
        """Return the number of a tensor's module in the network."""
        return self._order[slot.name.rpartition(".")[0]]

    def views(self, theta: Tensor, start: int = 0) -> dict[str, Tensor]:
        """Split a flat vector [P] into named tensors that share its memory (and its gradient graph).

        `theta` may be a part that begins at `start` and contains whole tensors.
        """
        stop = start + len(theta)
        whole = len(theta) == self.size
        slots = self.parameters if whole else [s for s in self.parameters if start <= s.start < stop]
        return _views(slots, theta)

    def with_head(self, theta: Tensor, head: Tensor) -> Tensor:
        """Return copies of models [..., P] under other heads [..., numbers of the head]."""
        theta = theta.clone(memory_format=torch.contiguous_format)
        theta[..., self.head] = head
        return theta

    def buffer_views(self, buffers: Tensor) -> dict[str, Tensor]:
        """Split running statistics [U] into named tensors that share its memory."""
        return _views(self.buffers, buffers)

    def flatten(self, network: nn.Module) -> tuple[Tensor, Tensor]:
        """Copy a network's parameters [P] and running statistics [U] out of it."""
        named = dict(network.named_buffers())
        theta = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
        buffers = [named[slot.name].reshape(-1) for slot in self.buffers]
        return theta, torch.cat(buffers) if buffers else theta.new_empty(0)

    def filled(self, network: nn.Module, theta: Tensor, buffers: Tensor) -> nn.Module:
        """Return a copy of the network with weights [P] and running statistics [U], in evaluation mode."""
        network = copy.deepcopy(network).eval()
        # by name: a state_dict has tied weights twice, and other buffers
        tensors = dict(network.named_parameters()) | dict(network.named_buffers())
        with torch.no_grad():
            for name, value in (self.views(theta) | self.buffer_views(buffers)).items():
                tensors[name].copy_(value)
        return network


def under(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def columns(layers: tuple[Layer, ...], mask: Tensor) -> Tensor:
    """Expand a mask of layers, bool [..., L], to the flat vector: bool [..., P]."""
    return spread([layer.size for layer in layers], mask)


def spread(sizes: Sequence[int], of_layers: Tensor) -> Tensor:
    """Repeat each layer's value, [..., L], for each of the layer's numbers: [..., sum of the sizes]."""
    return of_layers.repeat_interleave(torch.tensor(sizes, device=of_layers.device), dim=-1)


def pieces(layers: Sequence[Layer]) -> Iterator[tuple[int, slice]]:
    """Yield (layer number, columns), in pieces that stay in a processor's cache for many models."""
    for number, layer in enumerate(layers):
        for start in range(layer.start, layer.stop, COLUMNS_AT_ONCE):
            yield number, slice(start, min(start + COLUMNS_AT_ONCE, layer.stop))


def _slots(shapes: dict[str, torch.Size], short: dict[str, str]) -> tuple[Slot, ...]:
    slots, start = [], 0
    for name, shape in shapes.items():
        stop = start + shape.numel()
        slots.append(Slot(name, tuple(shape), start, stop, short[name.rpartition(".")[0]]))
        start = stop
    return tuple(slots)


def _short_names(modules: Sequence[str]) -> dict[str, str]:
    """Name modules as papers do: without the `body.` or `head.` that every network starts with, if this
    names one of them only."""
    short = {name: name.removeprefix("body.").removeprefix("head.") for name in {*modules}}
    times = Counter(short.values())
    return {name: one if times[one] == 1 else name for name, one in short.items()}


def _views(slots: Sequence[Slot], flat: Tensor) -> dict[str, Tensor]:
    if not slots:
        return {}
    # split's backward is one concatenation; separate slices would each allocate a gradient of size P
    parts = flat.split([slot.stop - slot.start for slot in slots])
    return {slot.name: part.view(slot.shape) for slot, part in zip(slots, parts, strict=True)}
