"""Squared gradients of single samples equal those of autograd for each sample alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from by_hand import squares_by_hand
from harness import make_network
from torch import Tensor, nn
from torch.nn.functional import linear

from hpcfl.methods import fedas
from hpcfl.methods.fedas import squared_gradients


class Step(nn.Module):
    """A step of a network that has no weights of its own."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = function


def spectral() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.spectral_norm(nn.Linear(64, 10))


USED_TWICE, FIRST, TIED, THERE = (nn.Linear(64, outputs) for outputs in (64, 64, 64, 6))
TIED.weight = FIRST.weight

NETWORKS = {
    "convolutions, BatchNorm": make_network(batchnorm=True),
    "changed in place": nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(10)
    ),
    "a normalised layer": nn.Sequential(nn.Flatten(), spectral()),
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
    "looks at its numbers": nn.Sequential(
        nn.Flatten(), Step(lambda x: x if x.max() > 0 else -x), nn.Linear(64, 10)
    ),
    # as many steps [steps, n, features] as there are samples
    "steps first": nn.Sequential(
        *(Step(lambda x: x[:, 0, :7].transpose(0, 1)), nn.Linear(8, 6), nn.ReLU()),
        *(Step(lambda x: x.mean(dim=0)), nn.Linear(6, 10)),
    ),
}


def sampled(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network in float64 with running statistics that are not those of its start, and samples."""
    network = NETWORKS[name].double().train()
    x = torch.randn(7, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    network(x * 2 + 1)
    return network.eval(), x, torch.arange(7)


@pytest.mark.parametrize("name", NETWORKS)
def test_squared_gradients_equal_those_of_single_samples(name: str) -> None:
    network, x, y = sampled(name)
    torch.testing.assert_close(
        squared_gradients(network, x, y), squares_by_hand(network, x, y), rtol=1e-12, atol=0
    )


def test_samples_may_be_given_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, y = sampled("convolutions, BatchNorm")
    whole = squared_gradients(network, x, y)
    monkeypatch.setattr(fedas, "NUMBERS_AT_ONCE", 1)
    torch.testing.assert_close(squared_gradients(network, x, y), whole, rtol=1e-12, atol=0)
