"""Messages between rank 0 and the workers, and how fast they are."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hpcfl.communication.communicator import MAX_ELEMENTS, Communicator
from hpcfl.formatting import readable_bytes, readable_seconds

PROBE_BYTES = 4_000_000
TURNS = 3


def check_messages(world: Communicator) -> None:
    """Send numbers from rank 0 to the other ranks and back, and print how fast they are. Collective.

    A single rank sends none.
    """
    if world.size == 1:
        return
    latency_s = _round_trip_s(world, range(world.num_workers), 1) / 2
    found = [f"{readable_seconds(latency_s)} for a short one"]
    # host names may be equal
    nodes = world.all_gather(min(world.ranks_of_node()))
    for where, is_near in (("its node", True), ("other nodes", False)):
        workers = [rank - 1 for rank in range(1, world.size) if (nodes[rank] == nodes[0]) is is_near]
        if workers:
            num_bytes = min(PROBE_BYTES, MAX_ELEMENTS // len(workers))
            trip_s = _round_trip_s(world, workers, num_bytes) - 2 * latency_s
            rate = 2 * len(workers) * num_bytes / max(1e-6, trip_s)
            found.append(f"{readable_bytes(rate)}/s between rank 0 and {where}")
    print(f"messages: {found[0]}; {', '.join(found[1:])}", flush=True)


def _round_trip_s(world: Communicator, workers: Sequence[int], num_bytes: int) -> float:
    """Return the seconds, at best, of bytes to some workers, this many to each, and back. Collective."""
    counts = [num_bytes if worker in workers else 0 for worker in range(world.num_workers)]
    seconds = []
    for _ in range(TURNS):
        world.barrier()
        began_s = time.perf_counter()
        sent = torch.zeros(sum(counts), dtype=torch.uint8) if world.is_server else None
        world.gather(world.scatter(sent, counts, torch.uint8), counts)
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)
