"""FedAMP and FedFomo, whose clients are sent others' models: numbers worked out, and rounds by hand."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import assert_close, batches_of, gradient, loss, method_of, step_size, work
from harness import MLP, UNEQUAL_FEW, Run, random
from torch import Tensor
from uploads import GivenUpload

from hpcfl.communication.messages import Cohort, Message
from hpcfl.config.keys import TrainConfig
from hpcfl.errors import UserError
from hpcfl.methods import Context, diagnostics
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.fedamp import FedAMP, _squared_distances
from hpcfl.methods.fedfomo import FedFomo, FedFomoParams
from hpcfl.methods.local import Local
from hpcfl.models import MODELS
from hpcfl.randomness import torch_stream
from hpcfl.samples import SampleType
from hpcfl.training.batches import minibatches
from hpcfl.training.client_group import ClientGroup

FEDAMP, FEDFOMO = "method.name=fedamp", "method.name=fedfomo"
SOME = (*MLP, *UNEQUAL_FEW, "train.participation=0.5", "train.lr_decay=0.8")
"""Two of four clients in a round, all of them unequal, and smaller steps each round."""

ALONE = (*MLP, "data.clients=1", "data.partition.name=iid")


# FedAMP's weights

ALL = torch.ones(4, dtype=torch.bool)
"""Everybody is known."""

ON_A_LINE = torch.tensor([[0.0, 7.0], [1.0, 7.0], [3.0, 7.0]])
"""Three models with squared distances 1, 4 and 9."""


@pytest.mark.parametrize(("scale", "mean"), [("none", 1.0), ("mean", 14 / 3)])
def test_weights_by_distance_equal_those_by_hand(scale: str, mean: float) -> None:
    method = method_of(FedAMP, 3, sigma=2, alpha=0.5, scale=scale)
    found = method.attention(ON_A_LINE, (0, 2), ALL[:3])
    # alpha A'(x) = alpha / sigma exp(-x / sigma)
    near, middle, far = (0.25 * math.exp(-squared / mean / 2) for squared in (1, 4, 9))
    expected = [[1 - near - far, near, far], [far, middle, 1 - far - middle]]
    assert_close(found, torch.tensor(expected), atol=1e-6)


@pytest.mark.parametrize(("self_weight", "own"), [(None, 1 / 3), (0.6, 0.6)])
def test_weights_by_cosine_equal_those_by_hand(self_weight: float | None, own: float) -> None:
    method = method_of(FedAMP, 3, weights="cosine", sigma=2, self_weight=self_weight)
    models = torch.tensor([[2.0, 0.0], [3.0, 4.0], [0.0, 5.0]])
    found = method.attention(models, (0, 1, 2), ALL[:3])
    # cosines 0.6, 0 and 0.8
    a, b, c = (math.exp(2 * cosine) for cosine in (0.6, 0.0, 0.8))
    rest = 1 - own
    expected = [
        [own, rest * a / (a + b), rest * b / (a + b)],
        [rest * a / (a + c), own, rest * c / (a + c)],
        [rest * b / (b + c), rest * c / (b + c), own],
    ]
    assert_close(found, torch.tensor(expected), atol=1e-6)


@pytest.mark.parametrize("keys", [{}, {"scale": "none", "sigma": 0.1}, {"weights": "cosine"}])
def test_equal_models_have_equal_shares(keys: dict[str, Any]) -> None:
    found = method_of(FedAMP, **keys).attention(random(1, 50).expand(4, -1), (1, 3), ALL)
    assert_close(found, torch.full((2, 4), 0.25), atol=1e-6)


def test_a_step_that_would_weigh_the_own_model_negatively_is_refused() -> None:
    allowed = "among 4 clients; allowed: up to method.sigma / 3"
    with pytest.raises(UserError, match=re.escape(allowed)):
        method_of(FedAMP, sigma=0.75, alpha=0.26)
    limit = method_of(FedAMP, sigma=0.75, alpha=0.25)
    assert_close(limit.attention(torch.ones(4, 2), (2,), ALL), torch.tensor([[1, 1, 0, 1]]) / 3, atol=1e-6)
    method_of(FedAMP, alpha=100, weights="cosine")


# FedAMP's rounds


def weights_by_hand(run: Run, models: Tensor, client: int, known: set[int]) -> Tensor:
    """Return the weights [N] of all models in u of one client, where some have uploaded theirs."""
    params, others = run.method.params, [j for j in sorted(known) if j != client]
    sigma = params.sigma or {"distance": 1.0, "cosine": 25.0}[params.weights]
    if params.weights == "cosine":
        near = {
            j: math.exp(sigma * float(torch.cosine_similarity(models[client], models[j], 0))) for j in others
        }
        given = len(others) / (1 + len(others))
        weights = {j: given * value / sum(near.values()) for j, value in near.items()}
    else:
        squared = {(i, j): float((models[i] - models[j]).square().sum()) for i in range(4) for j in range(4)}
        pairs = [squared[pair] for pair in itertools.permutations(known, 2)]
        unit = sum(pairs) / max(1, len(pairs)) if params.scale == "mean" else 1.0
        alpha = sigma / 4 if params.alpha is None else params.alpha
        weights = {j: alpha / sigma * math.exp(-squared[client, j] / (unit or 1.0) / sigma) for j in others}
    weights[client] = 1.0 - sum(weights.values())
    return torch.tensor([weights.get(j, 0.0) for j in range(4)])


@pytest.mark.parametrize(
    "keys",
    [
        ("method.pull=3",),
        ("method.scale=none", "method.sigma=0.7", "method.alpha=0.2"),
        ("method.weights=cosine", "method.sigma=500"),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_of_fedamp_equal_those_by_hand(keys: tuple[str, ...]) -> None:
    run = Run(FEDAMP, *SOME, "train.rounds=4", "method.pull=0.5", *keys)
    models, known = run.method.context.initial_parameters(range(4)), set[int]()
    for number in range(4):
        clients = run.simulation.cohort(number).clients
        weights = torch.stack([weights_by_hand(run, models, client, known) for client in clients])
        around = weights @ models
        for client, u in zip(clients, around, strict=True):
            theta = u
            for x, y in batches_of(run, client, number):
                pull = run.method.params.pull * (theta - u)
                theta = theta - step_size(run, number) * (gradient(run, theta, x, y) + pull)
            models[client] = theta
        known.update(clients)
    # not a client's weights alone, and not everybody's mean
    assert (weights[0] - 0.25).abs().max() > 0.01
    assert weights[0].max() < 0.99
    assert_close(run.server["models"], models)
    assert_close(run.evaluated()["theta"], models)


@pytest.mark.parametrize("weights", ["distance", "cosine"])
def test_a_client_that_never_uploaded_is_nobodys_neighbour(weights: str) -> None:
    method = method_of(FedAMP, weights=weights)
    server = MethodAdapter(method).initial_server()
    everyone = Cohort(1, (0, 1, 2, 3), torch.ones(4))
    # before the first round there is nobody to be near to
    assert torch.equal(MethodAdapter(method).download(server, everyone)["theta"], server["models"])
    models = server["models"]
    models[:2] += 0.01 * random(2, method.layout.size)
    server["is_known"][:2] = 1
    sent = MethodAdapter(method).download(server, everyone)["theta"]
    shares = method.attention(models, everyone.clients, server["is_known"] == 1)
    assert_close(sent, shares @ models, atol=1e-6)
    # clients 2 and 3 have the same model, but no other client uses it
    assert (shares[:, 2:] > 0).tolist() == [[False, False]] * 2 + [[True, False], [False, True]]
    assert (shares[:, :2] > 0).all()


def test_close_models_far_from_zero_keep_their_distances() -> None:
    base = 100 * random(1, 5000)
    models = torch.cat([base, base + 1e-3 * random(3, 5000, seed=1)])
    expected = (models.unsqueeze(0) - models.unsqueeze(1)).double().square().sum(dim=2)
    found, mean = _squared_distances(models, range(4), ALL)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert mean == pytest.approx(float(expected.sum() / 12), rel=1e-6)


@pytest.mark.parametrize("diverged", [torch.nan, 1e25])
@pytest.mark.parametrize("weights", ["distance", "cosine"])
def test_a_diverged_client_is_not_combined_with_others(weights: str, diverged: float) -> None:
    method = method_of(FedAMP, weights=weights)
    models, cohort = random(4, method.layout.size), Cohort(1, (0, 2, 3), torch.ones(3))
    models[2, 5] = diverged
    server = {"models": models, "is_known": torch.ones(4, dtype=torch.int64)}
    sent = MethodAdapter(method).download(server, cohort)["theta"]
    others = models[[0, 1, 3]]
    assert_close(sent[[0, 2]], method.attention(others, (0, 2), ALL[:3]) @ others)
    torch.testing.assert_close(sent[1], models[2], rtol=0, atol=0, equal_nan=True)
    # the history has the same weights, and the diverged client by itself
    recorded = MethodAdapter(method).server_diagnostics(server)["attention"]
    assert_close(recorded[[0, 1, 3]][:, [0, 1, 3]], method.attention(others, (0, 1, 2), ALL[:3]))
    assert recorded[2].tolist() == recorded[:, 2].tolist() == [0, 0, 1, 0]
    models.fill_(torch.inf)
    assert torch.equal(MethodAdapter(method).server_diagnostics(server)["attention"], torch.eye(4))
    assert torch.equal(MethodAdapter(method).download(server, cohort)["theta"], models[[0, 2, 3]])


# FedFomo's held-out samples


def held_out_and_rest(run: Run, client: int) -> tuple[Tensor, Tensor]:
    """Return the training samples that models are judged on, and those trained on."""
    size = int(run.method.context.num_samples[client])
    order = torch.randperm(size, generator=torch_stream(0, "held out", 0, client))
    cut = max(1, math.floor(run.config.method.options.held_out * size + 0.5))
    return order[:cut], order[cut:]


class LocalOnTheRest(Local):
    """Local training that leaves the held-out samples alone."""

    def train(self, clients: ClientGroup, down: Message) -> Message:
        _, rest = clients.divided("held out", 0.2, fewest=(1, 1))
        clients["theta"] = clients.sgd(clients["theta"], samples=rest).theta
        return Message()


def test_without_others_models_fedfomo_is_local_on_the_samples_not_held_out() -> None:
    keys = (*UNEQUAL_FEW, "model.batchnorm=true", "train.participation=0.5", "train.momentum=0.9")
    run = Run(FEDFOMO, *keys, "method.models=0")
    local = Run("method.name=local", *keys, kind=LocalOnTheRest)
    torch.testing.assert_close(run.evaluated(), local.evaluated(), rtol=0, atol=0)
    assert run.bytes_by_client[:, 0].sum() == 0


def test_samples_held_out_are_never_trained_on_or_fine_tuned_on() -> None:
    run = Run(FEDFOMO, *MLP, *UNEQUAL_FEW, "method.models=3")
    client, number = 3, 4
    first = int(run.worker.shard.offset["train"][client])
    run.worker.shard.x[first + held_out_and_rest(run, client)[0]] = torch.nan
    up, clients = work(run, client, number)
    assert (up.per_client["weights"] == 0).all()
    assert clients["theta"].isfinite().all()
    tuned = run.method.finetune(ClientGroup(run.worker, [client], number), Message(), 1)
    assert tuned["theta"].isfinite().all()


# FedFomo's weights


def test_combined_models_equal_those_by_hand() -> None:
    method = method_of(FedFomo, models=2)
    candidates = torch.tensor([[[1.0, 0.0], [0.0, 8.0], [4.0, 4.0]]]).expand(4, -1, -1)
    weights = torch.tensor([[1.0, -5.0, 3.0], [0.0, 2.0, 0.0], [-1.0, -2.0, 0.0], [0.0, 0.0, 0.0]])
    # the last two have no positive weight and continue from their own model
    expected = [[3.25, 3.0], [0.0, 8.0], [1.0, 0.0], [1.0, 0.0]]
    assert method.combined(candidates, weights).tolist() == expected
    # a model without a weight may be no numbers
    candidates = torch.tensor([[[1.0, 2.0], [torch.nan, 0.0]]])
    assert method.combined(candidates, torch.tensor([[0.0, 0.0]])).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(("model", "fewest"), [("digits_cnn", 2), ("resnet18", 3)])
def test_a_client_needs_samples_for_weights_and_for_training(model: str, fewest: int) -> None:
    """The last BatchNorm of a ResNet18 sees one number a channel and sample, on images as small as these."""

    def fedfomo(count: int) -> FedFomo:
        options, sizes = MODELS[model].options(), torch.tensor([9, count, 9, 9])
        context = Context(model, options, SampleType((1, 8, 8)), 10, sizes, train=TrainConfig(), seed=0)
        return FedFomo(context, FedFomoParams())

    with pytest.raises(UserError, match=f"client 1 has {fewest - 1} of them in all; give each {fewest} or"):
        fedfomo(fewest - 1)
    assert fedfomo(fewest).num_received == 3


def rest_of(run: Run, client: int, round: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a client's mini-batches of the samples that are not held out."""
    x, y = run.worker.shard.samples("train", client)
    rest = held_out_and_rest(run, client)[1]
    order = rest[torch.randperm(len(rest), generator=torch_stream(0, "batches", round, client))]
    for start, stop in minibatches(len(rest), run.config.train.batch_size):
        yield x[order[start:stop]], y[order[start:stop]]


