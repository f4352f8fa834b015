"""Local training: both engines agree; the state of clients."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from harness import SMALL, make_network, make_worker, spread
from torch import Tensor

from hpcfl.communication.communicator import Communicator
from hpcfl.config.keys import LastBatch, Precision, TrainConfig
from hpcfl.errors import UserError
from hpcfl.parameters import ParameterLayout, Tensors
from hpcfl.randomness import torch_stream
from hpcfl.registries import load_config
from hpcfl.setup import validate
from hpcfl.setup.experiment import build
from hpcfl.training.batches import Batch, minibatches, same_size_groups
from hpcfl.training.client_group import ClientGroup, WorkerContext
from hpcfl.training.engines import LoopEngine
from hpcfl.training.forward import Forward
from hpcfl.training.losses import class_probabilities, cross_entropy_loss

KINDS: tuple[LastBatch, ...] = ("even", "drop", "keep")
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")

# mini-batches of 4: 13 are four, 11 three, 8 two, 3 and 2 are one
SIZES = (13, 11, 8, 3, 2)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def settings(**keys: object) -> TrainConfig:
    return TrainConfig.model_validate({"batch_size": 4, "local_epochs": 3, "lr": 0.1} | keys)


def everyone(place: WorkerContext, buffers: Tensor) -> ClientGroup:
    clients = ClientGroup(place, list(place.clients), 0)
    clients.buffers = buffers.clone()
    return clients


def one_by_one(
    place: WorkerContext, theta: Tensor, buffers: Tensor, **keys: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Train each client by itself; return theta, running statistics and steps of all."""
    ends = []
    for client in place.clients:
        alone = ClientGroup(place, [client], 0)
        alone.buffers = buffers[client : client + 1].clone()
        trained = alone.sgd(theta[client : client + 1], **keys)  # type: ignore[arg-type]
        ends.append((trained.theta, alone.buffers, trained.steps))
    return tuple(torch.cat(parts) for parts in zip(*ends, strict=True))  # type: ignore[return-value]


# Mini-batches


def cut(num_samples: int, batch_size: int, last_batch: LastBatch) -> list[int]:
    """Return the sizes of an epoch's mini-batches, which follow each other without a gap."""
    spans = minibatches(num_samples, batch_size, last_batch)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans)][: len(spans)]
    return [stop - start for start, stop in spans]


def test_an_epoch_is_cut_evenly_or_its_last_mini_batch_is_dropped_or_kept() -> None:
    # a last mini-batch of 4 would be a step as long as the 13 before it
    assert cut(420, 32, "even") == [30] * 14
    assert cut(420, 32, "drop") == [32] * 13
    assert cut(420, 32, "keep") == [32] * 13 + [4]
    assert [cut(10, 4, kind) for kind in KINDS] == [[4, 3, 3], [4, 4], [4, 4, 2]]
    assert [cut(8, 4, kind) for kind in KINDS] == [[4, 4]] * 3
    assert [cut(3, 4, kind) for kind in KINDS] == [[3]] * 3
    assert [cut(1, 4, kind) for kind in KINDS] == [[1]] * 3
    assert [cut(0, 4, kind) for kind in KINDS] == [[]] * 3
    assert minibatches(10, 4) == minibatches(10, 4, "even")


