"""Random streams are pure functions of (seed, purpose, round, client)."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from hpcfl.randomness import numpy_stream, stream_seed, torch_stream, uniform_by_key


def test_seeds_are_the_recorded_ones() -> None:
    assert stream_seed(0, "batches", 0, 0) == 7883774340374615953
    assert stream_seed(12345, "cohort", 7) == 7977299253315239378


def test_seeds_depend_on_all_four_parts_and_fit_63_bits() -> None:
    parts = itertools.product((0, 1, 11), ("batches", "cohort"), (0, 1, 11), (-1, 0, 1, 11))
    seeds = [stream_seed(*part) for part in parts]
    assert len(set(seeds)) == len(seeds) == 72
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_stream_always_starts_from_its_beginning() -> None:
    first = torch.randperm(50, generator=torch_stream(3, "batches", 2, 1))
    torch.manual_seed(99)
    torch.rand(5)
    assert torch.equal(torch.randperm(50, generator=torch_stream(3, "batches", 2, 1)), first)
    assert not torch.equal(torch.randperm(50, generator=torch_stream(3, "batches", 3, 1)), first)
    numbers = numpy_stream(3, "batches", 2, 1).random(4)
    assert np.array_equal(numpy_stream(3, "batches", 2, 1).random(4), numbers)


def test_streams_do_not_change_the_global_generators() -> None:
    state, legacy = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    torch.rand(3, generator=torch_stream(0, "a"))
    numpy_stream(0, "a").random(3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], legacy)


def test_numbers_by_key_equal_splitmix64() -> None:
    # what the generator's published code gives for the seed 1234567
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    keys = torch.tensor([1234567, 2**62 + 5])
    found, following = uniform_by_key(keys, (2, 1))
    rest, _ = uniform_by_key(following, (2, 1))
    assert found.shape == rest.shape == (2, 2, 1)
    numbers = torch.cat([found[0], rest[0]]).flatten().tolist()
    assert numbers == [((number >> 41) + 0.5) / 2**23 for number in expected]
    assert torch.equal(uniform_by_key(keys[1:], (2, 1))[0][0], found[1])


def test_numbers_by_key_are_spread_evenly_and_never_0_or_1() -> None:
    numbers = uniform_by_key(torch.tensor([stream_seed(0, "policy", 1, 2)]), (100_000,))[0][0]
    counts = (numbers * 20).long().bincount(minlength=20)
    # five standard deviations of a count around its mean
    assert (counts - 5000).abs().max() < 350
    assert 0 < numbers.min() < numbers.max() < 1
