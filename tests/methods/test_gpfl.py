"""GPFL: against rounds with torch's own modules and optimiser, and its loss worked out."""

from __future__ import annotations

import pytest
import torch
from by_hand import (
    SLIPPERY,
    SOME,
    adapted_by_head_alone,
    batches_of,
    mean_by_samples,
    torchs_optimiser,
)
from harness import UNEQUAL_FEW, Run
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from hpcfl.training.client_group import ClientGroup

GPFL = "method.name=gpfl"
FEATURES, HEAD = 64, 650


class Guided(nn.Module):
    """The network of one client, with modules of its own."""

    def __init__(self, run: Run, theta: Tensor, buffers: Tensor) -> None:
        super().__init__()
        layout, network = run.method.layout, run.method.context.build_network(-1)
        self.body = network.body
        self.embeddings = nn.Parameter(torch.empty(10, FEATURES))
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.LayerNorm(FEATURES)) for _ in range(2)
        )
        self.head = network.head
        with torch.no_grad():
            for parameter, value in zip(self.flat(), layout.views(theta).values(), strict=True):
                parameter.copy_(value)
            for name, value in layout.buffer_views(buffers).items():
                self.get_buffer(name).copy_(value)

    def guide(self) -> list[nn.Parameter]:
        return [self.embeddings, *self.gamma.parameters(), *self.beta.parameters()]

    def flat(self) -> list[nn.Parameter]:
        """Return all parameters in the order of theta."""
        return [*self.body.parameters(), *self.guide(), *self.head.parameters()]

    def theta(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.flat()])

    def buffers_of(self, run: Run) -> Tensor:
        statistics = [self.get_buffer(slot.name) for slot in run.method.layout.buffers]
        return torch.cat(statistics) if statistics else torch.empty(0)

    def valve(self, features: Tensor, condition: Tensor) -> Tensor:
        return torch.relu((self.gamma(condition) + 1) * features + self.beta(condition))


def shares_of(run: Run, client: int) -> Tensor:
    _, y = run.workplace.shard.samples("train", client)
    return torch.tensor([float((y == number).sum()) for number in range(10)]) / len(y)


def trained(run: Run, client: int, number: int, model: Guided) -> Guided:
    params = run.config.method.options
    received, shares = model.embeddings.detach().clone(), shares_of(run, client)
    general, own = received.mean(dim=0), (shares.unsqueeze(1) * received).sum(dim=0)
    optimiser = torchs_optimiser(run, model.flat(), number)
    for x, y in batches_of(run, client, number):
        features = model.body(x)
        guided = model.valve(features, general)
        cosines = cosine_similarity(guided.unsqueeze(1), model.embeddings.unsqueeze(0), dim=2)
        away = torch.stack([(row - received[label]).norm() for row, label in zip(guided, y, strict=True)])
        loss = cross_entropy(model.head(model.valve(features, own)), y) + cross_entropy(cosines, y)
        loss = loss + params.magnitude * away.mean()
        loss = loss + params.decay / 2 * sum((p**2).sum() for p in model.guide())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


@pytest.mark.parametrize(
    "keys",
    [
        (*SOME, "method.magnitude=0.5"),
        (*UNEQUAL_FEW, *SLIPPERY, "method.decay=0", "train.participation=0.75"),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_a_slow_twin(keys: tuple[str, ...]) -> None:
    run = Run(*keys, GPFL)
    start = run.driver.initial_server()
    theta, buffers = start["theta"], start.get("buffers", torch.empty(0))
    heads = theta[-HEAD:].repeat(4, 1)
    for number in range(3):
        clients = run.simulation.cohort(number).clients
        ends = [
            trained(run, client, number, Guided(run, torch.cat([theta[:-HEAD], heads[client]]), buffers))
            for client in clients
        ]
        for client, end in zip(clients, ends, strict=True):
            heads[client] = end.theta()[-HEAD:]
        shared = mean_by_samples(run, clients, torch.stack([end.theta() for end in ends]))
        theta = torch.cat([shared[:-HEAD], theta[-HEAD:]])
        buffers = mean_by_samples(run, clients, torch.stack([end.buffers_of(run) for end in ends]))
    torch.testing.assert_close(run.server["theta"], theta, rtol=0, atol=1e-9)
    torch.testing.assert_close(run.clients["head"], heads, rtol=0, atol=1e-9)
    evaluated = run.evaluated()
    for client in range(4):
        x, _ = run.workplace.shard.samples("test", client)
        group = ClientGroup(run.workplace, range(4), 3)
        model = Guided(run, torch.cat([theta[:-HEAD], heads[client]]), buffers).eval()
        with torch.no_grad():
            condition = shares_of(run, client) @ model.embeddings
            expected = model.head(model.valve(model.body(x), condition)).softmax(dim=1)
        ours = run.method.predict(group, evaluated, client, x)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)


def test_embeddings_are_drawn_by_the_seed_and_the_body_starts_as_the_models() -> None:
    one, other = (Run(GPFL, "train.rounds=1", f"run.seed={seed}") for seed in (1, 2))
    first = one.driver.initial_server()["theta"]
    place = slice(one.method.context.layout.body.stop, one.method.context.layout.body.stop + 640)
    assert not torch.equal(first[place], other.driver.initial_server()["theta"][place])
    assert 0.9 < first[place].std() < 1.1
    plain = one.method.context.initial_parameters()
    assert torch.equal(first[: place.start], plain[:-HEAD])
    assert torch.equal(first[-HEAD:], plain[-HEAD:])


def test_unseen_clients_learn_their_head_alone() -> None:
    keys = ("data.clients=5", "data.unseen_clients=0.4", "train.unseen_epochs=3", "model.batchnorm=true")
    run = Run(*UNEQUAL_FEW, GPFL, *keys)
    models = adapted_by_head_alone(run, HEAD)
    assert len(models["theta"]) == 2
    for client in range(2):
        _, y = run.unseen.shard.samples("train", client)
        torch.testing.assert_close(models["shares"][client], y.bincount(minlength=10) / len(y))
