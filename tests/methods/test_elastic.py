"""Elastic aggregation: sensitivities and factors, and rounds by hand."""

from __future__ import annotations

import pytest
import torch
from by_hand import (
    SLIPPERY,
    SOME,
    assert_close,
    batches_of,
    mean_by_samples,
    method_of,
    network_with,
    train_cohort,
    work,
)
from harness import MLP, Run
from torch import Tensor
from uploads import upload_of

from hpcfl.communication.messages import Cohort
from hpcfl.methods.elastic import Elastic

ELASTIC = "method.name=elastic"
ONE_A_ROUND = "train.participation=0.25"


@pytest.mark.quick
def test_the_step_of_the_server_equals_that_by_hand() -> None:
    """Of two clients the second has three times the samples.

    Omega is alike, three times as large at the second or the first, and nothing.
    """
    method = method_of(Elastic, 2)
    sensitivity = torch.tensor([[2.0, 1.0, 3.0, 0.0], [2.0, 3.0, 1.0, 0.0]])
    assert_close(
        method.factors(sensitivity, torch.tensor([10, 30])),
        torch.tensor([0.5, 1.5 - 2.5 / 3, 1.5 - 1.5 / 3, 1.5]),
        atol=1e-6,
    )
    size = method.layout.size
    server = {"theta": torch.ones(size)}
    rows = {
        "theta": torch.tensor([[2.0], [6.0]]).expand(2, size),
        "sensitivity": torch.tensor([[3.0], [1.0]]).expand(2, size),
    }
    method.aggregate(server, Cohort(0, (0, 1), torch.tensor([10, 30])), upload_of(rows))
    assert_close(server["theta"], torch.full((size,), 1 + 1.0 * 4.0), atol=1e-6)


def sensitivity_by_hand(run: Run, client: int, round: int, theta: Tensor, buffers: Tensor) -> Tensor:
    """Return Omega [P] by autograd, sample by sample within a mini-batch's forward pass."""
    mu, omega = run.config.method.options.mu, torch.zeros_like(theta)
    for x, _ in batches_of(run, client, round, "sensitivity", 1):
        network = network_with(run, theta, buffers)
        total = torch.stack([(row * row).sum() for row in network(x)]).sum() / len(x)
        slopes = torch.autograd.grad(total, list(network.parameters()))
        omega = mu * omega + (1 - mu) * torch.cat([slope.flatten() for slope in slopes]).abs()
    return omega


@pytest.mark.parametrize(
    "keys",
    [
        ("method.tau=0.2", "method.mu=0.5", "train.local_epochs=2"),
        ("method.mu=0", "model.batchnorm=false", ONE_A_ROUND),
    ],
    ids=str,
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, *SLIPPERY, ELASTIC, *keys)
    layout = run.method.layout
    theta, buffers = run.method.context.initial_parameters(), run.method.buffers.initial()
    for number in range(3):
        clients, models, statistics = train_cohort(run, number, theta, buffers)
        omegas = torch.stack([sensitivity_by_hand(run, client, number, theta, buffers) for client in clients])
        mean, largest = mean_by_samples(run, clients, omegas), omegas.amax(dim=0)
        update = mean_by_samples(run, clients, models) - theta
        ratio = [float(m / most) if most > 0 else 0.0 for m, most in zip(mean, largest, strict=True)]
        theta = theta + (1 + run.config.method.options.tau - torch.tensor(ratio)) * update
        buffers = mean_by_samples(run, clients, statistics)
    matters = torch.ones_like(theta, dtype=torch.bool)
    for slot in layout.parameters:
        # changes no output, so that its gradients are rounding errors
        if layout.buffer_size and "conv" in slot.name and slot.name.endswith("bias"):
            matters[slot.start : slot.stop] = False
    assert_close(run.server["theta"][matters], theta[matters])
    assert matters.double().mean() > 0.99


def test_measuring_sensitivity_does_not_change_training() -> None:
    """Clients send the models and running statistics of FedAvg, to the bit, and Omega."""
    sent = []
    for name in ("elastic", "fedavg"):
        run = Run(*SOME, *SLIPPERY, "train.rounds=1", f"method.name={name}")
        start = {"theta": run.method.context.initial_parameters(), "buffers": run.method.buffers.initial()}
        run.server |= start
        sent.append(work(run, 0, 1)[0].per_client)
    ours, fedavgs = sent
    assert all(torch.equal(ours[name], rows) for name, rows in fedavgs.items())


@pytest.mark.usefixtures("double")
def test_a_server_optimiser_uses_the_elastic_step() -> None:
    keys = (ELASTIC, *MLP, *SOME[:-1], "train.rounds=1")
    plain, double = Run(*keys), Run(*keys, "server.optimiser=momentum", "server.lr=2")
    start = plain.method.context.initial_parameters()
    assert_close(double.server["theta"] - start, 2 * (plain.server["theta"] - start), atol=1e-12)
