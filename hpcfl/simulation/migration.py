"""Which worker trains which client of a round, and the migration of clients to that worker and back.

The samples and state of a client are kept by the worker whose shard has it: its home. A random cohort gives
some workers more to train than others, so some members migrate to less busy workers for the round. The result
of a run does not depend on it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO

import torch
from torch import Tensor

from hpcfl.communication.channel import Channel
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort
from hpcfl.data.shard import SPLITS
from hpcfl.parameters import Tensors
from hpcfl.training.client_group import WorkerContext

HOME_SLACK = 1.02
"""Accepted slow-down of the busiest worker, so that fewer clients migrate."""


def assign_workers(work: Sequence[int], homes: Sequence[int], num_workers: int) -> tuple[int, ...]:
    """Return a worker for each client, given each one's work (training samples) and home.

    Clients go to the least busy worker, the longest first (Graham's LPT rule, at most 4/3 of the shortest
    possible time). As many clients stay at home as keep the busiest worker within `HOME_SLACK` of that.
    """
    longest_first = sorted(range(len(work)), key=lambda position: -work[position])
    loads, near = [0] * num_workers, [-1] * len(work)
    anywhere, shortest = _fill(near, longest_first, work, loads)
    limit = HOME_SLACK * shortest
    for position in longest_first:
        home = homes[position]
        if loads[home] + work[position] <= limit:
            near[position] = home
            loads[home] += work[position]
    near, longest = _fill(near, longest_first, work, loads)
    return tuple(near if longest <= limit else anywhere)


def _fill(
    workers: Sequence[int], order: Sequence[int], work: Sequence[int], loads: Sequence[int]
) -> tuple[list[int], int]:
    """Assign each client without a worker (-1) to the least busy worker, in this order.

    `loads` are those of the clients that have a worker. Also return the largest load in the end.
    """
    filled = list(workers)
    busy = [(load, worker) for worker, load in enumerate(loads)]
    heapq.heapify(busy)
    for position in order:
        if filled[position] < 0:
            load, filled[position] = busy[0]
            heapq.heapreplace(busy, (load + work[position], filled[position]))
    return filled, max(busy)[0]


Migration = tuple[int, int, int]
"""A client, the worker it leaves, and the worker it goes to."""


class ClientMigration:
    """Moves members of a cohort, with their samples and state, to the workers that train them, and back.

    `placement` is `run.placement`. Making one is collective.
    """

    def __init__(self, world: Communicator, channel: Channel, home: WorkerContext, placement: str) -> None:
        self._world, self._channel, self._home = world, channel, home
        # ranks differ: the server has no GPU, and a worker with few clients may train one at a time
        at_once = world.maximum(home.engine.clients_at_once)
        self._balances_work = placement == "balanced" and at_once == 1 and world.num_workers > 1
        self._migrations: list[Migration] = []
        self.worker_context = home
        """Samples and state of the clients that migrated to this rank."""

    def placed(self, cohort: Cohort) -> Cohort:
        """Return the cohort with the workers that train its members, the same on every rank.

        If clients train one at a time, they are balanced by their samples and local epochs (`run.placement`);
        otherwise they train at home.
        """
        if not self._balances_work:
            return cohort
        epochs, homes = self._home.work.local_epochs, self._channel.homes(cohort)
        sizes = zip(cohort.clients, cohort.num_samples.tolist(), strict=True)
        work = [epochs(cohort.round, client) * size for client, size in sizes]
        return replace(cohort, workers=assign_workers(work, homes, self._world.num_workers))

    def migrations(self, cohort: Cohort) -> list[Migration]:
        """Return the migration of each member that trains on another worker than its own."""
        if cohort.workers is None:
            return []
        ways = zip(cohort.clients, self._channel.homes(cohort), cohort.workers, strict=True)
        return [(client, home, worker) for client, home, worker in ways if home != worker]

    def begin(self, cohort: Cohort) -> None:
        """Send clients to the workers that train them. Every rank must call it, and `end` after training."""
        self._migrations = self.migrations(cohort)
        if not self._migrations:
            return
        arrived = self._carry(self._migrations, self._samples_and_state)
        clients = sorted(arrived)
        samples = {
            split: [(arrived[client][f"x/{split}"], arrived[client][f"y/{split}"]) for client in clients]
            for split in SPLITS
        }
        self.worker_context = replace(
            self._home,
            shard=self._home.shard.of_others(clients, samples),
            clients=clients,
            state={
                name: torch.stack([arrived[client][name] for client in clients]).to(stored.device)
                if clients
                else stored[:0]
                for name, stored in self._home.state.items()
            },
        )

    def end(self) -> None:
        """Send the clients' state back home. Every rank must call it."""
        if not self._migrations:
            return
        back = [(client, worker, home) for client, home, worker in self._migrations]
        for client, rows in self._carry(back, lambda client: _state(self.worker_context, client)).items():
            for name, row in rows.items():
                self._home.state[name][self._home.clients.index(client)] = row
        self._migrations, self.worker_context = [], self._home

    def _carry(self, migrations: Sequence[Migration], load: Callable[[int], Tensors]) -> dict[int, Tensors]:
        """Send the clients' tensors from worker to worker; return those that arrive here, by client."""
        me = self._world.worker_index
        leaving: dict[int, dict[int, Tensors]] = defaultdict(dict)
        for client, source, target in migrations:
            if source == me:
                # copies: a view would be packed with all of the tensor that it belongs to
                leaving[target][client] = {name: rows.cpu().clone() for name, rows in load(client).items()}
        sent = {target: _packed(clients) for target, clients in leaving.items()}
        sizes = {target: torch.tensor([len(data)]).view(torch.uint8) for target, data in sent.items()}
        expected = {source: 8 for _, source, target in migrations if target == me}
        for source, size in self._world.exchange(sizes, expected).items():
            expected[source] = int(size.view(torch.int64))
        arrived: dict[int, Tensors] = {}
        for data in self._world.exchange(sent, expected).values():
            arrived |= torch.load(BytesIO(data.numpy().tobytes()), weights_only=True)
        return arrived

    def _samples_and_state(self, client: int) -> Tensors:
        tensors = _state(self._home, client)
        for split in SPLITS:
            x, y = self._home.shard.samples(split, self._home.clients.index(client))
            tensors |= {f"x/{split}": x, f"y/{split}": y}
        return tensors


def _state(worker_context: WorkerContext, client: int) -> Tensors:
    position = worker_context.clients.index(client)
    return {name: stored[position] for name, stored in worker_context.state.items()}


def _packed(clients: dict[int, Tensors]) -> Tensor:
    """Return the tensors of clients as bytes, uint8."""
    file = BytesIO()
    torch.save(clients, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
