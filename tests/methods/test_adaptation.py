"""Per-FedAvg and FedALA: against rounds by hand with plain torch and autograd."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
import torch
from by_hand import assert_close, batches_of, mean_by_samples, method_of, work
from harness import UNEQUAL_FEW, Run
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from hpcfl.communication.messages import BUFFERS
from hpcfl.errors import UserError
from hpcfl.methods.fedala import FedALA
from hpcfl.methods.per_fedavg import PerFedAvg
from hpcfl.randomness import torch_stream
from hpcfl.training.batches import minibatches
from hpcfl.training.client_group import ClientGroup

PER_FEDAVG, FEDALA = "method.name=per_fedavg", "method.name=fedala"
VARIANTS = ("hessian_free", "exact", "first_order")
LINEAR = ("model.name=mlp", "model.hidden=[]")
HEAD = 650


def loss(run: Run, theta: Tensor, x: Tensor, y: Tensor, statistics: Tensor | None = None) -> Tensor:
    """Return the loss of a model [P] in training mode; statistics [U] move, if they are given."""
    layout, network = run.method.layout, run.method.context.network.train()
    if statistics is None:
        statistics = run.method.buffers.initial()
    return cross_entropy(
        functional_call(network, layout.views(theta) | layout.buffer_views(statistics), x), y
    )


def slope(run: Run, theta: Tensor, x: Tensor, y: Tensor, statistics: Tensor | None = None) -> Tensor:
    """Return the gradient of the loss."""
    leaf = theta.clone().requires_grad_()
    return torch.autograd.grad(loss(run, leaf, x, y, statistics), leaf)[0]


# Per-FedAvg


def hessian_times(run: Run, direction: Tensor, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the product of the loss's Hessian at a model [P] with a direction [P]."""
    leaf = theta.clone().requires_grad_()
    gradient = torch.autograd.grad(loss(run, leaf, x, y), leaf, create_graph=True)[0]
    return torch.autograd.grad(gradient @ direction, leaf)[0]


def meta_trained(run: Run, client: int, round: int, theta: Tensor, statistics: Tensor) -> Tensor:
    """Return one client's model after a round of Algorithm 1; statistics [U] move."""
    train, params = run.config.train, run.config.method.options
    w = theta.clone()
    optimiser = torch.optim.SGD(
        [w], train.lr * train.lr_decay**round, momentum=train.momentum, weight_decay=train.weight_decay
    )
    orders = [batches_of(run, client, round, purpose) for purpose in ("adaptation", "batches", "curvature")]
    for a, b, c in zip(*orders, strict=True):
        u = w - params.alpha * slope(run, w, *a)
        d = slope(run, u, *b, statistics)
        w.grad = d
        if params.variant == "hessian_free":
            ahead, behind = (slope(run, w + sign * params.delta * d, *c) for sign in (1, -1))
            w.grad = d - params.alpha * (ahead - behind) / (2 * params.delta)
        if params.variant == "exact":
            w.grad = d - params.alpha * hessian_times(run, d, w, *c)
        optimiser.step()
    return w


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("double")
@pytest.mark.warns
def test_rounds_of_per_fedavg_equal_those_by_hand(variant: str) -> None:
    keys = [*UNEQUAL_FEW, "model.batchnorm=true", "train.rounds=2", "train.local_epochs=2"]
    keys += ["train.participation=0.5", "train.momentum=0.9", "train.weight_decay=0.01", "train.lr_decay=0.5"]
    run = Run(PER_FEDAVG, f"method.variant={variant}", "method.alpha=0.2", *keys)
    start = run.adapter.initial_server()
    theta, statistics = start["theta"], run.method.buffers.initial()
    for number in range(2):
        cohort = run.simulation.cohort(number)
        moved = statistics.expand(len(cohort), -1).clone()
        trained = [
            meta_trained(run, client, number, theta, row)
            for client, row in zip(cohort.clients, moved, strict=True)
        ]
        theta = mean_by_samples(run, cohort.clients, torch.stack(trained))
        statistics = mean_by_samples(run, cohort.clients, moved)
    assert_close(run.server["theta"], theta)
    assert_close(run.server[BUFFERS], statistics)


def test_a_first_order_step_of_the_size_of_the_adaptation_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = "method.alpha=0.05, not below train.lr=0.05,.*; set method.variant=hessian_free, or a smaller"
    for variant, alpha in (("first_order", 0.05), ("first_order", 0.04), ("exact", 0.05)):
        method_of(PerFedAvg, variant=variant, alpha=alpha)
    (warning,) = caplog.messages
    assert re.search(expected, warning)


