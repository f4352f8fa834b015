"""FedNova, FedDyn and elastic aggregation: FedAvg whose server corrects for what unequal clients do."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from by_hand import (
    ADAM,
    SLIPPERY,
    SOME,
    Loss,
    assert_close,
    batches_of,
    cohort_of,
    mean_by_samples,
    method_of,
    network_with,
    train_cohort,
    work,
)
from harness import MLP, Run
from torch import Tensor
from torch.nn.functional import cross_entropy
from uploads import upload_of

from hpcfl.communication.messages import Cohort, Message
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.elastic import Elastic
from hpcfl.methods.feddyn import FedDyn
from hpcfl.methods.fednova import FedNova, sum_of_factors
from hpcfl.models import Network

# FedNova


@pytest.mark.quick
def test_factors_of_gradients_equal_those_by_hand() -> None:
    """With momentum 0.5 the gradients of three steps enter with 1 + 1/2 + 1/4, 1 + 1/2 and 1."""
    steps = torch.tensor([1, 2, 3])
    assert_close(sum_of_factors(steps, 0.0), steps.double(), atol=0)
    assert_close(sum_of_factors(steps, 0.5), torch.tensor([1, 2.5, 4.25], dtype=torch.float64), atol=1e-14)


@pytest.mark.usefixtures("double")
def test_rounds_of_fednova_equal_a_plain_implementation() -> None:
    keys = ("train.local_epochs=2", "train.lr_decay=0.8", "train.momentum=0.8", "train.weight_decay=0.01")
    run = Run(*SOME, "method.name=fednova", "train.batch_size=8", *keys)
    samples = run.method.context.num_samples
    theta, buffers = run.method.context.initial_parameters(), run.method.buffers.initial()
    for number in range(3):
        clients, models, statistics = train_cohort(run, number, theta, buffers)
        total = float(samples[clients].sum())
        step, effective, norms = torch.zeros_like(theta), 0.0, []
        for client, end in zip(clients, models, strict=True):
            # the recursion of the authors' optimiser
            counter = norm = 0.0
            for _ in batches_of(run, client, number):
                counter = run.config.train.momentum * counter + 1
                norm += counter
            share = float(samples[client]) / total
            step += share * (theta - end) / norm
            effective += share * norm
            norms.append(norm)
        assert len(set(norms)) > 1
        theta = theta - effective * step
        buffers = mean_by_samples(run, clients, statistics)
    assert_close(run.server["theta"], theta)
    assert_close(run.server["buffers"], buffers)


def test_fednova_converges_to_the_minimum_of_the_objective() -> None:
    """Two clients want 0 and 1; the second has three times the samples, and nine times the steps.

    With FedAvg they would rest near (0.75 * 9) / (0.25 + 0.75 * 9) = 0.964.
    """
    method = method_of(FedNova, 2)
    server = MethodAdapter(method).initial_server()
    cohort, steps = Cohort(0, (0, 1), torch.tensor([10, 30])), torch.tensor([1, 9])
    wanted = torch.tensor([[0.0], [1.0]]).expand(-1, method.layout.size)
    left = (1 - 1e-3) ** steps.float().unsqueeze(1)
    for _ in range(1500):
        rows = {"theta": torch.lerp(wanted, server["theta"].expand_as(wanted), left), "steps": steps}
        method.aggregate(server, cohort, upload_of(rows, Message(shared={"theta": server["theta"]})))
    assert_close(server["theta"], torch.full_like(server["theta"], 0.75), atol=2e-3)


@cache
def of_still_clients(name: str) -> Tensor:
    """Return the server's model after rounds whose clients do not move."""
    still = ("train.rounds=4", "train.lr=1e-12", "comm.codec=int8", "clients.local_epochs=[1,3]")
    return Run(*SOME, *still, *f"method.name={name}".split()).server["theta"]


@pytest.mark.parametrize(
    "name", ["fednova", "elastic", "scaffold method.global_lr=4", "pfedme method.beta=4"]
)
def test_a_download_that_is_rounded_moves_no_model_if_no_client_does(name: str) -> None:
    """The first download rounds the model, as with FedAvg; no later step makes more of it."""
    assert_close(of_still_clients(name), of_still_clients("fedavg"))


# FedDyn


