"""Rows that come one by one: their values, and views that stay as they are."""

from __future__ import annotations

import numpy as np
import pytest

from hpcfl.storage.growing import GrowingArray


def test_rows_come_and_go() -> None:
    rows = GrowingArray((2,), np.int64)
    assert rows.values.shape == (0, 2)
    assert not len(rows)
    for number in range(5):
        rows.append(np.array([number, 10 * number]))
    seen = rows.values
    assert seen.tolist() == [[0, 0], [1, 10], [2, 20], [3, 30], [4, 40]]
    rows.extend(np.full((40, 2), 7))
    assert len(rows) == 45
    assert seen.tolist() == [[0, 0], [1, 10], [2, 20], [3, 30], [4, 40]]
    rows.pop()
    rows.append(np.array([8, 9]))
    assert rows.values[-2:].tolist() == [[7, 7], [8, 9]]
    assert rows.values.flags.c_contiguous


def test_rows_keep_their_shape() -> None:
    rows = GrowingArray.of(np.zeros((0, 3, 2), np.float32))
    rows.append(np.ones((3, 2), np.float32))
    assert rows.values.dtype == np.float32
    with pytest.raises(ValueError, match=r"rows of shape \(2,\) among those of \(3, 2\)"):
        rows.append(np.ones(2))
    rows.pop()
    with pytest.raises(IndexError, match="no row to take back"):
        rows.pop()


def test_a_row_of_a_wider_type_loses_nothing() -> None:
    numbers = np.arange(3)
    rows = GrowingArray.of(numbers)
    rows.append(np.float64(0.5))
    assert rows.values.tolist() == [0.0, 1.0, 2.0, 0.5]
    assert numbers.tolist() == [0, 1, 2]