@pytest.mark.parametrize(
    "keys", [("method.models=3", "method.held_out=0.3"), ("method.models=2", "method.epsilon=0")]
)
@pytest.mark.usefixtures("double")
def test_rounds_of_fedfomo_equal_those_by_hand(keys: tuple[str, ...]) -> None:
    run = Run(FEDFOMO, *SOME, "train.rounds=5", "train.lr=0.2", *keys)
    models = run.method.context.initial_parameters(range(4))
    own, previous, affinity = models.clone(), models.clone(), torch.zeros(4, 4)
    is_known = torch.zeros(4, dtype=torch.bool)
    kept = mixed = fewer = 0
    for number in range(5):
        sent, cohort = models.clone(), run.simulation.cohort(number).clients
        # as many as there are for whoever may get fewest, since the own model is not sent
        count = min(
            run.method.num_received, *(int(is_known.sum()) - int(is_known[client]) for client in cohort)
        )
        fewer += count < run.method.num_received
        for client in cohort:
            x, y = run.worker.shard.samples("train", client)
            samples = held_out_and_rest(run, client)[0]
            ids = run.method.chosen(affinity[client], is_known, client, number)[:count].tolist()
            before = previous[client]
            gains = {client: 0.0}
            for n, theta in [(client, own[client]), *((n, sent[n]) for n in ids)]:
                gain = loss(run, before, x[samples], y[samples]) - loss(run, theta, x[samples], y[samples])
                distance = (theta - before).square().sum().sqrt()
                gains[n] = float(gain / distance) if distance > 0 else 0.0
            good = {n: value for n, value in gains.items() if value > 0}
            kept, mixed = kept + (not good), mixed + (len(good) > 1)
            theta = own[client]
            if good:
                of = {n: own[client] if n == client else sent[n] for n in good}
                theta = torch.stack([value * of[n] for n, value in good.items()]).sum(dim=0)
                theta = theta / sum(good.values())
            previous[client] = theta
            for x, y in rest_of(run, client, number):
                theta = theta - step_size(run, number) * gradient(run, theta, x, y)
            own[client] = models[client] = theta
            for n in ids:
                affinity[client, n] += gains[n]
        is_known[list(cohort)] = True
    assert fewer > 0
    assert kept > 0
    assert mixed > 0
    assert (affinity < 0).any()
    assert_close(run.server["affinity"], affinity)
    assert_close(run.server["models"], models)
    assert_close(run.clients["previous"], previous)
    assert_close(run.evaluated()["theta"], own)


