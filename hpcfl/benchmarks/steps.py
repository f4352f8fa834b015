"""Training steps and a server step: one process, one thread, turn by turn with what they are compared to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from hpcfl.benchmarks.ratios import Ratio, compare
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.config.keys import Precision, TrainConfig
from hpcfl.data.partitions import ClientIndices
from hpcfl.data.shard import Shard
from hpcfl.data.sources import Arrays
from hpcfl.methods import Context
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.pfedla import PFedLA, PFedLAParams
from hpcfl.methods.pfedmb import PFedMB, PFedMBParams
from hpcfl.models import ConvNetOptions
from hpcfl.parameters import Tensors
from hpcfl.randomness import numpy_stream, torch_stream
from hpcfl.training.batches import minibatches
from hpcfl.training.client_group import ClientGroup, WorkerContext
from hpcfl.training.engines import LoopEngine, has_bfloat16

IMAGE = (3, 32, 32)
NUM_CLASSES = 10
TRAIN_SAMPLES = 420
BATCH_SIZE = 32
SERVER_CLIENTS, SERVER_COHORT = 100, 10
STEPS = (
    ("LeNet-16/32 with BatchNorm", "lenet", True, 0.65),
    ("FedAvgCNN", "fedavgcnn", False, 0.75),
    ("LeNet-6/16", "lenet_small", False, 0.9),
)
"""Networks whose training step is timed: what they are called, name, BatchNorm, goal."""


def training_steps(repeats: int) -> Iterator[Ratio]:
    """Compare an epoch of the loop engine with a bare PyTorch loop on the same model and data."""
    for called, model, batchnorm, goal in STEPS:
        context = context_of(1, model, batchnorm)
        product, bare = _epochs(context)
        ratio, product_s, bare_s = compare(product, bare, repeats)
        steps = len(minibatches(TRAIN_SAMPLES, BATCH_SIZE))
        each = f"{product_s / steps * 1e3:.1f} and {bare_s / steps * 1e3:.1f} ms, batch {BATCH_SIZE}"
        yield Ratio(f"training step, {called}: loop engine / bare PyTorch", ratio, goal, each)
        if has_bfloat16():
            rounded, _ = _epochs(context, "bfloat16")
            ratio, rounded_s, plain_s = compare(rounded, product, repeats)
            each = f"{rounded_s / steps * 1e3:.1f} and {plain_s / steps * 1e3:.1f} ms"
            yield Ratio(f"training step, {called}: bfloat16 / float32", ratio, detail=each)


def branches(repeats: int) -> Iterator[Ratio]:
    """Compare a local round of pFedMB with 5 branches (an epoch of alpha, one of branches) with two of 1."""
    context = context_of(1, "lenet_small", batchnorm=False)
    shard = random_shard()
    train = TrainConfig(batch_size=64, lr=0.01, local_epochs=1)

    def local_round(count: int) -> Callable[[], None]:
        driver = MethodAdapter(PFedMB(context, PFedMBParams(branches=count)))
        workplace = _workplace(context, shard, train, driver.initial_clients([0]))
        down = driver.send(driver.initial_server(), Cohort(0, (0,), context.num_samples))

        def work() -> None:
            for _ in range(1 if count > 1 else 2):
                driver.work(ClientGroup(workplace, [0], 0), down)

        return work

    ratio, five_s, one_s = compare(local_round(5), local_round(1), repeats)
    steps = 2 * len(minibatches(TRAIN_SAMPLES, train.batch_size))
    each = f"{five_s / steps * 1e3:.1f} and {one_s / steps * 1e3:.1f} ms, LeNet-6/16, batch 64"
    yield Ratio("training step, pFedMB: 5 branches / 1", ratio, 1.3, each)


def server_step(repeats: int) -> Iterator[Ratio]:
    """Compare pFedLA's server step with stacking N models a client and autograd through the sum."""
    context = context_of(SERVER_CLIENTS)
    method = PFedLA(context, PFedLAParams(head_init="default"))
    server = method.server_state()
    stream = torch_stream(0, "bench")
    server["theta"] += 0.01 * torch.randn(server["theta"].shape, generator=stream)
    cohort = Cohort(
        0, tuple(range(0, SERVER_CLIENTS, SERVER_CLIENTS // SERVER_COHORT)), torch.ones(SERVER_COHORT)
    )
    trained = server["theta"][list(cohort.clients)] + 0.01

    driver = MethodAdapter(method)

    def product() -> None:
        sent = driver.send(server, cohort)
        rows = Message(rows={"theta": trained}, num_clients=SERVER_COHORT)
        driver.receive(server, cohort, Upload(iter([(slice(0, SERVER_COHORT), rows)]), sent))

    def stacked() -> None:
        for position, client in enumerate(cohort.clients):
            _stacked_step(method, server, client, trained[position])

    ratio, _, product_s = compare(stacked, product, max(2, repeats // 5))
    sizes = f"N={SERVER_CLIENTS} S={SERVER_COHORT} P={context.layout.size:,}"
    name = "server step, pFedLA: stacking all models for each client / ours"
    yield Ratio(name, ratio, 50, f"{product_s * 1e3:.0f} ms, {sizes}", is_floor=True)


def _epochs(
    context: Context, precision: Precision = "float32"
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return an epoch of the loop engine and one of plain PyTorch."""
    shard = random_shard()
    train = TrainConfig(batch_size=BATCH_SIZE, lr=0.01, local_epochs=1)
    workplace = _workplace(context, shard, train, {}, precision)
    theta, buffers = context.initial_parameters([0]), context.layout.flatten(context.network)[1].unsqueeze(0)
    network = copy.deepcopy(context.network).train()
    optimiser = torch.optim.SGD(network.parameters(), lr=train.lr)
    x, y = shard.samples("train", 0)
    x = x.contiguous()

    def product() -> None:
        clients = ClientGroup(workplace, [0], 0)
        clients.buffers = buffers.clone()
        clients.sgd(theta)

    def bare() -> None:
        order = torch.randperm(TRAIN_SAMPLES, generator=torch_stream(0, "batches"))
        for start, stop in minibatches(TRAIN_SAMPLES, BATCH_SIZE):
            index = order[start:stop]
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x[index]), y[index]).backward()
            optimiser.step()

    return product, bare


def _stacked_step(method: PFedLA, server: Tensors, client: int, trained: Tensor) -> None:
    """Do one client's server step as public code does: stack all models, differentiate their weighted sum."""
    outputs, leaves, _ = method.learner.outputs_to_differentiate(server, [client])
    alpha = outputs[0].softmax(dim=-1)
    weights = {layer.name: alpha[number] for number, layer in enumerate(method.layers)}
    models = [method.layout.views(model) for model in server["theta"]]
    start = {
        slot.name: (weights[slot.module] * torch.stack([m[slot.name] for m in models], dim=-1)).sum(dim=-1)
        for slot in method.layout.parameters
    }
    target = method.layout.views(trained)
    falling = [value.detach() - target[name] for name, value in start.items()]
    torch.autograd.grad(list(start.values()), list(leaves.values()), grad_outputs=falling)


def context_of(num_clients: int, model: str = "lenet", batchnorm: bool = True) -> Context:
    """Return a run's context with so many clients of TRAIN_SAMPLES images."""
    options = ConvNetOptions(batchnorm=batchnorm)
    num_samples = torch.full((num_clients,), TRAIN_SAMPLES)
    return Context(model, options, IMAGE, NUM_CLASSES, num_samples, TrainConfig(), 0)


def _workplace(
    context: Context, shard: Shard, train: TrainConfig, state: Tensors, precision: Precision = "float32"
) -> WorkerContext:
    engine = LoopEngine(context.network, context.layout, precision)
    return WorkerContext(shard, range(1), engine, engine, train, 0, torch.device("cpu"), state)


def random_shard(
    num_clients: int = 1, num_samples: int | None = None, device: torch.device | str = "cpu"
) -> Shard:
    """Return training samples of random images; `num_samples` a client, by default TRAIN_SAMPLES."""
    count = TRAIN_SAMPLES if num_samples is None else num_samples
    stream = numpy_stream(0, "bench")
    x = stream.standard_normal((count * num_clients, *IMAGE)).astype(np.float32)
    y = np.arange(len(x)) % NUM_CLASSES
    nothing = np.empty(0, np.int64)
    parts = [
        ClientIndices(np.arange(start, start + count), nothing, nothing) for start in range(0, len(x), count)
    ]
    ones = (1.0,) * IMAGE[0]
    zeros = (0.0,) * IMAGE[0]
    arrays = Arrays(x, y, NUM_CLASSES, 1.0, zeros, ones)
    return Shard.build(arrays, parts, range(num_clients), zeros, ones, device)
