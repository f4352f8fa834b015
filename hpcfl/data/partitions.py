"""Which client gets which samples.

A partition is a table of counts, [clients, classes], and the rest is common to all: the shuffled samples
of each class are assigned in client order, so that two clients never share a sample. Stratified partitions
are split inside every (client, class), so that a client's train and test parts have the same class
proportions; the others, as in PFLlib and FedEM, shuffle and split what a client has. `given` takes the
source's own clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcfl.config.keys import PartitionOptions
from hpcfl.data import partition_classes, partition_draws
from hpcfl.data.partition_request import BoolArray, IntArray, Request, Split, round_half_up
from hpcfl.errors import UserError
from hpcfl.randomness import numpy_stream, stream_seed


@dataclass(frozen=True, eq=False)
class ClientIndices:
    """One client's samples, as int64 indices into the pool."""

    train: IntArray
    val: IntArray
    test: IntArray


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


def partition(
    name: str,
    options: PartitionOptions,
    y: IntArray,
    request: Request,
    names: Sequence[str] = (),
) -> list[ClientIndices]:
    """Give each client its train, validation and test samples; a pure function of its arguments.

    The first (1 - test_fraction) of the samples of a client, or of a (client, class) in a stratified
    partition, are for training, of which the last val_fraction are for validation; both numbers are
    rounded, halves up.

    Args:
        name: one whose `counts` are not None.
        options: the partition's own, see `PARTITIONS[name].options`.
        y: labels of the pool, [n].
        names: how errors call the clients; default: their numbers.

    Raises:
        UserError: an amount the data cannot give, or a client without train or test samples, or without
            validation samples where val_fraction > 0.
    """
    kind = PARTITIONS[name]
    assert kind.counts is not None
    counts = kind.counts(request, options)
    _check_wrong_table(name, counts, request)
    samples = _assign_samples(y, counts, request.seed)
    if not kind.stratified:
        samples = [[_shuffled(np.concatenate(arrays), request.seed, i)] for i, arrays in enumerate(samples)]
    parts = [_split(arrays, request) for arrays in samples]
    _check_empty(parts, request, kind.remedy, names)
    return parts


def partition_in_domains(
    name: str,
    options: PartitionOptions,
    y: IntArray,
    request: Request,
    domain: IntArray,
    names: Sequence[str],
) -> list[ClientIndices]:
    """Partition each domain's samples among its own clients: client c belongs to domain c mod D.

    Each domain calls `partition` with a seed of its own.

    Args:
        domain: of each sample, 0..D-1 [n].
        names: of the domains [D].

    Raises:
        UserError: as `partition`, or a domain has no client.
    """
    num_clients = request.num_clients
    if num_clients < len(names):
        raise UserError(
            f"data.clients={num_clients}: the source has {len(names)} domains, and each needs a client; set "
            f"data.clients={len(names)} or more"
        )
    parts: dict[int, ClientIndices] = {}
    for number, of_domain in enumerate(names):
        samples = np.flatnonzero(domain == number)
        clients = range(number, num_clients, len(names))
        own = replace(
            request,
            sizes=class_sizes(y[samples], request.num_classes),
            num_clients=len(clients),
            seed=stream_seed(request.seed, "partition/domain", client=number),
        )
        try:
            found = partition(name, options, y[samples], own, [*map(str, clients)])
        except UserError as error:
            raise UserError(f"domain {of_domain} with {len(clients)} clients: {error}") from error
        for client, part in zip(clients, found, strict=True):
            parts[client] = ClientIndices(samples[part.train], samples[part.val], samples[part.test])
    return [parts[client] for client in range(num_clients)]


