"""The network between rank 0 and the workers: its speed, and the bytes that go over it.

Ranks fill one node after the other, as launchers place them; rank 0 is on the first.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hpcfl.communication.communicator import Communicator

ASSUMED_BYTES_A_S = 1e9
ASSUMED_LATENCY_S = 100e-6
MAX_COPIES = 3
"""Number of copies of a broadcast or a sum over rank 0's link: other nodes pass them on. With MPICH and 4 MB
they took as long as 1.0 and 1.1 copies on 2 nodes, 2.0 and 2.5 on 3, 2.5 and 1.8 on 4, 3.9 and 3.5 on 5, 2.6
and 2.2 on 8."""
PROBE_BYTES = 4_000_000
TURNS = 3


@dataclass(frozen=True)
class Interconnect:
    """Measured properties of the ranks' network; None: not measured."""

    ranks_per_node: int
    latency_s: float | None = None
    """Seconds of one collective with a few bytes, including rank 0's sleep between checks."""
    node_bytes_a_s: float | None = None
    """Bytes per second between rank 0 and ranks of its node."""
    link_bytes_a_s: float | None = None
    """Bytes per second between rank 0 and ranks of other nodes, all at once."""

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes for this many ranks."""
        return math.ceil(ranks / self.ranks_per_node)

    def seconds(self, collectives: int, load: Load, ranks: int) -> float:
        """Return the seconds of `collectives` collectives that carry `load` to and from this many ranks."""
        if ranks == 1:
            return 0.0
        in_node, over_link = bytes_at_rank_0(load, ranks, self.ranks_per_node)
        return (
            collectives * (self.latency_s or ASSUMED_LATENCY_S)
            + in_node / (self.node_bytes_a_s or ASSUMED_BYTES_A_S)
            + over_link / (self.link_bytes_a_s or ASSUMED_BYTES_A_S)
        )


@dataclass(frozen=True)
class Load:
    """Bytes between the server and all clients."""

    common: float
    """Bytes that all ranks get in a broadcast, or that are summed on the way to rank 0."""
    rows: float
    """Bytes of rows with one client's data, down and up, over all clients."""


def bytes_at_rank_0(load: Load, ranks: int, ranks_per_node: int) -> tuple[float, float]:
    """Return the bytes between rank 0 and the ranks of its node, and those over its link to other nodes."""
    near = min(ranks, ranks_per_node) - 1
    share_near, other_nodes = near / (ranks - 1), math.ceil(ranks / ranks_per_node) - 1
    in_node = load.rows * share_near + load.common * min(near, MAX_COPIES)
    over_link = load.rows * (1 - share_near) + load.common * min(other_nodes, MAX_COPIES)
    return in_node, over_link


def measured(world: Communicator) -> Interconnect:
    """Measure the network between rank 0 and the workers; only rank 0's result is valid. Collective."""
    # host names may be equal
    nodes = world.all_gather(min(world.ranks_of_node()))
    per_node = max(Counter(nodes).values())
    if world.size == 1:
        return Interconnect(per_node)
    near = [rank - 1 for rank in range(1, world.size) if nodes[rank] == nodes[0]]
    far = [rank - 1 for rank in range(1, world.size) if nodes[rank] != nodes[0]]
    latency_s = fastest_s(world, lambda: round_trip(world, range(world.num_workers), 1)) / 2
    return Interconnect(per_node, latency_s, _rate(world, near, latency_s), _rate(world, far, latency_s))


def _rate(world: Communicator, workers: Sequence[int], latency_s: float) -> float | None:
    """Return the bytes per second to some workers and back; None without workers. Collective."""
    if not workers:
        return None
    trip_s = fastest_s(world, lambda: round_trip(world, workers, PROBE_BYTES))
    return 2 * len(workers) * PROBE_BYTES / max(1e-6, trip_s - 2 * latency_s)


def round_trip(world: Communicator, workers: Sequence[int], num_bytes: int) -> None:
    """Send some workers this many bytes each, and receive them back. Collective."""
    counts = [num_bytes if worker in workers else 0 for worker in range(world.num_workers)]
    sent = torch.zeros(sum(counts), dtype=torch.uint8) if world.is_server else None
    world.gather(world.scatter(sent, counts, torch.uint8), counts)


def fastest_s(world: Communicator, step: Callable[[], None]) -> float:
    """Return the seconds of the fastest of several repeats of a collective step. Collective."""
    seconds = []
    for _ in range(TURNS):
        world.barrier()
        began_s = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)