# What the server of FedFomo sends


def test_raw_weights_are_added_at_the_positions_of_the_sent_models() -> None:
    method = method_of(FedFomo, models=2)
    server = MethodAdapter(method).initial_server()
    server["affinity"] += 10
    models, start = random(3, method.layout.size), server["models"].clone()
    weights = torch.tensor([[0.5, -2.0], [0.0, 1.0], [3.0, 4.0]])
    sent = Message(per_client={"ids": torch.tensor([[3, 1], [0, 2], [1, 0]])})
    rows = {"theta": models, "weights": weights}
    blocks = [
        (part, Message(per_client={n: v[part] for n, v in rows.items()}))
        for part in (slice(0, 2), slice(2, 3))
    ]
    method.aggregate(server, Cohort(0, (0, 1, 3), torch.tensor([5, 5, 5])), GivenUpload(blocks, sent))
    expected = [[10, 8, 10, 10.5], [10, 10, 11, 10], [10, 10, 10, 10], [14, 13, 10, 10]]
    assert server["affinity"].tolist() == expected
    # the models of clients that were not sampled stay available
    assert torch.equal(server["models"], torch.stack([models[0], models[1], start[2], models[2]]))


def test_a_large_matrix_is_not_recorded_at_each_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("method.name=fedfomo", "method.models=1", "train.rounds=1")
    recorded = MethodAdapter(run.method).server_diagnostics(run.server)
    assert torch.equal(recorded["affinity"], run.server["affinity"])
    monkeypatch.setattr(diagnostics, "HISTORY_LIMIT", 15)
    assert MethodAdapter(run.method).server_diagnostics(run.server) == {}
    assert MethodAdapter(method_of(FedAMP)).server_diagnostics({"models": torch.ones(4, 2)}) == {}


