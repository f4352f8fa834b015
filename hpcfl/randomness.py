"""Every random stream of a run, as a pure function of (seed, purpose, round, client).

A fresh generator for each quadruple means there is no generator state to save, nothing depends on
which rank runs a client, and a resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def stream_seed(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """Hash (seed, purpose, round, client) to a 63-bit seed; the same on every platform."""
    text = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def uniform(seed: int, purpose: str, round: int = 0, client: int = 0) -> float:
    """Return the one number of a stream that has no more, from U(0, 1), 0 included."""
    # 53 bits are exact in a float
    return (stream_seed(seed, purpose, round, client) >> 10) / 2**53


def torch_stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> torch.Generator:
    """Return a fresh CPU generator for one stream."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose, round, client))


@contextmanager
def seeded_hook(seed: int, purpose: str, round: int = 0, client: int = 0) -> Iterator[None]:
    """Give the own generators of torch (on the CPU), NumPy and Python one stream inside the block; after it,
    torch's is where it was before.

    To put back the others would take longer than many a hook, and nothing else draws from them in a round.
    """
    number = stream_seed(seed, purpose, round, client)
    np.random.seed(number % 2**32)
    random.seed(number)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(number)
        yield


@contextmanager
def seeded_generators(seed: int, purpose: str, round: int = 0, client: int = 0) -> Iterator[None]:
    """Give these generators one stream inside the block; after it, all are where they were before."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with seeded_hook(seed, purpose, round, client):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def generator_states() -> tuple[bytes, bytes, object]:
    """Return where the own generators of torch (on the CPU), NumPy and Python are, to compare."""
    of_numpy = np.random.get_state(legacy=False)["state"]
    numpy_bytes = of_numpy["key"].tobytes() + of_numpy["pos"].to_bytes(2, "little")
    return torch.get_rng_state().numpy().tobytes(), numpy_bytes, random.getstate()


def numpy_stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return a fresh NumPy generator (PCG64) for one stream."""
    return np.random.Generator(np.random.PCG64(stream_seed(seed, purpose, round, client)))


def draw_linear(shape: Sequence[int], inputs: int, stream: torch.Generator) -> Tensor:
    """Draw weights or biases of a linear layer as PyTorch does: U(-1, 1) / sqrt(inputs)."""
    return torch.empty(shape).uniform_(-1, 1, generator=stream) / math.sqrt(inputs)


def uniform_by_key(keys: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return numbers from U(0, 1), float32 [C, *shape], one stream for each int64 key [C], and the next keys.

    The streams are those of splitmix64 (Steele et al., Fast splittable pseudorandom number generators, 2014),
    whose n-th number is a function of key and n. So the device that has the keys draws, with the same bits
    wherever it is, where a generator's numbers would have to travel there.
    """
    count = math.prod(shape)
    places = torch.arange(1, count + 1, device=keys.device)
    z = keys.unsqueeze(1) + places * _signed(_GAMMA)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    z = z ^ _shifted(z, 31)
    # 23 bits and a half: neither 0 nor 1, and exact in float32
    uniform = (_shifted(z, 41).to(torch.float32) + 0.5) / 2**23
    return uniform.unflatten(1, tuple(shape)), keys + _signed(count * _GAMMA)


_GAMMA = 0x9E3779B97F4A7C15


def _signed(number: int) -> int:
    """Return the int64 of the same last 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right as if it were unsigned."""
    return (z >> bits) & (2 ** (64 - bits) - 1)
