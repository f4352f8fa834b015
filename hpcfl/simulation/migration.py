"""Which worker trains which client of a round, and the migration of clients to that worker and back.

The samples and state of a client are kept by the worker whose shard has it: its home. A random cohort gives
some workers more to train than others, so some members migrate to less busy workers for the round. The result
of a run does not depend on it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from hpcfl.communication.communicator import Communicator
from hpcfl.training.client_group import WorkerContext

HOME_SLACK = 1.02
"""Accepted slow-down of the busiest worker, so that fewer clients migrate."""

_ALIGNMENT = 16


def assign_workers(work: Sequence[int], homes: Sequence[int], num_workers: int) -> tuple[int, ...]:
    """Return a worker for each client, given each one's work (training samples) and home.

    Clients go to the least busy worker, the longest first (Graham's LPT rule, at most 4/3 of the shortest
    possible time). As many clients stay at home as keep the busiest worker within `HOME_SLACK` of that.
    """
    longest_first = sorted(range(len(work)), key=lambda position: -work[position])
    anywhere = _fill([-1] * len(work), longest_first, work, num_workers)
    limit = HOME_SLACK * max(_loads(work, anywhere, num_workers))
    loads, near = [0] * num_workers, [-1] * len(work)
    for position in longest_first:
        home = homes[position]
        if loads[home] + work[position] <= limit:
            near[position] = home
            loads[home] += work[position]
    near = _fill(near, longest_first, work, num_workers)
    return tuple(near if max(_loads(work, near, num_workers)) <= limit else anywhere)


def _fill(workers: Sequence[int], order: Sequence[int], work: Sequence[int], num_workers: int) -> list[int]:
    """Assign each client without a worker (-1) to the least busy worker, in this order."""
    filled = list(workers)
    busy = [(load, worker) for worker, load in enumerate(_loads(work, workers, num_workers))]
    heapq.heapify(busy)
    for position in order:
        if filled[position] < 0:
            load, filled[position] = busy[0]
            heapq.heapreplace(busy, (load + work[position], filled[position]))
    return filled


def _loads(work: Sequence[int], workers: Sequence[int], num_workers: int) -> list[int]:
    loads = [0] * num_workers
    for amount, worker in zip(work, workers, strict=True):
        if worker >= 0:
            loads[worker] += amount
    return loads


Migration = tuple[int, int, int]
"""A client, the worker it leaves, and the worker it goes to."""

Form = tuple[torch.Size, torch.dtype]


class ClientMigration:
    """Moves members of a cohort, with their samples and state, to the workers that train them, and back.

    `num_samples` holds the samples of every client [N] in each split that a round needs.
    """

    def __init__(
        self, world: Communicator, home: WorkerContext, num_samples: Mapping[str, Sequence[int]]
    ) -> None:
        self._world, self._home, self._num_samples = world, home, num_samples
        self._migrations: list[Migration] = []
        self.worker_context = home
        """Samples and state of the clients that migrated to this rank."""

    def begin(self, migrations: Sequence[Migration]) -> None:
        """Send clients to the workers that train them. Every rank must call it, and `end` after training."""
        self._migrations = list(migrations)
        if not migrations:
            return
        arrived = self._carry(self._migrations, self._samples_and_state, self._forms)
        clients, num_splits = list(arrived), len(self._num_samples)
        parts = {
            split: [(arrived[c][2 * n].permute(0, 3, 1, 2), arrived[c][2 * n + 1]) for c in clients]
            for n, split in enumerate(self._num_samples)
        }
        rows = [arrived[client][2 * num_splits :] for client in clients]
        self.worker_context = replace(
            self._home,
            shard=self._home.shard.of_others(clients, parts),
            clients=clients,
            state={
                name: torch.stack([row[n] for row in rows]).to(stored.device) if rows else stored[:0]
                for n, (name, stored) in enumerate(self._home.state.items())
            },
        )

    def end(self) -> None:
        """Send the clients' state back home. Every rank must call it."""
        if not self._migrations:
            return
        back = [(client, worker, home) for client, home, worker in self._migrations]
        arrived = self._carry(back, lambda c: _state(self.worker_context, c), lambda _: self._state_forms())
        for client, rows in arrived.items():
            for stored, row in zip(self._home.state.values(), rows, strict=True):
                stored[self._home.clients.index(client)] = row
        self._migrations, self.worker_context = [], self._home

    def _carry(
        self,
        migrations: Sequence[Migration],
        load: Callable[[int], list[Tensor]],
        forms: Callable[[int], list[Form]],
    ) -> dict[int, list[Tensor]]:
        """Send the clients' tensors from worker to worker; return those that arrive here, by client."""
        me = self._world.worker_index if self._world.is_worker else -1
        leaving: dict[int, list[Tensor]] = defaultdict(list)
        expected: dict[int, int] = defaultdict(int)
        for client, source, target in migrations:
            if source == me:
                leaving[target] += map(_as_bytes, load(client))
            if target == me:
                expected[source] += sum(map(_padded_size, forms(client)))
        nothing = torch.empty(0, dtype=torch.uint8)
        sent = {target: torch.cat([nothing, *parts]) for target, parts in leaving.items()}
        received = self._world.exchange(sent, expected)
        starts: dict[int, int] = defaultdict(int)
        arrived: dict[int, list[Tensor]] = defaultdict(list)
        for client, source, target in migrations:
            for shape, dtype in forms(client) if target == me else []:
                start = starts[source]
                data = received[source][start : start + shape.numel() * dtype.itemsize]
                # a copy of its own memory, as aligned as the original
                arrived[client].append(data.clone().view(dtype).view(shape))
                starts[source] += _padded_size((shape, dtype))
        return arrived

    def _samples_and_state(self, client: int) -> list[Tensor]:
        tensors = []
        for split in self._num_samples:
            x, y = self._home.shard.samples(split, self._home.clients.index(client))
            tensors += [x.permute(0, 2, 3, 1), y]
        return [*tensors, *_state(self._home, client)]

    def _forms(self, client: int) -> list[Form]:
        x, y = self._home.shard.x, self._home.shard.y
        channels, height, width = x.shape[1:]
        forms = []
        for counts in self._num_samples.values():
            count = int(counts[client])
            forms += [
                (torch.Size((count, height, width, channels)), x.dtype),
                (torch.Size((count,)), y.dtype),
            ]
        return [*forms, *self._state_forms()]

    def _state_forms(self) -> list[Form]:
        return [(stored.shape[1:], stored.dtype) for stored in self._home.state.values()]


def _state(worker_context: WorkerContext, client: int) -> list[Tensor]:
    return [stored[worker_context.clients.index(client)] for stored in worker_context.state.values()]


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's memory, flat uint8, padded as `_padded_size` says."""
    flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return pad(flat, (0, -len(flat) % _ALIGNMENT))


def _padded_size(form: Form) -> int:
    """Return the bytes of a tensor's memory, rounded up so that the next one may be of any type."""
    shape, dtype = form
    size = shape.numel() * dtype.itemsize
    return size + -size % _ALIGNMENT
