"""The user's own npz file, and checks of images and labels from the user's files."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hpcfl.errors import UserError, one_line

LOG = logging.getLogger(__name__)

IMAGE_CHANNELS = (1, 3, 4)
"""How many channels an image usually has, by which channels in the wrong place are noticed."""
MAX_VOCABULARY = 2**24
"""Most tokens of a file that does not say how many there are."""
MAX_NAMES = 10
"""Arrays of a file that an error names."""
DIGITS = 100
"""Steps of float32 that the deviation of a feature should have at least."""


def read_npz(path: str, layout: str | None) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Read the arrays of a file: x, y, and `client` and `vocabulary` if they are there.

    Args:
        layout: the axes of an x with 3 or 4 of them, see `data.layout`.

    Returns:
        x with channels first, maybe a view of another layout, y, and the other two by name, as
        `sources.arrays_of` takes and checks them.

    Raises:
        UserError: the file is missing, damaged or unfit.
    """
    where = f"data.path={path}"
    found: dict[str, Any] = read_arrays(path, where, ("x", "y"), ("client", "vocabulary"))
    x = _as_channels_first(found.pop("x"), where, layout)
    y = found.pop("y")
    if "vocabulary" in found:
        number = found["vocabulary"]
        if number.size != 1 or number.dtype.kind not in "iu" or number.item() < 1:
            raise UserError(f"{where}: vocabulary must be one whole number, how many tokens there are")
        found["vocabulary"] = number.item()
    return x, y, found


def as_pixels(x: np.ndarray, where: str) -> np.ndarray:
    """Return x as uint8 or float32; raise UserError, which begins with `where`, if it is neither."""
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind != "f":
        are_bytes = x.ndim == 4 and x.dtype.kind in "iu" and 0 <= x.min() <= x.max() <= 255
        advised = "uint8" if are_bytes else "float32"
        raise UserError(
            f"{where}: x has type {x.dtype}; allowed: uint8 (0..255) or float, as of x.astype('{advised}')"
        )
    with np.errstate(over="ignore"):
        pixels = x.astype(np.float32, copy=False)
    if not np.isfinite(pixels).all():
        raise UserError(f"{where}: x holds values that are not finite in float32; clean or rescale them")
    if x.ndim < 4:
        columns = (x[:, number] for number in range(x.shape[1]))
        warn_of_digits([(f"channel or feature {n}", column) for n, column in enumerate(columns)], where)
    return pixels


def warn_of_digits(columns: Sequence[tuple[str, np.ndarray]], where: str) -> None:
    """Warn of columns whose numbers differ by less than float32 can tell, such as seconds since 1970."""
    lost = []
    for name, exact in columns:
        deviation = exact.std(dtype=np.float64) if exact.dtype.itemsize > 4 else 0.0
        if 0 < deviation < DIGITS * np.spacing(np.float32(np.abs(exact).max())):
            lost.append(
                f"{name} has values near {exact.mean(dtype=np.float64):g} that differ by {deviation:g}"
            )
    if lost:
        more = f", and so on for {len(lost)} columns" if len(lost) > 1 else ""
        LOG.warning(
            f"{where}: {lost[0]}{more}: float32 has too few digits for them; subtract a number, or rescale"
        )


def are_tokens(x: np.ndarray) -> bool:
    """Whether samples are tokens: whole numbers with two axes."""
    return x.ndim == 2 and x.dtype.kind in "iu"


def as_tokens(x: np.ndarray, where: str, vocabulary: int | None) -> tuple[np.ndarray, int]:
    """Return whole numbers [n, L] as int64, and how many tokens there are; default: the largest one, and 1.

    Raises UserError, which begins with `where`, if a token is not in the vocabulary.
    """
    most = MAX_VOCABULARY if vocabulary is None else vocabulary
    if x.min() < 0 or x.max() >= most:
        raise UserError(
            f"{where}: x holds tokens {x.min()}..{x.max()}; allowed: 0..{most - 1} (integers with two axes "
            "are tokens; give the features of a table as floats)"
        )
    return x.astype(np.int64), int(x.max()) + 1 if vocabulary is None else vocabulary


_OF_ALL = "of the labels of all files together"


def as_labels(y: np.ndarray, where: str, num_images: int) -> np.ndarray:
    """Return labels, which may be whole numbers as floats, as int64 [n]; raise UserError, which begins with
    `where`, for others."""
    if y.ndim != 1 or len(y) != num_images:
        raise UserError(f"{where}: y has shape {y.shape}, x has {num_images} samples; y must be [n]")
    is_whole = y.dtype.kind == "f" and bool(((y == np.rint(y)) & (np.abs(y) < 2**53)).all())
    if y.dtype.kind not in "iu" and not is_whole:
        raise UserError(
            f"{where}: y has type {y.dtype}; labels must be whole numbers 0, 1, ..., such as "
            f"numpy.unique(y, return_inverse=True)[1] {_OF_ALL}"
        )
    return y.astype(np.int64)


