"""FedNTD and FedLC: FedAvg whose clients train on another loss of their logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from by_hand import (
    SLIPPERY,
    SOME,
    batches_of,
    mean_by_samples,
    method_of,
    network_with,
    torchs_optimiser,
    work,
)
from harness import Run
from torch import Tensor
from torch.nn.functional import cross_entropy

from hpcfl.methods.fedlc import FedLC
from hpcfl.methods.fedntd import not_true
from hpcfl.models import Network
from hpcfl.training.losses import distillation_loss

MLP = ("model.name=mlp", "model.hidden=[16]")

LossOf = Callable[[Run, int, Tensor, Tensor], Callable[[Network, Tensor, Tensor], Tensor]]
"""Function of a run, a client and what it received, to its loss of a network on a mini-batch."""


def assert_rounds_by_hand(run: Run, loss_of: LossOf) -> None:
    """Compare three rounds with torch's own modules and optimiser."""
    layout = run.method.layout
    theta, buffers = run.method.context.initial_parameters(), run.method.initial_buffers()
    for number in range(3):
        clients = run.simulation.cohort(number).clients
        ends = []
        for client in clients:
            network, loss = network_with(run, theta, buffers), loss_of(run, client, theta, buffers)
            optimiser = torchs_optimiser(run, list(network.parameters()), number)
            for x, y in batches_of(run, client, number):
                network.zero_grad()
                loss(network, x, y).backward()
                optimiser.step()
            ends.append(layout.flatten(network))
        theta, buffers = (
            mean_by_samples(run, clients, torch.stack(rows)) for rows in zip(*ends, strict=True)
        )
    torch.testing.assert_close(run.server["theta"], theta, rtol=0, atol=1e-9)
    torch.testing.assert_close(run.server["buffers"], buffers, rtol=0, atol=1e-9)
    assert torch.equal(run.evaluated()["theta"], run.server["theta"].expand(4, -1))


def counts_of(run: Run) -> Tensor:
    """Return how many training samples of each class each client has."""
    labels = [run.workplace.shard.samples("train", client)[1] for client in range(run.num_clients)]
    return torch.stack([torch.tensor([int((y == c).sum()) for c in range(10)]) for y in labels])


