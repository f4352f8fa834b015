"""pFedLA's server: beside code that stacks all models, and with many clients whole and sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hpcfl.benchmarks.ratios import Ratio, compare
from hpcfl.benchmarks.steps import context_of
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.sharded import BLOCK_CLIENTS, ShardedRows
from hpcfl.communication.upload import Upload
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.base import State
from hpcfl.methods.pfedla import PFedLA, PFedLAParams
from hpcfl.randomness import torch_stream
from hpcfl.setup.validate import check_large_state

STEP_CLIENTS = 100
"""Clients where the server's step is beside code that stacks all models."""
COHORT = 10
MAX_FULL_HEADS = 1000
"""Clients up to which hypernetworks have full heads, whose size grows with the square of the clients."""


class _Server:
    """Rounds of pFedLA's server without training: what it sends comes back a little changed."""

    def __init__(self, world: Communicator, num_clients: int, params: PFedLAParams) -> None:
        self._world = world
        self.method = PFedLA(context_of(num_clients), params)
        self.cohort = Cohort(
            0, tuple(range(0, num_clients, num_clients // COHORT))[:COHORT], torch.ones(COHORT)
        )
        self.state: State = {}

    def build(self) -> None:
        """Make the state of this rank, with models that differ."""
        method, count = self.method, self.method.context.num_clients
        if self._world.is_server:
            self.state = method.server_state()
        clients = method.client_state(self._world.shard(count))
        rows = clients.get("theta", self.state.get("theta", torch.empty(0, method.layout.size)))
        stream = torch_stream(0, "bench")
        # one by one: no second copy of all models
        for row in rows:
            row += 0.01 * torch.randn(len(row), generator=stream)
        if method.sharded_state is not None:
            method.sharded = ShardedRows(self._world, rows, method.layers, count)

    def round(self) -> None:
        """Send to a cohort and aggregate its answer. Collective."""
        is_sharded = self.method.sharded_state is not None
        if self._world.is_server:
            driver = MethodAdapter(self.method)
            sent = driver.download(self.state, self.cohort)
            trained = Message(per_client={"theta": sent.per_client["theta"] + 0.01}, num_clients=COHORT)
            driver.aggregate(self.state, self.cohort, Upload(iter([(slice(0, COHORT), trained)]), sent))
            if is_sharded:
                self.method.sharded.end()
        elif is_sharded:
            self.method.sharded.serve()
        self._world.barrier()


def server_step(repeats: int) -> Iterator[Ratio]:
    """Compare pFedLA's server step with stacking N models a client and autograd through the sum."""
    server = _Server(Communicator(), STEP_CLIENTS, PFedLAParams(head_init="default"))
    server.build()

    def stacked() -> None:
        for client in server.cohort.clients:
            _stacked_step(server.method, server.state, client, server.state["theta"][client] + 0.01)

    ratio, _, ours_s = compare(stacked, server.round, max(2, repeats // 5))
    sizes = f"N={STEP_CLIENTS} S={COHORT} P={server.method.layout.size:,}"
    name = "server step, pFedLA: stacking all models for each client / ours"
    yield Ratio(name, ratio, 50, f"{ours_s * 1e3:.0f} ms, {sizes}", is_floor=True)


def _stacked_step(method: PFedLA, state: State, client: int, trained: Tensor) -> None:
    """Do one client's server step as public code does: stack all models, differentiate their weighted sum."""
    outputs, leaves, _ = method.learner.outputs_to_differentiate(state, [client])
    alpha = outputs[0].softmax(dim=-1)
    weights = {layer.name: alpha[number] for number, layer in enumerate(method.layers)}
    models = [method.layout.views(model) for model in state["theta"]]
    start = {
        slot.name: (weights[slot.module] * torch.stack([m[slot.name] for m in models], dim=-1)).sum(dim=-1)
        for slot in method.layout.parameters
    }
    target = method.layout.views(trained)
    falling = [value.detach() - target[name] for name, value in start.items()]
    torch.autograd.grad(list(start.values()), list(leaves.values()), grad_outputs=falling)


def many_clients(world: Communicator, counts: Sequence[int], repeats: int) -> Iterator[Ratio]:
    """Compare a round of a sharded server with one of a whole server, for each number of clients. Collective.

    Raises UserError on all ranks if a state does not fit in rank 0's memory.
    """
    world.shard_unit = BLOCK_CLIENTS
    for count in counts:
        heads = PFedLAParams(heads="full" if count <= MAX_FULL_HEADS else "low_rank").heads
        whole = _Server(world, count, PFedLAParams(heads=heads))
        spread = _Server(world, count, PFedLAParams(heads=heads, server="sharded"))
        run_collectively(world, partial(check_large_state, whole.method, world))
        whole.build()
        spread.build()
        ratio, spread_s, whole_s = compare(spread.round, whole.round, repeats)
        name = f"server round, pFedLA, N={count:,}, {heads} heads: sharded / whole"
        yield Ratio(name, ratio, None, f"{whole_s:.2g} s whole, {spread_s:.2g} s sharded, S={COHORT}")
