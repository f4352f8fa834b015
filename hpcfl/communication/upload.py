"""A cohort's upload as the server reads it, and sums over clients that have the same bits in any order.

Shapes: S clients of the cohort, C clients of a block or rank, L layers, K sums of one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hpcfl.communication.messages import Message

_BITS = 61
"""Of a sum's absolute value: it stays below 2 ** 62 whatever is rounded, and int64 has 63."""
_LEAST_EXPONENT = -900
"""So that no power of two here is beyond float64."""
_AT_ONCE = 2**15
"""Numbers that are added at a time, so that they stay in a core's cache."""


class Upload:
    """A cohort's messages on the server. Each tensor is read once: as sums, or as the rows of all clients.

    A sum is made where the clients are: ranks add up their own clients, and MPI adds the ranks, so that about
    one tensor reaches rank 0, not the cohort's. Reading is collective: until the server has read all tensors,
    or calls `drain`, the other ranks are in `drain`.
    """

    def __init__(self, blocks: Iterable[tuple[slice, Message]], sent: Message | None = None) -> None:
        """Take blocks that are on this rank: positions in the cohort, and the message of these clients."""
        self.sent = sent
        """What the cohort was sent in this round, on the server."""
        self._blocks = blocks
        self._read: set[str] = set()

    @property
    def outline(self) -> Message:
        """The message of the whole cohort without its numbers: types, shapes, layers and pieces, to count."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[slice, Message]]:
        """Yield `blocks` of all tensors not read yet. Collective."""
        return self.blocks()

    def blocks(self, *names: str) -> Iterator[tuple[slice, Message]]:
        """Yield client-ordered blocks of these or all tensors not read yet; nothing on the other ranks.

        Collective, and to be read to the end before anything else is.
        """
        read = set(self._read)
        for positions, block in self._kept():
            wanted = names or [name for name in block.rows if name not in read]
            self._read |= {*wanted}
            yield positions, replace(block, rows={name: block.rows[name] for name in wanted})

    def sums(self, shares: Mapping[str, Tensor], sizes: Iterable[int] = ()) -> dict[str, Tensor]:
        """Return weighted sums over the cohort, [K, ...] of rows [S, ...], by name. Called by the server.

        Shares [K, S] are of whole rows, shares [K, S, ..., L] of the layers of rows [S, ..., P]; `sizes` are
        those of the layers. A share of 0 leaves the client out, whatever its numbers are. A sum is exact to
        2 ** -61 of the largest product, which outdoes one in float32; it is nan where a client has a number
        that is nan or infinite.
        """
        found, sizes = {}, tuple(sizes)
        for name, of_clients in shares.items():
            rows = torch.cat([block.rows[name] for _, block in self._kept()])
            total = FixedPointSum(rows, of_clients, *exponent_of(rows), sizes)
            found[name] = total.value()
        self._read |= {*shares}
        return found

    def collect(self, *names: str) -> dict[str, Tensor]:
        """Return the rows of all clients, [S, ...], of these or all tensors not read yet. Collective."""
        blocks = [block.rows for _, block in self.blocks(*names)]
        if len(blocks) <= 1:
            return blocks[0] if blocks else {}
        return {name: torch.cat([rows[name] for rows in blocks]) for name in blocks[0]}

    def drain(self) -> None:
        """End the reading: no other rank waits any more. Collective."""

    def _kept(self) -> list[tuple[slice, Message]]:
        self._blocks = list(self._blocks)
        return self._blocks


class FixedPointSum:
    """Weighted sums of a rank's rows in whole numbers: the same bits in whatever order they are added.

    Each product of a row and its share is rounded to a multiple of 2 ** (exponent - 61), in int64.
    """

    def __init__(
        self, rows: Tensor, shares: Tensor, exponent: int, has_others: bool, sizes: tuple[int, ...] = ()
    ) -> None:
        """Add up rows [C, ...] with shares [K, C] or [K, C, ..., L].

        All sums over all ranks must be below 2 ** exponent; with `has_others`, numbers may also be nan or
        infinite.
        """
        self._shape, self._dtype = (len(shares), *rows.shape[1:]), rows.dtype
        self._scale = 2.0 ** (_BITS - exponent)
        size = rows.shape[1:].numel()
        self.tensors = [torch.zeros(len(shares), size, dtype=torch.int64) for _ in range(1 + has_others)]
        """The sums [K, W], and how many numbers were nan or infinite; both are to be added over ranks."""
        for client, row in enumerate(rows.reshape(len(rows), size)):
            for number, share in enumerate(shares[:, client]):
                if share.any():
                    by_number = share.reshape(-1, share.shape[-1]) if share.dim() else share
                    self._add(number, row, _spread(by_number, sizes) if share.dim() else float(by_number))

    def _add(self, number: int, row: Tensor, share: Tensor | float) -> None:
        """Add a row [W] with its share, of all numbers or of each [W], to one of the sums."""
        total, *others = (tensor[number] for tensor in self.tensors)
        for counts in others:
            is_wrong = ~row.isfinite() if isinstance(share, float) else ~row.isfinite() & (share != 0)
            counts += is_wrong
            row = row.nan_to_num(0.0, 0.0, 0.0)
        share = share * self._scale
        for start in range(0, len(row), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            factor = share if isinstance(share, float) else share[part]
            total[part].add_(row[part].double().mul_(factor).round_().long())

    def value(self) -> Tensor:
        """Return the sums [K, ...]."""
        total, *others = self.tensors
        value = (total.double() / self._scale).to(self._dtype)
        for counts in others:
            value[counts > 0] = torch.nan
        return value.view(self._shape)


def _spread(share: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the share of each number [W] from those of layers [models, L]."""
    return share.repeat_interleave(torch.tensor(sizes), dim=-1).flatten()


def exponent_of(rows: Tensor) -> tuple[int, bool]:
    """Return the least e with |x| < 2 ** e for all finite numbers of a tensor, and whether it has others.

    The largest of each over ranks is that of all ranks' rows.
    """
    if not rows.numel():
        return _LEAST_EXPONENT, False
    least, largest = (float(bound) for bound in rows.aminmax())
    has_others = not math.isfinite(largest - least)
    if has_others:
        finite = rows.where(rows.isfinite(), 0.0)
        least, largest = (float(bound) for bound in finite.aminmax())
    exponent = math.frexp(max(-least, largest))[1] if least or largest else _LEAST_EXPONENT
    return max(exponent, _LEAST_EXPONENT), has_others
