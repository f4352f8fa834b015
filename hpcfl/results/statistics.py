"""Statistics over seeds and clients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """Mean and 95 % confidence interval of `count` differences."""

    mean: float
    half_width: float
    """Half the width of the interval; nan without one: of a single difference, or of equal ones, whose spread
    of 0 says nothing."""
    count: int

    @property
    def star(self) -> str:
        """Return " *" where the interval excludes 0, else nothing."""
        return " *" * (abs(self.mean) > self.half_width)


@dataclass(frozen=True)
class PairedDifference:
    """How much better one row is than another, client by client.

    With d[s, c] the difference of client c's accuracies in the two runs of seed s, D[s] the mean of d[s, c]
    over the clients, S seeds and n pairs (s, c):

        over_seeds    mean of D[s] +- t(S - 1) std(D) / sqrt(S)
        over_clients  mean of d[s, c] +- t(n - 1) std(d) / sqrt(n)

    t is Student's 97.5 % quantile, std the sample standard deviation. The clients of a seed share one
    partition, one initial model and one federation, so they are not independent trials of a method. Draw
    conclusions from the interval over seeds, whose unit is a whole run; it is wide with few seeds (t is 12.7
    for two seeds, 4.3 for three). The interval over clients holds for these runs only: it tells whether their
    models differ on clients such as these. Pairing removes the effects that both rows share, above all the
    difficulty of a client's classes.
    """

    over_seeds: Interval
    over_clients: Interval
    """Without an interval where clients are weighted."""


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of values, at least one, with Student's interval."""
    count = len(values)
    # means of few samples are often equal but for rounding
    if max(values) - min(values) < 1e-12:
        return Interval(statistics.fmean(values), math.nan, count)
    # its import takes a quarter of a second, and most runs end without an interval
    from scipy.special import stdtrit

    quantile = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    return Interval(statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(count), count)


def paired_difference(
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    weights: Sequence[Sequence[float]] | None = None,
) -> PairedDifference:
    """Compare two rows' accuracies [seeds][clients], at least one seed; `weights` of the clients likewise.

    With clients weighted by their samples, D[s] is the difference of the shares of all samples of a seed that
    are classified correctly.
    """
    differences = [
        [one - other for one, other in zip(of_first, of_second, strict=True)]
        for of_first, of_second in zip(first, second, strict=True)
    ]
    if weights is not None:
        means = [statistics.fmean(*of_seed) for of_seed in zip(differences, weights, strict=True)]
        over_seeds = interval(means)
        return PairedDifference(over_seeds, Interval(over_seeds.mean, math.nan, sum(map(len, weights))))
    return PairedDifference(
        over_seeds=interval([statistics.fmean(of_seed) for of_seed in differences]),
        over_clients=interval([difference for of_seed in differences for difference in of_seed]),
    )


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
