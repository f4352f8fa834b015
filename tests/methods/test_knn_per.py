"""kNN-Per: neighbours by hand, extreme values of its keys, and how clients choose its weight."""

from __future__ import annotations

import math

import pytest
import torch
from by_hand import assert_close, network_with, predicted
from harness import UNEQUAL_FEW, Run

from hpcfl.methods.knn_per import neighbour_probabilities

KNN_PER = "method.name=knn_per"


def test_neighbours_vote_with_weights_by_distance() -> None:
    store = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 2.0], [30.0, 0.0]])
    labels = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]])
    # squared distances from (0, 1): 1, 18, 1, 901; each is divided by scale F = 8
    near, far = math.exp(-1 / 8), math.exp(-18 / 8)
    found = neighbour_probabilities(torch.tensor([[0.0, 1.0]]), store, labels, 3, 4.0)
    expected = torch.tensor([[2 * near, far, 0.0]]) / (2 * near + far)
    torch.testing.assert_close(found, expected)
    # of the store's second sample: squared distances 25, 13 and 745
    alone = neighbour_probabilities(store, store, labels, 2, 4.0, 0)
    torch.testing.assert_close(alone[1], torch.tensor([1.0, 0, 0]))
    assert torch.equal(neighbour_probabilities(store[1:3], store, labels, 2, 4.0, 1), alone[1:3])
    # rows that fill up a store have no vote
    padded, theirs = torch.cat([store, torch.full((2, 2), torch.inf)]), torch.cat([labels, labels[:2]])
    shares = neighbour_probabilities(store, padded, theirs, 100, 1e9)[0].tolist()
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=1e-6)


@pytest.mark.usefixtures("double")
def test_predictions_equal_those_by_hand() -> None:
    keys = ("model.batchnorm=true", "method.neighbours=4", "method.scale=0.5", "method.weight=0.3")
    run = Run(*UNEQUAL_FEW, KNN_PER, *keys)
    network = network_with(run, run.server["theta"], run.server["buffers"]).eval()
    for client in range(4):
        known, labels = run.worker.shard.samples("train", client)
        x, _ = run.worker.shard.samples("test", client)
        with torch.no_grad():
            store, features, by_model = network.body(known), network.body(x), network(x).softmax(dim=1)
        found = predicted(run, client, x)
        for sample, feature in enumerate(features):
            squares = ((store - feature) ** 2).sum(dim=1)
            nearest = squares.argsort()[:4].tolist()
            votes = torch.zeros(10)
            for place in nearest:
                votes[labels[place]] += torch.exp(-squares[place] / (0.5 * 64))
            expected = 0.3 * votes / votes.sum() + 0.7 * by_model[sample]
            assert_close(found[sample], expected)


def test_without_neighbours_it_is_fedavg_and_without_the_model_it_is_the_neighbours_alone() -> None:
    fedavg = Run(*UNEQUAL_FEW, "method.name=fedavg")
    none, alone = (Run(*UNEQUAL_FEW, KNN_PER, f"method.weight={weight}") for weight in (0, 1))
    for client in range(4):
        x, y = none.worker.shard.samples("train", client)
        torch.testing.assert_close(predicted(none, client, x), predicted(fedavg, client, x))
        # a class that no sample of the client has gets no vote
        absent = y.bincount(minlength=10) == 0
        assert absent.any()
        assert (predicted(alone, client, x)[:, absent] < 1e-30).all()
        # one neighbour is the sample itself
        vars(alone.method)["params"] = alone.method.params.model_copy(update={"neighbours": 1})
        assert torch.equal(predicted(alone, client, x).argmax(dim=1), y)
        vars(alone.method)["params"] = alone.method.params.model_copy(update={"neighbours": 10})


def test_the_weight_is_chosen_on_validation_samples_where_there_are_some() -> None:
    run = Run("data.per_client=80", "data.val_fraction=0.3", KNN_PER, "method.neighbours=1", "train.lr=0.2")
    weights = run.evaluated()["weight"]
    for client in range(4):
        x, y = run.worker.shard.samples("val", client)
        losses = []
        for tenth in range(11):
            vars(run.method)["params"] = run.method.params.model_copy(update={"weight": tenth / 10})
            chosen = predicted(run, client, x).gather(1, y.unsqueeze(1))
            losses.append(-chosen.log().mean().item())
        vars(run.method)["params"] = run.method.params.model_copy(update={"weight": None})
        assert weights[client].item() == pytest.approx(losses.index(min(losses)) / 10)
        # test samples have no effect
        shard = run.worker.shard
        shard.x[shard._part("test", client)] *= -1
    assert torch.equal(run.evaluated()["weight"], weights)
    assert len(weights.unique()) > 1


def test_clients_with_one_sample_and_with_one_class() -> None:
    run = Run(KNN_PER, "train.rounds=1")
    shard = run.worker.shard
    shard.samples("train", 1)[1].fill_(3)
    shard.count["train"][2] = 1
    evaluated = run.evaluated()
    # no other sample could be a neighbour: the client stays with the model
    assert evaluated["weight"][2] == 0
    assert evaluated["labels"][2, 0] == int(shard.samples("train", 2)[1])
    assert evaluated["store"][2].isfinite().all(dim=1).tolist() == [True] + [False] * 27
    # all neighbours are of the class
    assert evaluated["weight"][1] == 1
    x, _ = shard.samples("test", 1)
    found = predicted(run, 1, x)
    assert (found.argmax(dim=1) == 3).all()
    assert predicted(run, 2, x).isfinite().all()


def test_unseen_clients_make_their_store_without_training() -> None:
    keys = ("data.clients=5", "data.unseen_clients=0.4", "train.unseen_epochs=7", "train.rounds=1")
    run = Run(*UNEQUAL_FEW, KNN_PER, *keys)
    models = run.adapted()
    assert torch.equal(models["theta"], run.server["theta"].expand(2, -1))
    most = int(torch.cat([run.method.context.num_samples, run.method.context.num_samples_of_unseen]).max())
    assert models["store"].shape == (2, most, 64)
    network = network_with(run, run.server["theta"], torch.empty(0)).eval()
    for client in range(2):
        x, y = run.unseen.shard.samples("train", client)
        assert torch.equal(models["labels"][client, : len(y)], y)
        torch.testing.assert_close(models["store"][client, : len(y)], network.body(x).detach())
    assert run.evaluated()["store"].shape == (3, most, 64)