@pytest.mark.parametrize("steps", [0, 6])
@pytest.mark.usefixtures("double")
def test_evaluation_takes_the_given_number_of_steps_on_training_data(steps: int) -> None:
    keys = ("model.batchnorm=true", "train.rounds=1", "method.alpha=0.1", "train.momentum=0.5")
    run = Run(PER_FEDAVG, *keys, f"method.adaptation_steps={steps}")
    evaluated, kept = run.evaluated(), run.server["theta"].clone()
    for client in range(4):
        theta = run.server["theta"].clone()
        optimiser = torch.optim.SGD([theta], 0.1, momentum=0.5)
        # 28 samples are four mini-batches a pass
        for x, y in islice(batches_of(run, client, 1, "evaluation", 2), steps):
            theta.grad = slope(run, theta, x, y)
            optimiser.step()
        torch.testing.assert_close(evaluated["theta"][client], theta, rtol=0, atol=1e-12)
    assert torch.equal(evaluated["theta"], kept.expand(4, -1)) == (steps == 0)
    assert torch.equal(evaluated[BUFFERS], run.server[BUFFERS].expand(4, -1))


def test_fine_tuning_replaces_the_adaptation_by_epochs_with_its_step_size() -> None:
    run = Run(PER_FEDAVG, "method.alpha=0.1", "train.rounds=1", "train.finetune_epochs=2")
    tuned = run.evaluated()["theta"]
    for client in range(4):
        alone = ClientGroup(run.worker, [client], 1)
        by_hand = alone.sgd(run.server["theta"].unsqueeze(0), epochs=2, lr=0.1, purpose="finetune").theta
        assert torch.equal(tuned[client], by_hand[0])


# FedALA


@dataclass
class Reference:
    """FedALA with autograd through the combined model; local training is `ClientGroup.sgd`."""

    run: Run

    def __post_init__(self) -> None:
        self.params, method = self.run.config.method.options, self.run.method
        self.top = method.layers[-self.params.adaptive_layers].start
        self.shared = method.context.initial_parameters()
        self.statistics = method.buffers.initial()
        self.own = method.context.initial_parameters(range(4))
        self.weights = torch.ones_like(self.own[:, self.top :])
        self.stage = [0] * 4
        self.passes: list[list[int]] = [[] for _ in range(4)]

    def combined(self, client: int, weights: Tensor) -> Tensor:
        apart = self.shared - self.own[client]
        return torch.cat(
            [self.shared[: self.top], self.own[client, self.top :] + apart[self.top :] * weights]
        )

    def one_pass(self, client: int, round: int, number: int, weights: Tensor) -> tuple[Tensor, float]:
        """Return the weights after a pass over the round's share of samples, and its mean loss."""
        seed, (x, y) = self.run.config.run.seed, self.run.worker.shard.samples("train", client)
        stream = torch_stream(seed, "adaptive aggregation", round, client)
        samples = torch.randperm(len(y), generator=stream)[: int(self.params.share * len(y) + 0.5)]
        stream = torch_stream(seed, f"adaptive aggregation/{number}", round, client)
        samples, total = samples[torch.randperm(len(samples), generator=stream)], 0.0
        for start, stop in minibatches(len(samples), self.run.config.train.batch_size):
            batch, leaf = samples[start:stop], weights.clone().requires_grad_()
            value = loss(self.run, self.combined(client, leaf), x[batch], y[batch])
            weights = weights - self.params.weights_lr * torch.autograd.grad(value, leaf)[0]
            weights = weights.clamp(0, 1)
            total += float(value.detach()) * len(batch)
        return weights, total / len(samples)

    def learn(self, client: int, round: int) -> tuple[Tensor, int]:
        """Return a client's weights after the passes of a round, and how many these are."""
        weights, losses = self.weights[client], []
        if self.stage[client] == 0 or torch.equal(self.own[client, self.top :], self.shared[self.top :]):
            return weights, 0
        while len(losses) < self.params.most_passes:
            weights, mean = self.one_pass(client, round, len(losses) + 1, weights)
            losses.append(mean)
            last = losses[-self.params.last_passes :]
            is_settled = len(last) == self.params.last_passes and np.std(last) < self.params.threshold
            if self.stage[client] == 2 or is_settled:
                break
        return weights, len(losses)

    def round(self, number: int) -> None:
        clients, ends, moved = self.run.simulation.cohort(number).clients, [], []
        for client in clients:
            self.weights[client], passes = self.learn(client, number)
            self.passes[client].append(passes)
            self.stage[client] = 2 if passes else max(1, self.stage[client])
            alone = ClientGroup(self.run.worker, [client], number)
            alone.buffers = self.statistics.unsqueeze(0).clone()
            ends.append(alone.sgd(self.combined(client, self.weights[client]).unsqueeze(0)).theta[0])
            moved.append(alone.buffers[0])
        self.own[list(clients)] = torch.stack(ends)
        self.shared = mean_by_samples(self.run, clients, torch.stack(ends))
        self.statistics = mean_by_samples(self.run, clients, torch.stack(moved))