def test_the_highest_ranked_models_are_sent_but_never_the_client_s_own() -> None:
    method = method_of(FedFomo, 5, models=3, epsilon=0)
    server = MethodAdapter(method).initial_server()
    server["models"] = random(5, method.layout.size)
    server["is_known"].fill_(1)
    server["affinity"][2] = torch.tensor([0.5, -1.0, 9.0, 0.0, 3.0])
    server["affinity"][4] = torch.tensor([-4.0, -3.0, -2.0, -1.0, 9.0])
    down = method.download(server, Cohort(7, (2, 4), torch.tensor([5, 5])))
    assert down["ids"].tolist() == [[4, 0, 3], [3, 2, 1]]
    assert torch.equal(down["models"], server["models"][down["ids"]])


def picks(epsilon: float, round: int = 0, decay: float = 0.05) -> Counter[int]:
    """Return how often client 1 of four got which model in 400 draws, where model 3 ranks highest."""
    method = method_of(FedFomo, models=1, epsilon=epsilon, epsilon_decay=decay)
    affinity = torch.tensor([1.0, 8.0, 0.0, 2.0])
    found = Counter[int]()
    for seed in range(400):
        method.context.seed = seed
        found[int(method.chosen(affinity, ALL, 1, round))] += 1
    return found


def test_random_models_are_sent_with_probability_epsilon_which_decays() -> None:
    assert picks(0.0) == {3: 400}
    always = picks(1.0, round=9, decay=0.0)
    assert set(always) == {0, 2, 3}
    # a standard deviation is 9.4
    assert all(abs(count - 400 / 3) < 35 for count in always.values())
    # two of three random picks are not the best: 400 * 2 / 3 * (0.9, 0.9 - 6 * 0.1, nothing)
    for round, expected in ((0, 240), (6, 80), (9, 0), (50, 0)):
        assert 400 - picks(0.9, round, decay=0.1)[3] == pytest.approx(expected, abs=35 if expected else 0)


