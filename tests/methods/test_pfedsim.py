"""pFedSim: weights, and rounds by hand in both phases."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from by_hand import assert_close, batches_of, cohort_of, gradient, mean_by_samples, method_of, step_size
from harness import MLP, UNEQUAL_FEW, Run, random
from torch import Tensor, cosine_similarity
from uploads import upload_of

from hpcfl.communication.messages import Cohort
from hpcfl.config.keys import TrainConfig
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.pfedsim import PFedSim

PFEDSIM = "method.name=pfedsim"
F, K = 16, 10
WEIGHTS = slice(64 * F + F, 64 * F + F + K * F)
"""Where the head's weights are in the model."""


# Weights


def test_weights_equal_those_by_hand() -> None:
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
def test_rounds_equal_those_by_hand(warm_up: str, rounds: int) -> None:
    keys = (*MLP, *UNEQUAL_FEW, "train.participation=0.5", "train.lr_decay=0.8", "train.rounds=5")
    run = Run(PFEDSIM, *keys, f"method.warm_up={warm_up}")
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


def test_a_client_without_a_finite_model_starts_from_that_of_the_warm_up() -> None:
    method = method_of(PFedSim, 4)
    server = MethodAdapter(method).initial_server()
    everyone = Cohort(100, (0, 1, 2, 3), method.context.num_samples)
    w = server["theta"]
    assert torch.equal(MethodAdapter(method).download(server, everyone)["theta"], w.expand(4, -1))
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
