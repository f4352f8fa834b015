"""Zip archives of arrays, as numpy.savez writes them and as somebody else may have forged them."""

from __future__ import annotations

import io
import math
import pickle
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from hpcfl.machine import free_bytes
from hpcfl.plain_files import open_plain

MOST_TIMES = 1100
"""How many bytes deflate makes of one, at most."""

DAMAGES = (
    OSError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    pickle.PickleError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What zipfile, NumPy and pickle raise for damaged files."""


@contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive; raises one of DAMAGES where it is none, as all that reads it does."""
    with io.BufferedReader(open_plain(path)) as file, zipfile.ZipFile(file) as archive:
        yield archive


@contextmanager
def member(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[IO[bytes], int]]:
    """Open a member for reading; yields its bytes and how many there are.

    Raises:
        ValueError: it is packed as no npz file is, or its size cannot be, or is more than memory holds.
    """
    info = archive.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is packed by method {info.compress_type}; allowed: none, deflate")
    times = MOST_TIMES if info.compress_type == zipfile.ZIP_DEFLATED else 1
    if info.file_size > times * min(info.compress_size, _size(archive)):
        raise ValueError(f"{name} says that its {info.compress_size:,} bytes hold {info.file_size:,}")
    if info.file_size > free_bytes():
        raise ValueError(f"{name} holds {info.file_size:,} bytes, more than the memory that is free")
    with archive.open(info) as stream:
        yield stream, info.file_size


def _size(archive: zipfile.ZipFile) -> int:
    assert archive.fp is not None
    return archive.fp.seek(0, io.SEEK_END)


def read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return the array of a member NAME.npy, which is no larger than the member.

    Raises:
        ValueError: it is no array, one of objects, or not of the size that its header says.
    """
    with member(archive, f"{name}.npy") as (stream, size):
        shape, is_fortran, dtype = array_header(stream)
        if dtype.hasobject or not dtype.itemsize:
            raise ValueError(f"{name} is an array of {dtype}, and not of numbers")
        count = math.prod(shape)
        if min(shape, default=0) < 0 or stream.tell() + count * dtype.itemsize != size:
            raise ValueError(f"{name} is {dtype} of shape {shape}, which its {size:,} bytes are not")
        raw = np.empty(count * dtype.itemsize, np.uint8)
        view, filled = raw.data, 0
        while filled < len(raw):
            got = stream.readinto(view[filled:])  # type: ignore[attr-defined]
            if not got:
                raise EOFError(f"{name} ends after {filled:,} of {len(raw):,} bytes")
            filled += got
    return raw.view(dtype).reshape(shape, order="F" if is_fortran else "C")


def array_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read what stands before the numbers of a .npy file: shape, whether in Fortran's order, type."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"an array of version {version}")
