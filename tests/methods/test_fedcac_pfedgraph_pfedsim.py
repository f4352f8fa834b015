"""FedCAC, pFedGraph and pFedSim, whose server mixes the clients' models: weights, and rounds by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from by_hand import assert_close, batches_of, cohort_of, gradient, loss, mean_by_samples, method_of, step_size
from harness import MLP, UNEQUAL_FEW, Run, random
from torch import Tensor, cosine_similarity
from uploads import upload_of

from hpcfl.communication.messages import Cohort
from hpcfl.config.keys import TrainConfig
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.base import Method, State
from hpcfl.methods.fedcac import FedCAC, collaborators, critical_numbers, overlaps, packed, unpacked
from hpcfl.methods.pfedgraph import PFedGraph
from hpcfl.methods.pfedsim import PFedSim
from hpcfl.parameters import Slot


def untrained(kind: type[Method], round: int = 1) -> tuple[Any, State, Cohort]:
    """Return a method of four unequal clients of which none has trained, its server, and all as a cohort.

    Each client gets the initial model.
    """
    method = method_of(kind, 4)
    method.context.num_samples = torch.tensor([10, 30, 5, 5])
    server = MethodAdapter(method).initial_server()
    everyone = Cohort(round, (0, 1, 2, 3), method.context.num_samples)
    start = server.get("theta", method.context.initial_parameters())
    assert torch.equal(MethodAdapter(method).download(server, everyone)["theta"], start.expand(4, -1))
    return method, server, everyone


# FedCAC


TWO_TENSORS = (Slot("a", (4,), 0, 4, "layer"), Slot("b", (3,), 4, 7, "layer"))


# Critical numbers


@pytest.mark.quick
@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, [0, 0, 0, 0, 0, 0, 0]),
        (0.3, [0, 1, 0, 0, 0, 0, 0]),
        (0.5, [1, 1, 0, 0, 0, 1, 0]),
        # the third does not move, and the fifth is 0
        (1.0, [1, 1, 0, 1, 1, 1, 1]),
    ],
)
def test_critical_weights_equal_those_by_hand(share: float, expected: list[int]) -> None:
    """Omega is 2, 6, 0, 1 in the first tensor of four numbers, and 0, 8, 3 in the second of three."""
    start = torch.tensor([[0.0, 5.0, 7.0, 2.0, -3.0, 6.0, 4.0]])
    theta = torch.tensor([[2**0.5, 6.0, 7.0, 1.0, 0.0, 2.0, 1.0]])
    found = critical_numbers(start, theta, TWO_TENSORS, share)
    assert found.int().tolist() == [expected]


def test_equal_values_at_the_threshold_are_all_critical() -> None:
    start, theta = torch.zeros(2, 7), torch.ones(2, 7)
    assert critical_numbers(start, theta, TWO_TENSORS, 0.5).all()


def test_a_weight_changed_only_by_rounding_is_not_critical() -> None:
    """The first tensor's largest number is 2, and its rounding error 2.4e-7."""
    theta = torch.tensor([[2.0, 0.001, 0.001, 0.001, 2.0, 0.001, 0.001]])
    start = theta + torch.tensor([[1e-6, 3e-6, 0.0, 5e-6, 1.0, 1.0, 1.0]])
    found = critical_numbers(start, theta, TWO_TENSORS, 1.0)
    assert found.int().tolist() == [[0, 0, 0, 1, 1, 1, 1]]


# Who collaborates


def test_overlaps_and_collaborators_equal_those_by_hand() -> None:
    """The first two have one of two critical numbers in common, the third has one number, the first's."""
    bits = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0]]).bool()
    expected = [[1, 1 - 2 / 4, 1 - 1 / 4], [1 - 2 / 4, 1, 1 - 3 / 4], [1 - 1 / 2, 1 - 3 / 2, 1]]
    found = overlaps(packed(bits))
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-15)
    # the mean of all pairs is 1/3, and the largest 3/4: the thresholds are 0.33, 0.54 and 0.79
    many, few = [[True] * 3, [True, True, False], [True, False, True]], torch.eye(3).bool()
    assert collaborators(found, 0.0).tolist() == many
    few[0, 2] = True
    assert torch.equal(collaborators(found, 0.5), few)
    assert torch.equal(collaborators(found, 1.1), torch.eye(3).bool())


