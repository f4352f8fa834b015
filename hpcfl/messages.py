"""What travels between server and clients: named tensors, the layers they carry, and their bytes.

Shapes: S clients of the cohort, C clients of a block or rank, P trainable numbers, L layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hpcfl.parameters import Layer, columns
from hpcfl.world import World

INDEX_BYTES = 8
"""What naming one layer that was left out costs on the wire."""

BUFFERS = "buffers"
"""The name under which running statistics travel; they are counted in a column of their own."""


@dataclass(frozen=True)
class Cohort:
    """The clients of one round, in ascending order of id."""

    round: int
    clients: tuple[int, ...]
    num_samples: Tensor
    """Training samples of each client, int64 [S]."""

    def __len__(self) -> int:
        return len(self.clients)


@dataclass
class Message:
    """Named tensors for a group of clients.

    `shared` tensors [...] are the same for every client, `rows` [C, ...] have one row a client. `keep[name]`
    says which layers of a tensor [..., P] travel: bool [L] if known to everyone, bool [C, L] if chosen client
    by client; without it all do. What did not travel arrives as zero, except in a shared tensor whose layers
    are chosen client by client: it arrives whole.
    """

    shared: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    keep: dict[str, Tensor] = field(default_factory=dict)
    num_clients: int = 1

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor with its client axis, [C, ...]; a shared one is expanded without a copy."""
        if name in self.rows:
            return self.rows[name]
        shared = self.shared[name]
        return shared.expand(self.num_clients, *shared.shape)

    def __contains__(self, name: str) -> bool:
        return name in self.rows or name in self.shared

    def to(self, device: torch.device) -> Message:
        """Return the message with its tensors on a device; masks too."""
        shared, rows, keep = (
            {name: tensor.to(device) for name, tensor in tensors.items()}
            for tensors in (self.shared, self.rows, self.keep)
        )
        return Message(shared, rows, keep, self.num_clients)

    def select(self, part: slice) -> Message:
        """Return the message of some of its clients, without copying."""
        keep = {name: mask if mask.dim() == 1 else mask[part] for name, mask in self.keep.items()}
        count = len(range(self.num_clients)[part])
        rows = {name: rows[part] for name, rows in self.rows.items()}
        return Message(self.shared, rows, keep, count)

    def __or__(self, other: Message) -> Message:
        """Return both messages of the same clients as one; where a name is in both, the other's tensor."""
        return Message(
            self.shared | other.shared, self.rows | other.rows, self.keep | other.keep, self.num_clients
        )


@dataclass
class Traffic:
    """Bytes addressed to, or sent by, each client of a cohort; int64 throughout."""

    parameters: np.ndarray
    """[S, labels]: trainable numbers by layer; a tensor not made of layers has a label of its own."""
    buffers: np.ndarray
    """[S]: running statistics."""
    indices: np.ndarray
    """[S]: names of layers left out, and whole-number tensors."""

    def add(self, positions: slice, other: Traffic) -> None:
        """Add the bytes of the clients at these positions of the cohort."""
        for mine, others in zip(vars(self).values(), vars(other).values(), strict=True):
            mine[positions] += others


def count_bytes(
    message: Message, layers: Sequence[Layer], labels: Sequence[str], names_layers: bool = True
) -> Traffic:
    """Count a message's bytes for each of its clients: a shared tensor once for each of them.

    `names_layers` says whether leaving out layers client by client costs their names.
    """
    clients = message.num_clients
    traffic = Traffic(
        np.zeros((clients, len(labels)), np.int64), np.zeros(clients, np.int64), np.zeros(clients, np.int64)
    )
    for name in [*message.shared, *message.rows]:
        tensor = message.rows[name][:1] if name in message.rows else message.shared[name].unsqueeze(0)
        item = tensor.element_size()
        shape = tensor.shape[1:]
        if name == BUFFERS:
            traffic.buffers += item * shape.numel()
        elif not tensor.is_floating_point():
            traffic.indices += item * shape.numel()
        elif shape and shape[-1] == layers[-1].stop:
            sizes = np.array([layer.size for layer in layers])
            keep = message.keep.get(name, torch.ones(len(layers), dtype=torch.bool)).numpy()
            traffic.parameters[:, : len(layers)] += keep * sizes * (item * math.prod(shape[:-1]))
            if keep.ndim == 2 and names_layers:
                traffic.indices += INDEX_BYTES * (~keep).sum(axis=1)
        else:
            traffic.parameters[:, labels.index(name)] += item * shape.numel()
    return traffic


