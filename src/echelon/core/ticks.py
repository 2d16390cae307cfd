"""Axes whose ticks people read at once: `20 s`, `1.5 min`, `200 MB`, whole numbers for counts.

Values stay in seconds and bytes; ticks are chosen from the range of the values, few enough for a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from echelon.core.figure import Json, axis

_MOST_STEPS = 5
_FEWEST_OF_LOG = 3
_FEW_COUNTS = 8
_DECIMAL = (1.0, 2.0, 5.0)
_SECONDS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_TIME_STEPS = (10.0, 20.0, 30.0, *(n * _MINUTE for n in (1, 2, 5, 10, 20, 30)), *(n * _HOUR for n in (1, 2, 4, 6, 12)))
_FAR_TIMES = (1.0, 10.0, _MINUTE, 10 * _MINUTE, *(n * _HOUR for n in (1, 10, 100, 1000)))
_NEAR_TIMES = (
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    30.0,
    *(n * _MINUTE for n in (1, 2, 5, 10, 20, 30)),
    _HOUR,
    2 * _HOUR,
    5 * _HOUR,
)


def time_axis(title: str, seconds: Sequence[float], log: bool = False, **more: Any) -> Json:
    """Return an axis of seconds.

    Args:
        seconds: values that it must reach, at least one; from 0 on where it is linear.
        log: logarithmic; all values are above 0.
        more: of plotly's axis.

    >>> time_axis("time", [0, 9.0])["ticktext"]
    ['0', '2 s', '4 s', '6 s', '8 s', '10 s']
    >>> time_axis("time", [100.0])["ticktext"], time_axis("time", [0.012])["ticktext"]
    (['0', '20 s', '40 s', '60 s', '80 s', '100 s'], ['0', '5 ms', '10 ms', '15 ms'])
    >>> time_axis("time", [400.0])["ticktext"]
    ['0', '2 min', '4 min', '6 min', '8 min']
    >>> time_axis("time", [0.5, 200.0], log=True)["ticktext"]
    ['1 s', '10 s', '1 min']
    """
    if log:
        far = [t for t in _decades(seconds, (1.0,)) if t < 1]
        near = [t for t in _decades(seconds, _DECIMAL) if t < 1]
        return _log_axis(title, seconds, ([*far, *_FAR_TIMES], [*near, *_NEAR_TIMES]), _SECONDS, more)
    top = max(seconds)
    step = _decimal_step(top)
    if top > _TIME_STEPS[0] * _MOST_STEPS:
        step = next((s for s in _TIME_STEPS if s * _MOST_STEPS >= top), _DAY * math.ceil(_decimal_step(top / _DAY)))
    return _linear_axis(title, top, step, _SECONDS, more)


def byte_axis(title: str, n_bytes: Sequence[float], log: bool = False, **more: Any) -> Json:
    """Return an axis of bytes, in units of 1000; arguments as of `time_axis`.

    >>> byte_axis("sent", [1.1e6])["ticktext"]
    ['0', '0.5 MB', '1 MB', '1.5 MB']
    >>> byte_axis("sent", [8e5, 4e9], log=True)["ticktext"]
    ['1 MB', '10 MB', '100 MB', '1 GB']
    >>> byte_axis("sent", [2e6, 9e6], log=True)["ticktext"]
    ['2 MB', '5 MB']
    """
    if log:
        return _log_axis(title, n_bytes, (_decades(n_bytes, (1.0,)), _decades(n_bytes, _DECIMAL)), _BYTES, more)
    return _linear_axis(title, max(n_bytes), max(_decimal_step(max(n_bytes)), 1.0), _BYTES, more)


def count_axis(title: str, largest: float, **more: Any) -> Json:
    """Return an axis of whole numbers: of few, each has a tick, and none lies between two.

    >>> count_axis("step", 3)["dtick"], "dtick" in count_axis("step", 300)
    (1, False)
    """
    return axis(title, **({"dtick": 1, "tickformat": "d"} if largest <= _FEW_COUNTS else {}), **more)


def _linear_axis(title: str, top: float, step: float, units: Sequence[tuple[float, str]], more: Json) -> Json:
    count = math.ceil(top / step - 1e-9) if top > 0 else 1
    values = [i * step for i in range(count + 1)]
    # The largest unit in which a step is half of one, or a tenth where units are powers of ten.
    scale, unit = next((u for u in units if step >= u[0] * (0.5 if u[0] > 1 and u[0] % 60 == 0 else 0.1)), units[-1])
    texts = ["0"] + [f"{v / scale:.4g} {unit}" for v in values[1:]]
    return axis(title, **{"tickvals": values, "ticktext": texts, "rangemode": "tozero", **more})


def _log_axis(
    title: str,
    values: Sequence[float],
    choices: Sequence[Sequence[float]],
    units: Sequence[tuple[float, str]],
    more: Json,
) -> Json:
    """Take the first choice of ticks of which enough lie among the values."""
    among = [[tick for tick in ticks if min(values) <= tick <= max(values)] for ticks in choices]
    ticks = next((inside for inside in among if len(inside) >= _FEWEST_OF_LOG), among[-1])
    texts = [next(f"{v / scale:.4g} {unit}" for scale, unit in (*units, units[-1]) if v >= scale) for v in ticks]
    return axis(title, type="log", tickvals=list(ticks), ticktext=texts, **more)


def _decimal_step(top: float) -> float:
    """Return the least of 1, 2, 5, 10, ... (times a power of ten) that reaches `top` in few steps."""
    least = top / _MOST_STEPS
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (*_DECIMAL, 10.0) if m * power >= least * (1 - 1e-9))


def _decades(values: Sequence[float], multiples: Sequence[float]) -> list[float]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return [m * 10.0**e for e in range(low, high + 1) for m in multiples]
