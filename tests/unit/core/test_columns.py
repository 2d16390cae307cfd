"""Numbers of a column are in one unit, which its head names, with the same decimals, and none is lost."""

from __future__ import annotations

import doctest
import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echelon.core import columns
from echelon.core.columns import Column, bytes_column, measure_column, moments_column, number_column, seconds_column

SCALES = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def _decimals(column: Column) -> set[int]:
    return {len(cell.partition(".")[2]) for cell in column.cells if cell != columns.NONE}


def test_examples() -> None:
    assert doctest.testmod(columns).failed == 0


@pytest.mark.parametrize("written", [seconds_column, bytes_column])
@given(values=st.lists(st.one_of(st.none(), st.just(0.0), st.floats(1e-4, 1e9)), min_size=1, max_size=12))
@example(values=[274877907.7755265, 0.0001])  # its last place is that of a float
def test_a_column_has_one_unit_and_one_number_of_decimals(written, values: list[float | None]) -> None:
    column = written("x", values)
    scale = SCALES[column.head.removeprefix("x, ")]
    assert len(_decimals(column)) <= 1 and column.counts
    for value, cell in zip(values, column.cells, strict=True):
        number = float(cell.replace(",", "").removeprefix("<")) if value is not None else None
        unit_of_last_place = 10.0 ** -len(cell.partition(".")[2])
        if cell.startswith("<"):
            assert value is not None and 0 < value / scale < unit_of_last_place
        elif value is not None and number is not None:
            rounding = 0.51 * unit_of_last_place * scale + 2 * math.ulp(value)
            assert number * scale == pytest.approx(value, rel=0, abs=rounding)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8))
def test_measures_and_settings_have_one_number_of_decimals(values: list[float]) -> None:
    assert len(_decimals(measure_column("RMSE", values))) == 1
    short = number_column("lr", values)
    assert len(_decimals(short)) == 1 or any("e" in cell for cell in short.cells)


def test_what_never_ends_and_moments_of_long_runs() -> None:
    assert seconds_column("run", [float("inf"), 90.0]).cells == ["never", "90.0"]
    assert all(re.fullmatch(r"\d+:\d\d:\d\d", cell) for cell in moments_column("at", [0.0, 59.6, 36_000.0]).cells)