@dataclass(frozen=True)
class _Entry:
    """What both ends must know of a tensor before its numbers travel; shape is that of one client's row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shared: bool
    keep: tuple[bool, ...] | None
    is_chosen: bool

    @staticmethod
    def describe(message: Message) -> list[_Entry]:
        entries = []
        for shared, tensors in ((True, message.shared), (False, message.rows)):
            for name, tensor in tensors.items():
                keep = message.keep.get(name)
                static = tuple(keep.tolist()) if keep is not None and keep.dim() == 1 else None
                shape = tuple(tensor.shape if shared else tensor.shape[1:])
                is_chosen = keep is not None and keep.dim() == 2
                entries.append(_Entry(name, shape, tensor.dtype, shared, static, is_chosen))
        return entries

    @staticmethod
    def encode(entries: Sequence[_Entry]) -> bytes:
        return json.dumps(
            [vars(e) | {"dtype": str(e.dtype).removeprefix("torch.")} for e in entries]
        ).encode()

    @staticmethod
    def decode(data: bytes) -> list[_Entry]:
        entries = []
        for item in json.loads(data):
            keep = None if item["keep"] is None else tuple(item["keep"])
            dtype = getattr(torch, item["dtype"])
            entries.append(
                _Entry(item["name"], tuple(item["shape"]), dtype, item["shared"], keep, item["is_chosen"])
            )
        return entries


class Channel:
    """The way between the server and the workers, for messages whose tensors consist of `layers`."""

    def __init__(self, world: World, layers: tuple[Layer, ...], num_clients: int) -> None:
        self._world, self._layers, self._num_clients = world, layers, num_clients
        self._layer_sizes = torch.tensor([layer.size for layer in layers])

    def own(self, cohort: Cohort) -> slice:
        """Return the positions in the cohort of this rank's clients."""
        if not self._world.is_worker:
            return slice(0, 0)
        counts = self._world.owner_counts(cohort.clients, self._num_clients)
        start = sum(counts[: self._world.worker_index])
        return slice(start, start + counts[self._world.worker_index])

    def down(self, message: Message | None, cohort: Cohort) -> Message:
        """Bring the server's message to the workers; each gets the rows of its own cohort members.

        Collective. `message` is the server's and None elsewhere; a serial world gets a copy.
        """
        world, own = self._world, self.own(cohort)
        header = _Entry.encode(_Entry.describe(message)) if message is not None else None
        received = Message(num_clients=own.stop - own.start)
        for entry in _Entry.decode(world.broadcast_bytes(header)):
            keep = self._static_keep(entry, 1 if entry.shared else len(cohort))
            if entry.is_chosen:
                chosen = torch.empty(len(cohort), len(self._layers), dtype=torch.uint8)
                if message is not None:
                    chosen.copy_(message.keep[entry.name])
                world.broadcast(chosen)
                received.keep[entry.name] = chosen[own].bool()
            if entry.shared:
                size = int(self._row_sizes(entry, keep, 1)[0])
                flat = torch.empty(size, dtype=entry.dtype)
                if message is not None:
                    flat = self._pack(message.shared[entry.name].unsqueeze(0), keep).cpu().clone()
                world.broadcast(flat)
                received.shared[entry.name] = self._unpack(flat, entry, keep, 1)[0]
            else:
                if entry.is_chosen:
                    keep = chosen.bool()
                rows = message.rows[entry.name] if message is not None else None
                received.rows[entry.name] = self._scatter(entry, rows, keep, cohort, own)
            if entry.keep is not None:
                received.keep[entry.name] = torch.tensor(entry.keep)
        return received

    def up(self, message: Message, cohort: Cohort, sent: Message | None = None) -> Upload:
        """Send the rows of this rank's cohort members to the server, in client-ordered blocks.

        `sent` is what the server had sent them, which it may need to make sense of the answer.

        Collective, and so is the iteration over the result, which only yields on the server: every rank
        must run it to its end (`Upload.drain`).
        """
        header = _Entry.encode(_Entry.describe(message)) if message.num_clients else b""
        headers = self._world.gather_bytes(header)
        first = next((h for h in headers if h), b"[]") if headers is not None else b""
        entries = _Entry.decode(self._world.broadcast_bytes(first))
        return Upload(self._gather(entries, message, cohort), sent)

    def _scatter(
        self, entry: _Entry, rows: Tensor | None, keep: Tensor | None, cohort: Cohort, own: slice
    ) -> Tensor:
        parts = [torch.empty(0, dtype=entry.dtype)]
        sizes = self._row_sizes(entry, keep, len(cohort))
        for block in self._blocks([entry], len(cohort)):
            send = None
            if rows is not None:
                send = self._pack(rows[block], None if keep is None else keep[block]).cpu()
            parts.append(self._world.scatter(send, self._worker_sizes(sizes, block, cohort), entry.dtype))
        flat = parts[1] if len(parts) == 2 else torch.cat(parts)
        return self._unpack(flat, entry, None if keep is None else keep[own], own.stop - own.start)

    def _gather(
        self, entries: Sequence[_Entry], message: Message, cohort: Cohort
    ) -> Iterator[tuple[slice, Message]]:
        world, own = self._world, self.own(cohort)
        keeps: dict[str, Tensor | None] = {}
        for entry in entries:
            keeps[entry.name] = self._static_keep(entry, len(cohort))
            if entry.is_chosen:
                chosen = torch.zeros(len(cohort), len(self._layers), dtype=torch.uint8)
                if message.num_clients:
                    chosen[own] = message.keep[entry.name].to(torch.uint8)
                counts = self._worker_sizes(
                    torch.full((len(cohort),), len(self._layers)), slice(None), cohort
                )
                gathered = world.gather(chosen[own].reshape(-1), counts)
                world.broadcast(chosen if gathered is None else chosen.copy_(gathered.view_as(chosen)))
                keeps[entry.name] = chosen.bool()
        for block in self._blocks(entries, len(cohort)):
            mine = slice(max(block.start, own.start), max(block.start, min(block.stop, own.stop)))
            received = Message(num_clients=block.stop - block.start)
            for entry in entries:
                keep = keeps[entry.name]
                send = torch.empty(0, dtype=entry.dtype)
                if mine.start < mine.stop:
                    rows = message.rows[entry.name][mine.start - own.start : mine.stop - own.start]
                    send = self._pack(rows, None if keep is None else keep[mine]).cpu()
                sizes = self._row_sizes(entry, keep, len(cohort))
                flat = world.gather(send, self._worker_sizes(sizes, block, cohort))
                if flat is not None:
                    part = None if keep is None else keep[block]
                    received.rows[entry.name] = self._unpack(flat, entry, part, received.num_clients)
                    if entry.keep is not None:
                        received.keep[entry.name] = torch.tensor(entry.keep)
                    elif part is not None:
                        received.keep[entry.name] = part
            if world.is_server:
                yield block, received

    def _blocks(self, entries: Sequence[_Entry], num_rows: int) -> list[slice]:
        """Cut a cohort into blocks of at most `max_elements` numbers, of one client at the least."""
        row = max(1, sum(math.prod(entry.shape) for entry in entries))
        step = max(1, self._world.max_elements // row)
        return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

    def _static_keep(self, entry: _Entry, num_rows: int) -> Tensor | None:
        return None if entry.keep is None else torch.tensor(entry.keep).expand(num_rows, -1)

    def _row_sizes(self, entry: _Entry, keep: Tensor | None, num_rows: int) -> Tensor:
        """Return how many numbers of each row travel, int64 [num_rows]."""
        if keep is None:
            return torch.full((num_rows,), math.prod(entry.shape))
        return (keep * self._layer_sizes).sum(dim=1) * math.prod(entry.shape[:-1])

    def _worker_sizes(self, row_sizes: Tensor, block: slice, cohort: Cohort) -> list[int]:
        """Return how many numbers of a block each worker has."""
        rows = range(len(cohort))[block]
        sizes = []
        stop = 0
        for count in self._world.owner_counts(cohort.clients, self._num_clients):
            start, stop = stop, stop + count
            sizes.append(int(row_sizes[max(start, rows.start) : max(rows.start, min(stop, rows.stop))].sum()))
        return sizes

    def _pack(self, rows: Tensor, keep: Tensor | None) -> Tensor:
        """Flatten rows [c, ..., P], leaving out the layers that do not travel."""
        if keep is None:
            return rows.contiguous().view(-1)
        chosen = columns(self._layers, keep)
        return torch.cat([row[..., mask].reshape(-1) for row, mask in zip(rows, chosen, strict=True)])

    def _unpack(self, flat: Tensor, entry: _Entry, keep: Tensor | None, num_rows: int) -> Tensor:
        """Undo `_pack`; layers that did not travel are zero."""
        if keep is None:
            return flat.view(num_rows, *entry.shape)
        rows = torch.zeros(num_rows, *entry.shape, dtype=entry.dtype)
        chosen = columns(self._layers, keep)
        sizes = self._row_sizes(entry, keep, num_rows).tolist()
        for row, mask, part in zip(rows, chosen, flat.split(sizes) if num_rows else (), strict=True):
            row[..., mask] = part.view(*entry.shape[:-1], -1)
        return rows


class Upload:
    """A cohort's messages on the server, arriving in client-ordered blocks; can be read once.

    Iteration yields (positions in the cohort, message of these clients). Collective.
    """

    def __init__(self, blocks: Iterator[tuple[slice, Message]], sent: Message | None = None) -> None:
        self.sent = sent
        """What the cohort was sent in this round, on the server."""
        self._blocks = blocks
        self._observers: list[Callable[[slice, Message], None]] = []

    def observe(self, observer: Callable[[slice, Message], None]) -> None:
        """Show every block to `observer` before the reader sees it."""
        self._observers.append(observer)

    def __iter__(self) -> Iterator[tuple[slice, Message]]:
        for positions, block in self._blocks:
            for observer in self._observers:
                observer(positions, block)
            yield positions, block

    def collect(self) -> dict[str, Tensor]:
        """Read all blocks and return the rows of all clients, [S, ...], by name."""
        blocks = [block.rows for _, block in self]
        if len(blocks) <= 1:
            return blocks[0] if blocks else {}
        return {name: torch.cat([rows[name] for rows in blocks]) for name in blocks[0]}

    def drain(self) -> None:
        """Read what is left, so that no rank waits for ever."""
        for _ in self:
            pass


class WeightedMean:
    """A weighted mean over clients that takes blocks as they come, in client order.

    One fused multiply-add a client, so that the bits do not depend on how the cohort is cut in blocks.
    """

    def __init__(self, weights: Tensor) -> None:
        self._weights = (weights.double() / weights.double().sum()).tolist()
        self.value: Tensor | None = None

    def add(self, positions: slice, rows: Tensor) -> None:
        """Add the clients at these positions of the cohort, rows [C, ...]."""
        if self.value is None:
            self.value = torch.zeros_like(rows[0])
        for row, weight in zip(rows, self._weights[positions], strict=True):
            self.value.add_(row, alpha=weight)


class LayerMean:
    """A mean over clients with weights of its own for each layer (and branch), taking blocks as they come.

    `weights` [S, ..., L] are divided by `total` [..., L] (default: their sum over the cohort); where that is
    0, the mean keeps the numbers of `old` [..., P].
    """

    def __init__(
        self, weights: Tensor, layers: Sequence[Layer], old: Tensor, total: Tensor | None = None
    ) -> None:
        weights = weights.double()
        total = weights.sum(dim=0) if total is None else total.double()
        self._weights = weights / total.where(total > 0, 1.0)
        self._layers = layers
        self.value = old.where(columns(tuple(layers), total == 0), 0.0)

    def add(self, positions: slice, rows: Tensor) -> None:
        """Add the clients at these positions of the cohort, rows [C, ..., P]."""
        for row, weights in zip(rows, self._weights[positions], strict=True):
            for number, layer in enumerate(self._layers):
                mean, numbers = (tensor[..., layer.start : layer.stop] for tensor in (self.value, row))
                for index in np.ndindex(weights.shape[:-1]):
                    # adding nothing would still turn -0 to 0, and a diverged client's numbers to nan
                    if weight := float(weights[(*index, number)]):
                        mean[index].add_(numbers[index], alpha=weight)
