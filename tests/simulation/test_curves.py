"""Numbers as one line of characters."""

from __future__ import annotations

import numpy as np
import pytest

from hpcfl.simulation.curves import ASCII_LEVELS, BLOCKS, curve, sparkline


def test_each_value_has_the_character_of_its_height() -> None:
    values = np.linspace(0.2, 0.9, 8).tolist()
    assert curve(values, 40, "utf-8") == f"20.00% {BLOCKS} 90.00%"
    assert sparkline(values[::-1], 40, "utf-8") == BLOCKS[::-1]
    assert curve([0.5], 40, "utf-8") == "50.00% ▁ 50.00%"
    assert curve([], 40, "utf-8") == sparkline([], 40, "utf-8") == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "no such encoding"])
def test_encodings_without_blocks_get_ascii(encoding: str) -> None:
    assert sparkline(list(range(8)), 8, encoding) == ASCII_LEVELS
    assert len(ASCII_LEVELS) == len(BLOCKS)
    assert ASCII_LEVELS.isascii()


def test_several_values_share_a_character_of_their_mean() -> None:
    # the means of the pairs are 0.5, 2.5 and 4.5
    assert sparkline([0, 1, 2, 3, 4, 5], 3, "utf-8") == "▁▅█"
    assert curve([0.0, 0.1, 0.2, 0.3], 2, "utf-8") == "0.00% ▁█ 30.00%"
    assert len(sparkline(list(range(2500)), 40, "utf-8")) == 40
