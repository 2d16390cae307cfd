"""Intervals over seeds, by the bootstrap; and where a curve first reaches a target."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

RESAMPLES = 9999
FEWEST_SEEDS = 3
"""That give an interval: from two values the bootstrap's is from one to the other, and holds their mean in half of all
cases; where they are equal, it has no width at all."""
_EXACT_UP_TO = 6
# Student's t, 97.5% quantile, by degrees of freedom from 1
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% interval; the bounds are None where the seeds are too few for one (`FEWEST_SEEDS`)."""

    value: float
    low: float | None
    high: float | None


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean over seeds with its bootstrap interval.

    The expanded percentile interval of Hesterberg (2015, "What Teachers Should Know About the Bootstrap", The American
    Statistician 69(4)): quantiles Phi(-sqrt(n/(n-1)) t(n-1)) instead of 2.5%, because the bootstrap's own are too
    narrow for few samples. For 3 and 4 seeds that is, to within 1%, from the least to the greatest value. All resamples
    are enumerated up to 6 seeds, beyond that 9999 are drawn with a fixed seed: the same numbers give the same interval.

    Raises:
        ValueError: no values.
    """
    n = len(values)
    if not n:
        raise ValueError("no values")
    if n < FEWEST_SEEDS:
        return Interval(fmean(values), None, None)
    means = sorted(_resampled_means(values))
    t = _t975(n - 1)
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * t)
    return Interval(fmean(values), _quantile(means, tail), _quantile(means, 1 - tail))


def _t975(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t; of many degrees of freedom by Fisher's expansion, to three digits."""
    return _T975[degrees - 1] if degrees <= len(_T975) else 1.96 + 2.372 / degrees + 2.823 / degrees**2


def ratio_interval(over: Sequence[float], under: Sequence[float]) -> Interval:
    """Return the geometric mean of the ratios over[i] / under[i] of paired seeds, with its bootstrap interval."""
    logs = [math.log(a / b) for a, b in zip(over, under, strict=True)]
    return _map(mean_interval(logs), math.exp)


def coverage_of(n: int) -> float:
    """Return how often an interval from the least to the greatest of n values holds their median: 1 - 2^(1-n).

    >>> coverage_of(3)
    0.75
    """
    return 1 - 2.0 ** (1 - n)


def reached_at(spent: Sequence[float], scores: Sequence[float | None], target: float) -> float | None:
    """Return what had been spent when scores first reached a target: linear between two of them; None: never.

    >>> reached_at([10, 20], [0.5, 0.9], 0.7)
    15.0
    """
    before: tuple[float, float] | None = None
    for x, y in zip(spent, scores, strict=True):
        if y is None:
            continue
        if y >= target:
            if before is None or y <= before[1]:
                return float(x)
            return before[0] + (x - before[0]) * (target - before[1]) / (y - before[1])
        before = (x, y)
    return None


def _resampled_means(values: Sequence[float]) -> list[float]:
    n = len(values)
    if n <= _EXACT_UP_TO:
        return [fmean(chosen) for chosen in itertools.product(values, repeat=n)]
    draw = random.Random(0)
    return [fmean(draw.choices(values, k=n)) for _ in range(RESAMPLES)]


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile by linear interpolation between order statistics."""
    place = share * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 2)
    return ordered[below] + (place - below) * (ordered[below + 1] - ordered[below])


def _map(interval: Interval, by: Callable[[float], float]) -> Interval:
    low, high = (None if bound is None else by(bound) for bound in (interval.low, interval.high))
    return Interval(by(interval.value), low, high)
