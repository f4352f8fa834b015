"""pFedFDA: heads of Gaussians, folds, the choice of beta, rounds by hand, and what it reduces to."""

from __future__ import annotations

import pytest
import torch
from by_hand import (
    SLIPPERY,
    SOME,
    adapted_gaussians,
    assert_close,
    discriminant_head,
    mean_by_samples,
    method_of,
    network_with,
    train_by_torch,
)
from harness import Run, random

from hpcfl.methods.pfedfda import Gaussians, PFedFDA, folds
from hpcfl.randomness import torch_stream

PFEDFDA = "method.name=pfedfda"
K, F = 10, 16


# Gaussians


@pytest.mark.usefixtures("double")
def test_mean_and_covariance_equal_those_by_hand() -> None:
    """Class 0 has a mean of its own; class 1 has two samples, around the mean of others; class 2 has none."""
    method = method_of(PFedFDA, ridge=0.5)
    features = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0], [5.0, 5.0], [6.0, 4.0]])
    instead = torch.tensor([[9.0, 9.0], [5.0, 4.0], [7.0, 8.0]])
    found = method.moments(features, torch.tensor([0, 0, 0, 1, 1]), instead)
    assert found.means.tolist() == [[1.0, 1.0], [5.0, 4.0], [7.0, 8.0]]
    # of class 0: (-1, -1), (2, -1), (-1, 2); of class 1: (0, 1), (1, 0)
    assert_close(found.covariance, torch.tensor([[7.0, -3.0], [-3.0, 7.0]]) / 4 + 0.5 * torch.eye(2))


@pytest.mark.parametrize("count", [1, 3])
def test_a_client_with_few_samples_of_one_class_has_a_head(count: int) -> None:
    method, everyone = method_of(PFedFDA), Gaussians(random(K, F).double(), torch.eye(F).double())
    features, y = random(count, F, seed=1).double(), torch.full((count,), 4)
    share = method.chosen_share(features, y, folds(y, torch_stream(0, "folds")), everyone)
    assert 0 <= share <= 1
    found = method.moments(features, y, everyone.means)
    assert all(part.isfinite().all() for part in method.head(found, method.priors(y)))


def test_the_head_of_a_diverged_client_is_nan_and_no_error() -> None:
    method = method_of(PFedFDA)
    gaussians = Gaussians(torch.full((K, F), torch.nan), torch.full((F, F), torch.nan))
    assert method.head(gaussians, method.priors(torch.arange(K)))[0].isnan().all()


# Rounds


@pytest.mark.parametrize(
    "keys",
    [
        ("data.partition.beta=0.2", "train.participation=0.25", "method.ridge=0.1"),
        ("model.batchnorm=false", "train.local_epochs=2", "train.lr=0.02"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, *SLIPPERY, PFEDFDA, *keys)
    layout = run.method.layout
    theta, buffers = run.method.context.initial_parameters(), run.method.buffers.initial()
    start = run.method.server_state()
    mu, sigma = start["means"], start["covariance"]
    assert 0 <= mu.min() < 0.1 < 0.9 < mu.max() <= 1
    assert torch.equal(sigma, torch.eye(len(sigma)))
    for number in range(3):
        clients = list(run.simulation.cohort(number).clients)
        ends = []
        for client in clients:
            _, y = run.worker.shard.samples("train", client)
            weights, biases = discriminant_head(mu, sigma, y)
            begin = torch.cat([theta[layout.body], weights.flatten(), biases])
            network = network_with(run, begin, buffers)
            train_by_torch(run, client, number, network, part="body.")
            ends.append(
                (*layout.flatten(network), *adapted_gaussians(run, client, number, network, mu, sigma))
            )
        mean, buffers, mu, sigma = (
            mean_by_samples(run, clients, torch.stack(rows)) for rows in zip(*ends, strict=True)
        )
        theta = torch.cat([mean[layout.body], theta[layout.head]])
    expected = {"theta": theta, "means": mu, "covariance": sigma}
    assert_close(run.server, expected | ({"buffers": buffers} if "buffers" in run.server else {}))
    for client, model in enumerate(run.evaluated()["theta"]):
        _, y = run.worker.shard.samples("train", client)
        gaussians = adapted_gaussians(run, client, 3, network_with(run, theta, buffers), mu, sigma)
        weights, biases = discriminant_head(*gaussians, y)
        assert_close(model, torch.cat([theta[layout.body], weights.flatten(), biases]))


@pytest.mark.usefixtures("double")
def test_the_first_gaussians_stay_if_clients_have_no_weight() -> None:
    run = Run(*SOME, PFEDFDA, "method.beta=0", "train.rounds=1")
    start = run.method.server_state()
    for name in ("means", "covariance"):
        assert_close(run.server[name], start[name], atol=1e-14)


@pytest.mark.usefixtures("double")
def test_a_new_client_makes_its_head_without_training() -> None:
    run = Run(*SOME, PFEDFDA, "data.unseen_clients=0.3", "method.beta=0.5", "train.rounds=1")
    found, body = run.adapted(), run.method.layout.body
    assert torch.equal(found["theta"][0, body], run.server["theta"][body])
    assert torch.equal(found["buffers"][0], run.server["buffers"])
    x, y = run.unseen.shard.samples("train", 0)
    with torch.no_grad():
        features = network_with(run, found["theta"][0], found["buffers"][0]).eval().body(x)
    everyone = Gaussians(run.server["means"], run.server["covariance"])
    own = run.method.moments(features, y, everyone.means)
    mu, sigma = ((one + other) / 2 for one, other in zip(everyone, own, strict=True))
    weights, biases = discriminant_head(mu, sigma, y)
    head = torch.cat([weights.flatten(), biases])
    assert_close(found["theta"][0, run.method.layout.head], head)
