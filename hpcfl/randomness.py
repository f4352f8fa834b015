"""Every random stream of a run, as a pure function of (seed, purpose, round, client).

A fresh generator for each quadruple means there is no generator state to save, nothing depends on
which rank runs a client, and a resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def stream_seed(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """Hash (seed, purpose, round, client) to a 63-bit seed; the same on every platform."""
    text = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def torch_stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> torch.Generator:
    """Return a fresh CPU generator for one stream."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose, round, client))


def numpy_stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return a fresh NumPy generator (PCG64) for one stream."""
    return np.random.Generator(np.random.PCG64(stream_seed(seed, purpose, round, client)))


def draw_linear(shape: Sequence[int], inputs: int, stream: torch.Generator) -> Tensor:
    """Draw weights or biases of a linear layer as PyTorch does: U(-1, 1) / sqrt(inputs)."""
    return torch.empty(shape).uniform_(-1, 1, generator=stream) / math.sqrt(inputs)
