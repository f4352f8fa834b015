"""GPFL and FedCP, whose clients have their own head and a module that depends on their data.

Against rounds with torch's own modules and optimiser.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from by_hand import (
    SLIPPERY,
    SOME,
    Loss,
    adapted_by_head_alone,
    assert_close,
    class_counts,
    mean_by_samples,
    predicted,
    train_by_torch,
)
from harness import UNEQUAL_FEW, Run
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from hpcfl.models import Network
from hpcfl.randomness import stream_seed, uniform_by_key

GPFL, FEDCP = "method.name=gpfl", "method.name=fedcp"
FEATURES, HEAD = 64, 650


class OfClient(nn.Module):
    """The network of one client, with modules of its own."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        network = run.method.context.build_network(-1)
        self.run, self.body, self.head = run, network.body, network.head

    def take(self, theta: Tensor, buffers: Tensor) -> None:
        layout = self.run.method.layout
        with torch.no_grad():
            for parameter, value in zip(self.flat(), layout.views(theta).values(), strict=True):
                parameter.copy_(value)
            for name, value in layout.buffer_views(buffers).items():
                self.get_buffer(name).copy_(value)

    def flat(self) -> list[nn.Parameter]:
        """Return all parameters in the order of theta."""
        raise NotImplementedError

    def theta(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.flat()])

    def buffers_of(self) -> Tensor:
        statistics = [self.get_buffer(slot.name) for slot in self.run.method.layout.buffers]
        return torch.cat(statistics) if statistics else torch.empty(0)

    def loss_of(self, client: int, number: int) -> Loss:
        """Return what the client trains on in a round."""
        raise NotImplementedError

    def work(self: Any, client: int, number: int) -> None:
        train_by_torch(self.run, client, number, self, loss=self.loss_of(client, number))

    def sent(self, theta: Tensor) -> Tensor:
        """Return what the client sends, of which its own head is never used."""
        return self.theta()

    def logits_of(self, client: int, x: Tensor) -> Tensor:
        raise NotImplementedError


# GPFL


class Guided(OfClient):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.embeddings = nn.Parameter(torch.empty(10, FEATURES))
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.LayerNorm(FEATURES)) for _ in range(2)
        )

    def guide(self) -> list[nn.Parameter]:
        return [self.embeddings, *self.gamma.parameters(), *self.beta.parameters()]

    def flat(self) -> list[nn.Parameter]:
        return [*self.body.parameters(), *self.guide(), *self.head.parameters()]

    def valve(self, features: Tensor, condition: Tensor) -> Tensor:
        return torch.relu((self.gamma(condition) + 1) * features + self.beta(condition))

    def shares_of(self, client: int) -> Tensor:
        counts = class_counts(self.run)[client]
        return counts / counts.sum()

    def loss_of(self, client: int, number: int) -> Loss:
        params = self.run.config.method.options
        received, shares = self.embeddings.detach().clone(), self.shares_of(client)
        general, own = received.mean(dim=0), (shares.unsqueeze(1) * received).sum(dim=0)

        def loss(_: Network, x: Tensor, y: Tensor) -> Tensor:
            features = self.body(x)
            guided = self.valve(features, general)
            cosines = cosine_similarity(guided.unsqueeze(1), self.embeddings.unsqueeze(0), dim=2)
            away = torch.stack([(row - received[label]).norm() for row, label in zip(guided, y, strict=True)])
            penalty = params.magnitude * away.mean()
            penalty = penalty + params.decay / 2 * torch.stack([(p**2).sum() for p in self.guide()]).sum()
            logits = self.head(self.valve(features, own))
            return cross_entropy(logits, y) + cross_entropy(cosines, y) + penalty

        return loss

    def logits_of(self, client: int, x: Tensor) -> Tensor:
        condition = self.shares_of(client) @ self.embeddings
        return self.head(self.valve(self.body(x), condition))


def test_embeddings_are_drawn_from_the_seed_and_the_body_starts_as_the_model_s() -> None:
    one, other = (Run(GPFL, "train.rounds=1", f"run.seed={seed}") for seed in (1, 2))
    first = one.adapter.initial_server()["theta"]
    place = slice(one.method.context.layout.body.stop, one.method.context.layout.body.stop + 640)
    assert not torch.equal(first[place], other.adapter.initial_server()["theta"][place])
    assert 0.9 < first[place].std() < 1.1
    plain = one.method.context.initial_parameters()
    assert torch.equal(first[: place.start], plain[:-HEAD])
    assert torch.equal(first[-HEAD:], plain[-HEAD:])


# FedCP


def test_fine_tuning_of_fedcp_leaves_the_received_head_as_it_is() -> None:
    runs = [Run(FEDCP, "train.rounds=1", f"train.finetune_epochs={epochs}") for epochs in (0, 2)]
    plain, tuned = (run.evaluated()["theta"] for run in runs)
    trained = runs[0].method.trained_part
    assert torch.equal(tuned[:, : trained.start], plain[:, : trained.start])
    assert not torch.equal(tuned[:, trained], plain[:, trained])


