"""Which client gets which samples.

A partition is a table of counts, [clients, classes], and the rest is common to all: the shuffled samples
of each class are assigned in client order, so that two clients never share a sample. Stratified partitions
are split inside every (client, class), so that a client's train and test parts have the same class
proportions; the others, as in PFLlib and FedEM, shuffle and split what a client has. `given` takes the
source's own clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from hpcfl.config.keys import PartitionOptions
from hpcfl.config.own_code import run_own_file
from hpcfl.data.partition_classes import (
    ClassesOptions,
    DominantOptions,
    NeighboursOptions,
    PairsOptions,
    PathologicalOptions,
    RandomClassesOptions,
    TargetOptions,
    classes_counts,
    dominant_counts,
    neighbours_counts,
    pairs_counts,
    pathological_counts,
    random_classes_counts,
    target_counts,
)
from hpcfl.data.partition_draws import (
    DirichletOptions,
    DirichletPfllibOptions,
    IidOptions,
    MixtureOptions,
    PachinkoOptions,
    dirichlet_counts,
    dirichlet_pfllib_counts,
    iid_counts,
    mixture_counts,
    pachinko_counts,
)
from hpcfl.data.partition_request import BoolArray, IntArray, Request, round_half_up
from hpcfl.errors import UserError
from hpcfl.randomness import numpy_stream, stream_seed


@dataclass(frozen=True, eq=False)
class ClientIndices:
    """One client's samples, as int64 indices into the pool."""

    train: IntArray
    val: IntArray
    test: IntArray


class GivenOptions(PartitionOptions):
    """Options of `given`: none."""


@dataclass(frozen=True)
class Partition:
    """How to draw the table of counts, and how to split.

    Attributes:
        counts: (request, options) -> int64 [clients, classes]; None if the source has its own clients.
        stratified: whether the train and test parts of a client have the same class proportions.
        remedy: what to change when a client's share is too small to be split.
    """

    description: str
    options: type[PartitionOptions]
    counts: Callable[[Request, Any], IntArray] | None
    stratified: bool
    remedy: str


@dataclass(frozen=True)
class Split:
    """How a client's samples are split into parts."""

    test_fraction: float
    val_fraction: float
    seed: int


def partition(
    name: str,
    y: IntArray,
    num_classes: int,
    *,
    num_clients: int | None,
    per_client: int | None,
    test_fraction: float,
    val_fraction: float,
    seed: int,
    options: PartitionOptions | Mapping[str, Any],
    owner: IntArray | None = None,
    is_test: BoolArray | None = None,
) -> list[ClientIndices]:
    """Give each client its train, validation and test samples; a pure function of its arguments.

    The first (1 - test_fraction) of the samples of a client, or of a (client, class) in a stratified
    partition, are for training, of which the last val_fraction are for validation; both numbers are
    rounded, halves up.

    Args:
        y: labels of the pool, [n].
        num_clients: None takes all that the source has; only for `given`.
        per_client: samples a client, all parts together; None takes the largest equal size.
        options: the partition's own, validated or not yet, see `PARTITIONS[name].options`.
        owner: the source's own client of each sample, [n]; only for `given`.
        is_test: the source's own split, [n]; only `given` asks, which then ignores test_fraction.

    Raises:
        UserError: unknown name or option, an amount the data cannot give, or a client without train or
            test samples, or without validation samples where val_fraction > 0.
    """
    if name not in PARTITIONS:
        raise UserError(f"data.partition.name={name}: unknown; allowed: {', '.join(PARTITIONS)}")
    if num_clients is not None and num_clients > MAX_CLIENTS:
        raise UserError(f"data.clients={num_clients} are more than {MAX_CLIENTS}; lower it")
    kind = PARTITIONS[name]
    chosen = options if isinstance(options, PartitionOptions) else _validated(kind, options)
    split = Split(test_fraction, val_fraction, seed)
    if kind.counts is None:
        parts = _given(owner, is_test, num_clients, per_client, split)
    else:
        assert num_clients is not None
        sizes = np.bincount(y, minlength=num_classes).astype(np.int64)
        request = Request(sizes, num_clients, per_client, test_fraction, seed)
        counts = kind.counts(request, chosen)
        _check_wrong_table(name, counts, request)
        dealt = _assign_samples(y, counts, seed)
        if not kind.stratified:
            dealt = [[_shuffled(np.concatenate(by_class), seed, i)] for i, by_class in enumerate(dealt)]
        parts = [_split(samples, split) for samples in dealt]
    for client, part in enumerate(parts):
        _check_empty(client, part, split, kind.remedy)
    return parts


