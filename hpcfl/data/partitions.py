"""Which client gets which samples.

A partition is a table of counts, [clients, classes]; the rest is common to all: the shuffled samples
of each class are dealt in client order, so that clients never share one, and are split inside every
(client, class), so that a client's train and test parts have the same class proportions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpcfl.errors import UserError
from hpcfl.randomness import numpy_stream

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

DIRICHLET_ATTEMPTS = 200


@dataclass(frozen=True, eq=False)
class ClientIndices:
    """One client's samples, as int64 indices into the pool."""

    train: IntArray
    val: IntArray
    test: IntArray


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ClassesOptions(_Options):
    """Options of `classes`, pFedLA's non-IID_1."""

    classes_per_client: int = Field(
        4,
        ge=1,
        description="classes a client owns; pFedLA: 4 of 10, 12 of CIFAR100's 100; all = balanced IID",
    )


class DominantOptions(_Options):
    """Options of `dominant`, pFedLA's non-IID_2."""

    dominant_classes: int = Field(
        2, ge=1, description="classes a client has more of; pFedLA: 2 of 10, 6 of CIFAR100's 100"
    )
    ratio: float = Field(
        6.0,
        ge=1,
        allow_inf_nan=False,
        description="samples of a dominant class for one of another; pFedLA gives none; 1 = balanced IID",
    )


class DirichletOptions(_Options):
    """Options of `dirichlet`, MOON's generator, which pFedMB uses."""

    beta: float = Field(
        0.5, gt=0, allow_inf_nan=False, description="concentration; small = few classes a client; MOON: 0.5"
    )
    min_samples: int = Field(10, ge=1, description="smallest client allowed; MOON: 10")


class IidOptions(_Options):
    """Options of `iid`: none."""


@dataclass(frozen=True)
class Partition:
    """How to draw the table of counts.

    Attributes:
        counts: (class sizes [K], clients, per_client or None, options, seed) -> int64 [clients, K].
        remedy: what to change when a client's share is too small to be split.
    """

    description: str
    options: type[BaseModel]
    counts: Callable[[IntArray, int, int | None, Any, int], IntArray]
    remedy: str


def partition(
    name: str,
    y: npt.NDArray[np.int64],
    num_classes: int,
    *,
    num_clients: int,
    per_client: int | None,
    test_fraction: float,
    val_fraction: float,
    seed: int,
    options: Mapping[str, Any],
) -> list[ClientIndices]:
    """Give each client its train, validation and test samples; a pure function of its arguments.

    Inside every (client, class) the first (1 - test_fraction) of the samples are for training, of which
    the last val_fraction are for validation; both numbers are rounded, halves up.

    Args:
        y: labels of the pool, [n].
        per_client: samples a client, all parts together; None takes the largest equal size.
        options: the partition's own, see `PARTITIONS[name].options`.

    Raises:
        UserError: unknown name or option, an amount the data cannot give, or a client without train or
            test samples, or without validation samples where val_fraction > 0.
    """
    if name not in PARTITIONS:
        raise UserError(f"data.partition.name={name}: unknown; allowed: {', '.join(PARTITIONS)}")
    kind = PARTITIONS[name]
    sizes = np.bincount(y, minlength=num_classes).astype(np.int64)
    counts = kind.counts(sizes, num_clients, per_client, _validated(kind, options), seed)
    parts = [_split(dealt, test_fraction, val_fraction) for dealt in _deal_samples(y, counts, seed)]
    for client, part in enumerate(parts):
        _refuse_empty(client, part, test_fraction, val_fraction, kind.remedy)
    return parts


def class_table(y: npt.NDArray[np.int64], parts: Sequence[ClientIndices], num_classes: int) -> IntArray:
    """Count every client's samples by class, all parts together: int64 [clients, classes]."""
    table = np.zeros((len(parts), num_classes), dtype=np.int64)
    for row, part in zip(table, parts, strict=True):
        row += np.bincount(y[np.concatenate([part.train, part.val, part.test])], minlength=num_classes)
    return table


def balanced_deal(num_clients: int, num_classes: int, per_client: int, seed: int) -> BoolArray:
    """Deal each client `per_client` different classes, every class equally often (within one).

    Each client in turn takes the classes with most cards left, ties by the seed. The numbers of cards
    left then never differ by more than one, so the deal cannot get stuck.

    Returns:
        [clients, classes], True where the client owns the class.
    """
    rng = numpy_stream(seed, "partition/deal")
    whole_decks, remainder = divmod(num_clients * per_client, num_classes)
    cards_left = np.full(num_classes, whole_decks)
    cards_left[rng.permutation(num_classes)[:remainder]] += 1
    owned = np.zeros((num_clients, num_classes), dtype=np.bool_)
    for client in range(num_clients):
        most_cards_first = np.lexsort((rng.random(num_classes), -cards_left))
        taken = most_cards_first[:per_client]
        owned[client, taken] = True
        cards_left[taken] -= 1
    return owned