class Policy(OfClient):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.shared_head = nn.Linear(FEATURES, 10).requires_grad_(False)
        self.linear, self.norm = nn.Linear(FEATURES, 2 * FEATURES), nn.LayerNorm(2 * FEATURES)
        self.head = nn.Linear(FEATURES, 10)

    def flat(self) -> list[nn.Parameter]:
        modules = (self.shared_head, self.body, self.linear, self.norm, self.head)
        return [parameter for module in modules for parameter in module.parameters()]

    def take(self, theta: Tensor, buffers: Tensor) -> None:
        super().take(theta, buffers)
        context = self.head.weight.detach().sum(dim=0)
        self.context = context / context.norm()

    def logits(self, features: Tensor, gumbel: Tensor | float = 0.0) -> Tensor:
        scores = self.norm(self.linear(features * self.context)).relu().view(len(features), 2, FEATURES)
        scores = torch.stack([scores[:, 0] + gumbel, scores[:, 1]], dim=1).softmax(dim=1)
        own: Tensor = self.head(scores[:, 0] * features)
        return own + self.shared_head(scores[:, 1] * features)

    def loss_of(self, client: int, number: int) -> Loss:
        weight, frozen = self.run.config.method.options.alignment, copy.deepcopy(self.body).eval()
        keys = torch.tensor([stream_seed(self.run.config.run.seed, "policy", number, client)])

        def loss(_: Network, x: Tensor, y: Tensor) -> Tensor:
            nonlocal keys
            features = self.body(x)
            with torch.no_grad():
                taught = frozen(x)
            drawn, keys = uniform_by_key(keys, (len(x), FEATURES))
            logits = self.logits(features, drawn[0].to(features).logit())
            return cross_entropy(logits, y) + weight * discrepancy(features, taught)

        return loss

    def sent(self, theta: Tensor) -> Tensor:
        """Return theta whose shared head comes half way to the client's own."""
        end = self.theta()
        return torch.cat([(theta[:HEAD] + end[-HEAD:]) / 2, end[HEAD:]])

    def logits_of(self, client: int, x: Tensor) -> Tensor:
        return self.logits(self.body(x))


def discrepancy(one: Tensor, other: Tensor) -> Tensor:
    def kernels(a: Tensor, b: Tensor) -> Tensor:
        squares = ((a.unsqueeze(1) - b.unsqueeze(0)) ** 2).sum(dim=2)
        return torch.stack([torch.exp(-squares / (2 * width)) for width in (10, 15, 20, 50)]).sum(dim=0)

    return (kernels(one, one) + kernels(other, other) - 2 * kernels(one, other)).mean()


# Both


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (Guided, (GPFL, *SOME, "method.magnitude=0.5")),
        (Guided, (GPFL, *UNEQUAL_FEW, *SLIPPERY, "method.decay=0", "train.participation=0.75")),
        (Policy, (FEDCP, *SOME)),
        (Policy, (FEDCP, *UNEQUAL_FEW, *SLIPPERY, "method.alignment=0", "train.participation=0.75")),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_a_plain_implementation(kind: type[OfClient], keys: tuple[str, ...]) -> None:
    run = Run(*keys)
    start = run.adapter.initial_server()
    theta, buffers = start["theta"], start.get("buffers", torch.empty(0))
    heads = theta[-HEAD:].repeat(4, 1)

    def of_client(client: int) -> OfClient:
        model = kind(run)
        model.take(torch.cat([theta[:-HEAD], heads[client]]), buffers)
        return model

    for number in range(3):
        clients = run.simulation.cohort(number).clients
        models = [of_client(client) for client in clients]
        for client, model in zip(clients, models, strict=True):
            model.work(client, number)
            heads[client] = model.theta()[-HEAD:]
        shared = mean_by_samples(run, clients, torch.stack([model.sent(theta) for model in models]))
        theta = torch.cat([shared[:-HEAD], theta[-HEAD:]])
        buffers = mean_by_samples(run, clients, torch.stack([model.buffers_of() for model in models]))
    assert_close(run.server["theta"], theta)
    assert_close(run.clients["head"], heads)
    for client in range(4):
        x, _ = run.worker.shard.samples("test", client)
        with torch.no_grad():
            expected = of_client(client).eval().logits_of(client, x).softmax(dim=1)
        assert_close(predicted(run, client, x), expected)


@pytest.mark.parametrize("method", [GPFL, FEDCP])
def test_unseen_clients_train_only_their_head(method: str) -> None:
    keys = ("data.clients=5", "data.unseen_clients=0.4", "train.unseen_epochs=3", "model.batchnorm=true")
    run = Run(*UNEQUAL_FEW, method, *keys)
    models = adapted_by_head_alone(run, HEAD)
    assert len(models["theta"]) == 2
    if method == GPFL:
        for client in range(2):
            _, y = run.unseen.shard.samples("train", client)
            torch.testing.assert_close(models["shares"][client], y.bincount(minlength=10) / len(y))
