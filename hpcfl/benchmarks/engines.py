"""The batched engine beside the loop engine on a device: one process, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hpcfl.benchmarks.ratios import Ratio, compare
from hpcfl.benchmarks.steps import BATCH_SIZE, context_of, random_shard
from hpcfl.communication.messages import Cohort
from hpcfl.config.keys import TrainConfig
from hpcfl.methods import Context
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.pfedla import PFedLA, PFedLAParams
from hpcfl.parameters import Tensors
from hpcfl.training.batches import minibatches
from hpcfl.training.client_group import ClientGroup, WorkerContext
from hpcfl.training.engines import BatchedEngine, Engine, LoopEngine

CLIENTS = {"cuda": 100, "cpu": 4}
"""Clients that are trained, by device."""
SAMPLES = 128
"""Training samples of each."""
GOAL = 20
"""How many times as fast the batched engine is to be on a GPU, where small networks leave the loop's idle."""


def engines(device: torch.device, repeats: int) -> Iterator[Ratio]:
    """Compare an epoch, and pFedLA's local round, of many clients of LeNet by either engine."""
    count = CLIENTS[device.type]
    context = context_of(count)
    # as in a run, unless run.tf32 says otherwise
    torch.backends.cudnn.allow_tf32 = False
    steps = len(minibatches(SAMPLES, BATCH_SIZE)) * count
    goal = GOAL if device.type == "cuda" else None
    for called, work_of in (("training step", _epoch), ("local round, pFedLA", _pfedla_round)):
        loop, batched = (work_of(context, device, is_batched) for is_batched in (False, True))
        ratio, loop_s, batched_s = compare(loop, batched, repeats)
        each = f"{loop_s / steps * 1e3:.2g} and {batched_s / steps * 1e3:.2g} ms a client's step"
        name = f"{called}, {count} clients on {device.type}: loop engine / batched engine"
        sizes = f"{batched_s:.2g} s in all, LeNet-16/32 with BatchNorm, batch {BATCH_SIZE}"
        yield Ratio(name, ratio, goal, f"{each}, {sizes}", is_floor=True)


def _epoch(context: Context, device: torch.device, is_batched: bool) -> Callable[[], None]:
    """Return an epoch of plain local training of all clients, with all its work done on the device."""
    place = _workplace(context, device, is_batched, {})
    theta = context.initial_parameters(place.clients).to(device)
    buffers = context.layout.flatten(context.network)[1].expand(len(theta), -1).to(device)

    def work() -> None:
        for group in _groups(place):
            clients = ClientGroup(place, place.clients[group], 0)
            clients.buffers = buffers[group].clone()
            clients.sgd(theta[group])
        _wait_for(device)

    return work


def _pfedla_round(context: Context, device: torch.device, is_batched: bool) -> Callable[[], None]:
    """Return what pFedLA's clients do in a round: models to the device, an epoch, models to the CPU."""
    driver = MethodAdapter(PFedLA(context, PFedLAParams()))
    place = _workplace(context, device, is_batched, driver.initial_clients(range(context.num_clients)))
    everyone = Cohort(0, tuple(place.clients), context.num_samples)
    down = driver.send(driver.initial_server(), everyone)

    def work() -> None:
        for group in _groups(place):
            up = driver.work(ClientGroup(place, place.clients[group], 0), down.select(group))
            up.to(torch.device("cpu"))

    return work


def _groups(place: WorkerContext) -> Iterator[slice]:
    """Yield positions of the clients that train at once."""
    size = place.engine.clients_at_once
    for start in range(0, len(place.clients), size):
        yield slice(start, start + size)


def _workplace(context: Context, device: torch.device, is_batched: bool, state: Tensors) -> WorkerContext:
    network = context.build_network(-1).to(device)
    loop = LoopEngine(network, context.layout)
    engine: Engine = BatchedEngine(network, context.layout, context.num_clients) if is_batched else loop
    train = TrainConfig(batch_size=BATCH_SIZE, lr=0.01, local_epochs=1)
    shard = random_shard(context.num_clients, SAMPLES, device)
    there = {name: rows.to(device) for name, rows in state.items()}
    return WorkerContext(shard, shard.clients, engine, loop, train, 0, device, there)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