def partition_in_domains(
    name: str,
    y: IntArray,
    num_classes: int,
    *,
    domain: IntArray,
    names: Sequence[str],
    num_clients: int,
    seed: int,
    **others: Any,
) -> list[ClientIndices]:
    """Partition each domain's samples among its own clients: client c belongs to domain c mod D.

    Args:
        domain: of each sample, 0..D-1 [n].
        names: of the domains [D].
        others: as of `partition`, which each domain calls with a seed of its own.

    Raises:
        UserError: as `partition`, or a domain has no client.
    """
    if num_clients < len(names):
        raise UserError(
            f"data.clients={num_clients}: the source has {len(names)} domains, and each needs a client; set "
            f"data.clients={len(names)} or more"
        )
    parts: dict[int, ClientIndices] = {}
    for number, of_domain in enumerate(names):
        samples = np.flatnonzero(domain == number)
        clients = range(number, num_clients, len(names))
        own_seed = stream_seed(seed, "partition/domain", client=number)
        try:
            found = partition(
                name, y[samples], num_classes, num_clients=len(clients), seed=own_seed, **others
            )
        except UserError as error:
            raise UserError(f"domain {of_domain} with {len(clients)} clients: {error}") from error
        for client, part in zip(clients, found, strict=True):
            parts[client] = ClientIndices(samples[part.train], samples[part.val], samples[part.test])
    return [parts[client] for client in range(num_clients)]


def class_table(y: IntArray, parts: Sequence[ClientIndices], num_classes: int) -> IntArray:
    """Count every client's samples by class, all parts together: int64 [clients, classes]."""
    return count_classes(
        y, [np.concatenate([part.train, part.val, part.test]) for part in parts], num_classes
    )


def count_classes(y: IntArray, samples: Sequence[IntArray], num_classes: int) -> IntArray:
    """Count samples by class for each of several lists of indices: int64 [lists, classes]."""
    table = np.zeros((len(samples), num_classes), dtype=np.int64)
    for row, indices in zip(table, samples, strict=True):
        row += np.bincount(y[indices], minlength=num_classes)
    return table


_SPLIT = "change data.test_fraction or data.val_fraction"
_GIVE_MORE = f"raise data.per_client or lower data.clients, or {_SPLIT}"
_RAISE_SMALLEST = f"raise data.partition.min_samples or data.partition.beta, or {_SPLIT}"
_FEWER_CLIENTS = f"lower data.clients, or {_SPLIT}"

PARTITIONS: dict[str, Partition] = {
    "classes": Partition(
        "each client owns a few classes, equally much of each (pFedLA non-IID_1)",
        ClassesOptions,
        classes_counts,
        True,
        _GIVE_MORE,
    ),
    "dominant": Partition(
        "each client has all classes, a few of them in larger number (pFedLA non-IID_2)",
        DominantOptions,
        dominant_counts,
        True,
        _GIVE_MORE,
    ),
    "neighbours": Partition(
        "each client owns all but one of the classes of the client before it (pFedLA, figure 6: 8 clients)",
        NeighboursOptions,
        neighbours_counts,
        True,
        _GIVE_MORE,
    ),
    "target": Partition(
        "a target client, one of the same classes, a similar one, others (pFedLA, figure 5: 8 clients)",
        TargetOptions,
        target_counts,
        True,
        _GIVE_MORE,
    ),
    "dirichlet": Partition(
        "each class is cut by Dirichlet(beta) over the clients, of unequal sizes (MOON, pFedMB: the same "
        "proportions in train, val and test)",
        DirichletOptions,
        dirichlet_counts,
        True,
        _RAISE_SMALLEST,
    ),
    "random_classes": Partition(
        "each client draws two classes, and those who drew a class share it equally (pFedMB)",
        RandomClassesOptions,
        random_classes_counts,
        True,
        _FEWER_CLIENTS,
    ),
    "pairs": Partition(
        "clients 2p and 2p+1 own the same classes, half of each (pFedMB's toy: 10 clients, 10 classes)",
        PairsOptions,
        pairs_counts,
        True,
        _GIVE_MORE,
    ),
    "pathological": Partition(
        "groups of clients own the same two classes, in random shares (PFLlib's pat, FedAFK); not stratified",
        PathologicalOptions,
        pathological_counts,
        False,
        f"raise data.partition.batch_size, or {_FEWER_CLIENTS}",
    ),
    "dirichlet_pfllib": Partition(
        "as dirichlet, with PFLlib's beta and smallest client (PFLlib's dir, FedAFK); not stratified",
        DirichletPfllibOptions,
        dirichlet_pfllib_counts,
        False,
        _RAISE_SMALLEST,
    ),
    "mixture": Partition(
        "groups of classes are cut by Dirichlet(beta) over the clients (FedEM, FedMN); not stratified",
        MixtureOptions,
        mixture_counts,
        False,
        _RAISE_SMALLEST,
    ),
    "pachinko": Partition(
        "each client has its own mix of coarse and fine classes (FedEM's CIFAR-100, FedMN); not stratified",
        PachinkoOptions,
        pachinko_counts,
        False,
        _GIVE_MORE,
    ),
    "iid": Partition(
        "each client gets a random sample of the data, of equal size",
        IidOptions,
        iid_counts,
        True,
        _GIVE_MORE,
    ),
    "given": Partition(
        "the clients that the source itself has, and its train and test split where it has one",
        GivenOptions,
        None,
        False,
        f"{_SPLIT}, or leave such clients out of the source",
    ),
}


MAX_CLIENTS = 10_000_000
"""Above this, memory would fail before the check of the number of samples."""


