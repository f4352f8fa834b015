"""Collectives as a run uses them: whether they bring what was sent, and how fast."""

from __future__ import annotations

import time

import torch

from hpcfl.checks.finding import Checked, gathered
from hpcfl.communication.communicator import Communicator

MANY = 2**20
"""Numbers of a large message: 4 MB."""
TURNS = {1: 20, MANY: 3}
SLOW_S, SLOW_BYTES_A_S = 0.05, 20e6
"""A number that takes longer, or a message that comes at a lower rate, is worth a word."""


def check_collectives(world: Communicator) -> Checked:
    """Send numbers down and up. Collective; says something on rank 0, and nothing where that is alone."""
    checked = Checked()
    if world.size == 1:
        return checked
    is_right, parts, slow = True, [], []
    for name, step in (("broadcast", _broadcast), ("scatter", _scatter), ("gather", _gather)):
        seconds = {}
        for count, turns in TURNS.items():
            world.barrier()
            began_s = time.monotonic()
            for _ in range(turns):
                is_right &= step(world, count)
            # the server may be done with sending long before the last rank has it
            world.barrier()
            seconds[count] = (time.monotonic() - began_s) / turns
        rate = 4 * MANY / max(seconds[MANY], 1e-9)
        parts.append(f"{name} {1e3 * seconds[1]:.2g} ms and {rate / 1e6:.0f} MB/s")
        if seconds[1] > SLOW_S or rate < SLOW_BYTES_A_S:
            slow.append(name)
    told = gathered(world, {"right": is_right, "host": world.host})
    if not world.is_server:
        return checked
    checked.lines.append(f"collectives, a number and {4 * MANY / 1e6:.0f} MB: {', '.join(parts)}")
    for rank, found in enumerate(told):
        if not found["right"]:
            checked.error(
                f"rank {rank} on {found['host']} got other numbers than were sent: use another MPI, or name "
                "another network to it"
            )
    if slow:
        checked.warning(
            f"{', '.join(slow)} are slow, which no run of short rounds bears: start no more ranks than there "
            "are cores, and check that MPI uses the fast network"
        )
    return checked


def _numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


def _broadcast(world: Communicator, count: int) -> bool:
    tensor = _numbers(count) if world.is_server else torch.zeros(count)
    world.broadcast(tensor)
    return bool(torch.equal(tensor, _numbers(count)))


def _scatter(world: Communicator, count: int) -> bool:
    counts = _counts(world, count)
    part = world.scatter(_numbers(sum(counts)) if world.is_server else None, counts, torch.float32)
    return bool(torch.equal(part, _own(world, counts)))


def _gather(world: Communicator, count: int) -> bool:
    counts = _counts(world, count)
    whole = world.gather(_own(world, counts), counts)
    return whole is None or bool(torch.equal(whole, _numbers(sum(counts))))


def _counts(world: Communicator, count: int) -> list[int]:
    return [max(1, count // world.num_workers)] * world.num_workers


def _own(world: Communicator, counts: list[int]) -> torch.Tensor:
    """Return this worker's part of the numbers; none on the server."""
    if not world.is_worker:
        return torch.empty(0)
    start = sum(counts[: world.worker_index])
    return _numbers(sum(counts))[start : start + counts[world.worker_index]].clone()
