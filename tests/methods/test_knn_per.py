"""kNN-Per: neighbours by hand, extreme values of its keys, and how clients choose its weight."""

from __future__ import annotations

import math

import pytest
import torch
from by_hand import assert_close, network_with, predicted
from harness import UNEQUAL_FEW, Run
from torch import Tensor

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


def shares_by_hand(store: Tensor, labels: Tensor, feature: Tensor) -> Tensor:
    """Return the votes [K] of the four nearest of a store, with a scale of 0.5."""
    squares = ((store - feature) ** 2).sum(dim=1)
    votes = torch.zeros(10)
    for place in squares.argsort()[:4].tolist():
        votes[labels[place]] += torch.exp(-squares[place] / (0.5 * 64))
    return votes / votes.sum()


@pytest.mark.parametrize(
    "keys",
    [
        ("method.weight=0.3",),
        ("method.weight=0",),
        ("method.weight=1",),
        (),
        ("data.subset_per_class=40", "data.val_fraction=0.3", "train.lr=0.2"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("double")
def test_predictions_equal_those_by_hand(keys: tuple[str, ...]) -> None:
    """The weight of neighbours is given, or chosen on validation samples or, without any, on stored ones."""
    some = (*UNEQUAL_FEW, KNN_PER, "model.batchnorm=true", "method.neighbours=4", "method.scale=0.5")
    run = Run(*some, *keys)
    given, validates = run.config.method.options.weight, run.config.data.val_fraction > 0
    network = network_with(run, run.server["theta"], run.server["buffers"]).eval()
    tenths, weights = torch.linspace(0, 1, 11).unsqueeze(1), run.evaluated()["weight"]
    for client in range(4):
        known, labels = run.worker.shard.samples("train", client)
        judged, y = run.worker.shard.samples("val" if validates else "train", client)
        x, _ = run.worker.shard.samples("test", client)
        with torch.no_grad():
            store, of_judged, features = (network.body(part) for part in (known, judged, x))
            by_model, of_tests = (network(part).softmax(dim=1) for part in (judged, x))
        losses = torch.zeros(11)
        for sample, label in enumerate(y):
            others = torch.arange(len(labels)) != (-1 if validates else sample)
            shares = shares_by_hand(store[others], labels[others], of_judged[sample])
            mixed = tenths * shares + (1 - tenths) * by_model[sample]
            losses -= mixed[:, label].clamp(min=1e-38).log()
        chosen = losses.argmin() / 10 if given is None else torch.tensor(given)
        assert_close(weights[client], chosen.to(weights))
        for sample, found in enumerate(predicted(run, client, x)):
            shares = shares_by_hand(store, labels, features[sample])
            assert_close(found, chosen * shares + (1 - chosen) * of_tests[sample])
    assert (len(weights.unique()) > 1) == (given is None)


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
