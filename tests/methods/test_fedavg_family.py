"""FedAvg and local training."""

from __future__ import annotations

import pytest
import torch
from by_hand import assert_close, method_of, models_of, network_with, train_by_torch
from harness import Run
from uploads import GivenUpload

from hpcfl.communication.messages import Cohort, Message
from hpcfl.errors import UserError
from hpcfl.methods.fedavg import FedAvg

STATISTICS = 32 + 64


def test_fedavg_takes_the_mean_weighted_by_samples() -> None:
    method = method_of(FedAvg)
    server, layout = method.server_state(), method.layout
    rows = torch.tensor([[1.0], [2.0], [8.0]]).expand(3, layout.size)
    blocks = [
        (slice(0, 2), Message(per_client={"theta": rows[:2]}, num_clients=2)),
        (slice(2, 3), Message(per_client={"theta": rows[2:]}, num_clients=1)),
    ]
    cohort = Cohort(0, (0, 2, 3), torch.tensor([10, 20, 10]))
    method.aggregate(server, cohort, GivenUpload(iter(blocks)))
    # (10 * 1 + 20 * 2 + 10 * 8) / 40
    assert torch.equal(server["theta"], torch.full((layout.size,), 3.25))


def test_statistics_of_fedavg_are_averaged_or_stay_with_the_client() -> None:
    averaged = Run("method.name=fedavg", "model.batchnorm=true")
    assert averaged.server["buffers"].shape == (STATISTICS,)
    assert averaged.clients == {}
    local = Run("method.name=fedavg", "model.batchnorm=true", "train.buffers=local")
    assert "buffers" not in local.server
    assert len({tuple(row.tolist()) for row in local.clients["buffers"]}) == 4
    assert torch.equal(local.evaluated()["buffers"], local.clients["buffers"])
    # training normalises by the batch, so where statistics are kept changes no weight
    assert torch.equal(local.server["theta"], averaged.server["theta"])
    with pytest.raises(
        UserError, match=r"train\.buffers=mixed does not go with method\.name=fedavg; allowed"
    ):
        Run("method.name=fedavg", "train.buffers=mixed")


@pytest.mark.usefixtures("double")
def test_local_clients_train_alone_when_sampled_and_send_nothing() -> None:
    run = Run("method.name=local", "model.batchnorm=true", "train.participation=0.5")
    start = zip(
        run.method.context.initial_parameters(range(4)), run.method.buffers.initial(range(4)), strict=True
    )
    networks = [network_with(run, *model) for model in start]
    for number in range(3):
        for client in run.simulation.cohort(number).clients:
            train_by_torch(run, client, number, networks[client])
    expected = models_of(run, networks)
    assert_close(run.clients, expected)
    assert_close(run.evaluated(), expected)
    assert run.server == {}
    assert run.bytes_by_client.sum() == 0
