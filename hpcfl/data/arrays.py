"""A pool of samples, and how arrays become one."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcfl.data.npz import are_tokens, as_labels, as_pixels, as_tokens, num_classes_of
from hpcfl.errors import UserError, one_line
from hpcfl.samples import SampleType

Channels = tuple[float, ...]

ROWS_AT_ONCE = 4096

OF_MNIST: tuple[Channels, Channels] = (0.1307,), (0.3081,)
"""Mean and deviation of MNIST, which sets like it take too."""


@dataclass(frozen=True, eq=False)
class Arrays:
    """One pool of samples, as stored.

    Attributes:
        x: images [n, C, H, W], series [n, C, L] or features [n, F], uint8 or float32, or tokens [n, L],
            int64; may be a view of another layout.
        y: int64 [n], classes 0..num_classes-1.
        scale: what x is divided by to lie in [0, 1]; 1 for floats.
        mean, std: constants a channel or feature, for scaled values; none for tokens. If both are empty for
            other samples, they are computed from the training samples.
        vocabulary: how many tokens there are; None if samples are numbers.
        owner: int64 [n], increasing, the client 0..M-1 of each sample; None where the source has no clients.
        is_test: bool [n], the source's own split of each client's samples; None where it has none.
        domains: names of the domains, if `owner` is the domain 0..D-1 of each sample: a partition divides
            each domain's samples among clients of its own, and `given` makes each domain a client.
        names: the source's own names of the clients 0..M-1; empty where it has none.
    """

    x: np.ndarray
    y: np.ndarray
    num_classes: int
    scale: float
    mean: Channels
    std: Channels
    owner: np.ndarray | None = None
    is_test: np.ndarray | None = None
    vocabulary: int | None = None
    domains: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def owner_names(self) -> tuple[str, ...]:
        """The names of the domains or clients that `owner` numbers; empty without names."""
        return self.domains or self.names

    @property
    def sample(self) -> SampleType:
        return SampleType(self.x.shape[1:], self.vocabulary)


def digest_of(arrays: Arrays) -> int:
    """Return a checksum of all samples, labels and clients, so that other data are noticed."""
    digest = 0
    parts = (arrays.x, arrays.y, arrays.owner, arrays.is_test)
    for part in (part for part in parts if part is not None):
        for start in range(0, len(part), ROWS_AT_ONCE):
            # of a view, a copy of some rows at a time
            rows = np.ascontiguousarray(part[start : start + ROWS_AT_ONCE])
            digest = zlib.crc32(rows.data.cast("B"), digest)
    return digest


def arrays_of(
    x: Any,
    y: Any,
    where: str,
    *,
    vocabulary: int | None = None,
    client: Any = None,
) -> Arrays:
    """Make a pool of samples and labels [n].

    Args:
        x: images [n, C, H, W], series [n, C, L], features [n, F], or tokens [n, L], which are integers; an
            array, a tensor or lists. Bytes of images are normalised to -1..1, floats of images are not
            changed; series and features get mean 0 and deviation 1 over all training samples.
        where: how errors begin.
        vocabulary: how many tokens there are; default: the largest that occurs, and 1.
        client: the client of each sample [n], numbers or texts, for `data.partition.name=given`.

    Raises:
        UserError: x or y have another shape or type.
    """
    x, y = _as_array(x, where, "x"), _as_array(y, where, "y")
    if not 2 <= x.ndim <= 4 or not x.size:
        raise UserError(
            f"{where}: x has shape {x.shape}; allowed: images [n, channels, height, width], series "
            "[n, channels, steps], features [n, features] or tokens [n, length], of some n"
        )
    y = as_labels(y, where, len(x))
    if not are_tokens(x):
        if vocabulary is not None:
            raise UserError(
                f"{where}: x has shape {x.shape} and type {x.dtype}, and a vocabulary; tokens are whole "
                "numbers [n, length]; leave the vocabulary out for other samples"
            )
        x = as_pixels(x, where)
    owner = None
    names: tuple[str, ...] = ()
    if client is not None:
        order, owner, names = _by_client(_as_array(client, where, "client"), where, len(x))
        if (np.diff(order) < 0).any():
            x, y = x[order], y[order]
    return replace(pool_of(x, y, where, vocabulary=vocabulary, owner=owner), names=names)


def _as_array(value: Any, where: str, name: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{where}: {name} is not an array of numbers: {one_line(error)}") from error


def pool_of(
    x: np.ndarray,
    y: np.ndarray,
    where: str,
    *,
    vocabulary: int | None = None,
    owner: np.ndarray | None = None,
    is_test: np.ndarray | None = None,
) -> Arrays:
    """Make a pool of numbers that `as_pixels` has checked, or of integers that are tokens, and labels int64.

    Raises UserError, which begins with `where`, if a token or label is not plausible.
    """
    classes = num_classes_of(y, where)
    if are_tokens(x):
        x, vocabulary = as_tokens(x, where, vocabulary)
        return Arrays(x, y, classes, 1.0, (), (), owner, is_test, vocabulary)
    is_bytes = x.dtype == np.uint8
    constants: Channels = (0.5, 0.5) if is_bytes else (0.0, 1.0)
    mean, std = ((number,) * x.shape[1] if x.ndim == 4 else () for number in constants)
    return Arrays(x, y, classes, 255.0 if is_bytes else 1.0, mean, std, owner, is_test)


def _by_client(
    client: np.ndarray, where: str, num_samples: int
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return the samples in the order of their clients, the number of each one's client, and their names."""
    if client.shape != (num_samples,) or client.dtype.kind not in "iuUS":
        raise UserError(
            f"{where}: client has shape {client.shape} and type {client.dtype}; allowed: a whole number or a "
            f"text for each of {num_samples} samples"
        )
    found, owner = np.unique(client, return_inverse=True)
    order = np.argsort(owner, kind="stable")
    names = (
        found.astype(np.str_) if found.dtype.kind != "S" else np.char.decode(found, "utf-8", errors="replace")
    )
    return order, owner[order].astype(np.int64), tuple(names.tolist())