BRIEF = ("method.last_passes=2", "method.threshold=0.005", "method.weights_lr=30", "method.share=0.5")
TOGETHER = ("run.engine=batched", "run.clients_at_once=3")
"""Clients of a group are done with their passes at different times."""
ENDLESS = ("method.threshold=0", "method.most_passes=3", "method.weights_lr=20", "method.adaptive_layers=2")


@pytest.mark.parametrize(
    ("keys", "fewest", "most"),
    [
        ((*UNEQUAL_FEW, "model.batchnorm=true", *BRIEF, *TOGETHER), 2, 49),
        ((*LINEAR, "train.participation=0.75", "method.last_passes=4", "method.threshold=0.01"), 4, 49),
        (ENDLESS, 3, 3),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_of_fedala_equal_a_plain_implementation(keys: tuple[str, ...], fewest: int, most: int) -> None:
    run = Run(FEDALA, "train.rounds=4", "train.lr=0.2", *keys)
    reference = Reference(run)
    for number in range(4):
        reference.round(number)
    learning = [[passes for passes in of_client if passes] for of_client in reference.passes]
    first = {passes[0] for passes in learning}
    assert fewest <= min(first) <= max(first) <= most
    assert (len(first) > 1) == (fewest < most)
    assert all(later == [1] * len(later) for _, *later in learning)
    assert_close(run.clients["weights"], reference.weights)
    assert_close(run.clients["theta"], reference.own)
    assert_close(run.server["theta"], reference.shared)
    assert run.clients["stage"].tolist() == reference.stage
    if BUFFERS in run.server:
        assert_close(run.server[BUFFERS], reference.statistics)
    hats = torch.stack([reference.combined(client, reference.learn(client, 4)[0]) for client in range(4)])
    assert_close(run.evaluated()["theta"], hats)
    assert (run.clients["weights"] - 1).abs().max() > 0.01


def test_a_client_whose_model_is_the_global_one_learns_nothing_yet() -> None:
    few = ("train.rounds=1", "method.most_passes=1")
    run = Run(FEDALA, *few, "train.participation=0.5", "method.weights_lr=1e3")
    sampled = run.simulation.cohort(0).clients
    assert run.clients["stage"].tolist() == [int(client in sampled) for client in range(4)]
    assert torch.equal(run.clients["weights"], torch.ones(4, HEAD))
    moved = (run.clients["theta"] != run.method.context.initial_parameters()).any(dim=1)
    assert moved.tolist() == [client in sampled for client in range(4)]
    run.worker.state["theta"][sampled[0]] = run.server["theta"]
    assert work(run, sampled[0], 1)[1]["stage"].tolist() == [1]
    hats = run.evaluated()["theta"]
    equal = (hats == run.server["theta"]).all(dim=1)
    assert equal.tolist() == [client != sampled[1] for client in range(4)]


def test_batchnorm_gets_two_samples_however_small_the_share() -> None:
    # the last BatchNorm sees one number a channel and sample of images as small as these
    keys = ("model.name=mobilenetv2", "data.clients=2", "data.per_client=8", "train.rounds=1")
    run = Run(FEDALA, *keys, "method.most_passes=1", "method.weights_lr=100", "method.share=0.001")
    # of weights that are learnt, some are below 1
    assert (run.evaluated()["theta"] != run.server["theta"]).any(dim=1).all()


def test_more_adaptive_layers_than_the_model_has_are_refused() -> None:
    expected = r"^method\.adaptive_layers=3 is more than the model's 2 layers \(.*\); allowed: up to 2$"
    with pytest.raises(UserError, match=expected):
        method_of(FedALA, adaptive_layers=3)
    method = method_of(FedALA, adaptive_layers=2)
    assert method.client_state(range(4))["weights"].shape == (4, method.layout.size)
