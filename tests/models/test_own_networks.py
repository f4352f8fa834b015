"""Which networks of a user's own are taken, and what their buffers and shared weights become."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from hpcfl.errors import UserError
from hpcfl.models import check_network
from hpcfl.models.networks import Network
from hpcfl.parameters import ParameterLayout
from hpcfl.samples import SampleType
from hpcfl.training.batches import Batch
from hpcfl.training.engines import BatchedEngine, LoopEngine
from hpcfl.training.private_gradients import PrivateGradients

SAMPLE = SampleType((6,))


def network(body: nn.Module, head: nn.Module | None = None) -> Network:
    return Network(OrderedDict(part=body), OrderedDict(out=head or nn.Linear(4, 3)))


class Centred(nn.Module):
    """Subtracts a running mean, which it changes in place or assigns, and picks features by an index."""

    def __init__(self, in_place: bool = True, counts: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.in_place, self.counts = in_place, counts
        self.mean: Tensor
        self.index: Tensor
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("index", torch.tensor([3, 1, 0, 2]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)[..., self.index]
        if self.training:
            mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0) + 1
            if self.in_place:
                self.mean.copy_(mean)
            else:
                self.mean = mean
            if self.counts:
                self.index.copy_(self.index.roll(1))
        return x - self.mean


class Plain(nn.Module):
    """Keeps a mean in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(6, 4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.training:
            self.mean = self.mean + x.detach().mean(dim=0) + 1
        return x - self.mean


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.mask).softmax(dim=-1)


class Scaled(nn.Linear):
    """With a constant as NumPy makes them."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__(4, 3)
        self.scale: Tensor
        scale = torch.ones(3, dtype=torch.float64)
        if is_buffer:
            self.register_buffer("scale", scale)
        else:
            self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (nn.Sequential(nn.Linear(6, 3)), "its build returned a Sequential; return Network"),
        (network(nn.Linear(6, 4), nn.Identity()), "the head needs parameters that the body does not have"),
        (network(nn.Linear(6, 4).requires_grad_(False)), r"part\.weight has requires_grad=False, .* make it"),
        (network(nn.LazyLinear(4)), r"body\.part\.weight has no shape yet; give its module's sizes"),
        (network(nn.Linear(6, 4).double()), r"part\.weight is torch\.float64; expected: torch\.float32"),
        (network(nn.BatchNorm1d(6, momentum=None)), r"body\.part has momentum=None, which is not supported"),
        (network(nn.SyncBatchNorm(6)), r"body\.part is a SyncBatchNorm, .* use BatchNorm"),
        (network(nn.Linear(6, 4), Scaled(False)), r"returns torch\.float64; expected: torch\.float32"),
        (network(nn.Linear(6, 4), Scaled(True)), r"scale is torch\.float64; expected: torch\.float32"),
        (network(nn.Linear(5, 4)), "fails on two samples .6 features.: RuntimeError: mat1 and mat2"),
        (network(Centred(in_place=False)), r"it assigns body\.part\.mean in training; change it in place"),
        (network(Plain()), "its outputs depend on what it has computed before, and no client keeps that"),
        (network(Masked()), r"the buffer body\.part\.mask is not finite; make a mask of true and false"),
        (network(Centred(counts=True)), r"it changes body\.part\.index in training, which is torch\.int64"),
        (network(nn.Linear(6, 4), nn.LSTM(4, 3)), "its network returns a tuple for two samples .6 features."),
        (network(nn.Linear(6, 4), nn.Linear(4, 5)), r"returns \[2, 5\] for two .*; expected: \[2, 3\]"),
    ],
)
def test_a_network_that_cannot_be_trained_is_refused(built: nn.Module, expected: str) -> None:
    with pytest.raises(UserError, match=f"model.name=mine: .*{expected}"):
        check_network("mine", built, SAMPLE, 3)


class Remembers(nn.Module):
    """Keeps what does not matter: its last features, and positions that it computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(6, 4))
        self.last = self.positions = None

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None:
            self.positions = torch.arange(4.0)
        self.last = self.linear(x) + self.positions
        return self.last


def test_a_network_may_keep_what_does_not_change_its_outputs() -> None:
    check_network("mine", network(nn.Sequential(Remembers(), nn.Dropout(), nn.BatchNorm1d(4))), SAMPLE, 3)


def test_the_check_changes_neither_the_network_nor_generators() -> None:
    built = network(nn.Sequential(Centred(), nn.BatchNorm1d(4), nn.Dropout()))
    before, state = ParameterLayout(built).flatten(built), torch.get_rng_state()
    check_network("mine", built, SAMPLE, 3)
    after = ParameterLayout(built).flatten(built)
    assert all(map(torch.equal, before, after))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_index_stays_in_the_network_and_engines_agree_on_the_other_buffer() -> None:
    built = network(Centred())
    layout = ParameterLayout(built)
    assert [slot.name for slot in layout.buffers] == ["body.part.mean"]
    theta, buffers = (rows.repeat(2, 1) for rows in layout.flatten(built))
    x, y = torch.randn(2, 5, 6), torch.tensor([[0, 1, 2, 0, 1]] * 2)
    statistics = []
    for engine in (LoopEngine(built, layout), BatchedEngine(built, layout, 2)):
        kept = buffers.clone()
        for some in (slice(0, 1), slice(1, 2)):
            batch = Batch(some, x[some], y[some], torch.arange(5).repeat(1, 1))
            engine.plain_gradient(theta[some], kept[some], batch)
        statistics.append(kept)
    torch.testing.assert_close(*statistics)
    assert statistics[0].ne(0).all()


class Tied(nn.Module):
    """Two layers with one weight, and a constant that a state_dict does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) * self.scale


def test_a_network_with_shared_weights_is_filled() -> None:
    built = network(Tied(), nn.Linear(6, 3))
    layout = ParameterLayout(built)
    theta, buffers = torch.randn(layout.size), torch.tensor([2.0])
    filled = layout.filled(built, theta, buffers)
    assert all(map(torch.equal, layout.flatten(filled), (theta, buffers)))
    assert filled.body.part.second.weight is filled.body.part.first.weight


def test_a_network_with_dropout_has_private_gradients() -> None:
    built = network(nn.Sequential(nn.Linear(6, 4), nn.Dropout()))
    layout = ParameterLayout(built)
    theta = layout.flatten(built)[0].unsqueeze(0)
    batch = Batch(slice(None), torch.randn(1, 5, 6), torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5))
    gradients = PrivateGradients(built, layout, clip=1.0, noise=0.0)
    first, _ = gradients.gradient(theta, batch, [5.0], [torch.Generator()])
    again, _ = gradients.gradient(theta, batch, [5.0], [torch.Generator()])
    assert first.isfinite().all()
    assert not torch.equal(first, again)


def test_the_width_of_features_is_what_the_first_linear_layer_of_the_head_takes() -> None:
    assert network(nn.Linear(6, 4), nn.Sequential(nn.Dropout(), nn.Linear(4, 3))).num_features == 4
    assert network(nn.Linear(6, 4), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))).num_features == 4
    with pytest.raises(UserError, match="needs a model whose head has a linear layer"):
        _ = network(nn.Linear(6, 4), nn.Sequential(nn.Conv1d(1, 3, 1))).num_features
