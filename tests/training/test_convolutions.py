"""Convolutions as unfolded images and products equal those of torch, for one client and for many at once."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from bits import run_here
from harness import SMALL, make_network, make_place, spread
from torch import nn
from torch.func import functional_call

from hpcfl.config.keys import TrainConfig
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.convolutions import UnfoldedConv2d, with_convolutions
from hpcfl.training.engines import BatchedEngine


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(3, 5, 3),
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), bias=False),
        nn.Conv2d(2, 4, 3, padding=2, dilation=2),
        nn.Conv2d(4, 2, 1),
    ],
)
def test_an_unfolded_convolution_equals_a_convolution(convolution: nn.Conv2d) -> None:
    convolution = copy.deepcopy(convolution).double()
    reference = with_convolutions(convolution, "unfold")
    assert type(reference) is UnfoldedConv2d
    assert type(convolution) is nn.Conv2d
    x = torch.randn(2, convolution.in_channels, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(reference(x), convolution(x), rtol=0, atol=1e-12)
    # of two clients at once, with weights of their own
    weights = {name: torch.stack([own, 1 - own]) for name, own in reference.named_parameters()}
    together = torch.vmap(lambda own: functional_call(reference, own, x))(weights)
    for client in range(2):
        alone = functional_call(convolution, {name: rows[client] for name, rows in weights.items()}, x)
        torch.testing.assert_close(together[client], alone, rtol=0, atol=1e-12)


def test_convolutions_that_unfold_does_not_support_are_unchanged() -> None:
    network = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1),
    )
    found = [type(module) for module in with_convolutions(network, "unfold")]  # type: ignore[call-overload]
    assert found == [nn.Conv2d] * 3 + [UnfoldedConv2d]
    assert with_convolutions(network, "grouped") is network


def test_a_local_round_is_the_same_with_either_convolution() -> None:
    network = make_network(batchnorm=True).double()
    train = TrainConfig(batch_size=8, local_epochs=1, lr=1e-3)
    theta, buffers = spread(network, 2)
    ends = []
    for kind in ("grouped", "unfold"):
        place = make_place(with_convolutions(network, kind), (16, 8), train, clients_at_once=2)  # type: ignore[arg-type]
        clients = ClientGroup(place, [0, 1], 0)
        clients.replace_buffers(buffers.clone())
        ends.append((clients.sgd(theta).theta, clients.buffers))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-9)
    assert (ends[0][0] - theta).abs().max() > 1e-4


def test_a_run_uses_the_convolutions_of_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[type]] = []
    gradient = BatchedEngine.gradient

    def watched(self: BatchedEngine, *arguments: object) -> object:
        seen.append({type(module) for module in self._network.modules()})
        return gradient(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(BatchedEngine, "gradient", watched)
    keys = [*SMALL, "train.rounds=1", "run.engine=batched", "run.convolutions=unfold"]
    assert run_here(tmp_path / "run", keys) == 0
    assert seen
    assert all(UnfoldedConv2d in types for types in seen)
