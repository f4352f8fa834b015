"""A few numbers as one line of characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = ".:-=+*#@"


def curve(values: Sequence[float], width: int, encoding: str) -> str:
    """Return shares such as accuracies as `lowest ▁▃▅█ highest` (see `sparkline`); "" where none are."""
    if not len(values):
        return ""
    return f"{min(values):.2%} {sparkline(values, width, encoding)} {max(values):.2%}"


def sparkline(values: Sequence[float], width: int, encoding: str) -> str:
    """Return numbers as characters between the lowest and the highest, at most `width`.

    Several in a row become one character where there are more than that, of the height of their mean.
    Characters are ASCII where the encoding has no blocks.
    """
    if not len(values):
        return ""
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    lowest, highest = means.min(), means.max()
    heights = (means - lowest) / (highest - lowest) if highest > lowest else np.zeros(len(means))
    levels = BLOCKS if _has(encoding, BLOCKS) else ASCII_LEVELS
    return "".join(levels[round(height * (len(levels) - 1))] for height in heights.tolist())


def _has(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
