"""pFedLA's server with many clients: seconds and memory of a round, with all models on rank 0 and sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from hpcfl.benchmarks.ratios import Ratio, compare
from hpcfl.benchmarks.steps import context_of
from hpcfl.communication import sharded
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.sharded import ShardedRows
from hpcfl.communication.upload import Upload
from hpcfl.errors import UserError
from hpcfl.machine import memory_bytes
from hpcfl.methods import Context
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.base import State
from hpcfl.methods.pfedla import PFedLA, PFedLAParams
from hpcfl.randomness import torch_stream
from hpcfl.setup.validate import state_bytes

COHORT = 10
FULL_HEADS_SHARE = 1 / 4
"""Share of the machine's memory up to which hypernetworks have full heads."""


class _Server:
    """A round of pFedLA's server without training: what it sends, and what it learns from models nearby."""

    def __init__(self, world: Communicator, context: Context, params: PFedLAParams) -> None:
        self._world, self._context = world, context
        self._method = PFedLA(context, params)
        self._state: State = {}
        self._clients: State = {}

    def build(self) -> None:
        """Make the state of this rank, with models that differ."""
        world, method, count = self._world, self._method, self._context.num_clients
        if world.is_server:
            self._state = method.server_state()
        own = world.shard(count)
        self._clients = method.client_state(own)
        rows = self._clients.get("theta", self._state.get("theta", torch.empty(0, method.layout.size)))
        for row, client in zip(rows, own if "theta" in self._clients else range(count), strict=False):
            row += 0.01 * torch.randn(len(row), generator=torch_stream(0, "bench", 0, client))
        if method.sharded_state is not None:
            method.sharded = ShardedRows(world, rows, method.layers, count)

    def round(self) -> None:
        """Send to a cohort and aggregate its answer. Collective."""
        is_sharded = self._method.sharded_state is not None
        if self._world.is_server:
            self._on_server()
            if is_sharded:
                self._method.sharded.end()
        elif is_sharded:
            self._method.sharded.serve()
        self._world.barrier()

    def _on_server(self) -> None:
        count = self._context.num_clients
        cohort = Cohort(0, tuple(range(0, count, count // COHORT))[:COHORT], torch.ones(COHORT))
        driver = MethodAdapter(self._method)
        sent = driver.send(self._state, cohort)
        rows = Message(rows={"theta": sent.rows["theta"] + 0.01}, num_clients=COHORT)
        driver.receive(self._state, cohort, Upload(iter([(slice(0, COHORT), rows)]), sent))


def server_rounds(world: Communicator, counts: Sequence[int], repeats: int) -> Iterator[Ratio]:
    """Compare a round of a sharded server with one of a whole server, for each number of clients. Collective.

    Hypernetworks have full heads where these fit well. Raises UserError on all ranks if the states do not
    fit in rank 0's memory.
    """
    world.shard_unit = sharded.BLOCK_CLIENTS
    for count in counts:
        context = context_of(count)
        full = state_bytes(PFedLA(context, PFedLAParams()))
        # whole and sharded server have hypernetworks each
        fits = 2 * (sum(full.values()) - full["theta"]) < FULL_HEADS_SHARE * memory_bytes()
        heads = PFedLAParams(heads="full" if fits else "low_rank").heads
        needed = 2 * sum(state_bytes(PFedLA(context, PFedLAParams(heads=heads))).values())
        run_collectively(world, partial(_refuse, world, needed))
        whole = _Server(world, context, PFedLAParams(heads=heads))
        spread = _Server(world, context, PFedLAParams(heads=heads, server="sharded"))
        of_whole, of_spread = (_peaks(world, server) for server in (whole, spread))
        ratio, spread_s, whole_s = compare(spread.round, whole.round, repeats)
        if world.is_server:
            seconds = f"{whole_s:.2g} s whole, {spread_s:.2g} s sharded"
            memory = f"GB of a rank at most: {_in_words(of_whole)} whole, {_in_words(of_spread)} sharded"
            name = f"server round, pFedLA, N={count:,}, {heads} heads: sharded / whole"
            yield Ratio(name, ratio, None, f"{seconds}, S={COHORT}; {memory}")


def _refuse(world: Communicator, needed: int) -> None:
    if world.is_server and needed > memory_bytes():
        raise UserError(
            f"--clients needs {needed / 1e9:.3g} GB, and this machine, or its job, has "
            f"{memory_bytes() / 1e9:.3g} GB; give smaller numbers"
        )


def _peaks(world: Communicator, server: _Server) -> list[float]:
    """Build a server's state and do a round; return by how many GB each rank's memory rose. Collective."""

    def work() -> None:
        server.build()
        world.barrier()
        server.round()

    rises = world.gather_bytes(str(_peak_rise(work)).encode())
    return [int(rise) / 1e9 for rise in rises or []]


def _peak_rise(work: Callable[[], None]) -> int:
    """Return by how many bytes this process's memory rose at most; 0 where the system does not tell."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        work()
        return 0

    def resident(name: str) -> int:
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    # forgets the highest so far
    reset.write_text("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def _in_words(peaks: Sequence[float]) -> str:
    workers = f", workers {max(peaks[1:]):.2g}" if len(peaks) > 1 else ""
    return f"server {peaks[0]:.2g}{workers}"