@pytest.mark.parametrize(
    "keys", [("method.weights=uniform", "train.momentum=0.8", "train.weight_decay=0.01"), ADAM]
)
@pytest.mark.usefixtures("double")
def test_rounds_of_feddyn_equal_a_plain_implementation_with_all_terms_in_its_loss(
    keys: tuple[str, ...],
) -> None:
    run = Run(*SOME, "method.name=feddyn", "method.alpha=0.3", "train.lr_decay=0.8", *keys)
    samples = run.method.context.num_samples
    w, buffers = run.method.context.initial_parameters(), run.method.buffers.initial()
    # the authors' form: sums of a client's moves, of which g_i is -alpha_i times
    moves = torch.zeros(4, len(w))

    def loss_of(client: int) -> Loss:
        alpha = 0.3
        if run.config.method.options.weights == "samples":
            alpha = 0.3 / (float(samples[client]) * 4 / float(samples.sum()))

        def loss(network: Network, x: Tensor, y: Tensor) -> Tensor:
            theta = torch.cat([p.flatten() for p in network.parameters()])
            penalty = alpha * (moves[client] @ theta) + alpha / 2 * (theta - w).square().sum()
            return cross_entropy(network(x), y) + penalty

        return loss

    for number in range(3):
        clients, models, statistics = train_cohort(run, number, w, buffers, loss_of)
        moves[clients] += models - w
        w = models.mean(dim=0) + moves.mean(dim=0)
        buffers = mean_by_samples(run, clients, statistics)
    assert_close(run.server["theta"], w)
    assert_close(run.server["h"], moves.mean(dim=0))
    assert_close(run.server["buffers"], buffers)
    assert_close(run.clients["gradient"] / run.method.strengths(samples), -moves)


@pytest.mark.parametrize(("weights", "rest"), [("samples", 0.75), ("uniform", 0.5)])
@pytest.mark.parametrize("sampled", [(0, 1), None], ids=["both", "by turns"])
def test_feddyn_converges_to_the_minimum_of_the_objective(
    weights: str, rest: float, sampled: tuple[int, ...] | None
) -> None:
    """Two clients want 0 and 1; the second has three times the samples. Each finds its minimum exactly."""
    method = method_of(FedDyn, 2, weights=weights, alpha=0.7)
    method.context.num_samples = torch.tensor([10, 30])
    server = MethodAdapter(method).initial_server()
    wanted = torch.tensor([[0.0], [1.0]]).expand(-1, method.layout.size)
    alpha, slope = method.strengths(method.context.num_samples), torch.zeros_like(wanted)
    for number in range(200):
        members = [*(sampled or (number % 2,))]
        w = server["theta"].expand_as(wanted)
        theta = ((wanted + slope + alpha * w) / (1 + alpha)).float()
        slope[members] = (slope - alpha * (theta - w)).float()[members]
        cohort = cohort_of(method, members, number)
        sent = Message(shared={"theta": server["theta"]})
        method.aggregate(server, cohort, upload_of({"theta": theta[members]}, sent))
    assert_close(server["theta"], torch.full_like(server["theta"], rest), atol=1e-4)
    assert_close(server["h"], torch.zeros_like(server["h"]), atol=1e-4)


@pytest.mark.usefixtures("double")
def test_h_of_feddyn_stays_the_clients_mean_move_if_downloads_are_rounded() -> None:
    run = Run(*SOME, "method.name=feddyn", "train.rounds=6", "comm.codec=int8", "comm.directions=down")
    moves = run.clients["gradient"] / run.method.strengths(run.method.context.num_samples)
    assert run.server["h"].norm() > 0.01
    assert_close(run.server["h"], -moves.mean(dim=0))


# Elastic aggregation


ELASTIC = "method.name=elastic"
ONE_A_ROUND = "train.participation=0.25"


@pytest.mark.quick
def test_an_elastic_step_of_the_server_equals_that_by_hand() -> None:
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
    sent = Message(shared={"theta": server["theta"]})
    method.aggregate(server, Cohort(0, (0, 1), torch.tensor([10, 30])), upload_of(rows, sent))
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
def test_rounds_of_elastic_aggregation_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, *SLIPPERY, ELASTIC, *keys)
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
    for slot in run.method.layout.parameters:
        # changes no output, so that its gradients are rounding errors
        if len(buffers) and "conv" in slot.name and slot.name.endswith("bias"):
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
