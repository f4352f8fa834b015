"""Tables of counts that say which client owns which classes.

Each `..._counts` returns int64 [clients, classes], how many samples of each class a client gets; a pure
function of (request, options). All may raise UserError.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.config.keys import PartitionOptions
from hpcfl.data.partition_request import (
    BoolArray,
    IntArray,
    Request,
    check_client_size,
    check_not_empty,
    check_shortage,
    check_too_large,
    check_too_many_classes,
    least_samples,
    round_half_up,
    warn_of_unused,
)
from hpcfl.errors import UserError
from hpcfl.randomness import numpy_stream


class ClassesOptions(PartitionOptions):
    """Options of `classes`, pFedLA's non-IID_1."""

    classes_per_client: int = Field(4, ge=1)
    """Classes a client owns (pFedLA: 4 of 10, 12 of CIFAR100's 100); all of them is balanced IID."""


class DominantOptions(PartitionOptions):
    """Options of `dominant`, pFedLA's non-IID_2."""

    dominant_classes: int = Field(2, ge=1)
    """Classes a client has more of (pFedLA: 2 of 10, 6 of CIFAR100's 100)."""
    ratio: float = Field(6.0, ge=1, allow_inf_nan=False)
    """Samples of a dominant class for one of another (pFedLA gives none); 1 is balanced IID."""


class NeighboursOptions(PartitionOptions):
    """Options of `neighbours`, pFedLA's figure 6."""

    classes_per_client: int = Field(4, ge=1)
    """Classes a client owns (pFedLA: 4)."""
    changed_classes: int = Field(1, ge=1)
    """Classes in which a client differs from the one before it (pFedLA: 1)."""


class TargetOptions(PartitionOptions):
    """Options of `target`, pFedLA's figure 5."""

    classes_per_client: int = Field(4, ge=1)
    """Classes a client owns (pFedLA: 4)."""
    similar_classes: int = Field(3, ge=0)
    """Classes that client 2 has in common with client 0, the target (pFedLA: 3)."""
    others_from: Literal["rest", "all"] = "rest"
    """What clients 3, 4, ... draw from: the classes that the target lacks, or all."""


class RandomClassesOptions(PartitionOptions):
    """Options of `random_classes`, pFedMB's."""

    classes_per_client: int = Field(2, ge=1)
    """Different classes that each client draws (pFedMB: 2)."""


class PathologicalOptions(PartitionOptions):
    """Options of `pathological`, PFLlib's `pat`."""

    classes_per_client: int = Field(2, ge=1)
    """Classes a client owns (PFLlib: 2 of 10, 10 of CIFAR100's 100)."""
    balanced: bool = False
    """Whether the owners of a class have equal shares of it, not random ones."""
    batch_size: int = Field(10, ge=1)
    """Sets the smallest share: a client has at least batch_size / data.test_fraction samples, or half the
    mean client if that is less, divided by the number of classes (PFLlib: 10)."""


