"""Transport of messages between the server and the workers, in blocks of clients.

Shapes: S clients of the cohort, C clients of a block or rank, P trainable numbers, L layers.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
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


class _Deal:
    """Which worker has which members of a cohort; positions are those in the cohort."""

    def __init__(self, workers: Sequence[int], num_workers: int) -> None:
        self._workers, self._num_workers = torch.tensor(workers, dtype=torch.int64), num_workers
        self._is_sorted = bool((self._workers.diff() >= 0).all())

    def of_worker(self, worker: int) -> list[int]:
        """Return the positions of a worker's members, in ascending order."""
        return torch.nonzero(self._workers == worker).flatten().tolist()

    def in_worker_order(self, block: slice) -> slice | Tensor:
        """Return the positions of a block, worker by worker, in ascending order within each."""
        if self._is_sorted:
            return block
        return block.start + self._workers[block].argsort(stable=True)

    def in_client_order(self, rows: Tensor, block: slice) -> Tensor:
        """Put the rows [c, ...] of a block's members back from worker order."""
        if self._is_sorted:
            return rows
        restored = torch.empty_like(rows)
        restored[self._workers[block].argsort(stable=True)] = rows
        return restored

    def sizes(self, row_sizes: Tensor, block: slice) -> list[int]:
        """Return how many numbers of a block each worker has, given those of each row, int64 [S]."""
        sizes = torch.zeros(self._num_workers, dtype=torch.int64)
        return sizes.index_add_(0, self._workers[block], row_sizes[block]).tolist()


class Channel:
    """The way between the server and the workers, for messages whose tensors consist of `layers`."""

    def __init__(self, world: World, layers: tuple[Layer, ...], num_clients: int) -> None:
        self._world, self._layers, self._num_clients = world, layers, num_clients

    def own(self, cohort: Cohort) -> list[int]:
        """Return the positions in the cohort of this rank's clients, in ascending order."""
        return self._deal(cohort).of_worker(self._world.worker_index) if self._world.is_worker else []

    def homes(self, cohort: Cohort) -> Sequence[int]:
        """Return the worker whose shard has each member."""
        return self._world.homes(cohort.clients, self._num_clients)

    def workers(self, cohort: Cohort) -> Sequence[int]:
        """Return the worker that each member trains on."""
        return self.homes(cohort) if cohort.workers is None else cohort.workers

    def down(self, message: Message | None, cohort: Cohort) -> Message:
        """Bring the server's message to the workers; each gets the rows of its own cohort members.

        Collective. `message` is the server's and None elsewhere; a serial world gets a copy.
        """
        world, own = self._world, self.own(cohort)
        header = _Entry.encode(_Entry.describe(message)) if message is not None else None
        received = Message(num_clients=len(own))
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

    def collect(self, cohort: Cohort, rows: Tensor) -> Tensor | None:
        """Bring figures [own members, F] to the server, [S, F], and None elsewhere. Collective."""
        deal, everyone, width = self._deal(cohort), slice(0, len(cohort)), rows.shape[1]
        counts = deal.sizes(torch.full((len(cohort),), width), everyone)
        gathered = self._world.gather(rows.reshape(-1).contiguous(), counts)
        return None if gathered is None else deal.in_client_order(gathered.view(-1, width), everyone)

    def _deal(self, cohort: Cohort) -> _Deal:
        return _Deal(self.workers(cohort), self._world.num_workers)

    def _scatter(
        self, entry: _Entry, rows: Tensor | None, keep: Tensor | None, cohort: Cohort, own: list[int]
    ) -> Tensor:
        parts = [torch.empty(0, dtype=entry.dtype)]
        sizes, deal = self._row_sizes(entry, keep, len(cohort)), self._deal(cohort)
        for block in self._blocks([entry], len(cohort)):
            send = None
            if rows is not None:
                order = deal.in_worker_order(block)
                send = self._pack(rows[order], None if keep is None else keep[order]).cpu()
            parts.append(self._world.scatter(send, deal.sizes(sizes, block), entry.dtype))
        flat = parts[1] if len(parts) == 2 else torch.cat(parts)
        return self._unpack(flat, entry, None if keep is None else keep[own], len(own))

    def _gather(
        self, entries: Sequence[_Entry], message: Message, cohort: Cohort
    ) -> Iterator[tuple[slice, Message]]:
        world, deal, own = self._world, self._deal(cohort), self.own(cohort)
        keeps: dict[str, Tensor | None] = {}
        for entry in entries:
            keeps[entry.name] = self._static_keep(entry, len(cohort))
            if entry.is_chosen:
                chosen = torch.zeros(len(cohort), len(self._layers), dtype=torch.uint8)
                if message.num_clients:
                    chosen[own] = message.keep[entry.name].to(torch.uint8)
                gathered = self.collect(cohort, chosen[own])
                world.broadcast(chosen if gathered is None else chosen.copy_(gathered))
                keeps[entry.name] = chosen.bool()
        for block in self._blocks(entries, len(cohort)):
            mine = own[bisect_left(own, block.start) : bisect_left(own, block.stop)]
            order = deal.in_worker_order(block)
            received = Message(num_clients=block.stop - block.start)
            for entry in entries:
                keep = keeps[entry.name]
                send = torch.empty(0, dtype=entry.dtype)
                if mine:
                    first = own.index(mine[0])
                    rows = message.rows[entry.name][first : first + len(mine)]
                    send = self._pack(rows, None if keep is None else keep[mine]).cpu()
                sizes = self._row_sizes(entry, keep, len(cohort))
                flat = world.gather(send, deal.sizes(sizes, block))
                if flat is not None:
                    rows = self._unpack(
                        flat, entry, None if keep is None else keep[order], received.num_clients
                    )
                    received.rows[entry.name] = deal.in_client_order(rows, block)
                    if entry.keep is not None:
                        received.keep[entry.name] = torch.tensor(entry.keep)
                    elif keep is not None:
                        received.keep[entry.name] = keep[block]
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
