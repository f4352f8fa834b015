"""What rounds by hand take of a run: one client's work, and gradients of flat models in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from harness import Run
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from hpcfl.communication.channel import Channel
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort, Message
from hpcfl.config.keys import TrainConfig
from hpcfl.methods import Context, Method
from hpcfl.models import MODELS
from hpcfl.training.client_group import ClientGroup


def method_of(kind: type[Method], clients: int = 4, **params: object) -> Any:
    """Return a method for so many clients and a small network, without data or a run."""
    network = MODELS["mlp"].options.model_validate({"hidden": [16]})
    sizes = torch.full((clients,), 20)
    context = Context("mlp", network, (1, 8, 8), 10, sizes, TrainConfig(), 0)
    return kind(context, kind.Params.model_validate(params))


def work(run: Run, client: int, round: int = 0) -> tuple[Message, ClientGroup]:
    """Train one client from its state and the server's as they are now; return its upload."""
    cohort = Cohort(round, (client,), run.method.context.num_samples[[client]])
    clients = ClientGroup(run.workplace, [client], round)
    channel = Channel(Communicator(), run.method.layers, run.num_clients)
    return run.driver.work(clients, channel.down(run.driver.send(run.server, cohort), cohort)), clients


def step_size(run: Run, round: int) -> float:
    """Return the step size of a round."""
    return float(run.config.train.lr * run.config.train.lr_decay**round)


def loss(run: Run, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of a model [P] without BatchNorm, which autograd can differentiate."""
    logits = functional_call(run.method.context.network, run.method.layout.views(theta), x)
    return cross_entropy(logits, y)


def gradient(run: Run, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient [P] of the cross-entropy of a model [P] without BatchNorm."""
    leaf = theta.clone().requires_grad_()
    return torch.autograd.grad(loss(run, leaf, x, y), leaf)[0]
