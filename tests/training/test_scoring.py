"""Scores of many clients at once equal those of one client after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import make_network, make_worker, spread
from torch import Tensor
from torch.nn.functional import nll_loss

from hpcfl.communication.messages import BUFFERS, Message
from hpcfl.config.keys import TrainConfig
from hpcfl.parameters import ParameterLayout
from hpcfl.training import scoring
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.losses import class_probabilities
from hpcfl.training.scoring import BatchedScorer, correctness_and_loss

SIZES = (13, 1, 8, 3)


def one_by_one(clients: ClientGroup, model: Message) -> Tensor:
    """Return what the loop engine's evaluator gives."""
    rows = []
    for position in range(len(clients)):
        x, y = clients.samples("train", position)
        probabilities = clients.outputs(model, position, class_probabilities, x)
        is_right = probabilities.argmax(dim=1) == y
        rows.append(torch.stack([is_right.double().mean(), nll_loss(probabilities.log(), y).double()]))
    return torch.stack(rows)


@pytest.mark.parametrize("samples_at_once", [2048, 5])
@pytest.mark.parametrize("batchnorm", [False, True])
def test_shared_and_own_models_are_scored(
    batchnorm: bool, samples_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "SAMPLES_AT_ONCE", samples_at_once)
    network = make_network(batchnorm=batchnorm)
    place = make_worker(network, SIZES, TrainConfig(), clients_at_once=4)
    clients = ClientGroup(
        replace(place, scorer=BatchedScorer(network, ParameterLayout(network))), range(4), 0
    )
    theta, buffers = spread(network, 4)
    theta, buffers = theta + 0.1 * torch.randn(theta.shape), buffers + torch.rand(buffers.shape)
    own = Message(per_client={"theta": theta, BUFFERS: buffers}, num_clients=4)
    common = Message(shared={"theta": theta[0], BUFFERS: buffers[0]}, num_clients=4)
    # such as FedAvg's, whose clients keep their running statistics
    mixed = Message(shared={"theta": theta[0]}, per_client={BUFFERS: buffers}, num_clients=4)
    for model in (own, common, mixed):
        found = clients.scores(model, "train")
        assert found is not None
        torch.testing.assert_close(found, one_by_one(clients, model), rtol=0, atol=1e-6)
    assert ClientGroup(place, range(4), 0).scores(own, "train") is None


def test_a_diverged_client_does_not_change_the_scores_of_others() -> None:
    network = make_network()
    place = make_worker(network, SIZES, TrainConfig(), clients_at_once=4)
    scorer = BatchedScorer(network, ParameterLayout(network))
    theta, buffers = spread(network, 4)
    theta[1] = torch.nan
    model = Message(per_client={"theta": theta, BUFFERS: buffers}, num_clients=4)
    found = scorer.scores(model, place.shard, "train", range(4))
    assert found.isnan().any(dim=1).tolist() == [False, True, False, False]
    # a model of nan predicts no class, not the first one
    assert found[1, 0] == 0
    assert correctness_and_loss(torch.full((4, 3), torch.nan), torch.tensor([0, 0, 0, 1]))[0].sum() == 0
