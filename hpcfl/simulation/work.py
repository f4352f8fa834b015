"""How many gradients of mini-batches a run takes, and how long one of them takes here."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.world import World
from hpcfl.config import Config
from hpcfl.methods import Method
from hpcfl.simulation.experiment import batched_engine, is_batched
from hpcfl.simulation.step_timing import seconds_of_step
from hpcfl.training.batches import minibatches
from hpcfl.training.engines import Engine, LoopEngine
from hpcfl.training.settings import TrainConfig


@dataclass(frozen=True)
class Work:
    """About how many gradients of mini-batches a run takes, over all clients and rounds."""

    training: float
    finetuning: float
    """Before evaluations, of clients in training."""
    unseen: float
    """Before evaluations, of clients that take no part in training."""

    @property
    def total(self) -> float:
        return self.training + self.finetuning + self.unseen


def work_of(config: Config, method: Method) -> Work:
    """Return the work of a whole run."""
    train, context = config.train, method.context
    batches, times = batches_of(context.num_samples, train), evaluations(config)
    turns = train.rounds * train.cohort_size(len(batches))
    return Work(
        float(np.mean(batches)) * turns * method.epochs_a_round,
        float(np.sum(batches)) * times * finetuning_a_batch(method),
        float(np.sum(batches_of(context.num_samples_of_unseen, train))) * times * adapting_a_batch(method),
    )


def batches_of(num_samples: Tensor, train: TrainConfig) -> list[int]:
    """Return the mini-batches of each client in a local epoch."""
    return [len(minibatches(count, train.batch_size, train.last_batch)) for count in num_samples.tolist()]


def evaluations(config: Config) -> int:
    """Return how many evaluations a run has; the last round always has one."""
    return math.ceil(config.train.rounds / config.run.eval_every)


def finetuning_a_batch(method: Method) -> float:
    """Return the gradients that fine-tuning before an evaluation takes per mini-batch of an epoch."""
    return method.context.train.finetune_epochs * method.finetuning_gradients(method.params)


def adapting_a_batch(method: Method) -> float:
    """Return the gradients that a client's adaptation, if it is new, takes per mini-batch of an epoch."""
    train = method.context.train.of_unseen()
    if method.traits.eval_after == "training":
        return method.gradient_epochs(method.params, train)
    return train.local_epochs * method.finetuning_gradients(method.params)


def step_seconds(config: Config, method: Method) -> float:
    """Return the seconds of one client's gradient and update of the method's network, on random images.

    That is the fastest of a few steps, as whatever else the machine does only slows them.
    """
    torch.set_num_threads(config.run.threads)
    world = World()
    device = world.device(config.run.device)
    count = method.context.num_clients
    network = copy.deepcopy(method.network).to(device)
    engine: Engine = LoopEngine(network, method.layout, config.train.precision)
    if is_batched(config, device):
        engine, _ = batched_engine(config, method, network, device, world.workers_on_device, count)
    return seconds_of_step(engine, method, device, min(engine.clients_at_once, count))