def partition_given(
    name: str,
    owner: IntArray | None,
    is_test: BoolArray | None,
    num_clients: int | None,
    per_client: int | None,
    split: Split,
    names: Sequence[str] = (),
) -> list[ClientIndices]:
    """Take the source's clients, all or a seeded draw; a client's split depends on no other client.

    Args:
        name: one whose `counts` are None.
        owner: the source's own client of each sample, [n].
        is_test: the source's own split, [n], in place of test_fraction.
        num_clients: None takes all that the source has.
        per_client: must be None.
        names: those of the source's clients; default: their numbers.

    Raises:
        UserError: the source has no clients, or too few, or as `partition`.
    """
    if owner is None:
        others = ", ".join(name for name, kind in PARTITIONS.items() if kind.counts is not None)
        raise UserError(
            "data.partition.name=given: this data.source has no clients (an npz file may have an array "
            "client, that of each sample; a CSV file a column data.client_column=COLUMN); allowed: "
            f"{others}"
        )
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
    of_drawn = [f"{names[client] if names else client} of the source" for client in np.sort(drawn).tolist()]
    _check_empty(parts, split, PARTITIONS[name].remedy, of_drawn)
    return parts


def class_sizes(y: IntArray, num_classes: int) -> IntArray:
    """Count samples by class: int64 [classes]."""
    return np.bincount(y, minlength=num_classes).astype(np.int64)


def class_table(y: IntArray, parts: Sequence[ClientIndices], num_classes: int) -> IntArray:
    """Count every client's samples by class, all parts together: int64 [clients, classes]."""
    return count_classes(
        y, [np.concatenate([part.train, part.val, part.test]) for part in parts], num_classes
    )


def count_classes(y: IntArray, samples: Sequence[IntArray], num_classes: int) -> IntArray:
    """Count samples by class for each of several lists of indices: int64 [lists, classes]."""
    table = np.zeros((len(samples), num_classes), dtype=np.int64)
    for row, indices in zip(table, samples, strict=True):
        row += class_sizes(y[indices], num_classes)
    return table


_SPLIT = "change data.test_fraction or data.val_fraction"
_GIVE_MORE = (
    "raise data.per_client (null is the most), lower data.clients, choose another data.partition.name, or "
    f"{_SPLIT}"
)
_RAISE_SMALLEST = f"raise data.partition.min_samples or data.partition.beta, or {_SPLIT}"
_FEWER_CLIENTS = f"lower data.clients, or {_SPLIT}"

PARTITIONS: dict[str, Partition] = {
    "classes": Partition(
        "each client owns a few classes, equally much of each (pFedLA non-IID_1)",
        partition_classes.ClassesOptions,
        partition_classes.classes_counts,
        True,
        _GIVE_MORE,
    ),
    "dominant": Partition(
        "each client has all classes, a few of them in larger number (pFedLA non-IID_2)",
        partition_classes.DominantOptions,
        partition_classes.dominant_counts,
        True,
        _GIVE_MORE,
    ),
    "neighbours": Partition(
        "each client owns all but one of the classes of the client before it (pFedLA, figure 6: 8 clients)",
        partition_classes.NeighboursOptions,
        partition_classes.neighbours_counts,
        True,
        _GIVE_MORE,
    ),
    "target": Partition(
        "a target client, one of the same classes, a similar one, others (pFedLA, figure 5: 8 clients)",
        partition_classes.TargetOptions,
        partition_classes.target_counts,
        True,
        _GIVE_MORE,
    ),
    "dirichlet": Partition(
        "each class is cut by Dirichlet(beta) over the clients that hold less than the mean so far, of "
        "unequal sizes (MOON, pFedMB: the same proportions in train, val and test)",
        partition_draws.DirichletOptions,
        partition_draws.dirichlet_counts,
        True,
        _RAISE_SMALLEST,
    ),
    "random_classes": Partition(
        "each client draws two classes, and those who drew a class share it equally (pFedMB)",
        partition_classes.RandomClassesOptions,
        partition_classes.random_classes_counts,
        True,
        _FEWER_CLIENTS,
    ),
    "pairs": Partition(
        "clients 2p and 2p+1 own the same classes, half of each (pFedMB's toy: 10 clients, 10 classes)",
        PartitionOptions,
        partition_classes.pairs_counts,
        True,
        _GIVE_MORE,
    ),
    "pathological": Partition(
        "groups of clients own the same two classes, in random shares (PFLlib's pat, FedAFK); not stratified",
        partition_classes.PathologicalOptions,
        partition_classes.pathological_counts,
        False,
        f"raise data.partition.batch_size, or {_FEWER_CLIENTS}",
    ),
    "dirichlet_pfllib": Partition(
        "as dirichlet, with PFLlib's beta and smallest client (PFLlib's dir, FedAFK); not stratified",
        partition_draws.DirichletPfllibOptions,
        partition_draws.dirichlet_pfllib_counts,
        False,
        _RAISE_SMALLEST,
    ),
    "mixture": Partition(
        "groups of classes are cut by Dirichlet(beta) over the clients (FedEM, FedMN); not stratified",
        partition_draws.MixtureOptions,
        partition_draws.mixture_counts,
        False,
        _RAISE_SMALLEST,
    ),
    "pachinko": Partition(
        "each client has its own mix of coarse and fine classes (FedEM's CIFAR-100, FedMN); not stratified",
        partition_draws.PachinkoOptions,
        partition_draws.pachinko_counts,
        False,
        _GIVE_MORE,
    ),
    "iid": Partition(
        "each client gets a random sample of the data, of equal size",
        PartitionOptions,
        partition_draws.iid_counts,
        True,
        _GIVE_MORE,
    ),
    "given": Partition(
        "the clients and, where it has one, the train and test split of the source itself; not stratified",
        PartitionOptions,
        None,
        False,
        f"{_SPLIT}, or leave such clients out of the source",
    ),
}