def _classes_counts(
    sizes: IntArray, num_clients: int, per_client: int | None, options: ClassesOptions, seed: int
) -> IntArray:
    num_owned = options.classes_per_client
    if num_owned > len(sizes):
        raise UserError(
            f"data.partition.classes_per_client={num_owned}: the data has {len(sizes)} classes; "
            f"allowed: 1..{len(sizes)}"
        )
    owned = balanced_deal(num_clients, len(sizes), num_owned, seed)
    demand = owned.sum(axis=0)
    _refuse_shortage(sizes, demand, num_clients)
    wanted = demand > 0
    largest = int((sizes[wanted] // demand[wanted]).min())
    amount = largest
    if per_client is not None:
        _refuse_too_large(per_client, largest * num_owned)
        amount, rest = divmod(per_client, num_owned)
        if rest:
            raise UserError(
                f"data.per_client={per_client}: must be a multiple of "
                f"data.partition.classes_per_client={num_owned}, at most {largest * num_owned}"
            )
    return owned * np.int64(amount)


def _dominant_counts(
    sizes: IntArray, num_clients: int, per_client: int | None, options: DominantOptions, seed: int
) -> IntArray:
    num_classes, num_dominant = len(sizes), options.dominant_classes
    if num_dominant >= num_classes:
        raise UserError(
            f"data.partition.dominant_classes={num_dominant}: the data has {num_classes} classes; "
            f"allowed: 1..{num_classes - 1}"
        )
    dominant = balanced_deal(num_clients, num_classes, num_dominant, seed)

    def counts(amount: int) -> IntArray:
        return np.where(dominant, _round_half_up(options.ratio * amount), amount).astype(np.int64)

    def client_size(amount: int) -> int:
        return num_dominant * _round_half_up(options.ratio * amount) + (num_classes - num_dominant) * amount

    _refuse_shortage(sizes, counts(1).sum(axis=0), num_clients)
    demand = np.where(dominant, options.ratio, 1.0).sum(axis=0)
    # Rounding moves a class's demand by less than the step from one amount to the next.
    near = int((sizes / demand).min())
    largest = next(
        amount for amount in (near + 1, near, near - 1) if (counts(amount).sum(axis=0) <= sizes).all()
    )
    if per_client is None:
        return counts(largest)
    _refuse_too_large(per_client, client_size(largest))
    near = int(per_client / (num_dominant * options.ratio + num_classes - num_dominant))
    nearby = range(max(1, near - 1), near + 3)
    exact = [amount for amount in nearby if client_size(amount) == per_client]
    if not exact:
        below = [client_size(amount) for amount in nearby if client_size(amount) < per_client][-1:]
        above = [client_size(amount) for amount in nearby if client_size(amount) > per_client][:1]
        raise UserError(
            f"data.per_client={per_client}: {num_dominant} dominant and {num_classes - num_dominant} other "
            f"classes in the ratio {options.ratio:g} do not add up to it; nearest: "
            f"{' and '.join(map(str, below + above))}"
        )
    return counts(exact[0])


def _dirichlet_counts(
    sizes: IntArray, num_clients: int, per_client: int | None, options: DirichletOptions, seed: int
) -> IntArray:
    if per_client is not None:
        raise UserError(
            f"data.per_client={per_client}: the dirichlet partition draws the sizes itself; "
            "set data.per_client=null"
        )
    largest = int(sizes.sum()) // num_clients
    if options.min_samples > largest:
        raise UserError(
            f"data.partition.min_samples={options.min_samples}: {sizes.sum()} samples for "
            f"data.clients={num_clients} allow at most {largest}"
        )
    rng = numpy_stream(seed, "partition/dirichlet")
    for _ in range(DIRICHLET_ATTEMPTS):
        counts = _draw_dirichlet(sizes, num_clients, options.beta, rng)
        if counts is not None and counts.sum(axis=1).min() >= options.min_samples:
            return counts
    raise UserError(
        f"data.partition.beta={options.beta:g}: none of {DIRICHLET_ATTEMPTS} draws gave each of "
        f"{num_clients} clients data.partition.min_samples={options.min_samples} samples; raise "
        "data.partition.beta, or lower data.partition.min_samples or data.clients"
    )


def _draw_dirichlet(
    sizes: IntArray, num_clients: int, beta: float, rng: np.random.Generator
) -> IntArray | None:
    """Cut each class by a Dirichlet draw over the clients that hold less than the mean (MOON's generator).

    Returns None where the draw gives all those clients nothing.
    """
    mean_size = sizes.sum() / num_clients
    counts = np.zeros((num_clients, len(sizes)), dtype=np.int64)
    held = np.zeros(num_clients, dtype=np.int64)
    for label in np.flatnonzero(sizes):
        share = np.cumsum(rng.dirichlet(np.full(num_clients, beta)) * (held < mean_size))
        if not share[-1] > 0:
            return None
        ends = (share / share[-1] * sizes[label]).astype(np.int64)
        counts[:, label] = np.diff(ends, prepend=0)
        held += counts[:, label]
    return counts


def _iid_counts(
    sizes: IntArray, num_clients: int, per_client: int | None, options: IidOptions, seed: int
) -> IntArray:
    num_classes = len(sizes)
    largest = int(sizes.sum()) // num_clients
    if largest == 0:
        raise UserError(f"data.clients={num_clients}: the data has {sizes.sum()} samples; use fewer clients")
    size = largest if per_client is None else per_client
    _refuse_too_large(size, largest)
    labels = np.repeat(np.arange(num_classes), sizes)
    drawn = numpy_stream(seed, "partition/iid").permutation(labels)[: num_clients * size]
    cells = np.repeat(np.arange(num_clients), size) * num_classes + drawn
    return np.bincount(cells, minlength=num_clients * num_classes).reshape(num_clients, num_classes)


_GIVE_MORE = "raise data.per_client or lower data.clients, or change data.test_fraction or data.val_fraction"

PARTITIONS: dict[str, Partition] = {
    "classes": Partition(
        "each client owns a few classes, equally much of each (pFedLA non-IID_1)",
        ClassesOptions,
        _classes_counts,
        _GIVE_MORE,
    ),
    "dominant": Partition(
        "each client has all classes, a few of them in larger number (pFedLA non-IID_2)",
        DominantOptions,
        _dominant_counts,
        _GIVE_MORE,
    ),
    "dirichlet": Partition(
        "each class is cut by Dirichlet(beta) over the clients, of unequal sizes (MOON, pFedMB)",
        DirichletOptions,
        _dirichlet_counts,
        "raise data.partition.min_samples or data.partition.beta, or change data.test_fraction or "
        "data.val_fraction",
    ),
    "iid": Partition(
        "each client gets a random sample of the data, of equal size",
        IidOptions,
        _iid_counts,
        _GIVE_MORE,
    ),
}


def _validated(kind: Partition, options: Mapping[str, Any]) -> BaseModel:
    try:
        return kind.options(**options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = ", ".join(kind.options.model_fields) or "none"
        raise UserError(f"data.partition.{key}={first['input']}: {first['msg']}; options: {known}") from error


def _deal_samples(y: IntArray, counts: IntArray, seed: int) -> list[list[IntArray]]:
    """Deal the shuffled samples of each class in client order; return indices as [client][class]."""
    ends = np.cumsum(counts, axis=0)
    dealt: list[list[IntArray]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        shuffled = numpy_stream(seed, f"partition/class{label}").permutation(np.flatnonzero(y == label))
        for client, end in enumerate(ends[:, label]):
            dealt[client].append(shuffled[end - counts[client, label] : end])
    return dealt


def _split(dealt: list[IntArray], test_fraction: float, val_fraction: float) -> ClientIndices:
    train, val, test = [], [], []
    for samples in dealt:
        num_kept = _round_half_up((1 - test_fraction) * len(samples))
        num_train = num_kept - _round_half_up(val_fraction * num_kept)
        train.append(samples[:num_train])
        val.append(samples[num_train:num_kept])
        test.append(samples[num_kept:])
    return ClientIndices(np.concatenate(train), np.concatenate(val), np.concatenate(test))


def _round_half_up(value: float) -> int:
    """Round halves up; the inner rounding removes the noise of products such as 0.1 * 5."""
    return math.floor(round(value, 9) + 0.5)


def _refuse_shortage(sizes: IntArray, need: IntArray, num_clients: int) -> None:
    """Refuse where some class cannot give its clients even the smallest amounts."""
    short = np.flatnonzero(need > sizes)
    if len(short):
        label = short[0]
        raise UserError(
            f"data.clients={num_clients}: class {label} has {sizes[label]} samples and its clients need "
            f"at least {need[label]}; use fewer clients or more data"
        )


def _refuse_too_large(per_client: int, largest: int) -> None:
    if per_client > largest:
        raise UserError(
            f"data.per_client={per_client}: the data allows at most {largest} for disjoint clients"
        )


def _refuse_empty(
    client: int, part: ClientIndices, test_fraction: float, val_fraction: float, remedy: str
) -> None:
    total = len(part.train) + len(part.val) + len(part.test)
    for name, samples, needed in (
        ("training", part.train, True),
        ("validation", part.val, val_fraction > 0),
        ("test", part.test, True),
    ):
        if needed and len(samples) == 0:
            raise UserError(
                f"client {client} would have no {name} samples of its {total} with data.test_fraction="
                f"{test_fraction:g} and data.val_fraction={val_fraction:g}: {remedy}"
            )
