"""HDF5 files that are not what a run writes: they may name other files, run filters, or lie about sizes."""

from __future__ import annotations

import math
from typing import Any

import h5py

MISFITS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What h5py, NumPy and our own reading raise where a file is not as it was written."""

MOST_DEPTH = 20
"""Of groups in groups."""


def refuse_foreign(file: h5py.File, most_bytes: int) -> None:
    """Look at all that is in an open file, and read nothing of it.

    A run writes groups, and numbers and texts of fixed length in this file itself, neither packed nor linked.

    Args:
        most_bytes: the file's size; what it holds is no more.

    Raises:
        ValueError: there is something else, or more than the file can hold; also what h5py raises for damage.
    """
    _refuse_in(file, most_bytes, MOST_DEPTH, {_address(file)})


def _refuse_in(group: h5py.Group, left: int, depth: int, seen: set[int]) -> int:
    """Look at a group with all in it; return the bytes that are left for others."""
    left -= _bytes_of_attributes(group)
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"{name!r} is a link to another place")
        item = group[name]
        if _address(item) in seen:
            raise ValueError(f"{name!r} is there under another name, too")
        seen.add(_address(item))
        if isinstance(item, h5py.Group) and depth:
            left = _refuse_in(item, left, depth - 1, seen)
        elif isinstance(item, h5py.Dataset):
            left -= _bytes_of(item)
        else:
            raise ValueError(f"{name!r} is neither a group nor numbers")
        if left < 0:
            raise ValueError(f"{name!r} has more numbers than the file")
    return left


def _address(item: h5py.Group | h5py.Dataset) -> int:
    """Return where an object stands in its file."""
    return int(h5py.h5o.get_info(item.id).addr)


def _bytes_of(data: h5py.Dataset) -> int:
    """Return the bytes of a dataset, which all stand in its file."""
    plan = data.id.get_create_plist()
    if data.is_virtual or data.external or plan.get_nfilters():
        raise ValueError(f"{data.name!r} is in another file, or packed")
    _refuse_kind(data.name, data.dtype)
    count = math.prod(data.shape) * data.dtype.itemsize
    if not data.shape or data.id.get_storage_size() < count:
        raise ValueError(f"{data.name!r} has the shape {data.shape} and {data.id.get_storage_size():,} bytes")
    return count + _bytes_of_attributes(data)


def _bytes_of_attributes(item: h5py.Group | h5py.Dataset) -> int:
    count = 0
    for name in item.attrs:
        attribute = item.attrs.get_id(name)
        _refuse_kind(name, attribute.dtype)
        count += math.prod(attribute.shape) * attribute.dtype.itemsize
    return count


def _refuse_kind(name: str, dtype: Any) -> None:
    if dtype.kind not in "biufS" or not dtype.itemsize or not dtype.isnative:
        raise ValueError(f"{name!r} is of type {dtype}")


def whole(value: Any, least: int) -> int:
    """Return a whole number from `least` on that 64 bits hold; ValueError for another value."""
    if int(value) != value or not least <= value < 2**63:
        raise ValueError(f"{value!r} where there is a whole number from {least} on")
    return int(value)


def finite(value: Any) -> float:
    """Return a number; ValueError for one that is not finite."""
    if not math.isfinite(value):
        raise ValueError(f"{value!r} where there is a number")
    return float(value)
