"""Runs in this process with all their state in reach, and groups of clients made for a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hpcfl.communication.channel import Channel
from hpcfl.communication.codecs import codec_of
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort
from hpcfl.config.keys import TrainConfig
from hpcfl.data.shard import Shard
from hpcfl.methods import Method
from hpcfl.methods.base import State
from hpcfl.models import MODELS, build_network
from hpcfl.parameters import ParameterLayout
from hpcfl.registries import load_config
from hpcfl.samples import SampleType
from hpcfl.setup.experiment import build
from hpcfl.simulation.round_loop import Simulation
from hpcfl.terminal import Progress
from hpcfl.training.augmentation import Augmentation
from hpcfl.training.client_group import ClientGroup, WorkerContext
from hpcfl.training.engines import BatchedEngine, LoopEngine

SMALL = (
    "data.clients=4",
    "data.per_client=40",
    "train.rounds=3",
    "train.local_epochs=1",
    "train.batch_size=10",
    "run.eval_every=1000",
    "run.checkpoint_every=1000",
    "run.device=cpu",
)
"""Four clients with 28 training digits each, three rounds."""

UNEQUAL = (
    "data.partition.name=dirichlet",
    "data.per_client=null",
    "data.subset_per_class=15",
    "data.partition.min_samples=5",
    "data.partition.beta=2.0",
)
"""Makes the clients of `SMALL` unequal in size."""

UNEQUAL_FEW = (*UNEQUAL, "data.subset_per_class=10")
"""The same of fewer samples."""

MLP = ("model.name=mlp", "model.hidden=[16]")
"""A network that is trained in no time."""


class Run:
    """A finished serial run of `SMALL` with some keys changed; `kind` replaces the method's class.

    With torch's default type at float64 the whole run is in float64.
    """

    def __init__(self, *overrides: str, kind: type[Method] | None = None) -> None:
        world = Communicator()
        self.config = load_config(None, [*SMALL, *overrides])
        experiment = build(self.config, world)
        if kind is not None:
            method = kind(experiment.method.context, self.config.method.options)
            experiment = replace(experiment, method=method)
        self.worker = experiment.worker_context
        self.unseen = experiment.unseen
        for place in (self.worker, self.unseen):
            if place.shard.x.is_floating_point():
                place.shard.x = place.shard.x.to(torch.get_default_dtype())
        self.method: Any = experiment.method
        self.adapter = experiment.adapter
        self.num_clients = experiment.num_clients
        self.simulation = Simulation(experiment, world, None, Progress(), None)
        assert self.simulation.run() == "finished"
        self.server: State = self.simulation.server
        self.clients: State = self.worker.state

    @property
    def bytes_by_client(self) -> Tensor:
        """Bytes of trainable numbers down and up, int64 [N, 2]."""
        return torch.from_numpy(self.simulation.ledger.client_bytes)

    def adapted(self) -> State:
        """Return the models of clients that took no part in training, [U, ...]."""
        federation = self.simulation._federation
        models = [
            self.adapter.new_client_model(clients, down)
            for cohort in federation.cohorts(self.config.train.rounds, federation.unseen)
            for clients, down in federation.downloads(self.server, cohort)
        ]
        return {name: torch.cat([model[name] for model in models]) for name in models[0].names}

    def evaluated(self, *groups: range) -> State:
        """Return the models that would be scored now, [N, ...], or those of some groups of clients."""
        rounds, everyone = self.config.train.rounds, range(self.num_clients)
        cohort = Cohort(rounds, tuple(everyone), self.method.context.num_samples)
        channel = Channel(Communicator(), self.method.layers, self.num_clients)
        message = self.adapter.eval_download(self.server, cohort)
        down = channel.down(message, cohort, codec_of(self.config.comm, "down"))
        models = []
        for group in groups or [range(client, client + 1) for client in everyone]:
            clients = ClientGroup(self.worker, group, rounds)
            models.append(self.adapter.eval_model(clients, down.select(slice(group.start, group.stop))))
        return {name: torch.cat([model[name] for model in models]) for name in models[0].names}


def random(*shape: int, seed: int = 0) -> Tensor:
    """Draw from N(0, 1)."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_network(name: str = "digits_cnn", *, seed: int = 0, side: int = 8, **options: object) -> nn.Module:
    """Build a network for grey images of `side` pixels, in torch's default type."""
    chosen = MODELS[name].options.model_validate(options)
    return build_network(name, SampleType((1, side, side)), 10, chosen, seed)


def make_worker(
    network: nn.Module,
    sizes: Sequence[int],
    train: TrainConfig,
    *,
    clients_at_once: int | None = None,
    state: State | None = None,
    side: int = 8,
    device: torch.device | str = "cpu",
) -> WorkerContext:
    """Build a rank with clients of the given sizes and random grey images in the network's type.

    `clients_at_once` chooses the batched engine; the network must be on the device.
    """
    layout = ParameterLayout(network)
    dtype = next(network.parameters()).dtype
    stream = torch.Generator().manual_seed(7)
    x = torch.randn(sum(sizes), 1, side, side, generator=stream, dtype=torch.float64).to(dtype)
    y = torch.randint(10, (sum(sizes),), generator=stream)
    counts = torch.tensor(sizes)
    none = torch.zeros_like(counts)
    offset = {"train": counts.cumsum(0) - counts, "val": none, "test": none}
    shard = Shard(
        range(len(sizes)), x.to(device), y.to(device), offset, {"train": counts, "val": none, "test": none}
    )
    smoothing = train.label_smoothing or 0.0
    loop = LoopEngine(network, layout, label_smoothing=smoothing)
    engine = loop if clients_at_once is None else BatchedEngine(network, layout, clients_at_once, smoothing)
    changes = None if train.augment is None else Augmentation(train.augment, torch.full((1,), -0.5))
    place = WorkerContext(
        shard=shard,
        clients=range(len(sizes)),
        engine=engine,
        evaluator=loop,
        train=train,
        seed=0,
        device=torch.device(device),
        state=state or {},
    )
    return replace(place, augmentation=changes)


def spread(network: nn.Module, num_clients: int) -> tuple[Tensor, Tensor]:
    """Return a different model for each client, theta [C, P] and running statistics [C, U]."""
    theta, buffers = ParameterLayout(network).flatten(network)
    stream = torch.Generator().manual_seed(8)
    noise = torch.randn(num_clients, len(theta), generator=stream, dtype=torch.float64).to(theta.dtype)
    return theta + 0.01 * noise, buffers.expand(num_clients, -1).clone()
