"""Training steps: the loop engine beside bare PyTorch, and beside the batched engine. One process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hpcfl.benchmarks.ratios import Ratio, compare
from hpcfl.config.keys import TrainConfig
from hpcfl.data.arrays import Arrays
from hpcfl.data.partitions import ClientIndices
from hpcfl.data.shard import Shard
from hpcfl.methods import Context
from hpcfl.models import ConvNetOptions, NetworkOptions
from hpcfl.models.sequences import LstmOptions, TransformerOptions
from hpcfl.randomness import numpy_stream, torch_stream
from hpcfl.samples import SampleType
from hpcfl.training.batches import minibatches
from hpcfl.training.client_group import ClientGroup, WorkerContext
from hpcfl.training.engines import (
    BatchedEngine,
    Engine,
    LoopEngine,
    has_bfloat16,
    set_cuda_arithmetic,
)

CPU = torch.device("cpu")
NUM_CLASSES = 10
TRAIN_SAMPLES = 420
TRAIN = TrainConfig(batch_size=32, lr=0.01, local_epochs=1)
IMAGES = SampleType((3, 32, 32))
TOKENS = SampleType((80,), 100)


@dataclass(frozen=True)
class Timed:
    """A network whose training step is timed."""

    called: str
    model: str
    options: NetworkOptions
    sample: SampleType
    goal: float


LENET = Timed("LeNet-16/32 with BatchNorm", "lenet", ConvNetOptions(batchnorm=True), IMAGES, 0.65)
NETWORKS = (
    LENET,
    Timed("FedAvgCNN", "fedavgcnn", ConvNetOptions(), IMAGES, 0.75),
    Timed("LeNet-6/16", "lenet_small", ConvNetOptions(), IMAGES, 0.9),
    Timed("LSTM on 80 tokens", "lstm", LstmOptions(), TOKENS, 1.1),
    Timed("transformer on 80 tokens", "transformer", TransformerOptions(), TOKENS, 1.1),
)
CLIENTS_AT_ONCE: dict[str, dict[int, float | None]] = {"cuda": {10: 0.33, 100: 0.05}, "cpu": {4: None}}
"""How many clients the batched engine trains, by device, each with its goal: the loop engine leaves a GPU
idle with small networks."""


def training_steps(repeats: int) -> Iterator[Ratio]:
    """Compare an epoch of the loop engine with a bare PyTorch loop on the same model and data."""
    steps = len(minibatches(TRAIN_SAMPLES, TRAIN.batch_size))
    for network in NETWORKS:
        context, shard = context_of(1, network), _random_shard(1, network.sample)
        loop = LoopEngine(context.network, context.layout)
        ours = _epoch(context, shard, loop, loop)
        ratio, ours_s, bare_s = compare(ours, _bare_epoch(context, shard), repeats)
        each = f"{ours_s / steps * 1e3:.1f} and {bare_s / steps * 1e3:.1f} ms, batch {TRAIN.batch_size}"
        yield Ratio(f"training step, {network.called}: loop engine / bare PyTorch", ratio, network.goal, each)
        if has_bfloat16():
            rounded = LoopEngine(context.network, context.layout, "bfloat16")
            ratio, rounded_s, plain_s = compare(_epoch(context, shard, rounded, rounded), ours, repeats)
            each = f"{rounded_s / steps * 1e3:.1f} and {plain_s / steps * 1e3:.1f} ms"
            yield Ratio(f"training step, {network.called}: bfloat16 / float32", ratio, detail=each)


def engines(device: torch.device, repeats: int) -> Iterator[Ratio]:
    """Compare an epoch of many clients of LeNet by the batched engine and by the loop engine on a device."""
    # as in a run, unless run.tf32 says otherwise
    set_cuda_arithmetic(tf32=False)
    for count, goal in CLIENTS_AT_ONCE[device.type].items():
        context = context_of(count)
        network, shard = context.build_network(-1).to(device), _random_shard(count, LENET.sample, device)
        loop = LoopEngine(network, context.layout)
        batched = BatchedEngine(network, context.layout, count)
        one_by_one = _epoch(context, shard, loop, loop, device)
        ratio, batched_s, loop_s = compare(_epoch(context, shard, batched, loop, device), one_by_one, repeats)
        steps = len(minibatches(TRAIN_SAMPLES, TRAIN.batch_size)) * count
        each = f"{batched_s / steps * 1e3:.2g} and {loop_s / steps * 1e3:.2g} ms a client's step"
        name = f"training step, {count} clients on {device.type}: batched engine / loop engine"
        detail = f"{each}, LeNet-16/32 with BatchNorm, batch {TRAIN.batch_size}"
        yield Ratio(name, ratio, goal, detail)


def context_of(num_clients: int, timed: Timed = LENET) -> Context:
    """Return a run's context with this many clients of TRAIN_SAMPLES samples."""
    num_samples = torch.full((num_clients,), TRAIN_SAMPLES)
    return Context(timed.model, timed.options, timed.sample, NUM_CLASSES, num_samples, train=TRAIN, seed=0)


def _epoch(
    context: Context,
    shard: Shard,
    engine: Engine,
    evaluator: LoopEngine,
    device: torch.device = CPU,
) -> Callable[[], None]:
    """Return an epoch of plain local training of a shard's clients by an engine."""
    worker = WorkerContext(
        shard=shard,
        clients=shard.clients,
        engine=engine,
        evaluator=evaluator,
        train=TRAIN,
        seed=0,
        device=device,
        state={},
    )
    theta = context.initial_parameters(shard.clients).to(device)
    buffers = context.layout.flatten(context.network)[1].expand(len(theta), -1).to(device)

    def work() -> None:
        for start in range(0, len(theta), engine.clients_at_once):
            group = slice(start, start + engine.clients_at_once)
            clients = ClientGroup(worker, worker.clients[group], 0)
            clients.buffers = buffers[group].clone()
            clients.sgd(theta[group])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return work


def _bare_epoch(context: Context, shard: Shard) -> Callable[[], None]:
    """Return an epoch of plain PyTorch on the samples of client 0."""
    network = context.build_network(-1).train()
    optimiser = torch.optim.SGD(network.parameters(), lr=TRAIN.lr)
    x, y = shard.samples("train", 0)
    x = x.contiguous()

    def work() -> None:
        order = torch.randperm(TRAIN_SAMPLES, generator=torch_stream(0, "batches"))
        for start, stop in minibatches(TRAIN_SAMPLES, TRAIN.batch_size):
            index = order[start:stop]
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x[index]), y[index]).backward()
            optimiser.step()

    return work


def _random_shard(num_clients: int, sample: SampleType, device: torch.device = CPU) -> Shard:
    """Return TRAIN_SAMPLES random samples for each client, all of them to train on."""
    shape, stream = (TRAIN_SAMPLES * num_clients, *sample.shape), numpy_stream(0, "bench")
    if sample.vocabulary is None:
        x: np.ndarray = stream.standard_normal(shape, np.float32)
    else:
        x = stream.integers(sample.vocabulary, size=shape)
    y = np.arange(len(x)) % NUM_CLASSES
    none = np.empty(0, np.int64)
    parts = [ClientIndices(own, none, none) for own in np.split(np.arange(len(x)), num_clients)]
    mean, std = (0.0,) * sample.channels, (1.0,) * sample.channels
    arrays = Arrays(x, y, NUM_CLASSES, 1.0, mean, std, vocabulary=sample.vocabulary)
    return Shard.build(arrays, parts, range(num_clients), mean, std, device)