def test_clients_with_equal_overlaps_and_single_clients_collaborate() -> None:
    """All overlaps are equal, at any time: rounding of their mean separates no clients."""
    third = torch.full((5, 5), 1 / 3, dtype=torch.float64)
    assert all(collaborators(third, progress).all() for progress in (0.0, 0.3, 1.0, 7.0))
    assert collaborators(torch.ones(1, 1), 3.0).tolist() == [[True]]
    # clients that training did not change have nothing critical
    assert overlaps(torch.zeros(3, 2, dtype=torch.uint8)).isfinite().all()


# Rounds


def critical_by_hand(run: Run, start: Tensor, theta: Tensor) -> set[int]:
    """Return the places of critical numbers: of each tensor, those not below the last of the share."""
    found = set()
    for slot in run.method.layout.parameters:
        places = range(slot.start, slot.stop)
        omega = {place: float(((theta - start) * theta)[place].abs()) for place in places}
        count = int(run.config.method.options.share * len(omega))
        if count:
            least = sorted(omega.values(), reverse=True)[count - 1]
            found |= {place for place, value in omega.items() if value >= least}
    return {place for place in found if theta[place] != start[place]}


def mixed_by_hand(
    run: Run, round: int, client: int, known: Sequence[int], models: Tensor, critical: dict[int, set[int]]
) -> Tensor:
    """Return u of one client [P]."""
    mean = mean_by_samples(run, known, models[known])
    if client not in known:
        return mean
    overlap = {
        (i, j): 1 - len(critical[i] ^ critical[j]) / (2 * len(critical[i]))
        for i in known
        for j in known
        if i != j
    }
    average, largest = sum(overlap.values()) / len(overlap), max(overlap.values())
    threshold = average + round / run.config.method.options.beta * (largest - average)
    similar = [j for j in known if j == client or overlap[client, j] >= threshold]
    places = sorted(critical[client])
    mean[places] = models[similar].mean(dim=0)[places]
    return mean


@pytest.mark.parametrize(
    "keys", [("train.participation=0.5", "method.beta=1.5"), ("method.share=0.3", "method.beta=4")], ids=str
)
@pytest.mark.usefixtures("double")
def test_rounds_of_fedcac_equal_those_by_hand(keys: tuple[str, ...]) -> None:
    run = Run("method.name=fedcac", *MLP, *UNEQUAL_FEW, "train.lr_decay=0.8", "train.rounds=4", *keys)
    start = run.method.context.initial_parameters()
    models, known, critical = start.repeat(4, 1), list[int](), dict[int, set[int]]()
    for number in range(4):
        clients, before, masks = run.simulation.cohort(number).clients, models.clone(), dict(critical)
        for client in clients:
            u = mixed_by_hand(run, number, client, known, before, masks) if known else start
            theta = u
            for x, y in batches_of(run, client, number):
                theta = theta - step_size(run, number) * gradient(run, theta, x, y)
            models[client], critical[client] = theta, critical_by_hand(run, u, theta)
        known = sorted({*known, *clients})
    assert_close(run.server["models"], models)
    assert_close(run.evaluated()["theta"], models)
    for client, places in critical.items():
        bits = unpacked(run.server["critical"][[client]])[0]
        assert bits.nonzero().flatten().tolist() == sorted(places)