def add_own_partition(path: str, expected: str | None = None) -> tuple[str, str]:
    """Add the one Partition that a user's Python file makes, under the file's name.

    Returns the name and a digest of the file; raises UserError (see `run_own_file`).
    """
    file = run_own_file("data.partition.path", path, expected)
    kind = file.only(lambda value: isinstance(value, Partition), "instances of Partition")
    file.check_options(kind.options, PartitionOptions)
    file.add_to(PARTITIONS, file.name, kind)
    return file.name, file.code


def _validated(kind: Partition, options: Mapping[str, Any]) -> PartitionOptions:
    try:
        return kind.options(**options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = ", ".join(kind.options.model_fields) or "none"
        raise UserError(f"data.partition.{key}={first['input']}: {first['msg']}; options: {known}") from error


def _check_wrong_table(name: str, counts: IntArray, request: Request) -> None:
    """Raise UserError unless a table of counts is valid; a user's own partition may return anything."""
    place, shape = f"data.partition.name={name}: its table", (request.num_clients, request.num_classes)
    if not isinstance(counts, np.ndarray) or counts.dtype.kind != "i" or counts.shape != shape:
        found = f"{counts.dtype} {counts.shape}" if isinstance(counts, np.ndarray) else type(counts).__name__
        raise UserError(f"{place} is {found}; it must be int64 [clients, classes], here {shape}")
    if counts.min() < 0:
        raise UserError(f"{place} has the count {counts.min()}; allowed: 0 or more")
    dealt = counts.sum(axis=0)
    for label in np.flatnonzero(dealt > request.sizes)[:1]:
        raise UserError(
            f"{place} deals {dealt[label]} samples of class {label}; allowed: up to {request.sizes[label]}"
        )


def _assign_samples(y: IntArray, counts: IntArray, seed: int) -> list[list[IntArray]]:
    """Assign the shuffled samples of each class in client order; return indices as [client][class]."""
    ends = np.cumsum(counts, axis=0)
    dealt: list[list[IntArray]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        shuffled = numpy_stream(seed, f"partition/class{label}").permutation(np.flatnonzero(y == label))
        for client, end in enumerate(ends[:, label]):
            dealt[client].append(shuffled[end - counts[client, label] : end])
    return dealt


def _given(
    owner: IntArray | None,
    is_test: BoolArray | None,
    num_clients: int | None,
    per_client: int | None,
    split: Split,
) -> list[ClientIndices]:
    """Take the source's clients, all or a seeded draw; a client's split depends on no other client."""
    if owner is None:
        others = ", ".join(name for name, kind in PARTITIONS.items() if kind.counts is not None)
        raise UserError(f"data.partition.name=given: this data.source has no clients; allowed: {others}")
    if per_client is not None:
        raise UserError(
            f"data.per_client={per_client}: the given partition takes what each client of the source has; "
            "set data.per_client=null"
        )
    sizes = np.bincount(owner)
    if num_clients is None:
        num_clients = len(sizes)
    if num_clients > len(sizes):
        raise UserError(
            f"data.clients={num_clients}: the source has {len(sizes)} clients; "
            f"allowed: 1..{len(sizes)}, or null for all"
        )
    drawn = numpy_stream(split.seed, "partition/given").permutation(len(sizes))[:num_clients]
    held = np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])
    parts = []
    for client in np.sort(drawn).tolist():
        samples = _shuffled(held[client], split.seed, client)
        if is_test is None:
            parts.append(_split([samples], split))
        else:
            test = is_test[samples]
            parts.append(ClientIndices(*_cut_validation(samples[~test], split), samples[test]))
    return parts


def _shuffled(samples: IntArray, seed: int, client: int) -> IntArray:
    return numpy_stream(seed, "partition/split", client=client).permutation(samples)


def _split(dealt: Sequence[IntArray], split: Split) -> ClientIndices:
    """Split each of the arrays in proportion, and join the parts."""
    train, val, test = [], [], []
    for samples in dealt:
        num_kept = round_half_up((1 - split.test_fraction) * len(samples))
        trained, validated = _cut_validation(samples[:num_kept], split)
        train.append(trained)
        val.append(validated)
        test.append(samples[num_kept:])
    return ClientIndices(np.concatenate(train), np.concatenate(val), np.concatenate(test))


def _cut_validation(kept: IntArray, split: Split) -> tuple[IntArray, IntArray]:
    """Take the validation samples from the end of the training samples."""
    num_train = len(kept) - round_half_up(split.val_fraction * len(kept))
    return kept[:num_train], kept[num_train:]


def _check_empty(client: int, part: ClientIndices, split: Split, remedy: str) -> None:
    total = len(part.train) + len(part.val) + len(part.test)
    for name, samples, needed in (
        ("training", part.train, True),
        ("validation", part.val, split.val_fraction > 0),
        ("test", part.test, True),
    ):
        if needed and len(samples) == 0:
            raise UserError(
                f"client {client} would have no {name} samples of its {total} with data.test_fraction="
                f"{split.test_fraction:g} and data.val_fraction={split.val_fraction:g}: {remedy}"
            )
