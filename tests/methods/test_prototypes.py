"""FedProto: own models whose clients compare their features by class.

Shapes: N clients, K classes, F features, P trainable numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from harness import Run
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_twins import (
    SLIPPERY,
    SOME,
    batches_of,
    network_with,
    torchs_sgd,
)

from hpcfl.communication.messages import Message
from hpcfl.communication.upload import Upload
from hpcfl.methods._prototypes import average_prototypes, distance
from hpcfl.models import Network

K, F = 10, 64
ONE_A_ROUND = "train.participation=0.25"
ALL = "train.participation=1"


def sort_of(run: Run, client: int) -> dict[int, Tensor]:
    """Return a client's training images by class, for the classes that it has."""
    x, y = run.workplace.shard.samples("train", client)
    return {int(label): x[y == label] for label in y.unique()}


def class_means(run: Run, client: int, network: Network) -> dict[int, Tensor]:
    """Return the mean features [F] of each class that a client has, in evaluation mode."""
    network.eval()
    with torch.no_grad():
        means = {label: network.body(x).mean(dim=0) for label, x in sort_of(run, client).items()}
    network.train()
    return means


def train_towards(
    run: Run,
    client: int,
    round: int,
    network: Network,
    targets: dict[int, Tensor],
    strength: float,
    part: str = "",
) -> None:
    """Train on cross-entropy plus the squared distance to the targets, sample by sample, with torch's SGD."""
    named = [p for name, p in network.named_parameters() if name.startswith(part)]
    optimiser = torchs_sgd(run, named, round)
    for x, y in batches_of(run, client, round):
        network.zero_grad()
        features = network.body(x)
        total = torch.zeros(())
        for sample, label in zip(features, y.tolist(), strict=True):
            if label in targets:
                total = total + (sample - targets[label]).square().sum() / (F * len(y))
        (cross_entropy(network.head(features), y) + strength * total).backward()
        optimiser.step()


