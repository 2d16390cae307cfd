"""Times of every type, and strings that stand for them, are one number in the unit that a run keeps."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import open_data
from echelon.data.column_numbers import as_numbers, read_strings, unit_of
from echelon.data.columns import MeasuredColumns, inputs_of_rows, number_facts

ROWS = 40
FORMS: list[Any] = [
    "2021-03-01",
    "2021-03-01 00:00",
    "2021-03-01T00:00:00",
    "2021-03-01T00:00:00Z",
    date(2021, 3, 1),
    datetime(2021, 3, 1),
    datetime(2021, 3, 1, tzinfo=UTC),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: repr(form)[:45])
@pytest.mark.parametrize("time", ["", " 07:00"], ids=["dates", "times"])
def test_a_day_is_one_number_however_it_is_written(tmp_path: Path, form: Any, time: str) -> None:
    """A run that was trained on times, or on dates, has the same input for a day as a date, a time or a string."""
    days = [f"2021-0{1 + i // 20}-{i % 20 + 1:02}{time}" for i in range(ROWS)]
    (tmp_path / "a.csv").write_text("day,y\n" + "".join(f"{day},{i}.5\n" for i, day in enumerate(days)))
    run = tmp_path / "run"
    run.mkdir()
    source = open_data(DataConfig(source=str(tmp_path / "a.csv"), target="y"), 0, "regression", run)
    given = inputs_of_rows(pa.Table.from_pylist([{"day": form}]), source.info, MeasuredColumns(run))
    facts = MeasuredColumns(run).known("day")
    assert facts.unit == ("s" if time else "d")
    day_s = datetime(2021, 3, 1, tzinfo=UTC).timestamp() / (1 if time else 86_400)
    np.testing.assert_allclose(given, [[(day_s - facts.mean) / facts.std]], rtol=1e-5)
    with pytest.raises(UserError, match="column day: 'yesterday' in row 2 is no time such as 2021-03-01 07:00"):
        inputs_of_rows(pa.table({"day": ["2021-03-01", "yesterday"]}), source.info, MeasuredColumns(run))


def test_a_string_that_is_no_number_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i}.5,{i}.5\n" for i in range(ROWS)))
    run = tmp_path / "run"
    run.mkdir()
    info = open_data(DataConfig(source=str(tmp_path / "a.csv"), target="y"), 0, "regression", run).info
    rows = inputs_of_rows(pa.table({"x": ["1.5", "2.5"]}), info, MeasuredColumns(run))
    np.testing.assert_array_equal(rows, inputs_of_rows(pa.table({"x": [1.5, 2.5]}), info, MeasuredColumns(run)))
    with pytest.raises(UserError, match="column x: '2,5' in row 2 is no number"):
        inputs_of_rows(pa.table({"x": ["1.5", "2,5"]}), info, MeasuredColumns(run))


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_durations_are_of_one_unit(unit: str) -> None:
    kind = pa.duration(unit)
    ticks = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[unit]
    values = pa.chunked_array([pa.array([90 * ticks, None]).cast(kind)])
    assert unit_of(kind) == unit
    np.testing.assert_allclose(as_numbers(values, "s"), [90.0, np.nan])
    assert as_numbers(values)[0] == 90 * ticks


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_time_of_day_is_one_number_however_it_is_written(unit: Any) -> None:
    kind = pa.time32(unit) if unit in ("s", "ms") else pa.time64(unit)
    values = pa.chunked_array([pa.array([time(i % 24, 30) for i in range(ROWS)]).cast(kind)])
    facts = number_facts(values)
    assert facts.unit == f"day:{unit}" == unit_of(kind)
    texts = ["07:00", "07:00:00", "07:00:00.0", None]
    alike = [pa.array(texts), pa.array(texts, pa.large_string()), pa.array([time(7)] * 3 + [None])]
    alike.append(pa.array([timedelta(hours=7)] * 3 + [None]))  # since midnight, as pandas may have it
    numbers = [as_numbers(read_strings("at", pa.chunked_array([each]), facts.unit), facts.unit) for each in alike]
    for each in numbers:
        np.testing.assert_allclose(each, as_numbers(values, facts.unit)[0] * np.array([14, 14, 14, np.nan]))
    np.testing.assert_allclose(as_numbers(values, unit), as_numbers(values))  # which earlier versions have measured
    for other in ("2021-03-01 07:00", "25:00", "07", ""):
        with pytest.raises(UserError, match=f"column at: '{other}' in row 2 is no time of day such as 07:00"):
            read_strings("at", pa.chunked_array([["07:00", other]]), facts.unit)
    with pytest.raises(UserError, match=r"column at holds timestamp\[us\]; the run's data has times of day"):
        read_strings("at", pa.chunked_array([[datetime(2021, 3, 1, 7)]]), facts.unit)
