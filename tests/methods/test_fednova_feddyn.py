"""FedNova and FedDyn: FedAvg whose server corrects for what unequal clients do."""

from __future__ import annotations

import pytest
import torch
from by_hand import ADAM, SOME, Loss, assert_close, cohort_of, mean_by_samples, method_of, train_cohort
from harness import Run
from torch import Tensor
from torch.nn.functional import cross_entropy
from uploads import upload_of

from hpcfl.communication.messages import Cohort
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.feddyn import FedDyn
from hpcfl.methods.fednova import FedNova, sum_of_factors
from hpcfl.models import Network


def steps_of(run: Run, client: int) -> int:
    """Return the number of mini-batches of a client in a round."""
    samples, train = int(run.method.context.num_samples[client]), run.config.train
    return -(-samples // train.batch_size) * train.local_epochs


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
    run = Run(*SOME, "method.name=fednova", *keys)
    samples = run.method.context.num_samples
    theta, buffers = run.method.context.initial_parameters(), run.method.buffers.initial()
    for number in range(3):
        clients, models, statistics = train_cohort(run, number, theta, buffers)
        total = float(samples[clients].sum())
        step, effective, norms = torch.zeros_like(theta), 0.0, []
        for client, end in zip(clients, models, strict=True):
            # the recursion of the authors' optimiser
            counter = norm = 0.0
            for _ in range(steps_of(run, client)):
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
        method.aggregate(server, cohort, upload_of(rows))
    assert_close(server["theta"], torch.full_like(server["theta"], 0.75), atol=2e-3)


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
        method.aggregate(server, cohort, upload_of({"theta": theta[members]}))
    assert_close(server["theta"], torch.full_like(server["theta"], rest), atol=1e-4)
    assert_close(server["h"], torch.zeros_like(server["h"]), atol=1e-4)