def test_a_model_that_was_never_trained_is_not_sent() -> None:
    method = method_of(FedFomo, 5, models=3, epsilon=1, epsilon_decay=0)
    server = MethodAdapter(method).initial_server()
    cohort = Cohort(0, (0, 1, 4), torch.ones(3))
    assert method.download(server, cohort)["ids"].shape == (3, 0)
    server["is_known"][[1, 2, 3]] = 1
    for number in range(20):
        down = method.download(server, replace(cohort, round=number))
        # client 1 has two others; nobody gets more in this round
        assert down["models"].shape == (3, 2, method.layout.size)
        for client, ids in zip(cohort.clients, down["ids"].tolist(), strict=True):
            assert set(ids) <= {1, 2, 3} - {client}


def test_clients_of_equal_rank_are_in_random_order() -> None:
    method = method_of(FedFomo, models=1, epsilon=0)
    assert {int(method.chosen(torch.zeros(4), ALL, 1, number)) for number in range(30)} == {0, 2, 3}


def test_more_models_than_other_clients_are_refused() -> None:
    expected = "method.models=4 is more than the other clients; allowed: 0 to 3"
    with pytest.raises(UserError, match=re.escape(expected)):
        method_of(FedFomo, models=4)
    # by default five, or all others
    assert [method_of(FedFomo, clients).num_received for clients in (1, 4, 9)] == [0, 3, 5]
    assert method_of(FedFomo, models=3).num_received == 3
    with pytest.raises(UserError, match=re.escape("allowed: 0 to 0, as there are 1 clients")):
        method_of(FedFomo, 1, models=5)
    assert Run(FEDFOMO, *ALONE, "method.models=0", "train.rounds=1").evaluated()["theta"].isfinite().all()
