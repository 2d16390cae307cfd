"""Columns of numbers and of times as arrays: a time is its seconds, a date its days, or what unit a run keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.errors import UserError

_NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
_OF_DAY = "day:"  # before the unit of a time of day; in what earlier versions have measured it is not there
_SECONDS = {"d": 86_400.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SECONDS |= {f"{_OF_DAY}{unit}": _SECONDS[unit] for unit in ("s", "ms", "us", "ns")}


def is_string(values: pa.ChunkedArray) -> bool:
    """Whether a column holds strings."""
    return bool(pa.types.is_string(values.type) or pa.types.is_large_string(values.type))


def stray(values: pa.ChunkedArray) -> str:
    """Say which value of strings is the first that is no number, where most of them are; else the first of all."""
    matched = pc.match_substring_regex(values, _NUMBER) if is_string(values) else None
    if matched is None or 2 * (pc.sum(matched).as_py() or 0) < len(values):
        first = next((value for value in values.slice(0, 1000).to_pylist() if value is not None), None)
        return "" if first is None else f", such as {str(first)[:60]!r}"
    place = pc.index(pc.fill_null(matched, True), False).as_py()
    return f" (most are numbers, but not such as {values[place].as_py()!r})" if place >= 0 else ""


def unit_of(kind: pa.DataType) -> str:
    """Return the unit of times, such as `s`, `d`, or `day:s` of times of day, by a type; empty: it is none of times."""
    if pa.types.is_date32(kind):
        return "d"
    if pa.types.is_timestamp(kind) or pa.types.is_date64(kind):
        return "s"
    if pa.types.is_time(kind):
        return f"{_OF_DAY}{kind.unit}"
    return str(kind.unit) if pa.types.is_duration(kind) else ""


def as_numbers(values: pa.ChunkedArray, unit: str = "") -> NDArray[np.float64]:
    """Return a column of numbers `(N,)`, missing ones NaN.

    Args:
        unit: of times; empty: that of the column's type, as `unit_of` returns it.
    """
    own = unit_of(values.type)
    if own == "s" and not pa.types.is_duration(values.type):
        values = values.cast(pa.timestamp("s"), safe=False).cast("int64")
    elif own:
        values = values.cast("int32" if values.type.bit_width == 32 else "int64")
    numbers: NDArray[np.float64] = values.cast(pa.float64(), safe=False).to_numpy().astype(np.float64)
    return numbers * (_SECONDS[own] / _SECONDS[unit]) if own and unit and own != unit else numbers


def in_order(values: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column of numbers or times, of which none is missing, by what it is ordered: `(N,)`, of no common unit.

    Times are whole numbers of the column's own unit, so that none of its fractions of a second is lost.
    """
    kind = values.type
    if pa.types.is_temporal(kind):
        values = values.cast("int32" if kind.bit_width == 32 else "int64")
    elif pa.types.is_decimal(kind):
        values = values.cast(pa.float64())
    ordered: NDArray[Any] = values.to_numpy()
    return ordered


@dataclass(frozen=True)
class _Kind:
    """What strings are read as, and what they have to look like."""

    types: tuple[pa.DataType, ...]
    words: str


_NUMBERS = _Kind((pa.float64(),), "no number")
_TIMES = _Kind(
    tuple(pa.timestamp(unit, zone) for unit in ("us", "ns") for zone in (None, "UTC")),
    "no time such as 2021-03-01 07:00, and no date such as 2021-03-01",
)

_TIMES_OF_DAY = _Kind((pa.time64("us"), pa.time64("ns")), "no time of day such as 07:00 or 07:00:30")


def read_strings(
    name: str, values: pa.ChunkedArray, unit: str, places: NDArray[np.int64] | None = None
) -> pa.ChunkedArray:
    """Return a column of strings as the times or numbers that it stands for, as JSON has them; any other as it is.

    Args:
        unit: of the times that the run has there; empty: it has numbers.
        places: of the values in their file, `(n,)`, from 0; None: they are all of it, in its order.

    Raises:
        UserError: names the first row that is none; or the run has times of day, and these are other times.
    """
    of_day = unit.startswith(_OF_DAY)
    is_of_day = pa.types.is_time(values.type) or pa.types.is_duration(values.type)  # since midnight
    if of_day and unit_of(values.type) and not is_of_day:
        raise UserError(f"column {name} holds {values.type}; the run's data has times of day there, such as 07:00")
    if not is_string(values):
        return values
    kind = _TIMES_OF_DAY if of_day else _TIMES if unit in ("d", "s") else _NUMBERS
    for wanted in kind.types:
        if (read := _cast(values, wanted)) is not None:
            return read
    row = next(
        row for row in range(len(values)) if all(_cast(values.slice(row, 1), wanted) is None for wanted in kind.types)
    )
    place = row if places is None else int(places[row])
    raise UserError(f"column {name}: {values[row].as_py()!r} in row {place + 1} is {kind.words}")


def _cast(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    try:
        if pa.types.is_time(kind):  # which Arrow reads with a date alone
            values = values.cast(pa.string())
            dated = pc.binary_join_element_wise("1970-01-01", values, " ")
            is_time = pc.match_substring(values, ":")
            return pc.if_else(is_time, dated, "").cast(pa.timestamp(kind.unit)).cast(kind)
        return values.cast(kind)
    except pa.ArrowException:
        return None
