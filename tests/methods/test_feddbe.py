"""FedDBE: against rounds with torch's own modules and optimiser."""

from __future__ import annotations

import pytest
import torch
from by_hand import SLIPPERY, SOME, assert_close, mean_by_samples, network_with, predicted, train_by_torch
from harness import UNEQUAL_FEW, Run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpcfl.models import Network

FEDDBE = "method.name=feddbe"
FEATURES = 64


class Reference:
    """FedDBE with a module and two of torch's optimisers for each client."""

    def __init__(self, run: Run) -> None:
        self.run, self.params = run, run.config.method.options
        start = run.adapter.initial_server()
        self.theta, self.buffers = start["theta"], start.get("buffers", torch.empty(0))
        self.consensus: Tensor | None = None
        self.offsets = torch.zeros(4, FEATURES)

    def round(self, number: int) -> None:
        clients = self.run.simulation.cohort(number).clients
        networks = [network_with(self.run, self.theta, self.buffers) for _ in clients]
        means = []
        for client, network in zip(clients, networks, strict=True):
            if self.consensus is None:
                train_by_torch(self.run, client, number, network)
                with torch.no_grad():
                    x, _ = self.run.worker.shard.samples("train", client)
                    means.append(network.eval().body(x).mean(dim=0))
            else:
                self.train(client, number, network, self.consensus)
        models = [self.run.method.layout.flatten(network) for network in networks]
        self.theta, self.buffers = (
            mean_by_samples(self.run, clients, torch.stack(rows)) for rows in zip(*models, strict=True)
        )
        if means:
            self.consensus = mean_by_samples(self.run, clients, torch.stack(means))

    def train(self, client: int, number: int, network: Network, consensus: Tensor) -> None:
        momentum, mean = self.params.mean_momentum, torch.zeros(FEATURES)
        offset = nn.Parameter(self.offsets[client].clone())

        def loss(network: Network, x: Tensor, y: Tensor) -> Tensor:
            nonlocal mean
            features = network.body(x)
            mean = (1 - momentum) * mean.detach() + momentum * features.mean(dim=0)
            apart = self.params.kappa * ((mean - consensus) ** 2).sum() / (2 * FEATURES)
            return cross_entropy(network.head(features + offset), y) + apart

        network.register_parameter("offset", offset)
        train_by_torch(self.run, client, number, network, loss=loss)
        del network.offset
        self.offsets[client] = offset.detach()

    def probabilities(self, client: int, x: Tensor) -> Tensor:
        network = network_with(self.run, self.theta, self.buffers).eval()
        with torch.no_grad():
            return network.head(network.body(x) + self.offsets[client]).softmax(dim=1)


@pytest.mark.parametrize(
    "keys",
    [
        SOME,
        (*SOME, *SLIPPERY, "method.mean_momentum=0.3", "train.local_epochs=2"),
        (*UNEQUAL_FEW, "method.kappa=0", "train.momentum=0.9"),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(*keys, FEDDBE)
    reference = Reference(run)
    for number in range(3):
        reference.round(number)
    assert_close(run.server["theta"], reference.theta)
    assert_close(run.server["consensus"], reference.consensus)
    assert_close(run.clients["offset"], reference.offsets)
    if "buffers" in run.server:
        assert_close(run.server["buffers"], reference.buffers)
    assert run.clients["offset"].abs().max() > 1e-3
    for client in range(4):
        x, _ = run.worker.shard.samples("test", client)
        assert_close(predicted(run, client, x), reference.probabilities(client, x))


@pytest.mark.usefixtures("double")
def test_unseen_clients_learn_an_offset_beside_the_model() -> None:
    keys = ("data.clients=5", "data.unseen_clients=0.4", "train.unseen_epochs=2", "model.batchnorm=true")
    run = Run(*UNEQUAL_FEW, FEDDBE, *keys)
    theta, buffers = run.server["theta"], run.server["buffers"]
    models = run.adapted()
    assert torch.equal(models["theta"][:, :-10], theta[:-10].expand(2, -1))
    assert torch.equal(models["buffers"], buffers.expand(2, -1))
    for client in range(2):
        network = network_with(run, theta, buffers)
        offset = nn.Parameter(torch.zeros(FEATURES))
        network.register_parameter("offset", offset)

        def loss(network: Network, x: Tensor, y: Tensor, offset: Tensor = offset) -> Tensor:
            return cross_entropy(network.head(network.body(x) + offset), y)

        train_by_torch(run, 3 + client, 3, network, part="offset", purpose="finetune", epochs=2, loss=loss)
        (head,) = network.head.children()
        assert isinstance(head, nn.Linear)
        expected = head.bias + head.weight @ offset
        assert_close(models["theta"][client, -10:], expected.detach())