# FedNTD


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_not_true_distillation_worked_out(temperature: float) -> None:
    y = torch.tensor([0, 2])
    z_w = temperature * torch.tensor([[5.0, 0.0, math.log(3)], [0.0, 0.0, -7.0]])
    z = temperature * torch.tensor([[9.0, 1.0, 1.0], [2.0, 2.0, 30.0]])
    assert torch.equal(not_true(z, y), temperature * torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    # of the first sample, 1/4 and 3/4 against 1/2 and 1/2; both models agree on the second one
    expected = temperature**2 * (0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2
    found = distillation_loss(not_true(z_w, y), not_true(z, y), temperature)
    assert found.item() == pytest.approx(expected, rel=1e-6)
    # with two classes, one is left, of which there is nothing to know
    assert distillation_loss(not_true(z_w[:, 1:], y // 2), not_true(z[:, 1:], y // 2), temperature) == 0


def with_distillation(
    run: Run, client: int, theta: Tensor, buffers: Tensor
) -> Callable[[Network, Tensor, Tensor], Tensor]:
    received, params = network_with(run, theta, buffers).eval(), run.config.method.options

    def loss(network: Network, x: Tensor, y: Tensor) -> Tensor:
        logits = network(x)
        others = torch.arange(10) != y.unsqueeze(1)
        with torch.no_grad():
            of_w = (received(x)[others].view(len(y), 9) / params.temperature).softmax(dim=1)
        ours = (logits[others].view(len(y), 9) / params.temperature).softmax(dim=1)
        divergence = (of_w * (of_w / ours).log()).sum(dim=1).mean()
        return cross_entropy(logits, y) + params.beta * params.temperature**2 * divergence

    return loss


@pytest.mark.parametrize("keys", [SLIPPERY, ("method.beta=0.3", "method.temperature=3")], ids=["1", "0.3"])
@pytest.mark.usefixtures("double")
def test_rounds_of_fedntd_equal_a_slow_twin(keys: tuple[str, ...]) -> None:
    assert_rounds_by_hand(Run(*SOME, "train.local_epochs=2", "method.name=fedntd", *keys), with_distillation)


@pytest.mark.parametrize("keys", [SLIPPERY, ("train.buffers=local",)], ids=["average", "local"])
def test_without_distillation_fedntd_is_fedavg_to_the_bit(keys: tuple[str, ...]) -> None:
    fedavg = Run(*SOME, *keys, "method.name=fedavg")
    ours = Run(*SOME, *keys, "method.name=fedntd", "method.beta=0")
    torch.testing.assert_close(ours.server, fedavg.server, rtol=0, atol=0)
    assert torch.equal(ours.evaluated()["buffers"], fedavg.evaluated()["buffers"])


# FedLC


@pytest.mark.quick
def test_margins_worked_out() -> None:
    counts = torch.tensor([[16.0, 81.0, 0.0, 1.0]])
    torch.testing.assert_close(
        method_of(FedLC, tau=3).margins(counts), torch.tensor([[1.5, 1.0, torch.inf, 3.0]])
    )
    assert method_of(FedLC, tau=0).margins(counts).tolist() == [[0.0, 0.0, torch.inf, 0.0]]


def with_margins(
    run: Run, client: int, theta: Tensor, buffers: Tensor
) -> Callable[[Network, Tensor, Tensor], Tensor]:
    counts, tau = counts_of(run)[client].tolist(), run.config.method.options.tau
    held = [c for c in range(10) if counts[c]]

    def loss(network: Network, x: Tensor, y: Tensor) -> Tensor:
        scores = {c: z - tau * counts[c] ** -0.25 for c, z in enumerate(network(x).unbind(1)) if c in held}
        normaliser = torch.stack(list(scores.values())).exp().sum(dim=0).log()
        own = torch.stack([scores[int(c)][number] for number, c in enumerate(y)])
        return (normaliser - own).mean()

    return loss


@pytest.mark.parametrize("keys", [SLIPPERY, ("method.tau=0",)], ids=["1", "0"])
@pytest.mark.usefixtures("double")
def test_rounds_of_fedlc_equal_a_slow_twin(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, "data.partition.beta=0.5", "method.name=fedlc", *keys)
    assert (counts_of(run) == 0).any()
    assert_rounds_by_hand(run, with_margins)


def test_without_margins_fedlc_is_fedavg_to_the_bit_where_clients_have_all_classes() -> None:
    keys = (*MLP, "data.partition.name=iid", "data.per_client=100", "train.momentum=0.9")
    ours = Run(*keys, "method.name=fedlc", "method.tau=0")
    assert (counts_of(ours) > 0).all()
    assert torch.equal(ours.server["theta"], Run(*keys, "method.name=fedavg").server["theta"])


def test_weights_of_a_class_that_nobody_of_the_round_has_stay() -> None:
    run = Run(*MLP, "method.name=fedlc", "train.rounds=1", "train.participation=0.25")
    (client,) = run.simulation.cohort(0).clients
    absent = counts_of(run)[client] == 0
    assert 0 < absent.sum() < 10
    start = network_with(run, run.method.context.initial_parameters(), torch.empty(0)).head
    end = network_with(run, run.server["theta"], torch.empty(0)).head
    for before, after in zip(start.parameters(), end.parameters(), strict=True):
        assert torch.equal((before == after).view(10, -1).all(dim=1), absent)


def test_a_client_with_one_class_returns_fedlcs_model_as_it_came() -> None:
    run = Run(*MLP, "method.name=fedlc", "train.rounds=1")
    run.workplace.shard.samples("train", 2)[1].fill_(3)
    down, (up, clients) = run.method.download(run.server, run.simulation.cohort(0)), work(run, 2)
    assert torch.equal(up["theta"], down["theta"])
    assert clients.loss_sum.item() == 0
