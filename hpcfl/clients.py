"""The clients a hook works on: their data, state, random streams and local training.

Shapes: C clients of the group, P trainable numbers, U running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hpcfl.data.shard import Shard
from hpcfl.parameters import Tensors
from hpcfl.randomness import torch_stream
from hpcfl.training import (
    Batch,
    Engine,
    LoopEngine,
    Loss,
    TrainConfig,
    cross_entropy_loss,
    minibatches,
    same_size_groups,
)


@dataclass(frozen=True)
class Workplace:
    """What all clients of one rank share: samples, engines, settings, and the state of each client.

    `state` maps names to tensors [clients of the shard, ...].
    """

    shard: Shard
    clients: range
    engine: Engine
    evaluator: LoopEngine
    train: TrainConfig
    seed: int
    device: torch.device
    state: Tensors


class Trained(NamedTuple):
    """The end of a local training pass: theta [C, P] and the number of steps [C]."""

    theta: Tensor
    steps: Tensor


class Clients:
    """Some clients of this rank in one round: what `train`, `personalised` and `finetune` are given.

    `clients[name]` reads and writes the clients' state [C, ...]. Writes stay with this object until
    `commit`, which the round loop calls after training and never after an evaluation.
    """

    def __init__(self, workplace: Workplace, ids: Sequence[int], round: int) -> None:
        self._place = workplace
        self.ids = list(ids)
        self.round = round
        self._local = [client - workplace.clients.start for client in self.ids]
        self._written: Tensors = {}
        self.device = workplace.device
        self.buffers = torch.empty(len(self.ids), 0, device=self.device)
        """Running statistics [C, U] that training and evaluation use and update."""
        self.steps = torch.zeros(len(self.ids), dtype=torch.int64)
        """Training steps done by each client through this object [C]."""
        self.loss_sum = torch.zeros(len(self.ids), dtype=torch.float64)
        """Sum of the losses of these steps [C]."""

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, name: str) -> bool:
        return name in self._place.state

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._written:
            self._written[name] = self._place.state[name][self._local].to(self.device)
        return self._written[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._written[name] = value

    def commit(self) -> None:
        """Write the clients' state back to the rank's."""
        for name, rows in self._written.items():
            stored = self._place.state[name]
            stored[self._local] = rows.to(stored.device)

    @property
    def num_samples(self) -> Tensor:
        """Number of training samples of each client, int64 [C]."""
        return self._place.shard.count["train"][self._local]

    def samples(self, split: str, position: int) -> tuple[Tensor, Tensor]:
        """Return one client's (x [n, ...], y [n]) of a split: "train", "val" or "test"."""
        return self._place.shard.samples(split, self._local[position])

    def batches(self, purpose: str = "batches", epochs: int | None = None) -> Iterator[Batch]:
        """Yield mini-batches of the training split in an order given by (seed, purpose, round, client).

        Clients whose current mini-batch has the same size come in one Batch; `epochs` defaults to
        `train.local_epochs`.
        """
        shard, train = self._place.shard, self._place.train
        counts = self.num_samples.tolist()
        cuts = [minibatches(count, train.batch_size) for count in counts]
        streams = [torch_stream(self._place.seed, purpose, self.round, client) for client in self.ids]
        offsets = shard.offset["train"][self._local]
        for _ in range(train.local_epochs if epochs is None else epochs):
            orders = [torch.randperm(n, generator=stream) for n, stream in zip(counts, streams, strict=True)]
            for step in range(max(map(len, cuts), default=0)):
                spans = [cut[step] if step < len(cut) else (0, 0) for cut in cuts]
                for _size, members in same_size_groups([stop - start for start, stop in spans]):
                    index = torch.stack([orders[m][slice(*spans[m])] for m in members])
                    position = (index + offsets[members, None]).to(self.device)
                    everyone = len(members) == len(self)
                    rows = slice(None) if everyone else torch.tensor(members, device=self.device)
                    x = shard.x[position[0]].unsqueeze(0) if len(members) == 1 else shard.x[position]
                    yield Batch(rows, x, shard.y[position], index.to(self.device))

    def gradient(self, loss: Loss, tensors: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
        """Differentiate a per-client loss on a batch with respect to tensors [len(batch), ...].

        Running statistics of these clients are updated. Returns gradients by name and losses.
        """
        if isinstance(batch.rows, slice):
            return self._place.engine.gradient(loss, tensors, self.buffers, batch)
        buffers = self.buffers[batch.rows]
        result = self._place.engine.gradient(loss, tensors, buffers, batch)
        self.buffers[batch.rows] = buffers
        return result

    def sgd(
        self,
        theta: Tensor,
        *,
        epochs: int | None = None,
        lr: float | None = None,
        loss: Loss = cross_entropy_loss,
        extra_gradient: Callable[[Tensor, slice | Tensor], Tensor] | None = None,
        trained: slice | None = None,
        purpose: str = "batches",
    ) -> Trained:
        """Train by SGD from theta [C, P], which is left as it was.

        `extra_gradient(theta, rows)` is added to the gradient (a proximal pull, say): theta [len(rows), P]
        are the current weights of the group's clients `rows`. `trained` limits the update to one slice of
        the vector, the rest staying frozen. Momentum starts at zero.
        """
        train = self._place.train
        theta = theta.clone(memory_format=torch.contiguous_format)
        lr = train.lr * train.lr_decay**self.round if lr is None else lr
        velocity = torch.zeros_like(theta) if train.momentum else None
        part = slice(None) if trained is None else trained
        steps = torch.zeros(len(self), dtype=torch.int64, device=theta.device)
        losses = torch.zeros(len(self), dtype=torch.float64, device=theta.device)
        for batch in self.batches(purpose, epochs):
            rows = batch.rows
            weights = theta[rows]
            gradients, values = self.gradient(loss, {"theta": weights}, batch)
            update = gradients["theta"]
            if extra_gradient is not None:
                update = update + extra_gradient(weights, rows)
            if train.weight_decay:
                update = update.add(weights, alpha=train.weight_decay)
            if velocity is not None:
                update = velocity[rows].mul_(train.momentum).add_(update)
                velocity[rows] = update
            weights[:, part].add_(update[:, part], alpha=-lr)
            if not isinstance(rows, slice):
                theta[rows] = weights
            steps[rows] += 1
            losses[rows] += values
        self.steps += steps.cpu()
        self.loss_sum += losses.cpu()
        return Trained(theta, steps)

    def probabilities(self, model: Tensors, position: int, x: Tensor) -> Tensor:
        """Return class probabilities [n, K] of one client's model (`theta` and `buffers`, a row a client)."""
        return self._place.evaluator.probabilities(model["theta"][position], model["buffers"][position], x)
