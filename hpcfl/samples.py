"""What one sample of a data set is: an image, a series, a vector of features, or a sequence of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SampleKind = Literal["images", "series", "features", "tokens"]

_KINDS: dict[int, SampleKind] = {3: "images", 2: "series", 1: "features"}


@dataclass(frozen=True)
class SampleType:
    """Shape and kind of the samples of a run, which are all alike."""

    shape: tuple[int, ...]
    """Of an image [channels, height, width], a series [channels, steps], features [features] or tokens
    [length]."""
    vocabulary: int | None = None
    """How many tokens there are; a sample has values 0 to vocabulary - 1. None if samples are numbers."""

    @property
    def kind(self) -> SampleKind:
        return "tokens" if self.vocabulary else _KINDS[len(self.shape)]

    @property
    def channels(self) -> int:
        """How many means and deviations normalise a sample: one a channel or feature, none for tokens."""
        return 0 if self.vocabulary else self.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of a sample as a network takes it: float32, or int64 for tokens."""
        return (8 if self.vocabulary else 4) * math.prod(self.shape)

    def by_channel(self, values: Sequence[float]) -> Tensor:
        """Return a number for each channel or feature as float32, in a shape that fits samples [n, ...]."""
        return torch.tensor(values, dtype=torch.float32).view(-1, *[1] * (len(self.shape) - 1))

    def zeros(self, count: int) -> Tensor:
        """Return `count` samples of zeros, in torch's default type or as tokens."""
        return torch.zeros(count, *self.shape, dtype=torch.int64 if self.vocabulary else None)

    def __str__(self) -> str:
        by = "x".join(map(str, self.shape))
        return {
            "images": f"images of {by}",
            "series": f"series of {by}",
            "features": f"{by} features",
            "tokens": f"sequences of {by} of {self.vocabulary} tokens",
        }[self.kind]