@pytest.mark.parametrize("clients", [(0, 2), (1, 3)])
def test_a_client_of_fedcac_without_a_finite_model_is_left_out_and_starts_from_the_mean(
    clients: tuple[int, int],
) -> None:
    method, server, everyone = untrained(FedCAC)
    sound, lost = list(clients), [client for client in range(4) if client not in clients]
    server["models"][sound] += random(2, method.layout.size)
    server["models"][lost[0]] = torch.nan
    server["is_known"][[*sound, lost[0]]] = 1
    server["critical"][:] = 255
    sent = MethodAdapter(method).download(server, everyone)["theta"]
    weights = method.context.num_samples[sound] / method.context.num_samples[sound].sum()
    mean = weights @ server["models"][sound]
    assert_close(sent[lost], mean.expand(2, -1), atol=1e-6)
    assert_close(sent[sound], server["models"][sound].mean(dim=0).expand(2, -1), atol=1e-6)
    new = MethodAdapter(method).new_client_download(server, Cohort(1, (4, 5), torch.ones(2)))
    assert_close(new["theta"], mean.expand(2, -1), atol=1e-6)


# pFedGraph


# The graph


@pytest.mark.quick
@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(2.0, [7 / 12, 4 / 12, 1 / 12]), (1.0, [3 / 4, 1 / 4, 0.0]), (0.1, [1.0, 0.0, 0.0])],
)
def test_weights_of_the_graph_equal_those_by_hand(alpha: float, expected: list[float]) -> None:
    """Clients of as many samples, whose moves have cosines 1, 0 and -1 with the first one's."""
    method = method_of(PFedGraph, 3, alpha=alpha)
    models = method.context.initial_parameters(range(3))
    models[0, 0] += 1.0
    models[1, 1] += 3.0
    models[2, 0] -= 2.0
    found = method.weights(models, torch.arange(3), (0,))
    assert_close(found, torch.tensor([expected], dtype=torch.float64), atol=1e-6)


def test_a_client_of_pfedgraph_without_a_finite_model_has_no_neighbours_and_starts_from_the_mean() -> None:
    method, server, everyone = untrained(PFedGraph)
    assert MethodAdapter(method).server_diagnostics(server)["collaboration"].isnan().all()
    models = server["models"]
    models[:2] += random(2, method.layout.size)
    models[2] = torch.nan
    server["is_known"][:3] = 1
    sent = MethodAdapter(method).download(server, everyone)["theta"]
    mean = 0.25 * models[0] + 0.75 * models[1]
    assert_close(sent[2:], mean.expand(2, -1), atol=1e-6)
    graph = MethodAdapter(method).server_diagnostics(server)["collaboration"]
    assert_close(graph[:, :2] @ models[:2], sent, atol=1e-6)
    assert (graph[:, 2:] == 0).all()
    assert (sent[:2] - mean).abs().max() > 0.1
    new = MethodAdapter(method).new_client_download(server, Cohort(1, (4, 5), torch.ones(2)))
    assert_close(new["theta"], mean.expand(2, -1), atol=1e-6)


# Rounds


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
def test_rounds_of_pfedgraph_equal_those_by_hand(keys: tuple[str, ...]) -> None:
    some = (*MLP, *UNEQUAL_FEW, "train.participation=0.5", "train.lr_decay=0.8", "train.rounds=4")
    run = Run("method.name=pfedgraph", *some, *keys)
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


# pFedSim


F, K = 16, 10
WEIGHTS = slice(64 * F + F, 64 * F + F + K * F)
"""Where the head's weights are in the model."""


# Weights


def test_weights_by_similarity_of_heads_equal_those_by_hand() -> None:
    """Heads agree in all classes, or in half of them at right angles in the others, or are opposed.

    Their similarity with the first is then 1, of which 0.9999 is left, 0.5, and -1, of which 0 is left. The
    lengths of rows and the biases do not matter.
    """
    method = method_of(PFedSim, 4)
    assert method.layout.body.stop == WEIGHTS.start
    models = random(4, method.layout.size)
    heads = torch.zeros(4, K, F)
    heads[:, :, 0] = torch.tensor([1.0, 3.0, 1.0, -2.0]).unsqueeze(1)
    heads[2, 5:] = 0
    heads[2, 5:, 1] = torch.arange(1.0, 6.0)
    models[:, WEIGHTS] = heads.flatten(1)
    found = method.weights(models, torch.tensor([0, 3]))
    most, half = -math.log(1e-4), math.log(2)
    total = 2 * most + half
    expected = [[most / total, most / total, half / total, 0.0], [0.0, 0.0, 0.0, 1.0]]
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_a_head_of_zeros_is_similar_to_no_other() -> None:
    method = method_of(PFedSim, 3)
    models = random(3, method.layout.size)
    models[1, WEIGHTS] = 0
    found = method.weights(models, torch.arange(3))
    assert found[1].tolist() == [0.0, 1.0, 0.0]
    assert_close(found.sum(dim=1), torch.ones(3, dtype=torch.float64), atol=1e-12)


