"""Local training with torch's own modules and optimiser, of which slow twins of methods are made."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from harness import UNEQUAL_FEW, Run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpcfl.models import Network
from hpcfl.randomness import torch_stream
from hpcfl.training.batches import minibatches

SOME = (*UNEQUAL_FEW, "train.participation=0.75", "model.batchnorm=true")
"""Unequal clients, three of four in a round."""

SLIPPERY = ("train.momentum=0.9", "train.weight_decay=0.01", "train.lr_decay=0.9")
"""Settings under which numbers that should stand still drift if they are not left out of the optimiser."""


def network_with(run: Run, theta: Tensor, buffers: Tensor) -> Network:
    """Return the run's network with weights [P] and running statistics [U] of its own, in training mode."""
    network: Network = copy.deepcopy(run.method.context.network).train()
    layout = run.method.layout
    network.load_state_dict(layout.views(theta) | layout.buffer_views(buffers), strict=False)
    return network


def batches_of(
    run: Run, client: int, round: int, purpose: str = "batches", epochs: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one client's mini-batches (x, y) of a training pass."""
    x, y = run.workplace.shard.samples("train", client)
    stream = torch_stream(run.config.run.seed, purpose, round, client)
    for _ in range(run.config.train.local_epochs if epochs is None else epochs):
        order = torch.randperm(len(y), generator=stream)
        for start, stop in minibatches(len(y), run.config.train.batch_size):
            yield x[order[start:stop]], y[order[start:stop]]


def torchs_sgd(run: Run, parameters: Sequence[nn.Parameter], round: int) -> torch.optim.SGD:
    """Return torch's optimiser with the settings of a round."""
    train = run.config.train
    lr = train.lr * train.lr_decay**round
    return torch.optim.SGD(parameters, lr, momentum=train.momentum, weight_decay=train.weight_decay)


def train_by_torch(
    run: Run,
    client: int,
    round: int,
    network: Network,
    *,
    part: str = "",
    purpose: str = "batches",
    epochs: int | None = None,
) -> None:
    """Train the parameters whose names begin with `part` on cross-entropy."""
    optimiser = torchs_sgd(run, [p for name, p in network.named_parameters() if name.startswith(part)], round)
    for x, y in batches_of(run, client, round, purpose, epochs):
        network.zero_grad()
        cross_entropy(network(x), y).backward()
        optimiser.step()


def mean_by_samples(run: Run, clients: Sequence[int], rows: Tensor) -> Tensor:
    """Return the mean of rows [S, ...] of some clients, weighted by their training samples."""
    samples = run.method.context.num_samples[list(clients)]
    return torch.tensordot(samples / samples.sum(), rows, dims=1)
