"""Tables of counts that are drawn: uniformly, or from Dirichlet distributions.

Each `..._counts` returns int64 [clients, classes], how many samples of each class a client gets; a pure
function of (request, options). All may raise UserError.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pydantic import Field

from hpcfl.config.keys import PartitionOptions
from hpcfl.data.partition_request import (
    IntArray,
    Request,
    check_client_size,
    check_too_many_classes,
    equal_size,
    least_samples,
)
from hpcfl.errors import UserError
from hpcfl.randomness import numpy_stream

ATTEMPTS = 2000

SMALLEST_WEIGHT = float(np.finfo(np.float64).tiny)

# fmt: off
CIFAR100_COARSE = np.array([
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11,
    6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5,
    5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17,
    10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13,
    16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
])
# fmt: on
"""The coarse label of each of CIFAR-100's fine labels; both are numbered in the order of their names."""


class DirichletOptions(PartitionOptions):
    """Options of `dirichlet`, MOON's generator, which pFedMB uses."""

    beta: float = Field(0.5, gt=0, allow_inf_nan=False)
    """Concentration of the draw (MOON: 0.5): the smaller, the fewer classes a client has."""
    min_samples: int = Field(10, ge=1)
    """Samples of the smallest client allowed (MOON: 10); clients are drawn anew until all have them."""


class DirichletPfllibOptions(PartitionOptions):
    """Options of `dirichlet_pfllib`, PFLlib's `dir`."""

    beta: float = Field(0.1, gt=0, allow_inf_nan=False)
    """Concentration of the draw (PFLlib: 0.1): the smaller, the fewer classes a client has."""
    batch_size: int = Field(10, ge=1)
    """Sets the smallest client: batch_size / data.test_fraction (PFLlib: 10)."""
    min_samples: int | None = Field(None, ge=1)
    """Samples of the smallest client allowed; default: batch_size / data.test_fraction, at most half of the
    mean client (PFLlib)."""


class MixtureOptions(PartitionOptions):
    """Options of `mixture`, FedEM's."""

    components: int = Field(3, ge=-1)
    """Number of groups of classes (FedEM: 3 of 10); at -1 each class is its own (FedEM's EMNIST)."""
    beta: float = Field(0.4, gt=0, allow_inf_nan=False)
    """Concentration of the draw (FedEM: 0.4): the smaller, the fewer groups a client has."""
    min_samples: int = Field(10, ge=1)
    """Samples of the smallest client allowed (FedEM does not redraw)."""


class PachinkoOptions(PartitionOptions):
    """Options of `pachinko`, FedEM's of CIFAR-100."""

    coarse_beta: float = Field(0.4, gt=0, allow_inf_nan=False)
    """Concentration over the coarse classes (FedEM: 0.4)."""
    fine_beta: float = Field(10.0, gt=0, allow_inf_nan=False)
    """Concentration over the fine classes of a coarse one (FedEM: 10)."""
    coarse_classes: int | None = Field(None, ge=1)
    """Number of coarse classes, each of consecutive fine ones; default: CIFAR-100's own 20."""


def dirichlet_counts(request: Request, options: DirichletOptions) -> IntArray:
    """Cut each class by a Dirichlet draw over the clients (MOON's generator)."""
    check_client_size(request.per_client, "dirichlet")
    return _dirichlet_by_class(request, options.beta, options.min_samples)


def dirichlet_pfllib_counts(request: Request, options: DirichletPfllibOptions) -> IntArray:
    """Draw with MOON's generator, which PFLlib uses too, and with PFLlib's fewest samples of a client."""
    check_client_size(request.per_client, "dirichlet_pfllib")
    smallest = options.min_samples
    if smallest is None:
        smallest = least_samples(request, options.batch_size)
    return _dirichlet_by_class(request, options.beta, smallest)


def mixture_counts(request: Request, options: MixtureOptions) -> IntArray:
    """Cut each group of classes by a Dirichlet and a multinomial draw over the clients (FedEM).

    The classes are shuffled into groups of almost equal size. A client's share of a group is a random sample
    of it, whatever the class.
    """
    check_client_size(request.per_client, "mixture")
    num_classes = request.num_classes
    num_groups = num_classes if options.components == -1 else options.components
    if not 1 <= num_groups <= num_classes:
        raise UserError(
            f"data.partition.components={options.components}: the data has {num_classes} classes; "
            f"allowed: 1..{num_classes}, or -1 for each its own"
        )
    rng = numpy_stream(request.seed, "partition/mixture")
    group_of = np.empty(num_classes, dtype=np.int64)
    group_of[rng.permutation(num_classes)] = _consecutive_groups(num_classes, num_groups)

    def draw() -> IntArray:
        counts = np.zeros((request.num_clients, num_classes), dtype=np.int64)
        for group in range(num_groups):
            labels = _labels(np.where(group_of == group, request.sizes, 0))
            weights = rng.dirichlet(np.full(request.num_clients, options.beta))
            counts += _cut(rng.permutation(labels), rng.multinomial(len(labels), weights), num_classes)
        return counts

    return _first_with(draw, request, options.beta, options.min_samples)


