"""The range test of the learning rate (Smith 2017): train a few steps at rates that rise, and see where the loss falls.

Pure: rates by step, and what the losses of steps say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

LOWEST, HIGHEST = 1e-6, 10.0
STEPS = 100
DIVERGED = 4.0  # times the lowest loss: no higher rate is of interest
LR_FIND = "lr_find"
_EACH_SIDE = 3  # steps that a loss is smoothed over
_LEAST_FALL = 0.02  # of the first loss: what falls less is noise


def rate_of(step: int) -> float:
    """Return the learning rate of a step, counted from 0; after the last one of the search nothing is learnt.

    >>> rate_of(0), rate_of(99), rate_of(100)
    (1e-06, 10.0, 0.0)
    """
    return LOWEST * (HIGHEST / LOWEST) ** (step / (STEPS - 1)) if step < STEPS else 0.0


@dataclass(frozen=True)
class RateCurve:
    """Losses by rate, as far as they are numbers; `smooth`: each the mean of its neighbours.

    Attributes:
        over: whether higher rates would say nothing more, or none are left.
        steepest: the rate at which the smoothed loss falls most steeply over the logarithm of the rate; None: it does
            not fall.
        tenth: a tenth of the rate at which the smoothed loss is lowest; None: it does not fall.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    smooth: Sequence[float]
    over: bool
    steepest: float | None = None
    tenth: float | None = None


def curve_of(losses: Mapping[int, float]) -> RateCurve:
    """Return what the losses of steps, counted from 1, say of learning rates."""
    steps = sorted(step for step in losses if step <= STEPS)
    finite = next((i for i, step in enumerate(steps) if not math.isfinite(losses[step])), len(steps))
    rates = [rate_of(step - 1) for step in steps[:finite]]
    values = [losses[step] for step in steps[:finite]]
    smooth = [fmean(values[max(0, i - _EACH_SIDE) : i + _EACH_SIDE + 1]) for i in range(len(values))]
    ended = finite < len(steps) or (bool(steps) and steps[-1] == STEPS)
    diverged = bool(smooth) and min(smooth) > 0 and smooth[-1] > DIVERGED * min(smooth)
    curve = RateCurve(rates, values, smooth, ended or diverged)
    if len(smooth) < 2 * _EACH_SIDE + 1:
        return curve
    lowest = min(range(len(smooth)), key=smooth.__getitem__)
    if smooth[0] - smooth[lowest] < _LEAST_FALL * abs(smooth[0]):
        return curve
    # All steps are equally far apart in the logarithm of the rate.
    falls = {i: smooth[i - _EACH_SIDE] - smooth[min(i + _EACH_SIDE, lowest)] for i in range(_EACH_SIDE, lowest + 1)}
    steepest = max(falls, key=falls.__getitem__, default=lowest)
    return RateCurve(rates, values, smooth, curve.over, rates[steepest], rates[lowest] / 10)


def suggestion(curve: RateCurve, scale: float = 1.0) -> str:
    """Return in words which rates a curve suggests.

    Args:
        scale: what a setting of the rate is multiplied by before it is used.
    """
    if curve.steepest is None or curve.tenth is None:
        return "the loss fell at no learning rate: no suggestion"
    return (
        f"--lr {_rounded(curve.steepest / scale)} is where the loss fell most steeply, --lr "
        f"{_rounded(curve.tenth / scale)} a tenth of where it was lowest"
    )


def _rounded(rate: float) -> str:
    return f"{rate:.1e}" if rate < 1e-3 else f"{rate:.2g}"
