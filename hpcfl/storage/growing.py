"""Rows that come one by one in the course of a run, in one piece of memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class GrowingArray:
    """Rows of one shape and type, one more now and then.

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
        """Begin with the rows [n, ...] of an array."""
        rows = GrowingArray(values.shape[1:], values.dtype)
        rows.extend(values)
        return rows

    @property
    def values(self) -> np.ndarray:
        """All rows [n, ...]; a view, which rows that come later leave as it is."""
        return self._memory[: self._count]

    def append(self, row: np.ndarray) -> None:
        """Add a row; ValueError where it has another shape."""
        if np.shape(row) != self._memory.shape[1:]:
            raise ValueError(f"a row of shape {np.shape(row)} among those of {self._memory.shape[1:]}")
        if self._count == len(self._memory):
            self._memory = np.concatenate([self._memory, np.empty_like(self._memory)])
        self._memory[self._count] = row
        self._count += 1

    def extend(self, rows: Iterable[np.ndarray]) -> None:
        """Add rows; ValueError where one has another shape."""
        for row in rows:
            self.append(row)

    def pop(self) -> None:
        """Take the last row back; it may be overwritten in views that have it."""
        self._count -= 1

    def __len__(self) -> int:
        return self._count
