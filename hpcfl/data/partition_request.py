"""The request to a partition, and code that partitions share: base of options, rounding, checks."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpcfl.config.keys import PartitionOptions as PartitionOptions
from hpcfl.errors import UserError

LOG = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Split:
    """How a client's samples are split into parts."""

    test_fraction: float
    val_fraction: float
    seed: int


@dataclass(frozen=True, eq=False)
class Request(Split):
    """The arguments of a partition's table of counts, and how its samples are split.

    Attributes:
        sizes: samples of each class, int64 [classes].
        per_client: samples a client, all parts together; None takes the largest equal size.
    """

    sizes: IntArray
    num_clients: int
    per_client: int | None

    @property
    def num_classes(self) -> int:
        return len(self.sizes)

    @property
    def largest_equal_size(self) -> int:
        return int(self.sizes.sum()) // self.num_clients


def least_samples(request: Request, batch_size: int) -> int:
    """Return PFLlib's fewest samples of a client: batch_size / test_fraction, or half the mean if smaller."""
    mean_size = request.sizes.sum() / request.num_clients
    return int(round(min(batch_size / request.test_fraction, mean_size / 2), 9))


def round_half_up(value: float) -> int:
    """Round halves up; the inner rounding removes errors of products such as 0.1 * 5."""
    return math.floor(round(value, 9) + 0.5)


def check_too_many_classes(key: str, value: int, num_classes: int, largest: int) -> None:
    if value > largest:
        raise UserError(
            f"data.partition.{key}={value}: the data has {num_classes} classes; allowed: 1..{largest}"
        )


def check_not_empty(label: int, size: int, num_clients: int) -> None:
    """Raise UserError for a class without samples that clients are to have."""
    if size == 0:
        raise UserError(
            f"data.clients={num_clients}: class {label} has 0 samples; labels must be 0..K-1 without gaps, "
            "such as numpy.unique(y, return_inverse=True)[1]; if they are, take more data or "
            "data.partition.name=iid"
        )


def check_shortage(sizes: IntArray, need: IntArray, num_clients: int) -> None:
    """Raise UserError if a class has too few samples for the smallest amounts of its clients."""
    short = np.flatnonzero(need > sizes)
    if len(short):
        label = short[0]
        check_not_empty(label, sizes[label], num_clients)
        raise UserError(
            f"data.clients={num_clients}: class {label} has {sizes[label]} samples and its clients need "
            f"at least {need[label]}; use fewer clients or more data"
        )


def check_too_large(per_client: int, largest: int) -> None:
    if per_client > largest:
        raise UserError(
            f"data.per_client={per_client}: the data allows at most {largest} for disjoint clients; lower "
            "it, or set data.per_client=null for the most"
        )


def warn_of_unused(counts: IntArray, request: Request) -> None:
    """Warn where a scarce class lets equal clients use less than half of the samples of their classes."""
    sizes = np.where(counts.any(axis=0), request.sizes, 0)
    scarce = int(np.argmin(np.where(sizes > 0, sizes, sizes.max() + 1)))
    is_scarce = 2 * sizes[scarce] < sizes[sizes > 0].mean()
    if request.per_client is None and is_scarce and 2 * counts.sum() < sizes.sum():
        LOG.warning(
            f"{counts.sum()} of {sizes.sum()} samples are used: clients have equally many of each of their "
            f"classes, and class {scarce} has {sizes[scarce]}; data.partition.name=dirichlet, "
            "random_classes or iid uses all"
        )


def check_client_size(per_client: int | None, partition: str) -> None:
    """Raise UserError for data.per_client if the partition decides the sizes."""
    if per_client is not None:
        raise UserError(
            f"data.per_client={per_client}: the {partition} partition draws the sizes itself; "
            "set data.per_client=null"
        )


def equal_size(request: Request) -> int:
    """Return the requested size of every client, or the largest; UserError if the data has too few
    samples."""
    largest = request.largest_equal_size
    if largest == 0:
        raise UserError(
            f"data.clients={request.num_clients}: the data has {request.sizes.sum()} samples; "
            "use fewer clients"
        )
    size = largest if request.per_client is None else request.per_client
    check_too_large(size, largest)
    return size
