"""Mini-batches of several clients at once, and the division of an epoch into mini-batches.

Shapes: C clients, B samples of a mini-batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfl.config.keys import LastBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch for each of C clients: x [C, B, ...], y [C, B] and sample index [C, B].

    `members` are the positions of these clients in their group; `counted` are the same positions on the CPU,
    for counters there; None if `members` are on the CPU. A loss gets one client's batch, without the client
    axis: x [B, ...], y [B], index [B].
    """

    members: slice | Tensor
    x: Tensor
    y: Tensor
    index: Tensor
    counted: slice | Tensor | None = None

    def pick(self, table: Tensor) -> Tensor:
        """Return the entries [C, B, ...] for this batch of a table [clients of the group, samples, ...]."""
        chosen = table[self.members]
        clients = torch.arange(len(chosen), device=chosen.device).unsqueeze(1)
        return chosen[clients, self.index]


def minibatches(num_samples: int, batch_size: int, last_batch: LastBatch = "even") -> list[tuple[int, int]]:
    """Divide an epoch into (start, stop), by the rule of `TrainConfig.last_batch`."""
    if last_batch == "even":
        count = math.ceil(num_samples / batch_size)
        if count > 1 and num_samples // count == 1:
            count -= 1
        small, larger = divmod(num_samples, max(1, count))
        sizes = [small + 1] * larger + [small] * (count - larger)
        stops = list(itertools.accumulate(sizes))
        return list(zip([0, *stops[:-1]], stops, strict=True)) if stops else []
    starts = list(range(0, num_samples, batch_size))
    if last_batch == "drop" and num_samples >= batch_size:
        num_samples -= num_samples % batch_size
        starts = starts[: num_samples // batch_size]
    if len(starts) > 1 and num_samples - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], num_samples], strict=True)) if starts else []


def same_size_groups(sizes: list[int]) -> Iterator[list[int]]:
    """Yield the positions of each distinct non-zero size, largest first."""
    for size in sorted(set(sizes) - {0}, reverse=True):
        yield [position for position, other in enumerate(sizes) if other == size]
