"""Statistics over seeds and clients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of the values that are not nan and their sample standard deviation.

    None for a mean of nothing, and for the deviation of fewer than two.
    """
    known = [value for value in values if not math.isnan(value)]
    mean = statistics.fmean(known) if known else None
    return mean, statistics.stdev(known) if len(known) > 1 else None


def worst_tenth(accuracies: Sequence[float]) -> float:
    """Return the mean over the tenth of the clients that do worst: floor(N / 10) of them, at least one."""
    worst = sorted(accuracies)[: max(1, len(accuracies) // 10)]
    return statistics.fmean(worst)
