"""Rows that come one by one in the course of a run, in one piece of memory."""

from __future__ import annotations

import numpy as np


class GrowingArray:
    """Rows of one shape, one more now and then.

    The memory is made twice as large when it is full. A list of rows, copied into an array at each
    checkpoint, would scatter a long run's memory: between the copies, each larger than the one before, lie
    the new rows.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype | type) -> None:
        """Begin without rows."""
        self._memory = np.empty((1, *shape), dtype)
        self._count = 0

    @staticmethod
    def of(values: np.ndarray) -> GrowingArray:
        """Begin with the rows [n, ...] of an array, which is copied."""
        rows = GrowingArray(values.shape[1:], values.dtype)
        rows.extend(values)
        return rows

    @property
    def values(self) -> np.ndarray:
        """All rows [n, ...]; a view, which rows that come later leave as it is."""
        return self._memory[: self._count]

    def append(self, row: np.ndarray) -> None:
        """Add a row, and have all of a type that holds it; ValueError where it has another shape."""
        self.extend(np.asarray(row)[None])

    def extend(self, rows: np.ndarray) -> None:
        """Add rows [n, ...]; see `append`."""
        if rows.shape[1:] != self._memory.shape[1:]:
            raise ValueError(f"rows of shape {rows.shape[1:]} among those of {self._memory.shape[1:]}")
        count, dtype = self._count + len(rows), np.result_type(self._memory.dtype, rows.dtype)
        if count > len(self._memory) or dtype != self._memory.dtype:
            grown = np.empty((max(count, 2 * self._count), *rows.shape[1:]), dtype)
            grown[: self._count] = self.values
            self._memory = grown
        self._memory[self._count : count] = rows
        self._count = count

    def pop(self) -> None:
        """Take the last row back; it may be overwritten in views that have it."""
        if not self._count:
            raise IndexError("there is no row to take back")
        self._count -= 1

    def __len__(self) -> int:
        return self._count
