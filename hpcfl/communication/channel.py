"""Transport of messages between the server and the workers, in blocks of clients.

Shapes: S clients of the cohort, C clients of a block or rank, P trainable numbers, L layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message, numbers_of_layers
from hpcfl.communication.world import World
from hpcfl.parameters import Layer, columns


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

        `sent` is the message that the server sent to the cohort; a method may need it to read the upload.

        Collective. The iteration over the result is collective, too, and yields blocks on the server only:
        every rank must iterate to the end (`Upload.drain`).
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
        return numbers_of_layers(entry.shape, self._layers, keep).sum(dim=1)

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
