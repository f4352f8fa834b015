"""The shard: only own samples, their positions, and normalisation by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hpcfl.data.arrays import Arrays, arrays_of
from hpcfl.data.partitions import ClientIndices
from hpcfl.data.shard import Shard, resolve_normalisation
from hpcfl.errors import UserError

NUM_SAMPLES = 12


def pool(channels: int = 3) -> Arrays:
    """A pool whose sample i holds i everywhere, plus 100 a channel; its label is i modulo 5."""
    x = np.zeros((NUM_SAMPLES, channels, 2, 4), np.uint8)
    x += np.arange(NUM_SAMPLES, dtype=np.uint8)[:, None, None, None]
    x += 100 * np.arange(channels, dtype=np.uint8)[:, None, None]
    return Arrays(x, np.arange(NUM_SAMPLES) % 5, 5, 255.0, (0.1,) * channels, (0.2,) * channels)


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


PARTS = [
    ClientIndices(indices(0, 1), indices(), indices(2)),
    ClientIndices(indices(9, 3, 5), indices(4), indices(6, 7)),
    ClientIndices(indices(8), indices(10, 11), indices()),
]


def build(clients: range) -> Shard:
    return Shard.build(pool(), PARTS, clients, (0.0,) * 3, (1.0,) * 3, "cpu")


@pytest.mark.parametrize("clients", [range(0, 3), range(1, 3)])
def test_every_client_has_its_own_samples_in_order(clients: range) -> None:
    shard = build(clients)
    for local, client in enumerate(clients):
        for split in ("train", "val", "test"):
            x, y = shard.samples(split, local)
            expected = getattr(PARTS[client], split)
            assert y.tolist() == (expected % 5).tolist()
            assert (x[:, 0, 0, 0] * 255).round().int().tolist() == expected.tolist()
            assert x.shape == (len(expected), 3, 2, 4)
            assert x.is_contiguous(memory_format=torch.channels_last)
            assert x.stride() == (24, 1, 12, 3)


def test_only_own_samples_are_kept_and_those_of_a_pool_of_floats_are_copied() -> None:
    arrays = replace(pool(), x=pool().x.astype(np.float32), scale=1.0)
    shard = Shard.build(arrays, PARTS, range(1, 2), (0.5,) * 3, (0.5,) * 3, "cpu")
    np.testing.assert_array_equal(arrays.x, pool().x)
    before = shard.x.clone()
    arrays.x[:] = 0
    arrays.y[:] = 0
    assert torch.equal(shard.x, before)
    assert shard.y.tolist() == [4, 3, 0, 4, 1, 2]
    # 6 samples of 3 * 2 * 4 floats of 4 bytes
    assert shard.x.untyped_storage().nbytes() == 6 * 24 * 4


def test_samples_begin_at_the_same_addresses_whatever_clients_come_before() -> None:
    """Products of a CPU round in another way where a row of five numbers puts them."""
    arrays = Arrays(np.ones((NUM_SAMPLES, 5)), np.zeros(NUM_SAMPLES, np.int64), 1, 1.0, (), ())
    shard = Shard.build(arrays, PARTS, range(3), (0.0,) * 5, (1.0,) * 5, "cpu")
    samples = [shard.samples(split, client)[0] for split in ("train", "val", "test") for client in range(3)]
    assert {x.data_ptr() % 64 for x in samples if len(x)} == {0}


def test_normalisation_equals_that_by_hand() -> None:
    shard = Shard.build(pool(), PARTS, range(0, 1), (0.5, 0.25, 0.0), (0.5, 0.25, 2.0), "cpu")
    # Sample 1 holds 1, 101 and 201 in its three channels.
    by_hand = [(1 / 255 - 0.5) / 0.5, (101 / 255 - 0.25) / 0.25, 201 / 255 / 2]
    x, _ = shard.samples("train", 0)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x[1, :, 1, 3], torch.tensor(by_hand))


def test_normalisation_accepts_its_settings() -> None:
    for setting, mean, std in (
        ("auto", (0.1,) * 3, (0.2,) * 3),
        ("none", (0.0,) * 3, (1.0,) * 3),
        ("half", (0.5,) * 3, (0.5,) * 3),
        ("cifar10", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        ([[1, 2, 3], [4, 5, 6]], (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)),
    ):
        assert resolve_normalisation(pool(), setting, indices(0)) == (mean, std)


def test_unfit_normalisation_is_refused() -> None:
    for setting, message in (
        ("imagenet", "unknown; allowed: auto, standard, none, half, digits, mnist,"),
        ("npz", "unknown; allowed: auto"),
        ("mnist", "has 1 means and 1 stds, the data, images of 3x"),
        ([[0.5] * 3, [0.5] * 2], "has 3 means and 2 stds"),
        ([[0.5] * 3], r"must be \[\[means\], \[stds\]\]"),
        ([[0.5] * 3, [0.5, 0.0, 0.5]], "positive stds"),
        ([[float("nan")] * 3, [0.5] * 3], "finite numbers"),
        ([[0.5] * 3, [0.5, float("inf"), 0.5]], "finite numbers"),
    ):
        with pytest.raises(UserError, match=rf"^data\.normalise=.*: .*{message}"):
            resolve_normalisation(pool(), setting, indices(0))


def test_standard_normalisation_uses_the_training_samples() -> None:
    x = np.array([[1.0, 5.0], [3.0, 5.0], [1e6, -7.0]], np.float32)
    table = Arrays(x, np.arange(3), 3, 1.0, (), ())
    for setting in ("auto", "standard"):
        assert resolve_normalisation(table, setting, indices(0, 1)) == ((2.0, 5.0), (1.0, 1.0))
    parts = [ClientIndices(indices(0, 1), indices(), indices(2))]
    shard = Shard.build(table, parts, range(1), (2.0, 5.0), (1.0, 1.0), "cpu")
    assert shard.x.tolist() == [[-1.0, 0.0], [1.0, 0.0], [999998.0, -12.0]]


def test_tokens_are_not_normalised() -> None:
    texts = Arrays(np.array([[1, 2], [3, 0]]), np.arange(2), 2, 1.0, (), (), vocabulary=4)
    assert resolve_normalisation(texts, "auto", indices(0)) == ((), ())
    shard = Shard.build(texts, [ClientIndices(indices(1, 0), indices(), indices())], range(1), (), (), "cpu")
    assert (shard.x.dtype, shard.x.tolist()) == (torch.int64, [[3, 0], [1, 2]])
    assert torch.equal(shard.at(torch.tensor([1])), torch.tensor([[1, 2]]))


@pytest.mark.parametrize("constant", [7, 13, 77, 100])
def test_a_constant_channel_has_the_deviation_1(constant: int) -> None:
    x = np.full((40, 1, 5), constant, np.uint8)
    arrays = arrays_of(x, np.arange(40) % 2, "x")
    _, std = resolve_normalisation(arrays, "standard", np.arange(40))
    assert std == (1.0,)