def mean_by_counts(run: Run, clients: Sequence[int], found: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    """Return the mean of each class over the clients that hold it, weighted by how many samples they have."""
    means = {}
    for label in {label for of_client in found for label in of_client}:
        rows = [
            (len(sort_of(run, client)[label]), of_client[label])
            for client, of_client in zip(clients, found, strict=True)
            if label in of_client
        ]
        means[label] = torch.stack([n * row for n, row in rows]).sum(dim=0) / sum(n for n, _ in rows)
    return means


# What they share


def test_a_distance_by_hand() -> None:
    """Class 1 is not known: ((1 - 3)^2 + (0 - 2)^2) / 2 = 4 and 0, whose mean is 2."""
    features, targets = torch.tensor([[1.0, 0.0], [5.0, 5.0]]), torch.tensor([[3.0, 2.0], [0.0, 0.0]])
    assert distance(features, torch.tensor([0, 1]), targets, torch.tensor([1.0, 0.0])) == 2
    assert distance(features, torch.tensor([0, 1]), targets, torch.tensor([1.0, 1.0])) == 2 + 12.5


def test_a_class_that_nobody_holds_keeps_its_prototype() -> None:
    """Clients with 1 and 3 samples hold the first class, one client the second, and nobody the third."""
    server = {
        "prototypes": torch.tensor([[9.0, 9.0], [9.0, 9.0], [7.0, 8.0]]),
        "is_known": torch.tensor([1, 0, 0], dtype=torch.uint8),
    }
    means = torch.tensor([[[4.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[0.0, 8.0], [1.0, 2.0], [0.0, 0.0]]])
    counts = torch.tensor([[1, 0, 0], [3, 5, 0]], dtype=torch.int32)
    average_prototypes(
        server, Upload([(slice(0, 2), Message(rows={"prototypes": means}, num_clients=2))]), counts
    )
    assert server["prototypes"].tolist() == [[1.0, 6.0], [1.0, 2.0], [7.0, 8.0]]
    assert server["is_known"].tolist() == [1, 1, 0]


# FedProto


def fedproto_by_hand(run: Run) -> tuple[dict[int, Tensor], Tensor, Tensor]:
    """Return the prototypes, and each client's model [N, P] and running statistics."""
    everyone = range(run.num_clients)
    theta, buffers = run.method.context.initial_parameters(everyone), run.method.initial_buffers(everyone)
    known: dict[int, Tensor] = {}
    for number in range(run.config.train.rounds):
        found, clients = [], run.simulation.cohort(number).clients
        for client in clients:
            network = network_with(run, theta[client], buffers[client])
            train_towards(run, client, number, network, known, run.config.method.options.alignment)
            theta[client], buffers[client] = run.method.layout.flatten(network)
            found.append(class_means(run, client, network))
        known = known | mean_by_counts(run, clients, found)
    return known, theta, buffers


@pytest.mark.parametrize("keys", [(), ("data.partition.beta=0.2", ONE_A_ROUND, "method.alignment=3")])
@pytest.mark.usefixtures("double")
def test_rounds_of_fedproto_equal_a_slow_twin(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, *SLIPPERY, "method.name=fedproto", *keys)
    known, theta, buffers = fedproto_by_hand(run)
    assert run.server["is_known"].nonzero().flatten().tolist() == sorted(known)
    for label, prototype in known.items():
        torch.testing.assert_close(run.server["prototypes"][label], prototype, rtol=0, atol=1e-9)
    torch.testing.assert_close(run.clients["theta"], theta, rtol=0, atol=1e-9)
    torch.testing.assert_close(run.clients["buffers"], buffers, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("double")
def test_fedproto_predicts_the_class_of_the_nearest_prototype() -> None:
    run = Run(*SOME, "method.name=fedproto", "train.lr=0.2")
    evaluated, labels = run.evaluated(), run.server["is_known"].nonzero().flatten()
    for client in range(run.num_clients):
        network = network_with(run, evaluated["theta"][client], evaluated["buffers"][client]).eval()
        x, _ = run.workplace.shard.samples("test", client)
        with torch.no_grad():
            features, found = network.body(x), network(x).softmax(dim=1)
        squared = (features.unsqueeze(1) - run.server["prototypes"][labels]).square().sum(dim=2)
        torch.testing.assert_close(found[:, labels], (-squared).softmax(dim=1), rtol=1e-9, atol=1e-12)
        assert torch.equal(found.argmax(dim=1), labels[squared.argmin(dim=1)])


def test_fedproto_never_predicts_a_class_without_a_prototype() -> None:
    run = Run("method.name=fedproto", "train.rounds=1")
    run.server["is_known"][3] = 0
    run.server["prototypes"][3] = 0
    evaluated = run.evaluated()
    network = network_with(run, evaluated["theta"][0], evaluated["buffers"][0])
    x, _ = run.workplace.shard.samples("test", 0)
    assert network(x).softmax(dim=1)[:, 3].count_nonzero() == 0


def test_fedproto_predicts_by_the_own_head_before_there_are_prototypes() -> None:
    run = Run("method.name=fedproto", "train.rounds=1")
    run.server["is_known"].zero_()
    assert torch.equal(run.evaluated()["theta"], run.clients["theta"])


def test_fedproto_without_alignment_trains_as_local_does_to_the_bit() -> None:
    local = Run(*SOME, *SLIPPERY, "method.name=local")
    ours = Run(*SOME, *SLIPPERY, "method.name=fedproto", "method.alignment=0")
    for name in ("theta", "buffers"):
        assert torch.equal(ours.clients[name], local.clients[name])
    other = Run(*SOME, *SLIPPERY, "method.name=fedproto")
    assert not torch.equal(other.clients["theta"], local.clients["theta"])


@pytest.mark.usefixtures("double")
def test_a_new_client_of_fedproto_trains_towards_the_prototypes() -> None:
    run = Run(*SOME, "method.name=fedproto", "data.unseen_clients=0.3", "train.unseen_epochs=2")
    found, means = run.adapted(), run.server["prototypes"]
    body, head = run.method.layout.body, run.method.layout.head
    bias = torch.where(run.server["is_known"] == 1, -means.square().sum(dim=1), -1e6)
    assert torch.equal(found["theta"][0, head], torch.cat([2 * means.flatten(), bias]))
    network = network_with(run, run.method.context.initial_parameters(), run.method.initial_buffers())
    x, y = run.unseen.shard.samples("train", 0)
    with torch.no_grad():
        before = cross_entropy(network.eval()(x), y)
        after = cross_entropy(network_with(run, found["theta"][0], found["buffers"][0]).eval()(x), y)
    assert after < before
    assert not torch.equal(found["theta"][0, body], run.method.context.initial_parameters()[body])
