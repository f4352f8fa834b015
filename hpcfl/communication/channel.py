"""Transport of messages between the server and the workers, in blocks of clients.

Shapes: S clients of the cohort, C clients of a block or rank, P trainable numbers, L layers.
"""

from __future__ import annotations

import json
import math
import pickle
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from hpcfl.communication.codecs import IDENTITY, Codec, Frame, UploadCoding
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort, Message, Piece, SameKinds
from hpcfl.communication.upload import FixedPointSum, Upload
from hpcfl.parameters import Layer, spread


class _Placement:
    """Which worker has which members of a cohort; positions are those in the cohort.

    `own` are the positions of the members on `worker`, in ascending order; none for -1, a server's.
    """

    def __init__(self, workers: Sequence[int], num_workers: int, worker: int) -> None:
        self._workers, self._num_workers = torch.tensor(workers, dtype=torch.int64), num_workers
        self._is_sorted = bool((self._workers.diff() >= 0).all())
        self.own: list[int] = torch.nonzero(self._workers == worker).flatten().tolist()

    def __len__(self) -> int:
        return len(self._workers)

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
        """Return the numbers of a block that each worker has, given the count of each row, int64 [S]."""
        sizes = torch.zeros(self._num_workers, dtype=torch.int64)
        return sizes.index_add_(0, self._workers[block], row_sizes[block]).tolist()


