"""FedCP: against rounds with torch's own modules and optimiser, and what travels."""

from __future__ import annotations

import math

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
from torch.nn.functional import cross_entropy

from hpcfl.randomness import stream_seed
from hpcfl.training.client_group import ClientGroup

FEDCP = "method.name=fedcp"
FEATURES, HEAD = 64, 650
MASK = 2**64 - 1


class SplitMix:
    """The generator splitmix64 in Python's whole numbers."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def uniform(self) -> float:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return (((z ^ (z >> 31)) >> 41) + 0.5) / 2**23

    def logistic(self, *shape: int) -> Tensor:
        drawn = [self.uniform() for _ in range(math.prod(shape))]
        return torch.tensor([math.log(u / (1 - u)) for u in drawn]).view(shape)


class Policy(nn.Module):
    """The network of one client, with modules of its own."""

    def __init__(self, run: Run, theta: Tensor, buffers: Tensor) -> None:
        super().__init__()
        layout, network = run.method.layout, run.method.context.build_network(-1)
        self.shared_head = nn.Linear(FEATURES, 10)
        self.body = network.body
        self.linear, self.norm = nn.Linear(FEATURES, 2 * FEATURES), nn.LayerNorm(2 * FEATURES)
        self.head = nn.Linear(FEATURES, 10)
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), layout.views(theta).values(), strict=True):
                parameter.copy_(value)
            for name, value in layout.buffer_views(buffers).items():
                self.get_buffer(name).copy_(value)
            context = self.head.weight.sum(dim=0)
            self.context = context / context.norm()

    def theta(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()])

    def buffers_of(self, run: Run) -> Tensor:
        statistics = [self.get_buffer(slot.name) for slot in run.method.layout.buffers]
        return torch.cat(statistics) if statistics else torch.empty(0)

    def logits(self, features: Tensor, gumbel: Tensor | float = 0.0) -> Tensor:
        scores = self.norm(self.linear(features * self.context)).relu().view(len(features), 2, FEATURES)
        scores = torch.stack([scores[:, 0] + gumbel, scores[:, 1]], dim=1).softmax(dim=1)
        own: Tensor = self.head(scores[:, 0] * features)
        return own + self.shared_head(scores[:, 1] * features)


def discrepancy(one: Tensor, other: Tensor) -> Tensor:
    def kernels(a: Tensor, b: Tensor) -> Tensor:
        squares = ((a.unsqueeze(1) - b.unsqueeze(0)) ** 2).sum(dim=2)
        return torch.stack([torch.exp(-squares / (2 * width)) for width in (10, 15, 20, 50)]).sum(dim=0)

    return (kernels(one, one) + kernels(other, other) - 2 * kernels(one, other)).mean()


def trained(run: Run, client: int, number: int, model: Policy, frozen: Policy) -> Policy:
    weight = run.config.method.options.alignment
    noise = SplitMix(stream_seed(run.config.run.seed, "policy", number, client))
    learning = [p for name, p in model.named_parameters() if not name.startswith("shared_head")]
    optimiser = torchs_optimiser(run, learning, number)
    frozen.eval()
    for x, y in batches_of(run, client, number):
        features = model.body(x)
        with torch.no_grad():
            taught = frozen.body(x)
        loss = cross_entropy(model.logits(features, noise.logistic(len(x), FEATURES)), y)
        if weight:
            loss = loss + weight * discrepancy(features, taught)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


@pytest.mark.parametrize(
    "keys", [SOME, (*UNEQUAL_FEW, *SLIPPERY, "method.alignment=0", "train.participation=0.75")]
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_a_slow_twin(keys: tuple[str, ...]) -> None:
    run = Run(*keys, FEDCP)
    start = run.driver.initial_server()
    theta, buffers = start["theta"], start.get("buffers", torch.empty(0))
    heads = theta[-HEAD:].repeat(4, 1)
    for number in range(3):
        clients, sent, moved = run.simulation.cohort(number).clients, [], []
        for client in clients:
            whole = torch.cat([theta[:-HEAD], heads[client]])
            model, frozen = (Policy(run, whole, buffers) for _ in range(2))
            end = trained(run, client, number, model, frozen)
            heads[client] = end.theta()[-HEAD:]
            sent.append(torch.cat([(theta[:HEAD] + heads[client]) / 2, end.theta()[HEAD:-HEAD]]))
            moved.append(end.buffers_of(run))
        theta = torch.cat([mean_by_samples(run, clients, torch.stack(sent)), theta[-HEAD:]])
        buffers = mean_by_samples(run, clients, torch.stack(moved))
    torch.testing.assert_close(run.server["theta"], theta, rtol=0, atol=1e-9)
    torch.testing.assert_close(run.clients["head"], heads, rtol=0, atol=1e-9)
    evaluated = run.evaluated()
    for client in range(4):
        x, _ = run.workplace.shard.samples("test", client)
        group = ClientGroup(run.workplace, range(4), 3)
        model = Policy(run, torch.cat([theta[:-HEAD], heads[client]]), buffers).eval()
        with torch.no_grad():
            expected = model.logits(model.body(x)).softmax(dim=1)
        ours = run.method.predict(group, evaluated, client, x)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)


def test_unseen_clients_learn_their_head_alone() -> None:
    keys = ("data.clients=5", "data.unseen_clients=0.4", "train.unseen_epochs=3", "model.batchnorm=true")
    run = Run(*UNEQUAL_FEW, FEDCP, *keys)
    assert len(adapted_by_head_alone(run, HEAD)["theta"]) == 2