# Rounds


def start_by_hand(models: Tensor, client: int, known: Sequence[int]) -> Tensor:
    """Return the model [P] from which a client starts after the warm-up."""
    weights = []
    for other in known:
        one, two = (models[number, WEIGHTS].view(K, F) for number in (client, other))
        alike = 0.9999 if client == other else max(0.0, float(cosine_similarity(one, two, dim=1).mean()))
        weights.append(-math.log(1 - alike))
    start = models[client].clone()
    bodies = models[list(known), : WEIGHTS.start]
    start[: WEIGHTS.start] = torch.tensor(weights) @ bodies / sum(weights)
    return start


@pytest.mark.parametrize(("warm_up", "rounds"), [("0", 0), ("0.3", 1)], ids=["none", "rounded down"])
@pytest.mark.usefixtures("double")
def test_rounds_of_pfedsim_equal_those_by_hand(warm_up: str, rounds: int) -> None:
    keys = (*MLP, *UNEQUAL_FEW, "train.participation=0.5", "train.lr_decay=0.8", "train.rounds=5")
    run = Run("method.name=pfedsim", *keys, f"method.warm_up={warm_up}")
    w = run.method.context.initial_parameters()
    models, known = torch.zeros(4, len(w)), set[int]()
    for number in range(5):
        clients, before, ends = run.simulation.cohort(number).clients, models.clone(), []
        for client in clients:
            theta = start_by_hand(before, client, sorted(known)) if client in known else w
            for x, y in batches_of(run, client, number):
                theta = theta - step_size(run, number) * gradient(run, theta, x, y)
            ends.append(theta)
        if number < rounds:
            w = mean_by_samples(run, clients, torch.stack(ends))
        else:
            models[list(clients)] = torch.stack(ends)
            known |= set(clients)
    assert_close(run.server["theta"], w)
    assert_close(run.server["models"][sorted(known)], models[sorted(known)])
    assert run.clients["has_own"].nonzero().flatten().tolist() == sorted(known)
    expected = torch.stack([models[client] if client in known else w for client in range(4)])
    assert_close(run.evaluated()["theta"], expected)


def test_a_share_that_is_a_whole_number_of_rounds_loses_none_to_rounding() -> None:
    context = method_of(PFedSim, 2).context
    context.train = TrainConfig(rounds=100)
    method = PFedSim(context, PFedSim.Params(warm_up=0.29))
    for number, rest in ((28, 0), (29, 2)):
        server = method.server_state()
        sent = upload_of({"theta": random(2, method.layout.size)})
        method.aggregate(server, cohort_of(method, range(2), number), sent)
        assert server["is_known"].sum() == rest


def test_a_client_of_pfedsim_without_a_finite_model_starts_from_that_of_the_warm_up() -> None:
    method, server, everyone = untrained(PFedSim, round=100)
    w = server["theta"]
    server["models"][:2] += random(2, method.layout.size)
    server["models"][2] = torch.nan
    server["is_known"][:3] = 1
    sent = MethodAdapter(method).download(server, everyone)["theta"]
    assert torch.equal(sent[2:], w.expand(2, -1))
    assert torch.equal(sent[:2, method.layout.head], server["models"][:2, method.layout.head])
    weights = method.weights(server["models"][:2], torch.arange(2)).float()
    body = method.layout.body
    assert_close(sent[:2, body], weights @ server["models"][:2, body], atol=1e-6)
    new = MethodAdapter(method).new_client_download(server, Cohort(1, (4, 5), torch.ones(2)))
    assert torch.equal(new["theta"], w.expand(2, -1))
