"""Random streams are pure functions of (seed, purpose, round, client)."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from hpcfl.randomness import numpy_stream, stream_seed, torch_stream


def test_seeds_are_those_of_every_platform_and_version() -> None:
    assert stream_seed(0, "batches", 0, 0) == 7883774340374615953
    assert stream_seed(12345, "cohort", 7) == 7977299253315239378


def test_all_four_parts_matter_and_seeds_fit_63_bits() -> None:
    parts = itertools.product((0, 1, 11), ("batches", "cohort"), (0, 1, 11), (-1, 0, 1, 11))
    seeds = [stream_seed(*part) for part in parts]
    assert len(set(seeds)) == len(seeds) == 72
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_stream_starts_anew_each_time_whatever_was_drawn_before() -> None:
    first = torch.randperm(50, generator=torch_stream(3, "batches", 2, 1))
    torch.manual_seed(99)
    torch.rand(5)
    assert torch.equal(torch.randperm(50, generator=torch_stream(3, "batches", 2, 1)), first)
    assert not torch.equal(torch.randperm(50, generator=torch_stream(3, "batches", 3, 1)), first)
    numbers = numpy_stream(3, "batches", 2, 1).random(4)
    assert np.array_equal(numpy_stream(3, "batches", 2, 1).random(4), numbers)


def test_streams_leave_the_global_generators_alone() -> None:
    state, legacy = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    torch.rand(3, generator=torch_stream(0, "a"))
    numpy_stream(0, "a").random(3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], legacy)
