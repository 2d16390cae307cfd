"""Columns of a table: their numbers are in one unit, which the head names, with the same decimals each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from echelon.core.units import rounded

NONE = "–"
_TIMES = ((1e-3, "ms", 1.0), (1.0, "s", 600.0), (60.0, "min", 4 * 3600.0), (3600.0, "h", math.inf))
_SIZES = ((1.0, "B", 1e3), (1e3, "kB", 1e6), (1e6, "MB", 1e9), (1e9, "GB", 1e12), (1e12, "TB", math.inf))
_DIGITS = 3  # of the middle one of the numbers
_MOST_PLACES = 4


@dataclass(frozen=True)
class Column:
    """A head, and a cell for each row; where these `count`, they end below each other."""

    head: str
    cells: Sequence[str]
    counts: bool = False


def rows_of(columns: Sequence[Column]) -> list[list[str]]:
    """Return the cells of columns by rows."""
    return [list(row) for row in zip(*(column.cells for column in columns), strict=True)]


def seconds_column(head: str, values: Sequence[float | None], unit_of: Sequence[float | None] = ()) -> Column:
    """Write durations in one unit: that of `unit_of`, where columns beside each other are to have the same.

    >>> seconds_column("took", [0.0094, None, 0.107, 0.0512])
    Column(head='took, ms', cells=['9.4', '–', '107.0', '51.2'], counts=True)
    >>> seconds_column("to target", [0.999, None], unit_of=[1.34, 2.71])
    Column(head='to target, s', cells=['1.00', '–'], counts=True)
    """
    return _in_one_unit(head, values, _TIMES, unit_of)


def bytes_column(head: str, values: Sequence[float | None]) -> Column:
    """Write sizes in one decimal unit.

    >>> bytes_column("sent", [14_600, 1_540_000, 129_000])
    Column(head='sent, kB', cells=['15', '1,540', '129'], counts=True)
    """
    return _in_one_unit(head, values, _SIZES)


def number_column(head: str, values: Sequence[float | None]) -> Column:
    """Write numbers that have no unit, such as learning rates, with all decimals that one of them has.

    >>> number_column("lr", [0.1, 0.05, 1])
    Column(head='lr', cells=['0.10', '0.05', '1.00'], counts=True)
    """
    short = [f"{v:g}" for v in values if v is not None]
    if any("e" in text for text in short):
        return Column(head, [NONE if v is None else f"{v:g}" for v in values], counts=True)
    places = max((len(text.partition(".")[2]) for text in short), default=0)
    return Column(head, [_write(v, 1.0, places) for v in values], counts=True)


def measure_column(head: str, values: Sequence[float | None]) -> Column:
    """Write what was measured in a unit that nobody knows, such as an error of a target's.

    >>> measure_column("RMSE", [3.14159, 12.5, 0.77]).cells
    ['3.142', '12.500', '0.770']
    """
    return Column(head, [_write(v, 1.0, _places(_middle(values), _DIGITS + 1)) for v in values], counts=True)


def moments_column(head: str, seconds: Sequence[float]) -> Column:
    """Write moments of something that took as long as the last one: as on a clock where that is minutes.

    >>> moments_column("at", [0.5, 75]).cells, moments_column("at", [59.9, 4000]).cells
    (['0.5', '75.0'], ['0:01:00', '1:06:40'])
    """
    if max(seconds, default=0.0) < _TIMES[1][2]:
        return Column(f"{head}, s", [_write(s, 1.0, 1) for s in seconds], counts=True)
    whole = [round(s) for s in seconds]
    return Column(f"{head}, h:mm:ss", [f"{s // 3600}:{s // 60 % 60:02}:{s % 60:02}" for s in whole], counts=True)


def _in_one_unit(
    head: str,
    values: Sequence[float | None],
    units: Sequence[tuple[float, str, float]],
    unit_of: Sequence[float | None] = (),
) -> Column:
    middle = _middle(unit_of) or _middle(values)
    scale, unit = next((scale, unit) for scale, unit, below in units if middle < below)
    places = 0 if unit == "B" else _places(middle / scale, _DIGITS)
    return Column(f"{head}, {unit}", [_write(v, scale, places) for v in values], counts=True)


def _middle(values: Sequence[float | None]) -> float:
    """Return the middle one of the sizes: the smallest may be nearly nothing."""
    sizes = [abs(v) for v in values if v and math.isfinite(v)]
    return median_low(sizes) if sizes else 0.0


def _places(number: float, digits: int) -> int:
    """Return how many decimals give a number so many digits."""
    places = digits - 1 - math.floor(math.log10(number)) if number else 0
    return min(max(0, places), _MOST_PLACES)


def _write(value: float | None, scale: float, places: int) -> str:
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "never"
    least = 10.0**-places
    if 0 < value / scale < least / 2:
        return f"<{least:.{places}f}"
    return f"{rounded(value / scale, places):,.{places}f}"