def _check_wrong_table(name: str, counts: IntArray, request: Request) -> None:
    """Raise UserError unless a table of counts is valid; a user's own partition may return anything."""
    place, shape = f"data.partition.name={name}: its table", (request.num_clients, request.num_classes)
    if not isinstance(counts, np.ndarray) or counts.dtype.kind != "i" or counts.shape != shape:
        found = f"{counts.dtype} {counts.shape}" if isinstance(counts, np.ndarray) else type(counts).__name__
        raise UserError(f"{place} is {found}; it must be int64 [clients, classes], here {shape}")
    if counts.min() < 0:
        raise UserError(f"{place} has the count {counts.min()}; allowed: 0 or more")
    totals = counts.sum(axis=0)
    for label in np.flatnonzero(totals > request.sizes)[:1]:
        raise UserError(
            f"{place} has {totals[label]} samples of class {label}; allowed: up to {request.sizes[label]}"
        )


def _assign_samples(y: IntArray, counts: IntArray, seed: int) -> list[list[IntArray]]:
    """Assign the shuffled samples of each class in client order; return indices as [client][class]."""
    ends = np.cumsum(counts, axis=0)
    assigned: list[list[IntArray]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        shuffled = numpy_stream(seed, f"partition/class{label}").permutation(np.flatnonzero(y == label))
        for client, end in enumerate(ends[:, label]):
            assigned[client].append(shuffled[end - counts[client, label] : end])
    return assigned


def _shuffled(samples: IntArray, seed: int, client: int) -> IntArray:
    return numpy_stream(seed, "partition/split", client=client).permutation(samples)


def _split(arrays: Sequence[IntArray], split: Split) -> ClientIndices:
    """Split each of the arrays in proportion, and join the parts."""
    train, val, test = [], [], []
    for samples in arrays:
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


def _check_empty(
    parts: Sequence[ClientIndices], split: Split, remedy: str, names: Sequence[str] = ()
) -> None:
    for client, part in enumerate(parts):
        total = len(part.train) + len(part.val) + len(part.test)
        for name, samples, needed in (
            ("training", part.train, True),
            ("validation", part.val, split.val_fraction > 0),
            ("test", part.test, True),
        ):
            if needed and len(samples) == 0:
                raise UserError(
                    f"client {names[client] if names else client} would have no {name} samples of its "
                    f"{total} with data.test_fraction={split.test_fraction:g} and data.val_fraction="
                    f"{split.val_fraction:g}: {remedy}"
                )