class Channel:
    """Sends messages between the server and the workers; their tensors consist of `layers`.

    Clients live in shards that begin at multiples of `shard_unit`.
    """

    def __init__(
        self, world: Communicator, layers: tuple[Layer, ...], num_clients: int, shard_unit: int = 1
    ) -> None:
        self._world, self._layers = world, layers
        self._num_clients, self._shard_unit = num_clients, shard_unit

    def own(self, cohort: Cohort) -> list[int]:
        """Return the positions in the cohort of this rank's clients, in ascending order."""
        return self._placement(cohort).own

    def homes(self, cohort: Cohort) -> Sequence[int]:
        """Return the worker whose shard has each member."""
        return self._world.homes(cohort.clients, self._num_clients, self._shard_unit)

    def workers(self, cohort: Cohort) -> Sequence[int]:
        """Return the worker that each member trains on."""
        return self.homes(cohort) if cohort.workers is None else cohort.workers

    def down(self, message: Message | None, cohort: Cohort, codec: Codec = IDENTITY) -> Message:
        """Bring the server's message to the workers; each gets the rows of its own cohort members.

        Collective. `message` is the server's and None elsewhere; a serial world gets a copy.
        """
        world, placement = self._world, self._placement(cohort)
        own = placement.own
        header = None if message is None else pickle.dumps(self._frames(message))
        received = Message(num_clients=len(own))
        for frame in pickle.loads(world.broadcast_bytes(header)):
            rows = None if message is None else frame.rows_of(message)
            if frame.is_shared:
                received.shared[frame.name] = self._broadcast(frame, rows, codec)[0]
            else:
                received.per_client[frame.name] = self._scatter(frame, rows, placement, codec)
            if frame.layer_mask is not None:
                received.layer_mask[frame.name] = frame[own].layer_mask
        return received

    def as_received(self, message: Message, codec: Codec) -> Message:
        """Return a download as its clients decode it, with the pieces that were sent.

        Layers that are left out stay unchanged.
        """
        arrived = message.with_clients(message.num_clients)
        for frame in self._frames(message):
            coder = codec.for_frame(frame)
            if coder is IDENTITY:
                continue
            rows = frame.rows_of(message)
            arrived.pieces[frame.name] = coder.pieces(frame)
            frame = frame.as_sent
            mask = None if frame.layer_mask is None else frame.layer_mask.expand(len(rows), -1)
            decoded = torch.empty_like(rows)
            for block in self._world.blocks(rows[0].numel(), len(rows)):
                numbers, part = frame.by_model(rows[block].cpu()), frame[block]
                coded = coder.decode(coder.encode(numbers, part), part)
                if mask is not None:
                    coded = frame.where(mask[block], coded, numbers)
                decoded[block] = coded.view_as(rows[block])
            if frame.is_shared:
                arrived.shared[frame.name] = decoded[0]
            else:
                arrived.per_client[frame.name] = decoded
        return arrived

    def up(
        self,
        message: Message,
        cohort: Cohort,
        sent: Message | None = None,
        coding: UploadCoding | None = None,
    ) -> Upload:
        """Start to send the rows of this rank's cohort members to the server.

        `sent` is the message that the server sent to the cohort, None elsewhere: a method or a `coding` may
        need it to read the upload.
        Without a `coding` tensors are not compressed. Collective; see `Upload` for what ranks do next.
        """
        # without the clients' own masks, which `_upload_frame` collects from all ranks
        frames_of_rank = [frame[[]] for frame in self._frames(message)]
        own = self.own(cohort)
        header = pickle.dumps((cohort.clients[own[0]], message.row_kinds(), frames_of_rank)) if own else b""
        headers = [pickle.loads(header) for header in self._world.gather_bytes(header) or () if header]
        same = SameKinds()
        for client, kinds, _ in headers:
            same.check(client, kinds)
        first = headers[0][2] if headers else []
        frames = {}
        for described in pickle.loads(self._world.broadcast_bytes(pickle.dumps(first))):
            frame = self._upload_frame(described, message, cohort, sent, coding)
            frames[frame.name] = frame
            if coding is not None and coding.codec.for_frame(frame).uses_error_feedback:
                coding.unsent.begin(frame)
        placement = self._placement(cohort)
        return _SentUpload(self._world, message, placement, frames, sent, coding)

    def collect(self, cohort: Cohort, rows: Tensor) -> Tensor | None:
        """Bring figures [own members, F] to the server, [S, F], and None elsewhere. Collective."""
        placement, everyone, width = self._placement(cohort), slice(0, len(cohort)), rows.shape[1]
        counts = placement.sizes(torch.full((len(cohort),), width), everyone)
        gathered = self._world.gather(rows.reshape(-1).contiguous(), counts)
        return None if gathered is None else placement.in_client_order(gathered.view(-1, width), everyone)

    def _placement(self, cohort: Cohort) -> _Placement:
        return _Placement(self.workers(cohort), self._world.num_workers, self._world.worker_index)

    def _frames(self, message: Message) -> list[Frame]:
        return [Frame.from_message(message, name, self._layers) for name in message.names]

    def _broadcast(self, frame: Frame, row: Tensor | None, codec: Codec) -> Tensor:
        """Return the server's row [1, ...] of a shared tensor on every rank. Collective."""
        frame, codec = frame.as_sent, codec.for_frame(frame)
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

    def _scatter(self, frame: Frame, rows: Tensor | None, placement: _Placement, codec: Codec) -> Tensor:
        """Return this rank's rows of the server's [S, ...]. Collective."""
        codec = codec.for_frame(frame)
        pieces = codec.pieces(frame)
        parts = [[torch.empty(0, dtype=piece.dtype)] for piece in pieces]
        for block in self._world.blocks(math.prod(frame.shape), len(placement)):
            encoded, order = None, placement.in_worker_order(block)
            if rows is not None:
                encoded = codec.encode(frame.by_model(rows[order].cpu()), frame[order])
            for number, piece in enumerate(pieces):
                send = None if encoded is None else _pack(encoded[number], piece[order])
                counts = placement.sizes(_row_sizes(piece, len(placement)), block)
                parts[number].append(self._world.scatter(send, counts, piece.dtype))
        own, count = placement.own, len(placement.own)
        arrived = [
            _unpack(part[1] if len(part) == 2 else torch.cat(part), piece[own], count)
            for part, piece in zip(parts, pieces, strict=True)
        ]
        return codec.decode(arrived, frame[own]).view(count, *frame.shape)

    def _upload_frame(
        self,
        frame: Frame,
        message: Message,
        cohort: Cohort,
        sent: Message | None,
        coding: UploadCoding | None,
    ) -> Frame:
        """Return the frame of an upload's tensor for the whole cohort, given that of one rank. Collective."""
        own = self.own(cohort)
        if frame.has_own_masks:
            chosen = torch.zeros(len(cohort), len(self._layers), dtype=torch.uint8)
            if message.num_clients:
                chosen[own] = message.layer_mask[frame.name].to(torch.uint8)
            gathered = self.collect(cohort, chosen[own])
            self._world.broadcast(chosen if gathered is None else chosen.copy_(gathered))
            frame = replace(frame, layer_mask=chosen.bool())
        if coding is None or frame.name not in coding.differences:
            return frame
        if sent is not None:
            return frame.after(sent)
        of_rank = frame[own].after(coding.received)
        if of_rank.received_layers is None:
            return frame
        # only this rank's rows are read
        known = torch.zeros(len(cohort), len(frame.sizes), dtype=torch.bool)
        known[own] = of_rank.received_layers
        return replace(frame, received_layers=known)