def test_a_mini_batch_has_one_sample_only_if_the_client_has_one() -> None:
    assert [cut(9, 4, kind) for kind in KINDS] == [[3, 3, 3], [4, 4], [4, 5]]
    assert [cut(5, 4, kind) for kind in KINDS] == [[3, 2], [4], [5]]
    assert [cut(5, 2, kind) for kind in KINDS] == [[3, 2], [2, 2], [2, 3]]
    assert [cut(3, 2, kind) for kind in KINDS] == [[3], [2], [3]]
    for kind in KINDS:
        for size in range(2, 40):
            for batch_size in range(2, 12):
                sizes = cut(size, batch_size, kind)
                assert min(sizes) >= 2
                assert max(sizes) <= batch_size + 1
                assert sum(sizes) == (
                    size if kind != "drop" else max(size // batch_size * batch_size, min(size, batch_size))
                )
                if kind == "even":
                    assert max(sizes) - min(sizes) <= 1
                    assert batch_size == 2 or len(sizes) == math.ceil(size / batch_size)


def test_clients_whose_batch_has_the_same_size_are_grouped_largest_first() -> None:
    assert list(same_size_groups([4, 2, 0, 4, 1])) == [[0, 3], [1], [4]]
    assert list(same_size_groups([0, 0])) == []


def rows_of(batch: Batch) -> list[int]:
    """Return which of five clients a batch is for."""
    return list(range(5)) if isinstance(batch.members, slice) else batch.members.tolist()


OF_SIZES = {
    "even": [[4, 3, 3, 3], [4, 4, 3], [4, 4], [3], [2]],
    "drop": [[4, 4, 4], [4, 4], [4, 4], [3], [2]],
    "keep": [[4, 4, 5], [4, 4, 3], [4, 4], [3], [2]],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batched", [False, True])
def test_batches_permute_each_client_by_its_own_stream(batched: bool, kind: LastBatch) -> None:
    train = settings().model_copy(update={"last_batch": kind})
    place = make_worker(make_network(), SIZES, train, clients_at_once=5 if batched else None)
    seen: dict[int, list[Tensor]] = {client: [] for client in place.clients}
    for batch in ClientGroup(place, range(5), round=2).batches("batches", epochs=2):
        for position, client in enumerate(rows_of(batch)):
            x, y = place.shard.samples("train", client)
            assert torch.equal(batch.x[position], x[batch.index[position]])
            assert torch.equal(batch.y[position], y[batch.index[position]])
            seen[client].append(batch.index[position])
    sizes = [[len(index) for index in seen[client]] for client in place.clients]
    assert sizes == [of_epoch * 2 for of_epoch in OF_SIZES[kind]]
    for client, size in enumerate(SIZES):
        stream = torch_stream(place.seed, "batches", 2, client)
        used = sum(OF_SIZES[kind][client])
        epochs = [torch.randperm(size, generator=stream)[:used] for _ in range(2)]
        assert torch.equal(torch.cat(seen[client]), torch.cat(epochs))


@pytest.mark.parametrize(
    ("share", "fewest", "sizes"),
    [
        (0.5, (1, 1), [7, 6, 4, 2, 1]),
        (0.99, (1, 2), [11, 9, 6, 1, 1]),
        (0.01, (2, 0), [2, 2, 2, 2, 2]),
        (1.0, (1, 0), list(SIZES)),
    ],
)
def test_clients_divide_their_samples(share: float, fewest: tuple[int, int], sizes: list[int]) -> None:
    place = make_worker(make_network(), SIZES, settings())
    first, rest = ClientGroup(place, range(5), round=3).divided("purpose", share, fewest=fewest)
    assert [len(samples) for samples in first] == sizes
    for part, other, size in zip(first, rest, SIZES, strict=True):
        assert sorted([*part.tolist(), *other.tolist()]) == list(range(size))


# The engines agree


MOMENTUM = {"momentum": 0.9}
ALL_AT_ONCE = {
    "optimiser": "adamw",
    "epsilon": 1e-3,
    "clip": 0.5,
    "warmup_rounds": 2,
    "label_smoothing": 0.1,
    "augment": ["crop", "flip"],
}
"""Local training beyond SGD; its numbers are compared with torch's in the tests of methods."""


@pytest.mark.parametrize(
    ("network", "sizes", "keys"),
    [
        ({}, SIZES, MOMENTUM),
        ({"batchnorm": True}, SIZES, MOMENTUM),
        ({"batchnorm": True}, SIZES, MOMENTUM | ALL_AT_ONCE),
        # less makes BatchNorm divide by next to nothing, and rounding grows in every layer
        ({"name": "mobilenetv2", "side": 32}, (16, 8), {"local_epochs": 1, "batch_size": 8, "lr": 1e-3}),
    ],
)
def test_engines_agree_in_float64_after_a_local_round(
    network: dict[str, Any], sizes: tuple[int, ...], keys: dict[str, object]
) -> None:
    made, train = make_network(**network).double(), settings(weight_decay=0.01, **keys)
    theta, buffers = spread(made, len(sizes))
    loop, batched = (
        make_worker(made, sizes, train, clients_at_once=count, side=network.get("side", 8))
        for count in (None, len(sizes))
    )
    alone = one_by_one(loop, theta, buffers)
    together = everyone(batched, buffers=buffers)
    trained = together.sgd(theta)
    torch.testing.assert_close(trained.theta, alone[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(together.buffers, alone[1], rtol=0, atol=1e-9)
    assert (trained.theta - theta).abs().amax(dim=1).min() > 0.01
    assert not buffers.numel() or (together.buffers - buffers).abs().amax(dim=1).min() > 0.01
    assert trained.steps.tolist() == alone[2].tolist() == ([12, 9, 6, 3, 3] if sizes == SIZES else [2, 1])


def one_client(samples: int, batched: bool) -> tuple[ClientGroup, Tensor]:
    """Return a group of one client with so many samples, and a model for it, theta [1, P]."""
    network = make_network()
    place = make_worker(network, [samples], settings(), clients_at_once=1 if batched else None)
    return everyone(place, buffers=torch.empty(1, 0)), spread(network, 1)[0]


@pytest.mark.parametrize("batched", [False, True])
def test_a_loss_may_have_constants_that_are_no_floating_point_numbers(batched: bool) -> None:
    clients, theta = one_client(4, batched)
    batch = next(clients.batches(epochs=1))

    def loss(forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        logits = forward.logits(tensors["theta"], batch.x) * tensors["factor"]
        return forward.cross_entropy(logits.where(tensors["is_held"], -1e9), batch.y)

    def gradient(*held: int) -> Tensor:
        known = {"is_held": torch.tensor([held]) > 0, "factor": torch.ones(1, 1, dtype=torch.int64)}
        return clients.gradient_with_constants(loss, lambda batch: known)(theta, batch)[0]

    torch.testing.assert_close(gradient(*[1] * 10), clients.plain_gradient(theta, batch)[0])
    assert not torch.equal(gradient(*[1] * 9, 0), gradient(*[1] * 10))


# The loop engine


@pytest.mark.parametrize("general", [False, True])
def test_bfloat16_rounds_products_and_nothing_else(general: bool) -> None:
    network = make_network("lenet", side=28, batchnorm=True)
    layout = ParameterLayout(network)
    theta, buffers = spread(network, 1)
    x, y = torch.randn(1, 32, 1, 28, 28), torch.randint(10, (1, 32))
    batch = Batch(slice(None), x, y, torch.arange(32).view(1, 32))
    found = {}
    for precision in PRECISIONS:
        engine, statistics = LoopEngine(network, layout, precision), buffers.clone()
        if general:
            gradients, value = engine.gradient(cross_entropy_loss, {"theta": theta}, statistics, batch)
            gradient = gradients["theta"]
        else:
            gradient, value = engine.plain_gradient(theta, statistics, batch)
        scores = engine.outputs(theta[0], buffers[0], class_probabilities, x[0])
        found[precision] = (gradient, value, statistics, scores)
    assert all(tensor.dtype == torch.float32 for tensor in found["bfloat16"])
    for exact, rounded in list(zip(*found.values(), strict=True))[:3]:
        assert 0 < (exact - rounded).norm() < 0.2 * exact.norm()
    assert torch.equal(found["float32"][3], found["bfloat16"][3])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], "train.precision=bfloat16: this processor has neither AVX-512 BF16 nor AMX"),
        (["run.engine=batched"], "train.precision=bfloat16 is for the loop engine on a CPU"),
    ],
)
def test_bfloat16_is_refused_where_it_does_not_pay(
    keys: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "has_bfloat16", lambda: False)
    with pytest.raises(UserError, match=expected):
        build(load_config(None, [*SMALL, "train.precision=bfloat16", *keys]), Communicator())


def test_probabilities_are_the_evaluation_modes_softmax_in_pieces() -> None:
    network = make_network(batchnorm=True)
    layout = ParameterLayout(network)
    engine = LoopEngine(network, layout)
    theta, _ = spread(network, 1)
    buffers = torch.rand(1, layout.buffer_size) + 0.5
    reference = copy.deepcopy(network).eval()
    reference.load_state_dict(layout.views(theta[0]) | layout.buffer_views(buffers[0]), strict=False)
    x, kept = torch.randn(1100, 1, 8, 8), buffers.clone()
    found = engine.outputs(theta[0], buffers[0], class_probabilities, x)
    torch.testing.assert_close(found, reference(x).softmax(dim=1).detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(buffers, kept)
    # training mode is back
    y = torch.zeros(1, 6, dtype=torch.int64)
    batch = Batch(slice(None), x[:6].unsqueeze(0), y, torch.arange(6).view(1, 6))
    engine.gradient(cross_entropy_loss, {"theta": theta}, buffers, batch)
    assert not torch.equal(buffers, kept)


# Options of clients.sgd


# State
