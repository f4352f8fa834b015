"""Sharded models: each client's model stays on its home worker, and the server mixes and compares them.

The server's hooks use `ShardedRows` like a matrix of all models; meanwhile the workers are in `serve` and
execute its commands. Only sums of models, products and the models of a cohort reach rank 0.

The bits are the same for any number of ranks: clients form blocks of BLOCK_CLIENTS consecutive ids, each on
one worker, and a block's part of a result is a product of fixed shape. A mixture is the sum over blocks in
the order of ids: the running sum goes from worker to worker, piece by piece, so that all work at once.

Shapes: N clients, S of a cohort, L layers, P trainable numbers.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpcfl.communication.communicator import Communicator, Transfer
from hpcfl.communication.upload import Upload
from hpcfl.parameters import COLUMNS_AT_ONCE, Layer, pieces

BLOCK_CLIENTS = 16
"""Clients in one product; shards begin at multiples of it. Another number changes the last bits."""
MEMBERS_AT_ONCE = 64
"""Members of a cohort in one product; a constant for the same reason."""
MAX_ON_THE_WAY = 4
"""Running sums that a worker may send before the next one has received them."""


class ShardedRows:
    """One row [P] for each of N clients, kept by the workers; rank 0 calls, all others are in `serve`."""

    def __init__(self, state: str, layers: Sequence[Layer]) -> None:
        """Announce the client state of this name; its rows are there from `attach` on."""
        self.state = state
        self._layers = layers

    def attach(self, world: Communicator, rows: Tensor, num_clients: int) -> None:
        """Wrap this rank's rows [own clients, P], on the CPU; other code may change them in place."""
        self._world, self._rows, self._num_clients = world, rows, num_clients
        shard_unit = shard_unit_of(self)
        self._shards = [world.shard(num_clients, worker, shard_unit) for worker in range(world.num_workers)]
        self._own = world.shard(num_clients, None, shard_unit)
        self._upload: Upload | None = None
        # products read copies, whose alignment in memory does not depend on the shard
        self._copy = rows.new_empty(BLOCK_CLIENTS * COLUMNS_AT_ONCE)

    @contextmanager
    def after(self, upload: Upload) -> Iterator[None]:
        """Let rows be used inside only once this upload is read: until then the workers send it."""
        self._upload = upload
        yield
        self._upload = None

    def mix(self, weights: Tensor) -> Tensor:
        """Return the weighted sums [S, P] of all rows, weights [S, L, N]. Rank 0 only, while the others
        serve."""
        self._command(do="mix", count=len(weights))
        mixed = self._mix(len(weights), weights)
        assert mixed is not None
        return mixed

    def products(self, vectors: Tensor) -> Tensor:
        """Return the products by layer [S, L, N] of vectors [S, P] with all rows. Rank 0, others serve."""
        self._command(do="products", count=len(vectors))
        products = self._products(len(vectors), vectors)
        assert products is not None
        return products

    def put(self, clients: Sequence[int], rows: Tensor) -> None:
        """Replace the rows of some clients, in ascending order, by rows [S, P]. Rank 0 only, while the others
        serve."""
        self._command(do="put", clients=list(clients))
        self._put(clients, rows)

    def end(self) -> None:
        """End `serve` on the other ranks. Rank 0 only."""
        self._command(do="end")

    def serve(self) -> None:
        """Execute rank 0's commands until it calls `end`. All ranks but rank 0."""
        while (command := json.loads(self._world.broadcast_bytes(None)))["do"] != "end":
            if command["do"] == "mix":
                self._mix(command["count"])
            elif command["do"] == "products":
                self._products(command["count"])
            else:
                self._put(command["clients"])

    def _command(self, **what: Any) -> None:
        if self._upload is not None and not self._upload.is_read:
            raise RuntimeError("read all of the upload, or drain it, before you use the sharded state")
        self._world.broadcast_bytes(json.dumps(what).encode())

    def _mix(self, count: int, weights: Tensor | None = None) -> Tensor | None:
        """Return `mix` on rank 0, which has the weights. Collective."""
        mixed = None if weights is None else self._rows.new_empty(count, self._layers[-1].stop)
        for members in _members(count):
            shape = (len(range(count)[members]), len(self._layers), self._num_clients)
            alpha = self._everywhere(shape, None if weights is None else weights[members])
            if self._world.size == 1:
                for number, part in pieces(self._layers):
                    assert mixed is not None
                    mixed[members, part] = self._add(self._zeros(alpha, part), alpha, number, part)
            elif mixed is not None:
                self._take_sums(mixed[members])
            elif self._own:
                self._relay(alpha)
        return mixed

    def _relay(self, alpha: Tensor) -> None:
        """Add this worker's rows to the sums that come from the worker before, and pass them on."""
        # workers that have clients come first, in the order of their clients
        before = self._world.rank - 1
        after = self._world.rank + 1 if self._own.stop < self._num_clients else 0
        going: deque[Transfer] = deque()
        for number, part in pieces(self._layers):
            total = self._zeros(alpha, part)
            if self._own.start:
                self._world.wait(self._world.start_receive(total, before))
            self._add(total, alpha, number, part)
            going.append(self._world.start_send(total, after))
            if len(going) > MAX_ON_THE_WAY:
                self._world.wait(going.popleft())
        for transfer in going:
            self._world.wait(transfer)

    def _take_sums(self, mixed: Tensor) -> None:
        """Receive the whole sums [r, P] from the last worker that has clients. Rank 0."""
        last = max(worker for worker, shard in enumerate(self._shards) if shard) + 1
        for _, part in pieces(self._layers):
            total = self._zeros(mixed, part)
            self._world.wait(self._world.start_receive(total, last))
            mixed[:, part] = total

    def _zeros(self, members: Tensor, part: slice) -> Tensor:
        return self._rows.new_zeros(len(members), part.stop - part.start)

    def _add(self, total: Tensor, alpha: Tensor, number: int, part: slice) -> Tensor:
        """Add this rank's rows, weighted for one layer, to the sums [r, columns] in place."""
        for block in self._blocks():
            total.addmm_(alpha[:, number, block], self._copied(block, part))
        return total

    def _products(self, count: int, vectors: Tensor | None = None) -> Tensor | None:
        """Return `products` on rank 0, which has the vectors. Collective."""
        found = []
        for members in _members(count):
            shape = (len(range(count)[members]), self._layers[-1].stop)
            delta = self._everywhere(shape, None if vectors is None else vectors[members])
            found.append(self._gather(self._own_products(delta)))
        return None if vectors is None else torch.cat([part for part in found if part is not None])

    def _own_products(self, delta: Tensor) -> Tensor:
        """Return the products [r, L, own clients] of vectors [r, P] with this rank's rows."""
        blocks = list(self._blocks())
        found = [
            [delta.new_zeros(len(delta), block.stop - block.start) for block in blocks] for _ in self._layers
        ]
        for number, part in pieces(self._layers):
            for block, products in zip(blocks, found[number], strict=True):
                products.addmm_(delta[:, part], self._copied(block, part).T)
        nothing = delta.new_empty(len(delta), 0)
        return torch.stack([torch.cat([nothing, *of_layer], dim=1) for of_layer in found], dim=1)

    def _gather(self, own: Tensor) -> Tensor | None:
        """Bring figures [r, L, own clients] to rank 0, [r, L, N], and None elsewhere. Collective."""
        num_layers = len(self._layers)
        found = []
        for block in self._world.blocks(num_layers * self._num_clients, len(own)):
            mine = own[block]
            counts = [len(mine) * num_layers * len(shard) for shard in self._shards]
            flat = self._world.gather(mine.reshape(-1), counts)
            if flat is not None:
                parts = zip(flat.split(counts), self._shards, strict=True)
                of_workers = [part.view(len(mine), num_layers, len(shard)) for part, shard in parts]
                found.append(torch.cat(of_workers, dim=2))
        return torch.cat(found) if found else None

    def _put(self, clients: Sequence[int], rows: Tensor | None = None) -> None:
        """Give every worker the new rows of its clients, which rank 0 has. Collective."""
        size = self._layers[-1].stop
        for block in self._world.blocks(size, len(clients)):
            some = clients[block]
            counts = [size * sum(client in shard for client in some) for shard in self._shards]
            send = None if rows is None else rows[block].contiguous()
            mine = self._world.scatter(send, counts, self._rows.dtype)
            own = [client - self._own.start for client in some if client in self._own]
            if own:
                self._rows[own] = mine.view(-1, size)

    def _everywhere(self, shape: Sequence[int], tensor: Tensor | None) -> Tensor:
        """Return rank 0's tensor on every rank, a copy of its own. Collective."""
        copy = self._rows.new_empty(*shape)
        if tensor is not None:
            copy.copy_(tensor)
        self._world.broadcast(copy)
        return copy

    def _blocks(self) -> Iterator[slice]:
        """Yield this rank's blocks of clients, as ids."""
        for start in range(self._own.start, self._own.stop, BLOCK_CLIENTS):
            yield slice(start, min(start + BLOCK_CLIENTS, self._own.stop))

    def _copied(self, block: slice, part: slice) -> Tensor:
        """Copy some columns of a block's rows to where products read them."""
        rows = self._rows[block.start - self._own.start : block.stop - self._own.start, part]
        return self._copy[: rows.numel()].view(rows.shape).copy_(rows)


def shard_unit_of(sharded: ShardedRows | None) -> int:
    """Return of how many clients each worker's shard has a multiple (but for the last one)."""
    return 1 if sharded is None else BLOCK_CLIENTS


def _members(count: int) -> Iterator[slice]:
    for start in range(0, count, MEMBERS_AT_ONCE):
        yield slice(start, min(start + MEMBERS_AT_ONCE, count))