def num_classes_of(y: np.ndarray, where: str) -> int:
    """Return the largest label + 1; raise UserError, which begins with `where`, if it is implausible."""
    if y.min() > 0:
        raise UserError(
            f"{where}: y holds labels {y.min()}..{y.max()}, and classes count from 0; give "
            f"y - {y.min()}, or numpy.unique(y, return_inverse=True)[1] {_OF_ALL}"
        )
    if y.min() < 0 or y.max() >= len(y):
        raise UserError(
            f"{where}: y holds labels {y.min()}..{y.max()}; allowed: 0..K-1 with at most "
            f"as many classes as samples ({len(y)})"
        )
    classes = int(y.max()) + 1
    there = len(np.unique(y))
    if 2 * there < classes:
        LOG.warning(
            f"{where}: y holds labels up to {y.max()}, and only {there} of them occur, so that models have "
            f"{classes} outputs; if that is a mistake, give numpy.unique(y, return_inverse=True)[1] {_OF_ALL}"
        )
    return classes


def existing(path: str, where: str, kind: Literal["file", "folder"], advice: str) -> Path:
    """Return the path of a file or folder; UserError, which begins with `where`, if it cannot be read."""
    found = Path(path).expanduser()
    # unlike Path's methods, these return False for an invalid name
    if not (os.path.isfile if kind == "file" else os.path.isdir)(found):
        problem = f"is not a {kind}" if os.path.exists(found) else f"no such {kind}"
    elif not os.access(found, os.R_OK):
        problem = f"you may not read this {kind}"
    else:
        return found
    raise UserError(f"{where}: {problem}; {advice}")


def read_arrays(
    path: str, where: str, names: Sequence[str], others: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Read arrays of an npz file by name, and `others` that may be there.

    Raises UserError, which begins with `where`, if the file cannot be read or one of `names` is missing.
    """
    file = existing(path, where, "file", "name an npz file, such as FILE.npz")
    keywords = ", ".join(f"{name}={name}" for name in names)
    not_npz = f"{where}: cannot be read as an npz file; write it with numpy.savez(FILE, {keywords})"
    try:
        if not zipfile.is_zipfile(file):
            # numpy's own message advises to unpickle it
            raise zipfile.BadZipFile("File is not a zip file")
        # our own file object: numpy leaves its file open if the archive is damaged
        with file.open("rb") as raw, np.load(raw, allow_pickle=False) as archive:
            there = archive.files
            absent = [name for name in names if name not in there]
            if absent:
                more = f" and {len(there) - MAX_NAMES} more" if len(there) > MAX_NAMES else ""
                raise UserError(
                    f"{where}: has no array '{absent[0]}' (it holds {', '.join(there[:MAX_NAMES])}{more}); "
                    f"needed: {' and '.join(names)}"
                )
            found = {name: archive[name] for name in (*names, *others) if name in there}
            if not all(isinstance(array, np.ndarray) for array in found.values()):
                raise ValueError("a member is not an array")
            return found
    except UserError:
        raise
    except Exception as error:
        # numpy's own message advises to unpickle it
        if isinstance(error, ValueError) and "Object arrays" in str(error):
            raise UserError(
                f"{where}: an array has dtype object (samples of unequal length?): crop or pad all samples "
                "to one length"
            ) from error
        raise UserError(f"{not_npz} ({getattr(error, 'strerror', None) or one_line(error)})") from error


def _as_channels_first(x: np.ndarray, where: str, layout: str | None) -> np.ndarray:
    """Return x as a view with the channels of images and series as the second axis."""
    if x.ndim not in (2, 3, 4):
        raise UserError(
            f"{where}: x has {x.ndim} dimensions; allowed: 4 (images), 3 (grey images or series) or 2 "
            "(features or tokens)"
        )
    if x.size == 0:
        raise UserError(f"{where}: x is empty, its shape is {x.shape}; give one sample or more")
    if x.ndim == 2:
        return x
    if x.ndim == 3 and layout in ("NCL", "NLC"):
        return x.transpose(0, 2, 1) if layout == "NLC" else x
    if x.ndim == 3:
        return x[:, None]
    if layout not in ("NHWC", "NCHW"):
        raise UserError(
            f"data.layout={layout or 'null'}: x has shape {x.shape}; set data.layout=NCHW for [n, channels, "
            "height, width], or data.layout=NHWC for [n, height, width, channels]"
        )
    axis, other, likely = (1, 3, "NHWC") if layout == "NCHW" else (3, 1, "NCHW")
    if x.shape[axis] > max(IMAGE_CHANNELS) and x.shape[other] in IMAGE_CHANNELS:
        raise UserError(
            f"data.layout={layout}: x has shape {x.shape}, so that an image has {x.shape[axis]} channels; "
            f"set data.layout={likely}"
        )
    return x.transpose(0, 3, 1, 2) if layout == "NHWC" else x
