"""A cohort's upload as the server reads it, and sums over clients that have the same bits in any order.

Shapes: S clients of the cohort, C clients of a block or rank, L layers, K sums of one tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hpcfl.communication.messages import Message
from hpcfl.parameters import spread

_BITS = 61
"""Bits of a sum's absolute value: it stays below 2 ** 62 for any rounding, and int64 has 63 bits."""
_LEAST_EXPONENT = -900
"""Limit of exponents: every power of two here is within float64's range."""
_AT_ONCE = 2**15
"""Columns of a block: its numbers stay in a core's cache, and have one scale."""


class Upload(ABC):
    """A cohort's messages on the server. Each tensor is read once: as sums, or as the rows of all clients.
    For a sum, each rank adds its own clients, and MPI adds the ranks, so about one tensor reaches rank 0, not
    one for each client. Reading is collective: until the server has read all tensors, or calls `drain`, the
    other ranks are in `drain`.
    """

    sent: Message | None
    """The message that the server sent to the cohort in this round; on the server only."""

    def received(self, name: str) -> Tensor:
        """Return a tensor that all clients share as they received it: with a codec, not the server's own.

        A server's step starts here, since a codec's rounding is no client's move. On the server only.
        """
        assert self.sent is not None
        return self.sent.shared[name]

    @property
    @abstractmethod
    def is_read(self) -> bool:
        """Whether all has been read, so that the other ranks have left `drain`; on the server."""

    @property
    @abstractmethod
    def outline(self) -> Message:
        """The upload of the whole cohort without its numbers: types, shapes, layers and pieces, for byte
        counts."""

    def __iter__(self) -> Iterator[tuple[slice, Message]]:
        """Yield `blocks` of all tensors not read yet. Collective."""
        return self.blocks()

    @abstractmethod
    def blocks(self, *names: str) -> Iterator[tuple[slice, Message]]:
        """Yield client-ordered blocks of these or all tensors not read yet, each with its positions in the
        cohort; nothing on the other ranks.

        Collective; read it to the end before anything else.
        """

    @abstractmethod
    def sums(self, shares: Mapping[str, Tensor], sizes: Iterable[int] = ()) -> dict[str, Tensor]:
        """Return weighted sums over the cohort, [K, ...] of rows [S, ...], by name. Called by the server.

        Shares [K, S] are of whole rows, shares [K, S, ..., L] of the layers of rows [S, ..., P]; `sizes` are
        those of the layers. A share of 0 leaves the client out, whatever its numbers are. Products are
        rounded to about 2 ** -61 of the largest possible sum in the same 32,768 columns, which is more exact
        than a sum in float32 for all numbers but those that are 2 ** 37 times smaller than the largest of
        these columns; the sum is nan where a product is nan or infinite.
        """

    def collect(self, *names: str) -> dict[str, Tensor]:
        """Return the rows of all clients, [S, ...], of these or all tensors not read yet. Collective."""
        blocks = [block.per_client for _, block in self.blocks(*names)]
        if len(blocks) <= 1:
            return blocks[0] if blocks else {}
        return {name: torch.cat([rows[name] for rows in blocks]) for name in blocks[0]}

    @abstractmethod
    def drain(self) -> None:
        """End the reading; the other ranks stop waiting. Collective."""


class FixedPointSum:
    """Weighted sums of a rank's rows in integers: the same bits in any order of addition.

    Each product of a number and its share is rounded to a multiple of 2 ** (e - 61), in int64, where all sums
    of a block of columns are below 2 ** e.
    """

    def __init__(self, rows: Tensor, shares: Tensor, sizes: tuple[int, ...] = ()) -> None:
        """Take rows [C, ...] with shares [K, C] or [K, C, ..., L], and bound their products."""
        self._rows, self._shares, self._sizes = rows.flatten(1), shares, sizes
        self._shape = (len(shares), *rows.shape[1:])
        width = rows.shape[1:].numel()
        self._parts = [slice(start, min(start + _AT_ONCE, width)) for start in range(0, width, _AT_ONCE)]
        bounds = torch.full((len(shares), len(self._parts)), _LEAST_EXPONENT)
        has_others = False
        for number, block, product in self._products():
            least, largest = (float(bound) for bound in product.aminmax())
            if not math.isfinite(largest - least):
                has_others = True
                least, largest = (float(b) for b in product.nan_to_num(0.0, 0.0, 0.0).aminmax())
            if least or largest:
                exponent = math.frexp(max(-least, largest))[1]
                bounds[number, block] = max(int(bounds[number, block]), exponent)
        self.bounds = [*bounds.flatten().tolist(), int(has_others)]
        """The least e with |product| < 2 ** e for all, by sum and block; and 1 if some are nan or infinite.

        The largest of each over ranks bounds the products of all ranks.
        """
        self.tensors: list[Tensor] = []
        """After `add`: the sums [K, W], and how many products are nan or infinite, to be added over ranks."""

    def add(self, bounds: Sequence[int], num_clients: int) -> None:
        """Add up the products, given the bounds of all ranks' and how many clients these have together."""
        *exponents, has_others = bounds
        headroom = max(0, num_clients - 1).bit_length()
        self._exponents = torch.tensor(exponents).view(self._shape[0], -1) + headroom
        width = self._rows.shape[1]
        self.tensors = [
            torch.zeros(self._shape[0], width, dtype=torch.int64) for _ in range(1 + bool(has_others))
        ]
        for number, block, product in self._products():
            total, *others = (tensor[number, self._parts[block]] for tensor in self.tensors)
            for counts in others:
                counts += ~product.isfinite()
                product = product.nan_to_num_(0.0, 0.0, 0.0)
            total += product.mul_(self._scale(number, block)).round_().long()

    def value(self) -> Tensor:
        """Return the sums [K, ...]."""
        total, *others = self.tensors
        value = total.double()
        for number, of_sum in enumerate(value):
            for block, part in enumerate(self._parts):
                of_sum[part].div_(self._scale(number, block))
        for counts in others:
            value[counts > 0] = torch.nan
        dtype = self._rows.dtype
        return (value if dtype.is_floating_point else value.round()).to(dtype).view(self._shape)

    def _scale(self, number: int, block: int) -> float:
        return 2.0 ** (_BITS - int(self._exponents[number, block]))

    def _products(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the number of the sum, the block of columns, and a client's products in it, float64."""
        for client, row in enumerate(self._rows):
            for number, share in enumerate(self._shares[:, client]):
                if not share.any():
                    continue
                factor = spread(self._sizes, share).flatten() if share.dim() else float(share)
                for block, part in enumerate(self._parts):
                    product = row[part].to(torch.float64, copy=True)
                    if isinstance(factor, float):
                        yield number, block, product.mul_(factor)
                    else:
                        # a share of 0 leaves a number out, even nan
                        yield number, block, product.mul_(factor[part]).masked_fill_(factor[part] == 0, 0.0)
