"""An upload of given messages, for tests of `aggregate` without a channel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hpcfl.communication.messages import Message
from hpcfl.communication.upload import FixedPointSum, Upload


class GivenUpload(Upload):
    """An upload whose blocks are here: positions in the cohort, and the message of these clients."""

    def __init__(self, blocks: Iterable[tuple[slice, Message]], sent: Message | None = None) -> None:
        self.sent, self._blocks = sent, list(blocks)
        self._read: set[str] = set()

    @property
    def is_read(self) -> bool:
        raise NotImplementedError

    @property
    def outline(self) -> Message:
        raise NotImplementedError

    def blocks(self, *names: str) -> Iterator[tuple[slice, Message]]:
        read = set(self._read)
        for positions, block in self._blocks:
            wanted = names or [name for name in block.per_client if name not in read]
            self._read |= {*wanted}
            yield positions, replace(block, per_client={name: block.per_client[name] for name in wanted})

    def sums(self, shares: Mapping[str, Tensor], sizes: Iterable[int] = ()) -> dict[str, Tensor]:
        found, sizes = {}, tuple(sizes)
        for name, of_clients in shares.items():
            rows = torch.cat([block.per_client[name] for _, block in self._blocks])
            total = FixedPointSum(rows, of_clients, sizes)
            total.add(total.bounds, of_clients.shape[1])
            found[name] = total.value()
        self._read |= {*shares}
        return found

    def drain(self) -> None:
        """Do nothing: no other rank waits."""


def upload_of(rows: dict[str, Tensor], sent: Message | None = None) -> GivenUpload:
    """Return one block of what all clients of a cohort sent, tensors [S, ...] by name."""
    size = len(next(iter(rows.values())))
    return GivenUpload([(slice(0, size), Message(per_client=rows, num_clients=size))], sent)
