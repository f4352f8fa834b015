"""pFedGraph: the graph's weights, and rounds by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from by_hand import assert_close, batches_of, loss, method_of, step_size
from harness import MLP, UNEQUAL_FEW, Run, random
from torch import Tensor, cosine_similarity

from hpcfl.communication.messages import Cohort
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.pfedgraph import PFedGraph, cosine_gradient

PFEDGRAPH = "method.name=pfedgraph"


# The graph


@pytest.mark.quick
@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(2.0, [7 / 12, 4 / 12, 1 / 12]), (1.0, [3 / 4, 1 / 4, 0.0]), (0.1, [1.0, 0.0, 0.0])],
)
def test_weights_equal_those_by_hand(alpha: float, expected: list[float]) -> None:
    """Clients of as many samples, whose moves have cosines 1, 0 and -1 with the first one's."""
    method = method_of(PFedGraph, 3, alpha=alpha)
    models = method.context.initial_parameters(range(3))
    models[0, 0] += 1.0
    models[1, 1] += 3.0
    models[2, 0] -= 2.0
    found = method.weights(models, torch.arange(3), (0,))
    assert_close(found, torch.tensor([expected], dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("alpha", [0.05, 0.8, 20.0])
def test_weights_are_the_minimum_of_the_objective(alpha: float) -> None:
    """Where a weight is above 0, the objective's slope is at its lowest."""
    method = method_of(PFedGraph, 6, alpha=alpha)
    method.context.num_samples = torch.tensor([5, 10, 20, 5, 40, 20])
    start = method.context.initial_parameters()
    # pairs with something in common
    moves = random(6, method.layout.size) + 2 * random(2, method.layout.size, seed=1).repeat(3, 1)
    weights = method.weights(start + moves, torch.arange(6), range(6))
    cosines = torch.stack([cosine_similarity(move, moves, dim=1) for move in moves]).double()
    slopes = -cosines + 2 * alpha * (weights - method.context.num_samples / 100)
    assert_close(weights.sum(dim=1), torch.ones(6, dtype=torch.float64), atol=1e-12)
    assert weights.min() >= 0
    lowest = slopes.amin(dim=1, keepdim=True)
    assert ((slopes - lowest) * (weights > 0)).max() < 1e-5
    assert 1 < (weights > 0).sum() <= 36


def test_a_client_that_uploaded_nothing_or_nan_has_no_neighbours_and_starts_from_the_mean() -> None:
    method = method_of(PFedGraph, 4)
    method.context.num_samples = torch.tensor([10, 30, 5, 5])
    server = MethodAdapter(method).initial_server()
    everyone = Cohort(1, (0, 1, 2, 3), method.context.num_samples)
    start = method.context.initial_parameters()
    assert torch.equal(MethodAdapter(method).download(server, everyone)["theta"], start.expand(4, -1))
    assert method.server_diagnostics(server)["collaboration"].isnan().all()
    models = server["models"]
    models[:2] += random(2, method.layout.size)
    models[2] = torch.nan
    server["is_known"][:3] = 1
    sent = MethodAdapter(method).download(server, everyone)["theta"]
    mean = 0.25 * models[0] + 0.75 * models[1]
    assert_close(sent[2:], mean.expand(2, -1), atol=1e-6)
    graph = method.server_diagnostics(server)["collaboration"]
    assert_close(graph[:, :2] @ models[:2], sent, atol=1e-6)
    assert (graph[:, 2:] == 0).all()
    assert (sent[:2] - mean).abs().max() > 0.1
    new = MethodAdapter(method).new_client_download(server, Cohort(1, (4, 5), torch.ones(2)))
    assert_close(new["theta"], mean.expand(2, -1), atol=1e-6)


# Rounds


@pytest.mark.usefixtures("double")
def test_the_gradient_of_the_cosine_equals_autograd_s_and_is_0_at_the_start() -> None:
    moves, towards = random(3, 50).requires_grad_(), random(3, 50, seed=1)
    cosine_similarity(moves, towards, dim=1).sum().backward()
    assert moves.grad is not None
    assert_close(cosine_gradient(moves.detach(), towards), moves.grad, atol=1e-14)
    nothing = torch.zeros(3, 50)
    assert torch.equal(cosine_gradient(nothing, nothing), nothing)
    assert torch.equal(cosine_gradient(moves.detach(), nothing), nothing)


def weights_by_hand(run: Run, models: Tensor, client: int, known: Sequence[int]) -> Tensor:
    """Return the weights [N] of all models in u of one client, by bisection for the shift that sums to 1."""
    start, alpha = run.method.context.initial_parameters(), run.config.method.options.alpha
    shares = torch.zeros(4)
    shares[known] = run.method.context.num_samples[known].to(shares)
    target = shares / shares.sum()
    if client in known:
        target[known] += cosine_similarity(models[client] - start, models[known] - start, dim=1) / (2 * alpha)
    low, high = -10.0, 10.0
    for _ in range(80):
        shift = (low + high) / 2
        is_more = float((target[known] - shift).clamp(min=0).sum()) > 1
        low, high = (shift, high) if is_more else (low, shift)
    weights = torch.zeros(4)
    weights[known] = (target[known] - low).clamp(min=0)
    return weights


@pytest.mark.parametrize(
    "keys", [("method.alpha=2", "method.pull=0.5"), ("method.alpha=0.3",)], ids=["wide", "narrow"]
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_those_by_hand(keys: tuple[str, ...]) -> None:
    some = (*MLP, *UNEQUAL_FEW, "train.participation=0.5", "train.lr_decay=0.8", "train.rounds=4")
    run = Run(PFEDGRAPH, *some, *keys)
    start = run.method.context.initial_parameters()
    models, known = start.repeat(4, 1), list[int]()
    for number in range(4):
        clients, before = run.simulation.cohort(number).clients, models.clone()
        for client in clients:
            u = weights_by_hand(run, before, client, known) @ before if known else start
            theta = u.clone()
            for x, y in batches_of(run, client, number):
                leaf = theta.clone().requires_grad_()
                term = cosine_similarity(leaf - start, u - start, dim=0) if known else 0.0
                objective = loss(run, leaf, x, y) - run.config.method.options.pull * term
                theta = theta - step_size(run, number) * torch.autograd.grad(objective, leaf)[0]
            models[client] = theta
        known = sorted({*known, *clients})
    assert_close(run.server["models"], models)
    assert_close(run.evaluated()["theta"], models)