def pachinko_counts(request: Request, options: PachinkoOptions) -> IntArray:
    """Draw each client's samples down a tree of coarse and fine classes (FedEM's CIFAR-100).

    Each client has its own Dirichlet draw over the coarse classes, and one over the fine classes of each. A
    class that runs out is left out, for this client and all later ones, and the weights renormalised: later
    clients draw from the rest.
    """
    size = equal_size(request)
    coarse_of = _coarse_classes(request.num_classes, options.coarse_classes)
    rng = numpy_stream(request.seed, "partition/pachinko")
    left = request.sizes.copy()
    counts = np.zeros((request.num_clients, request.num_classes), dtype=np.int64)
    for client in range(request.num_clients):
        coarse = _positive_dirichlet(rng, options.coarse_beta, coarse_of.max() + 1)
        fine = np.empty(request.num_classes)
        for group in range(len(coarse)):
            inside = coarse_of == group
            fine[inside] = _positive_dirichlet(rng, options.fine_beta, inside.sum())
        for uniform in rng.random(size):
            ends = np.cumsum(_weights(coarse, fine, coarse_of, left))
            label = np.searchsorted(ends / ends[-1], uniform, side="right")
            counts[client, label] += 1
            left[label] -= 1
    return counts


def iid_counts(request: Request, options: PartitionOptions) -> IntArray:
    size = equal_size(request)
    shuffled = numpy_stream(request.seed, "partition/iid").permutation(_labels(request.sizes))
    return _cut(shuffled, np.full(request.num_clients, size), request.num_classes)


def _dirichlet_by_class(request: Request, beta: float, min_samples: int) -> IntArray:
    rng = numpy_stream(request.seed, "partition/dirichlet")
    return _first_with(
        lambda: _draw_by_class(request.sizes, request.num_clients, beta, rng), request, beta, min_samples
    )


def _draw_by_class(
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


def _first_with(
    draw: Callable[[], IntArray | None], request: Request, beta: float, min_samples: int
) -> IntArray:
    """Draw until every client has `min_samples`."""
    if min_samples > request.largest_equal_size:
        raise UserError(
            f"data.partition.min_samples={min_samples}: {request.sizes.sum()} samples for "
            f"data.clients={request.num_clients} allow at most {request.largest_equal_size}; lower one "
            "of the two"
        )
    for _ in range(ATTEMPTS):
        counts = draw()
        if counts is not None and counts.sum(axis=1).min() >= min_samples:
            return counts
    raise UserError(
        f"data.partition.beta={beta:g}: none of {ATTEMPTS} draws gave each of "
        f"{request.num_clients} clients data.partition.min_samples={min_samples} samples; raise "
        "data.partition.beta, or lower data.partition.min_samples or data.clients"
    )


def _labels(sizes: IntArray) -> IntArray:
    """Write out the label of every sample, class by class."""
    return np.repeat(np.arange(len(sizes)), sizes)


def _cut(labels: IntArray, client_sizes: IntArray, num_classes: int) -> IntArray:
    """Count the labels of each client when they are assigned in order; the rest stay unused."""
    num_clients = len(client_sizes)
    cells = np.repeat(np.arange(num_clients), client_sizes) * num_classes + labels[: client_sizes.sum()]
    return np.bincount(cells, minlength=num_clients * num_classes).reshape(num_clients, num_classes)


def _consecutive_groups(num_labels: int, num_groups: int) -> IntArray:
    """Number the groups of consecutive labels, the larger ones last (FedEM's iid_divide): int64 [labels]."""
    larger_first = [len(group) for group in np.array_split(np.arange(num_labels), num_groups)]
    return np.repeat(np.arange(num_groups), larger_first[::-1])


def _coarse_classes(num_classes: int, coarse_classes: int | None) -> IntArray:
    """Return the coarse class of each fine one, int64 [classes]."""
    if coarse_classes is not None:
        check_too_many_classes("coarse_classes", coarse_classes, num_classes, num_classes)
        return _consecutive_groups(num_classes, coarse_classes)
    if num_classes != len(CIFAR100_COARSE):
        raise UserError(
            f"data.partition.coarse_classes=null means CIFAR-100's own classes, but the data has "
            f"{num_classes} classes; allowed: 1..{num_classes}"
        )
    return CIFAR100_COARSE


def _positive_dirichlet(rng: np.random.Generator, beta: float, count: int) -> np.ndarray:
    """Draw weights that are never 0, so that what remains of them can be renormalised."""
    return np.maximum(rng.dirichlet(np.full(count, beta)), SMALLEST_WEIGHT)


def _weights(coarse: np.ndarray, fine: np.ndarray, coarse_of: IntArray, left: IntArray) -> np.ndarray:
    """Return each class's share, up to a common factor.

    The share of an exhausted class goes to the other fine classes of its coarse class.
    """
    fine = np.where(left > 0, fine, 0.0)
    inside = np.bincount(coarse_of, fine)
    factor = np.divide(coarse, inside, out=np.zeros_like(inside), where=inside > 0)
    weights: np.ndarray = factor[coarse_of] * fine
    return weights