class _SentUpload(Upload):
    """An upload whose rows are on the workers; in `drain` they serve what the server reads."""

    def __init__(
        self,
        world: Communicator,
        message: Message,
        placement: _Placement,
        frames: dict[str, Frame],
        sent: Message | None,
        coding: UploadCoding | None,
    ) -> None:
        """Take the rows of this rank's members and the frames of all tensors."""
        self.sent = sent
        self._world, self._message, self._placement, self._own = world, message, placement, placement.own
        self._frames, self._coding = frames, coding
        codec = IDENTITY if coding is None else coding.codec
        self._codecs = {name: codec.for_frame(frame) for name, frame in frames.items()}
        self._unread = list(frames)
        self._gathering: Iterator[tuple[slice, Message]] = iter(())
        self._is_gathering = False

    @property
    def is_read(self) -> bool:
        return not self._unread and not self._is_gathering

    @cached_property
    def outline(self) -> Message:
        outline = Message(num_clients=len(self._placement))
        for name, frame in self._frames.items():
            # only its type and shape are used
            rows = torch.zeros(1, dtype=frame.dtype).expand(len(self._placement), *frame.shape)
            outline.per_client[name] = rows
            outline.pieces[name] = self._codecs[name].pieces(frame)
            if frame.layer_mask is not None:
                outline.layer_mask[name] = frame.layer_mask
        return outline

    def sums(self, shares: Mapping[str, Tensor], sizes: Iterable[int] = ()) -> dict[str, Tensor]:
        names, sizes = [*shares], tuple(sizes)
        for name, of_clients in shares.items():
            is_whole = not sizes and of_clients.dim() == 2
            if not (is_whole or sizes) or of_clients.shape[1] != len(self._placement):
                raise ValueError(
                    f"the weights of {name!r} have the shape {[*of_clients.shape[1:]]}, and the cohort has "
                    f"{len(self._placement)} clients; give one for each, such as cohort.num_samples"
                )
        self._command(names, do="sum", shapes=[tuple(shares[name].shape) for name in names], sizes=sizes)
        return {name: self._sum(name, shares[name].double().contiguous(), sizes) for name in names}

    def drain(self) -> None:
        for _ in self._gathering:
            pass
        if self._world.is_server:
            if self._unread:
                self._command([], do="end")
                self._unread.clear()
            return
        while self._unread:
            command = json.loads(self._world.broadcast_bytes(None))
            if command["do"] == "end":
                return
            self._mark_read(command["names"])
            if command["do"] == "sum":
                for name, shape in zip(command["names"], command["shapes"], strict=True):
                    self._sum(name, torch.empty(shape, dtype=torch.float64), tuple(command["sizes"]))
            else:
                for _ in self._gather(command["names"]):
                    pass

    def blocks(self, *names: str) -> Iterator[tuple[slice, Message]]:
        if not self._world.is_server:
            self.drain()
            return iter(())
        wanted = [*names] or [*self._unread]
        if wanted:
            self._command(wanted, do="gather")
        self._gathering, self._is_gathering = self._gather(wanted), True
        return self._gathering

    def _command(self, names: Sequence[str], **what: object) -> None:
        """Send the other ranks a command on tensors that are not read yet. Called by the server."""
        if not self._world.is_server:
            raise RuntimeError("the server reads an upload, the other ranks call drain")
        if self._is_gathering:
            raise RuntimeError("read the blocks of an upload to the end before anything else of it")
        if other := [name for name in names if name not in self._unread]:
            raise ValueError(f"{', '.join(other)}: not in this upload, or read before; read each tensor once")
        self._mark_read(names)
        self._world.broadcast_bytes(json.dumps({"names": list(names), **what}).encode())

    def _mark_read(self, names: Sequence[str]) -> None:
        self._unread = [name for name in self._unread if name not in names]

    def _sum(self, name: str, shares: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return the sums [K, ...] of a tensor on the server, which passes the shares. Collective."""
        self._world.broadcast(shares)
        frame, own = self._frames[name], self._own
        rows = self._as_decoded(name).view(len(own), *frame.shape)
        sent_columns = None
        if frame.layer_mask is not None:
            is_sent = frame.layer_mask.view(-1, len(frame.sizes)).any(dim=0)
            sent_columns = spread(frame.sizes, is_sent)
            sizes = tuple(size * int(sent) for size, sent in zip(sizes, is_sent, strict=bool(sizes)))
            rows = rows[..., sent_columns]
        total = FixedPointSum(rows, shares[:, own], sizes)
        total.add(self._world.maxima(total.bounds), shares.shape[1])
        for tensor in total.tensors:
            self._world.sum_on_server(tensor)
        if sent_columns is None:
            return total.value()
        sums = torch.zeros(len(shares), *frame.shape, dtype=frame.dtype)
        sums[..., sent_columns] = total.value()
        return sums

    def _as_decoded(self, name: str) -> Tensor:
        """Return this rank's rows of a tensor [C, M, W] as the server would read them."""
        frame, codec = self._frames[name][self._own], self._codecs[name]
        if not self._own:
            return torch.empty(0, frame.models, sum(frame.sizes), dtype=frame.dtype)
        rows = self._message.per_client[name]
        encoded = _encoded(rows, frame, slice(0, len(rows)), codec, self._coding)
        base = None if self._coding is None else frame.base(self._coding.received)
        pieces = zip(encoded, codec.pieces(frame), strict=True)
        arrived = [_unpack(_pack(tensor, piece), piece, len(rows)) for tensor, piece in pieces]
        return codec.decode(arrived, frame, base)

    def _gather(self, names: Sequence[str]) -> Iterator[tuple[slice, Message]]:
        """Yield the blocks of some tensors, on the server. Collective."""
        world, placement = self._world, self._placement
        frames = {name: frame for name, frame in self._frames.items() if name in names}
        pieces = {name: self._codecs[name].pieces(frame) for name, frame in frames.items()}
        row_size = sum(math.prod(frame.shape) for frame in frames.values())
        for block in world.blocks(row_size, len(placement)):
            first, last = bisect_left(self._own, block.start), bisect_left(self._own, block.stop)
            mine, order = self._own[first:last], placement.in_worker_order(block)
            received = Message(num_clients=block.stop - block.start)
            for name, frame in frames.items():
                codec = self._codecs[name]
                send = [torch.empty(0, dtype=piece.dtype) for piece in pieces[name]]
                if mine:
                    rows, of_rank = self._message.per_client[name], slice(first, last)
                    encoded = _encoded(rows, frame[mine], of_rank, codec, self._coding)
                    send = [
                        _pack(tensor, piece[mine])
                        for tensor, piece in zip(encoded, pieces[name], strict=True)
                    ]
                arrived = []
                for flat, piece in zip(send, pieces[name], strict=True):
                    counts = placement.sizes(_row_sizes(piece, len(placement)), block)
                    gathered = world.gather(flat, counts)
                    if gathered is not None:
                        numbers = _unpack(gathered, piece[order], received.num_clients)
                        arrived.append(placement.in_client_order(numbers, block))
                if world.is_server:
                    received.per_client[name] = self._decoded(frame[block], codec, arrived, block)
                    if (mask := frame[block].layer_mask) is not None:
                        received.layer_mask[name] = mask
            if world.is_server:
                yield block, received
        self._is_gathering = False

    def _decoded(self, frame: Frame, codec: Codec, arrived: Sequence[Tensor], block: slice) -> Tensor:
        """Return the rows of a block from the pieces that arrived on the server."""
        base = None
        if self.sent is not None and codec is not IDENTITY:
            base = frame.base(self.sent.select(block))
        return codec.decode(arrived, frame, base).view(block.stop - block.start, *frame.shape)


def _encoded(
    rows: Tensor, frame: Frame, part: slice, codec: Codec, coding: UploadCoding | None
) -> list[Tensor]:
    """Return the encoded pieces of some rows; their compression errors go to the clients' state."""
    numbers = frame.by_model(rows[part].cpu())
    if coding is None or codec is IDENTITY:
        return codec.encode(numbers, frame)
    base = frame.base(coding.received.select(part))
    if not codec.uses_error_feedback:
        return codec.encode(numbers, frame, base)
    unsent = frame.by_model(coding.unsent.read(frame.name, part))
    encoded = codec.encode(numbers, frame, base, unsent)
    coding.unsent.write(frame.name, part, unsent)
    return encoded


def _row_sizes(piece: Piece, num_rows: int) -> Tensor:
    """Return how many numbers of each row are sent, int64 [num_rows]."""
    return piece.numbers().sum(dim=-1).expand(num_rows)


def _pack(numbers: Tensor, piece: Piece) -> Tensor:
    """Flatten rows [c, M, ...], without the layers that are not sent."""
    if piece.layer_mask is None:
        return numbers.contiguous().view(-1)
    chosen = spread(piece.sizes, piece.layer_mask.expand(len(numbers), -1))
    return torch.cat([row[:, mask].reshape(-1) for row, mask in zip(numbers, chosen, strict=True)])


def _unpack(flat: Tensor, piece: Piece, num_rows: int) -> Tensor:
    """Undo `_pack`; layers that were not sent are zero."""
    shape = (num_rows, piece.models, sum(piece.sizes))
    if piece.layer_mask is None:
        return flat.view(shape)
    rows = torch.zeros(shape, dtype=piece.dtype)
    chosen = spread(piece.sizes, piece.layer_mask.expand(num_rows, -1))
    sizes = _row_sizes(piece, num_rows).tolist()
    for row, mask, part in zip(rows, chosen, flat.split(sizes) if num_rows else (), strict=True):
        row[:, mask] = part.view(piece.models, -1)
    return rows
