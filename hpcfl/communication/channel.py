"""Transport of messages between the server and the workers, in blocks of clients.

Shapes: S clients of the cohort, C clients of a block or rank, P trainable numbers, L layers.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hpcfl.communication.codecs import AS_IT_IS, Codec, Frame, UploadCoding
from hpcfl.communication.messages import Cohort, Message, Piece
from hpcfl.communication.world import World
from hpcfl.parameters import Layer, spread


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

    def __len__(self) -> int:
        return len(self._workers)

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
        return self._own(self._deal(cohort))

    def homes(self, cohort: Cohort) -> Sequence[int]:
        """Return the worker whose shard has each member."""
        return self._world.homes(cohort.clients, self._num_clients)

    def workers(self, cohort: Cohort) -> Sequence[int]:
        """Return the worker that each member trains on."""
        return self.homes(cohort) if cohort.workers is None else cohort.workers

    def down(self, message: Message | None, cohort: Cohort, codec: Codec = AS_IT_IS) -> Message:
        """Bring the server's message to the workers; each gets the rows of its own cohort members.

        Collective. `message` is the server's and None elsewhere; a serial world gets a copy.
        """
        world, deal = self._world, self._deal(cohort)
        own = self._own(deal)
        header = _Entry.encode(_Entry.describe(message)) if message is not None else None
        received = Message(num_clients=len(own))
        for entry in _Entry.decode(world.broadcast_bytes(header)):
            frame = self._frame(entry, 1 if entry.shared else len(cohort))
            if entry.is_chosen:
                chosen = torch.empty(len(cohort), len(self._layers), dtype=torch.uint8)
                if message is not None:
                    chosen.copy_(message.keep[entry.name])
                world.broadcast(chosen)
                received.keep[entry.name] = chosen[own].bool()
            if entry.shared:
                row = message.shared[entry.name].unsqueeze(0) if message is not None else None
                received.shared[entry.name] = self._broadcast(frame, row, codec)[0]
            else:
                if entry.is_chosen:
                    frame = replace(frame, keep=chosen.bool())
                rows = message.rows[entry.name] if message is not None else None
                received.rows[entry.name] = self._scatter(frame, rows, deal, own, codec)
            if entry.keep is not None:
                received.keep[entry.name] = torch.tensor(entry.keep)
        return received

    def as_received(self, message: Message, codec: Codec) -> Message:
        """Return a download as its clients decode it, with what was sent.

        Layers that are left out stay as they are.
        """
        arrived = message.of(message.num_clients)
        for name in message.names:
            shared, keep = name in message.shared, message.keep.get(name)
            rows = message.shared[name].unsqueeze(0) if shared else message.rows[name]
            frame = Frame.of(name, rows.shape[1:], rows.dtype, self._layers)
            coder = codec.of(frame)
            if coder is AS_IT_IS:
                continue
            arrived.pieces[name] = coder.pieces(replace(frame, keep=keep))
            # a shared tensor whose layers are chosen client by client arrives whole
            mask = None if keep is None or (shared and keep.dim() == 2) else keep.expand(len(rows), -1)
            decoded = torch.empty_like(rows)
            for block in self._blocks(rows[0].numel(), len(rows)):
                numbers, part = frame.by_model(rows[block].cpu()), frame[block]
                coded = coder.decode(coder.encode(numbers, part), part)
                if mask is not None:
                    coded = frame.where(mask[block], coded, numbers)
                decoded[block] = coded.view_as(rows[block])
            if shared:
                arrived.shared[name] = decoded[0]
            else:
                arrived.rows[name] = decoded
        return arrived

    def up(
        self,
        message: Message,
        cohort: Cohort,
        sent: Message | None = None,
        coding: UploadCoding | None = None,
    ) -> Upload:
        """Send the rows of this rank's cohort members to the server, in client-ordered blocks.

        `sent` is the message that the server sent to the cohort; a method may need it to read the upload.
        Without a `coding` tensors travel as they are.

        Collective. The iteration over the result is collective, too, and yields blocks on the server only:
        every rank must iterate to the end (`Upload.drain`).
        """
        header = _Entry.encode(_Entry.describe(message)) if message.num_clients else b""
        headers = self._world.gather_bytes(header)
        first = next((h for h in headers if h), b"[]") if headers is not None else b""
        entries = _Entry.decode(self._world.broadcast_bytes(first))
        return Upload(self._gather(entries, message, cohort, coding), sent)

    def collect(self, cohort: Cohort, rows: Tensor) -> Tensor | None:
        """Bring figures [own members, F] to the server, [S, F], and None elsewhere. Collective."""
        deal, everyone, width = self._deal(cohort), slice(0, len(cohort)), rows.shape[1]
        counts = deal.sizes(torch.full((len(cohort),), width), everyone)
        gathered = self._world.gather(rows.reshape(-1).contiguous(), counts)
        return None if gathered is None else deal.in_client_order(gathered.view(-1, width), everyone)

    def _own(self, deal: _Deal) -> list[int]:
        return deal.of_worker(self._world.worker_index) if self._world.is_worker else []

    def _deal(self, cohort: Cohort) -> _Deal:
        return _Deal(self.workers(cohort), self._world.num_workers)

    def _broadcast(self, frame: Frame, row: Tensor | None, codec: Codec) -> Tensor:
        """Return the server's row [1, ...] of a shared tensor on every rank. Collective."""
        codec = codec.of(frame)
        pieces = codec.pieces(frame)
        encoded = None if row is None else codec.encode(frame.by_model(row.cpu()), frame)
        arrived = []
        for number, piece in enumerate(pieces):
            flat = torch.empty(int(_row_sizes(piece, 1)[0]), dtype=piece.dtype)
            if encoded is not None:
                flat = _pack(encoded[number], piece).clone()
            self._world.broadcast(flat)
            arrived.append(_unpack(flat, piece, 1))
        return codec.decode(arrived, frame).view(1, *frame.shape)

    def _scatter(
        self, frame: Frame, rows: Tensor | None, deal: _Deal, own: list[int], codec: Codec
    ) -> Tensor:
        """Return this rank's rows of the server's [S, ...]. Collective."""
        codec = codec.of(frame)
        pieces = codec.pieces(frame)
        parts = [[torch.empty(0, dtype=piece.dtype)] for piece in pieces]
        for block in self._blocks(math.prod(frame.shape), len(deal)):
            encoded, order = None, deal.in_worker_order(block)
            if rows is not None:
                encoded = codec.encode(frame.by_model(rows[order].cpu()), frame[order])
            for number, piece in enumerate(pieces):
                send = None if encoded is None else _pack(encoded[number], piece[order])
                counts = deal.sizes(_row_sizes(piece, len(deal)), block)
                parts[number].append(self._world.scatter(send, counts, piece.dtype))
        count = len(own)
        arrived = [
            _unpack(part[1] if len(part) == 2 else torch.cat(part), piece[own], count)
            for part, piece in zip(parts, pieces, strict=True)
        ]
        return codec.decode(arrived, frame[own]).view(count, *frame.shape)

    def _gather(
        self, entries: Sequence[_Entry], message: Message, cohort: Cohort, coding: UploadCoding | None
    ) -> Iterator[tuple[slice, Message]]:
        world, deal = self._world, self._deal(cohort)
        own = self._own(deal)
        frames = {}
        for entry in entries:
            frame = self._frame(entry, len(cohort))
            if entry.is_chosen:
                chosen = torch.zeros(len(cohort), len(self._layers), dtype=torch.uint8)
                if message.num_clients:
                    chosen[own] = message.keep[entry.name].to(torch.uint8)
                gathered = self.collect(cohort, chosen[own])
                world.broadcast(chosen if gathered is None else chosen.copy_(gathered))
                frame = replace(frame, keep=chosen.bool())
            frames[entry.name] = frame if coding is None else self._after(frame, coding, len(cohort), own)
        codecs = {name: AS_IT_IS if coding is None else coding.codec.of(f) for name, f in frames.items()}
        pieces = {name: codecs[name].pieces(frame) for name, frame in frames.items()}
        if coding is not None:
            for name, codec in codecs.items():
                if codec.remembers:
                    coding.unsent.begin(frames[name])
        for block in self._blocks(sum(math.prod(entry.shape) for entry in entries), len(cohort)):
            first, last = bisect_left(own, block.start), bisect_left(own, block.stop)
            mine, order = own[first:last], deal.in_worker_order(block)
            received = Message(num_clients=block.stop - block.start)
            for entry in entries:
                frame, codec = frames[entry.name], codecs[entry.name]
                send = [torch.empty(0, dtype=piece.dtype) for piece in pieces[entry.name]]
                if mine:
                    rows, of_rank = message.rows[entry.name], slice(first, last)
                    encoded = _encoded(rows, frame[mine], of_rank, codec, coding)
                    send = [
                        _pack(tensor, piece[mine])
                        for tensor, piece in zip(encoded, pieces[entry.name], strict=True)
                    ]
                arrived = []
                for flat, piece in zip(send, pieces[entry.name], strict=True):
                    sizes = deal.sizes(_row_sizes(piece, len(cohort)), block)
                    gathered = world.gather(flat, sizes)
                    if gathered is not None:
                        numbers = _unpack(gathered, piece[order], received.num_clients)
                        arrived.append(deal.in_client_order(numbers, block))
                if not world.is_server:
                    continue
                part, base = frame[block], None
                if coding is not None and coding.sent is not None and codec is not AS_IT_IS:
                    base = part.base(coding.sent.select(block))
                rows = codec.decode(arrived, part, base)
                received.rows[entry.name] = rows.view(received.num_clients, *frame.shape)
                if codec is not AS_IT_IS:
                    received.pieces[entry.name] = codec.pieces(part)
                if entry.keep is not None:
                    received.keep[entry.name] = torch.tensor(entry.keep)
                elif part.keep is not None:
                    received.keep[entry.name] = part.keep
            if world.is_server:
                yield block, received

    def _after(self, frame: Frame, coding: UploadCoding, num_rows: int, own: list[int]) -> Frame:
        """Return the frame of a cohort that says what its members received: all on the server, else `own`."""
        if coding.sent is not None:
            return frame.after(coding.sent)
        of_rank = frame[own].after(coding.received)
        if of_rank.known is None:
            return frame
        # only this rank's rows are looked at
        known = torch.zeros(num_rows, len(frame.sizes), dtype=torch.bool)
        known[own] = of_rank.known
        return replace(frame, known=known)

    def _blocks(self, row_size: int, num_rows: int) -> list[slice]:
        """Cut a cohort into blocks of at most `max_elements` numbers, of one client at the least."""
        step = max(1, self._world.max_elements // max(1, row_size))
        return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

    def _frame(self, entry: _Entry, num_rows: int) -> Frame:
        frame = Frame.of(entry.name, entry.shape, entry.dtype, self._layers)
        if entry.keep is None:
            return frame
        return replace(frame, keep=torch.tensor(entry.keep).expand(num_rows, -1))


def _encoded(
    rows: Tensor, frame: Frame, part: slice, codec: Codec, coding: UploadCoding | None
) -> list[Tensor]:
    """Return the pieces of a part of this rank's rows; what they leave out goes to the clients' state."""
    numbers = frame.by_model(rows[part].cpu())
    if coding is None or codec is AS_IT_IS:
        return codec.encode(numbers, frame)
    base = frame.base(coding.received.select(part))
    if not codec.remembers:
        return codec.encode(numbers, frame, base)
    unsent = frame.by_model(coding.unsent.read(frame.name, part))
    encoded = codec.encode(numbers, frame, base, unsent)
    coding.unsent.write(frame.name, part, unsent)
    return encoded


def _row_sizes(piece: Piece, num_rows: int) -> Tensor:
    """Return how many numbers of each row travel, int64 [num_rows]."""
    return piece.numbers().sum(dim=-1).expand(num_rows)


def _pack(numbers: Tensor, piece: Piece) -> Tensor:
    """Flatten rows [c, M, ...], leaving out the layers that do not travel."""
    if piece.travels is None:
        return numbers.contiguous().view(-1)
    chosen = spread(piece.sizes, piece.travels)
    return torch.cat([row[:, mask].reshape(-1) for row, mask in zip(numbers, chosen, strict=True)])


def _unpack(flat: Tensor, piece: Piece, num_rows: int) -> Tensor:
    """Undo `_pack`; layers that did not travel are zero."""
    shape = (num_rows, piece.models, sum(piece.sizes))
    if piece.travels is None:
        return flat.view(shape)
    rows = torch.zeros(shape, dtype=piece.dtype)
    chosen = spread(piece.sizes, piece.travels)
    sizes = _row_sizes(piece, num_rows).tolist()
    for row, mask, part in zip(rows, chosen, flat.split(sizes) if num_rows else (), strict=True):
        row[:, mask] = part.view(piece.models, -1)
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
