"""Squared gradients of single samples equal those of autograd for each sample alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from harness import make_network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize

from hpcfl.training import sample_gradients
from hpcfl.training.sample_gradients import squared_gradients


class Step(nn.Module):
    """A step of a network that has no weights of its own."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = function


def by_hand(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    squares = []
    for number in range(len(y)):
        loss = cross_entropy(network(x[number : number + 1]), y[number : number + 1])
        slopes = torch.autograd.grad(loss, list(network.parameters()))
        squares.append(sum(slope.square().sum() for slope in slopes))
    return torch.stack(squares)  # type: ignore[arg-type]


BY_LAYER = {
    "convolutions, BatchNorm": make_network(batchnorm=True),
    "convolutions": make_network("lenet_small", side=16),
    "linear": make_network("mlp", hidden=[12, 7]),
    "stride, padding, dilation, no bias": nn.Sequential(
        nn.Conv2d(1, 4, (3, 2), stride=(2, 1), padding=(1, 0), bias=False),
        nn.Conv2d(4, 3, 3, padding=2, dilation=2),
        nn.Flatten(),
        nn.LazyLinear(10, bias=False),
    ),
    "changed in place": nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(10)
    ),
    "linear at each position": nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(40, 10)),
}


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, dim=1) @ normalize(self.weight, dim=1).T


class Clamped(nn.Linear):
    """With a hook that changes what the layer returns for some samples."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.register_forward_hook(lambda module, inputs, output: output.clamp(max=0.9))


def spectral() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.spectral_norm(nn.Linear(64, 10))


USED_TWICE, FIRST, TIED, THERE = (nn.Linear(64, outputs) for outputs in (64, 64, 64, 6))
TIED.weight = FIRST.weight

ONE_BY_ONE = {
    "a layer of one's own": nn.Sequential(nn.Flatten(), Cosine(64, 10, bias=False)),
    "a hook": nn.Sequential(nn.Flatten(), Clamped()),
    "a normalised layer": nn.Sequential(nn.Flatten(), spectral()),
    "padding with other values": nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.LazyLinear(10)
    ),
    "padding by name": nn.Sequential(nn.Conv2d(1, 4, 3, padding="same"), nn.Flatten(), nn.LazyLinear(10)),
    "in groups": nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.LazyLinear(10)
    ),
    "another layer": nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.LazyLinear(10)),
    "used twice": nn.Sequential(
        nn.Flatten(), USED_TWICE, nn.Tanh(), Step(lambda x: USED_TWICE(x)), nn.Linear(64, 10)
    ),
    "tied": nn.Sequential(nn.Flatten(), FIRST, nn.Tanh(), TIED, nn.Linear(64, 10)),
    # as in an autoencoder, a layer's weight is also used by itself
    "back and forth": nn.Sequential(
        nn.Flatten(), THERE, nn.Tanh(), Step(lambda x: linear(x, THERE.weight.T)), nn.Linear(64, 10)
    ),
    "recurrent": nn.Sequential(
        nn.Flatten(1, 2), nn.LSTM(8, 6, batch_first=True), Step(lambda x: x[0][:, -1]), nn.Linear(6, 10)
    ),
    # as many steps [steps, n, features] as there are samples
    "steps first": nn.Sequential(
        *(Step(lambda x: x[:, 0, :7].transpose(0, 1)), nn.Linear(8, 6), nn.ReLU()),
        *(Step(lambda x: x.mean(dim=0)), nn.Linear(6, 10)),
    ),
    # all steps of all samples in one axis
    "steps as samples": nn.Sequential(
        nn.Flatten(0, 2), nn.Linear(8, 6), nn.ReLU(), Step(lambda x: x.view(-1, 48)), nn.Linear(48, 10)
    ),
}


def sampled(network: nn.Module, side: int = 8) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network in float64 with running statistics that are not those of its start, and samples."""
    network = network.double().train()
    x = torch.randn(7, 1, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x = x.squeeze(1) if isinstance(network, nn.Sequential) and isinstance(network[0], nn.Linear) else x
    network(x * 2 + 1)
    return network.eval(), x, torch.arange(7)


@pytest.mark.parametrize("name", [*BY_LAYER, *ONE_BY_ONE])
def test_squared_gradients_equal_those_of_single_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, y = sampled((BY_LAYER | ONE_BY_ONE)[name], side=16 if name == "convolutions" else 8)
    if name in BY_LAYER:
        monkeypatch.setattr(sample_gradients, "_one_by_one", None)
    known = by_hand(network, x, y)
    torch.testing.assert_close(squared_gradients(network, x, y), known, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["convolutions, BatchNorm", "in groups"])
def test_samples_may_be_given_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, y = sampled((BY_LAYER | ONE_BY_ONE)[name])
    whole = squared_gradients(network, x, y)
    monkeypatch.setattr(sample_gradients, "SAMPLES_AT_ONCE", 3)
    monkeypatch.setattr(sample_gradients, "NUMBERS_AT_ONCE", 1)
    torch.testing.assert_close(squared_gradients(network, x, y), whole, rtol=1e-12, atol=0)


def test_hooks_are_removed_afterwards() -> None:
    network, x, y = sampled(BY_LAYER["linear"])
    squared_gradients(network, x, y)
    assert not any(module._forward_hooks for module in network.modules())
