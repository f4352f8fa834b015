"""The speed of messages between rank 0 and the workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hpcfl.communication.communicator import Communicator

PROBE_BYTES = 4_000_000
TURNS = 3


@dataclass(frozen=True)
class Interconnect:
    """Measured properties of the ranks' network; None: not measured."""

    latency_s: float
    """Seconds of one collective with a few bytes, including rank 0's sleep between checks."""
    node_bytes_a_s: float | None
    """Bytes per second between rank 0 and ranks of its node."""
    link_bytes_a_s: float | None
    """Bytes per second between rank 0 and ranks of other nodes, all at once."""


def measured(world: Communicator) -> Interconnect:
    """Measure the network of several ranks; only rank 0's result is valid. Collective."""
    # host names may be equal
    nodes = world.all_gather(min(world.ranks_of_node()))
    near = [rank - 1 for rank in range(1, world.size) if nodes[rank] == nodes[0]]
    far = [rank - 1 for rank in range(1, world.size) if nodes[rank] != nodes[0]]
    latency_s = _fastest_s(world, lambda: _round_trip(world, range(world.num_workers), 1)) / 2
    return Interconnect(latency_s, _rate(world, near, latency_s), _rate(world, far, latency_s))


def _rate(world: Communicator, workers: Sequence[int], latency_s: float) -> float | None:
    """Return the bytes per second to some workers and back; None without workers. Collective."""
    if not workers:
        return None
    trip_s = _fastest_s(world, lambda: _round_trip(world, workers, PROBE_BYTES))
    return 2 * len(workers) * PROBE_BYTES / max(1e-6, trip_s - 2 * latency_s)


def _round_trip(world: Communicator, workers: Sequence[int], num_bytes: int) -> None:
    """Send some workers this many bytes each, and receive them back. Collective."""
    counts = [num_bytes if worker in workers else 0 for worker in range(world.num_workers)]
    sent = torch.zeros(sum(counts), dtype=torch.uint8) if world.is_server else None
    world.gather(world.scatter(sent, counts, torch.uint8), counts)


def _fastest_s(world: Communicator, step: Callable[[], None]) -> float:
    """Return the seconds of the fastest of several repeats of a collective step. Collective."""
    seconds = []
    for _ in range(TURNS):
        world.barrier()
        began_s = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)