def balanced_classes(num_clients: int, num_classes: int, per_client: int, seed: int) -> BoolArray:
    """Give each client `per_client` different classes, every class equally often (within one).

    As in a card game: each class has as many cards as clients will own it. Each client in turn takes one card
    of each of the classes with most cards left; the seed decides ties. The numbers of cards left never differ
    by more than one, so the last clients, too, find enough different classes.

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


def classes_counts(request: Request, options: ClassesOptions) -> IntArray:
    num_owned, num_classes = options.classes_per_client, request.num_classes
    check_too_many_classes("classes_per_client", num_owned, num_classes, num_classes)
    owned = balanced_classes(request.num_clients, num_classes, num_owned, request.seed)
    return _equal_amounts(owned, request, f"data.partition.classes_per_client={num_owned}")


def dominant_counts(request: Request, options: DominantOptions) -> IntArray:
    sizes, num_classes, num_dominant = request.sizes, request.num_classes, options.dominant_classes
    per_client = request.per_client
    check_too_many_classes("dominant_classes", num_dominant, num_classes, num_classes - 1)
    dominant = balanced_classes(request.num_clients, num_classes, num_dominant, request.seed)

    def counts(amount: int) -> IntArray:
        return np.where(dominant, round_half_up(options.ratio * amount), amount).astype(np.int64)

    def client_size(amount: int) -> int:
        return num_dominant * round_half_up(options.ratio * amount) + (num_classes - num_dominant) * amount

    check_shortage(sizes, counts(1).sum(axis=0), request.num_clients)
    demand = np.where(dominant, options.ratio, 1.0).sum(axis=0)
    # Rounding changes a class's demand by less than one step of the amount.
    near = int((sizes / demand).min())
    largest = next(
        amount for amount in (near + 1, near, near - 1) if (counts(amount).sum(axis=0) <= sizes).all()
    )
    if per_client is None:
        warn_of_unused(counts(largest), request)
        return counts(largest)
    check_too_large(per_client, client_size(largest))
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


def neighbours_counts(request: Request, options: NeighboursOptions) -> IntArray:
    """Give client i+1 the classes of client i but `changed_classes` (pFedLA, section 4.3 and figure 6).

    The classes form a ring, in an order drawn by the seed; each client owns a window of it, which moves by
    `changed_classes` per client. Inferred: the paper says only which neighbours share what. With 8 clients of
    4 classes of 10 the window passes the ring's start, and clients 0 and 7 have one class in common.
    """
    num_owned, step, num_classes = options.classes_per_client, options.changed_classes, request.num_classes
    check_too_many_classes("classes_per_client", num_owned, num_classes, num_classes - 1)
    largest = min(num_owned, num_classes - num_owned)
    if step > largest:
        raise UserError(
            f"data.partition.changed_classes={step}: invalid with {num_classes} classes and "
            f"data.partition.classes_per_client={num_owned}; allowed: 1..{largest}"
        )
    ring = numpy_stream(request.seed, "partition/neighbours").permutation(num_classes)
    places = np.arange(request.num_clients)[:, None] * step + np.arange(num_owned)
    owned = _owned(ring[places % num_classes], num_classes)
    return _equal_amounts(owned, request, f"data.partition.classes_per_client={num_owned}")


def target_counts(request: Request, options: TargetOptions) -> IntArray:
    """Make a target client, one with the same classes, a similar one and others (pFedLA, 4.3 and figure 5).

    Client 0, the target, and client 1, which the paper calls contrastive, own the same random classes. Client
    2 owns `similar_classes` of these classes, and otherwise classes that the target lacks. Clients 3, 4, ...
    draw their classes from those that the target lacks, or with `others_from=all` from all classes. Inferred:
    the ids, and the classes that clients 3, 4, ... draw from (the paper says "random" and "very different
    from the target client").
    """
    num_owned, num_similar, num_classes = (
        options.classes_per_client,
        options.similar_classes,
        request.num_classes,
    )
    if request.num_clients < 3:
        raise UserError(
            f"data.clients={request.num_clients}: the target partition has a target, one client of the same "
            "classes and a similar one; use 3 or more, such as pFedLA's 8"
        )
    only_rest = options.others_from == "rest" and request.num_clients > 3
    check_too_many_classes(
        "classes_per_client", num_owned, num_classes, num_classes // 2 if only_rest else num_classes
    )
    fewest = max(0, 2 * num_owned - num_classes)
    if not fewest <= num_similar <= num_owned:
        raise UserError(
            f"data.partition.similar_classes={num_similar}: invalid with {num_classes} classes and "
            f"data.partition.classes_per_client={num_owned}; allowed: {fewest}..{num_owned}"
        )
    rng = numpy_stream(request.seed, "partition/target")
    shuffled = rng.permutation(num_classes)
    target, rest = shuffled[:num_owned], shuffled[num_owned:]
    similar = np.concatenate([target[:num_similar], rest[: num_owned - num_similar]])
    pool = shuffled if options.others_from == "all" else rest
    others = [rng.permutation(pool)[:num_owned] for _ in range(request.num_clients - 3)]
    owned = _owned(np.array([target, target, similar, *others]), num_classes)
    return _equal_amounts(owned, request, f"data.partition.classes_per_client={num_owned}")


def random_classes_counts(request: Request, options: RandomClassesOptions) -> IntArray:
    """Let each client draw its classes, and divide each class equally among those who drew it (pFedMB, 5.1).

    That the shares are equal is inferred. A class that nobody draws stays unused, and so do the few samples
    of a class that its owners cannot divide.
    """
    check_client_size(request.per_client, "random_classes")
    num_owned, num_classes = options.classes_per_client, request.num_classes
    check_too_many_classes("classes_per_client", num_owned, num_classes, num_classes)
    rng = numpy_stream(request.seed, "partition/random_classes")
    drawn = [rng.permutation(num_classes)[:num_owned] for _ in range(request.num_clients)]
    owned = _owned(np.array(drawn), num_classes)
    demand = owned.sum(axis=0)
    check_shortage(request.sizes, demand, request.num_clients)
    return owned * (request.sizes // np.maximum(demand, 1))


def pairs_counts(request: Request, options: PartitionOptions) -> IntArray:
    """Divide the classes among pairs of clients, half of each to either (pFedMB, section 5.2).

    Pair p is clients 2p and 2p+1; with 10 clients and 10 classes it owns classes 2p and 2p+1.
    """
    num_pairs, odd = divmod(request.num_clients, 2)
    if odd or request.num_classes % num_pairs:
        fitting = [
            2 * pairs for pairs in range(1, request.num_classes + 1) if not request.num_classes % pairs
        ]
        raise UserError(
            f"data.clients={request.num_clients}: pairs cannot divide {request.num_classes} classes; "
            f"allowed: {', '.join(map(str, fitting))}"
        )
    num_owned = request.num_classes // num_pairs
    pair = np.arange(request.num_clients) // 2
    owned = _owned(pair[:, None] * num_owned + np.arange(num_owned), request.num_classes)
    return _equal_amounts(owned, request, f"the {num_owned} classes of a pair")


def pathological_counts(request: Request, options: PathologicalOptions) -> IntArray:
    """Give groups of clients in order the same few classes, in shares of random size (PFLlib's `pat`).

    Each class in turn goes to the first ceil(clients / classes * classes_per_client) clients that are not yet
    full, so the clients of a group have identical label sets. Where that does not divide evenly the last
    group's clients own fewer classes, or the last classes stay unused.
    """
    check_client_size(request.per_client, "pathological")
    num_owned, num_classes = options.classes_per_client, request.num_classes
    check_too_many_classes("classes_per_client", num_owned, num_classes, num_classes)
    rng = numpy_stream(request.seed, "partition/pathological")
    least = least_samples(request, options.batch_size) / num_classes
    num_owners = math.ceil(round(request.num_clients / num_classes * num_owned, 9))
    counts = np.zeros((request.num_clients, num_classes), dtype=np.int64)
    classes_left = np.full(request.num_clients, num_owned)
    for label, size in enumerate(request.sizes.tolist()):
        owners = np.flatnonzero(classes_left)[:num_owners]
        if len(owners) == 0:
            break
        mean = size / len(owners)
        low, high = int(max(mean / 10, least)), int(mean)
        if options.balanced:
            low, high = high, high + 1
        check_not_empty(label, size, request.num_clients)
        if low >= high or mean < 1:
            raise UserError(
                f"data.clients={request.num_clients}: class {label} has {size} samples for {len(owners)} "
                f"clients of at least {low + 1}; use fewer clients or data.partition.classes_per_client, "
                "or a smaller data.partition.batch_size"
            )
        shares = rng.integers(low, high, len(owners) - 1)
        counts[owners, label] = [*shares, size - shares.sum()]
        classes_left[owners] -= 1
    return counts


def _owned(labels: IntArray, num_classes: int) -> BoolArray:
    """Turn each client's classes, [clients, owned], into [clients, classes], True where it owns the class."""
    owned = np.zeros((len(labels), num_classes), dtype=np.bool_)
    np.put_along_axis(owned, labels, True, axis=1)
    return owned


def _equal_amounts(owned: BoolArray, request: Request, multiple_of: str) -> IntArray:
    """Give every client equally much of each class it owns; all own the same number of classes.

    Args:
        multiple_of: the name of that number in error messages.
    """
    demand = owned.sum(axis=0)
    check_shortage(request.sizes, demand, request.num_clients)
    wanted = demand > 0
    amount = int((request.sizes[wanted] // demand[wanted]).min())
    if request.per_client is not None:
        num_owned = int(owned[0].sum())
        largest = amount * num_owned
        check_too_large(request.per_client, largest)
        amount, rest = divmod(request.per_client, num_owned)
        if rest:
            raise UserError(
                f"data.per_client={request.per_client}: must be a multiple of {multiple_of}, "
                f"at most {largest}"
            )
    counts = owned * np.int64(amount)
    warn_of_unused(counts, request)
    return counts
