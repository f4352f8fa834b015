"""`hpcfl bench`: what the product costs, as ratios measured in one process or one run.

Seconds depend on the machine and its other users; ratios taken turn by turn hardly do.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hpcfl.commands.arguments import Parser
from hpcfl.communication.channel import Upload
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.world import World, agreed
from hpcfl.config import Config, resolve
from hpcfl.data.partitions import ClientIndices
from hpcfl.data.shard import Shard
from hpcfl.data.sources import Arrays
from hpcfl.errors import UserError
from hpcfl.methods import Context
from hpcfl.methods.pfedla import HYPERNETWORKS, PFedLA, PFedLAParams
from hpcfl.methods.pfedmb import PFedMB, PFedMBParams
from hpcfl.models import ConvNetOptions
from hpcfl.parameters import Tensors
from hpcfl.randomness import numpy_stream, torch_stream
from hpcfl.simulation.driver import Driver
from hpcfl.simulation.experiment import build
from hpcfl.simulation.loop import Simulation
from hpcfl.simulation.progress import Progress
from hpcfl.simulation.stopping import StopFlag
from hpcfl.storage.runfolder import RunFolder
from hpcfl.training.batches import minibatches
from hpcfl.training.clients import Clients, Workplace
from hpcfl.training.engines import LoopEngine
from hpcfl.training.settings import TrainConfig

IMAGE = (3, 32, 32)
NUM_CLASSES = 10
TRAIN_SAMPLES = 420
SERVER_CLIENTS, SERVER_COHORT = 100, 10
CHECKPOINT_EVERY = 50


def run_bench(arguments: Sequence[str], world: World) -> None:
    """Measure training steps, pFedLA's server step, a round's overhead and a checkpoint.

    The last two use the ranks there are: mpirun -n 3 python -m hpcfl.main bench.
    """
    parser = Parser("hpcfl bench", run_bench.__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="turns of each comparison (default: 15)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the run (default: 4)")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.rounds < 1:
        raise UserError("--repeats and --rounds must be 1 or more, such as --repeats 15 --rounds 4")
    torch.set_num_threads(1)
    if world.is_server:
        print("LeNet-16/32 with BatchNorm, batch 32 (pFedMB: LeNet-6/16, batch 64), one thread", flush=True)
        _report_step(options.repeats)
        _report_branches(options.repeats)
        _report_server_step(options.repeats)
    world.barrier()
    _report_round(world, options.rounds)


def _report_step(repeats: int) -> None:
    """Compare an epoch of the loop engine with a bare PyTorch loop on the same model and data."""
    context = _context(num_clients=1)
    shard = _random_shard()
    train = TrainConfig(batch_size=32, lr=0.01, local_epochs=1)
    workplace = _workplace(context, shard, train, {})
    theta, buffers = context.initial_parameters([0]), context.layout.flatten(context.network)[1].unsqueeze(0)
    network = copy.deepcopy(context.network).train()
    optimiser = torch.optim.SGD(network.parameters(), lr=train.lr)
    x, y = shard.samples("train", 0)
    x = x.contiguous()

    def product() -> None:
        clients = Clients(workplace, [0], 0)
        clients.buffers = buffers.clone()
        clients.sgd(theta)

    def bare() -> None:
        order = torch.randperm(TRAIN_SAMPLES, generator=torch_stream(0, "batches"))
        for start, stop in minibatches(TRAIN_SAMPLES, train.batch_size):
            index = order[start:stop]
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x[index]), y[index]).backward()
            optimiser.step()

    steps = len(minibatches(TRAIN_SAMPLES, train.batch_size))
    ratio, product_s, bare_s = _compare(product, bare, repeats)
    print(
        f"training step, loop engine / bare PyTorch: {ratio:.2f} (at most 1.05; "
        f"{product_s / steps * 1e3:.1f} and {bare_s / steps * 1e3:.1f} ms)",
        flush=True,
    )


def _report_branches(repeats: int) -> None:
    """Compare a local round of pFedMB with 5 branches (an epoch of alpha, one of branches) with two of 1."""
    context = _context(1, "lenet_small", batchnorm=False)
    shard = _random_shard()
    train = TrainConfig(batch_size=64, lr=0.01, local_epochs=1)

    def local_round(branches: int) -> Callable[[], None]:
        driver = Driver(PFedMB(context, PFedMBParams(branches=branches)))
        workplace = _workplace(context, shard, train, driver.initial_clients([0]))
        down = driver.send(driver.initial_server(), Cohort(0, (0,), context.num_samples))

        def work() -> None:
            for _ in range(1 if branches > 1 else 2):
                driver.work(Clients(workplace, [0], 0), down)

        return work

    ratio, five_s, one_s = _compare(local_round(5), local_round(1), repeats)
    steps = 2 * len(minibatches(TRAIN_SAMPLES, train.batch_size))
    print(
        f"pFedMB training step, 5 branches / 1: {ratio:.2f} (below 1.3; "
        f"{five_s / steps * 1e3:.1f} and {one_s / steps * 1e3:.1f} ms)",
        flush=True,
    )


def _report_server_step(repeats: int) -> None:
    """Compare pFedLA's server step with stacking N models a client and autograd through the sum."""
    context = _context(SERVER_CLIENTS)
    method = PFedLA(context, PFedLAParams(head_init="default"))
    server = method.server_state()
    stream = torch_stream(0, "bench")
    server["theta"] += 0.01 * torch.randn(server["theta"].shape, generator=stream)
    cohort = Cohort(
        0, tuple(range(0, SERVER_CLIENTS, SERVER_CLIENTS // SERVER_COHORT)), torch.ones(SERVER_COHORT)
    )
    trained = server["theta"][list(cohort.clients)] + 0.01

    driver = Driver(method)

    def product() -> None:
        sent = driver.send(server, cohort)
        rows = Message(rows={"theta": trained}, num_clients=SERVER_COHORT)
        driver.receive(server, cohort, Upload(iter([(slice(0, SERVER_COHORT), rows)]), sent))

    def stacked() -> None:
        for position, client in enumerate(cohort.clients):
            _stacked_step(method, server, client, trained[position])

    ratio, _, product_s = _compare(stacked, product, max(2, repeats // 5))
    sizes = f"N={SERVER_CLIENTS} S={SERVER_COHORT} P={context.layout.size:,}"
    print(
        f"server step, {sizes}: {product_s * 1e3:.0f} ms (at most 30)\n"
        f"server step, stacking all models for each client / ours: {ratio:.0f} (at least 50)",
        flush=True,
    )


def _stacked_step(method: PFedLA, server: Tensors, client: int, trained: Tensor) -> None:
    """Do one client's server step as public code does: stack all models, differentiate their weighted sum."""
    leaves = {
        name.removeprefix(HYPERNETWORKS): tensor[client : client + 1].clone().requires_grad_()
        for name, tensor in server.items()
        if name.startswith(HYPERNETWORKS)
    }
    alpha = method.hypernetworks.outputs(leaves)[0].softmax(dim=-1)
    weights = {layer.name: alpha[number] for number, layer in enumerate(method.layers)}
    models = [method.layout.views(model) for model in server["theta"]]
    start = {
        slot.name: (weights[slot.module] * torch.stack([m[slot.name] for m in models], dim=-1)).sum(dim=-1)
        for slot in method.layout.parameters
    }
    target = method.layout.views(trained)
    falling = [value.detach() - target[name] for name, value in start.items()]
    torch.autograd.grad(list(start.values()), list(leaves.values()), grad_outputs=falling)


def _report_round(world: World, rounds: int) -> None:
    """Time rounds and checkpoints of a real run: 10 clients, 10 local epochs. Collective."""
    with ExitStack() as at_exit:
        folder = b""
        if world.is_server:
            folder = at_exit.enter_context(tempfile.TemporaryDirectory(dir=".")).encode()
        path = Path(world.broadcast_bytes(folder).decode())
        if world.is_server:
            stream = numpy_stream(0, "bench")
            x = stream.integers(0, 256, (6000, *IMAGE), dtype=np.uint8)
            np.savez(path / "images.npz", x=x, y=np.arange(6000) % NUM_CLASSES)
        world.barrier()
        config = _round_config(path / "images.npz", rounds)
        experiment = agreed(world, lambda: build(config, world))
        run_folder = RunFolder(path / "run", config) if world.is_server else None
        layout = experiment.method.layout
        agreed(world, lambda: run_folder.open(False, layout, [], at_exit) if run_folder else None)
        stop = StopFlag()
        at_exit.callback(stop.restore)
        simulation = Simulation(experiment, world, stop, Progress(), run_folder)
        if simulation.run() == "stopped":
            return
        timing = simulation.timing
        if world.is_server:
            # the first round and the first checkpoint warm up
            round_s, train_s = statistics.median(timing.round_s[1:]), statistics.median(timing.train_s[1:])
            # the last checkpoint evaluates all models as it writes them
            save_s = statistics.median(timing.save_s[:-1])
            idle = 1 - train_s / round_s
            saving = save_s / (CHECKPOINT_EVERY * round_s + save_s)
            print(
                f"round of 10 clients, 10 epochs, {world.num_workers} worker(s): "
                f"{idle:.1%} of it is not training (at most 10 %; {round_s:.1f} s)\n"
                f"checkpoint every {CHECKPOINT_EVERY} rounds: "
                f"{saving:.2%} of the run (at most 2 %; {save_s * 1e3:.0f} ms)",
                flush=True,
            )


def _round_config(images: Path, rounds: int) -> Config:
    return resolve(
        {
            "data": {"source": "npz", "path": str(images), "layout": "NCHW", "per_client": 600},
            "model": {"batchnorm": True},
            "train": {"rounds": rounds + 1, "local_epochs": 10, "batch_size": 32, "lr": 0.01},
            "run": {"eval_every": rounds + 1, "checkpoint_every": 1, "device": "cpu"},
        }
    )


def _context(num_clients: int, model: str = "lenet", batchnorm: bool = True) -> Context:
    options = ConvNetOptions(batchnorm=batchnorm)
    num_samples = torch.full((num_clients,), TRAIN_SAMPLES)
    return Context(model, options, IMAGE, NUM_CLASSES, num_samples, TrainConfig(), 0)


def _workplace(context: Context, shard: Shard, train: TrainConfig, state: Tensors) -> Workplace:
    engine = LoopEngine(context.network, context.layout)
    return Workplace(shard, range(1), engine, engine, train, 0, torch.device("cpu"), state)


def _random_shard() -> Shard:
    stream = numpy_stream(0, "bench")
    x = stream.standard_normal((TRAIN_SAMPLES, *IMAGE)).astype(np.float32)
    y = np.arange(TRAIN_SAMPLES) % NUM_CLASSES
    nothing = np.empty(0, np.int64)
    part = ClientIndices(np.arange(TRAIN_SAMPLES), nothing, nothing)
    ones = (1.0,) * IMAGE[0]
    zeros = (0.0,) * IMAGE[0]
    return Shard.build(Arrays(x, y, NUM_CLASSES, 1.0, zeros, ones), [part], range(1), zeros, ones, "cpu")


def _compare(
    first: Callable[[], None], second: Callable[[], None], repeats: int
) -> tuple[float, float, float]:
    """Run two functions turn by turn; return the median ratio of their seconds, and both medians."""
    first()
    second()
    times = [(_seconds(first), _seconds(second)) for _ in range(repeats)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return statistics.median(a / b for a, b in times), medians[0], medians[1]


def _seconds(function: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s
