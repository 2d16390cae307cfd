from __future__ import annotations

from collections.abc import Callable

import pytest

from echelon.core.figure import Json
from echelon.core.ticks import byte_axis, count_axis, time_axis


@pytest.mark.parametrize(
    ("make", "top", "texts"),
    [
        (time_axis, 0.0, ["0", "1 s"]),
        (time_axis, 0.012, ["0", "5 ms", "10 ms", "15 ms"]),
        (time_axis, 0.5, ["0", "0.1 s", "0.2 s", "0.3 s", "0.4 s", "0.5 s"]),
        (time_axis, 49.0, ["0", "10 s", "20 s", "30 s", "40 s", "50 s"]),
        (time_axis, 119.0, ["0", "0.5 min", "1 min", "1.5 min", "2 min"]),
        (time_axis, 400.0, ["0", "2 min", "4 min", "6 min", "8 min"]),
        (time_axis, 20_000.0, ["0", "2 h", "4 h", "6 h"]),
        (time_axis, 1e6, ["0", "5 d", "10 d", "15 d"]),
        (byte_axis, 3.0, ["0", "1 B", "2 B", "3 B"]),
        (byte_axis, 800.0, ["0", "0.2 kB", "0.4 kB", "0.6 kB", "0.8 kB"]),
        (byte_axis, 1.1e6, ["0", "0.5 MB", "1 MB", "1.5 MB"]),
        (byte_axis, 3e9, ["0", "1 GB", "2 GB", "3 GB"]),
    ],
)
def test_a_linear_axis_reaches_its_values_in_few_round_ticks(
    make: Callable[..., Json], top: float, texts: list[str]
) -> None:
    made = make("what", [top])
    assert made["ticktext"] == texts
    assert made["tickvals"][0] == 0 and made["tickvals"][-1] >= top and len(texts) <= 6


@pytest.mark.parametrize(
    ("make", "values", "texts"),
    [
        (time_axis, [0.5, 5000.0], ["1 s", "10 s", "1 min", "10 min", "1 h"]),
        (time_axis, [11.0, 140.0], ["20 s", "30 s", "1 min", "2 min"]),
        (time_axis, [0.002, 0.1], ["2 ms", "5 ms", "10 ms", "20 ms", "50 ms", "100 ms"]),
        (byte_axis, [8e5, 4e9], ["1 MB", "10 MB", "100 MB", "1 GB"]),
        (byte_axis, [2e6, 3e7], ["2 MB", "5 MB", "10 MB", "20 MB"]),
    ],
)
def test_a_logarithmic_axis_has_a_tick_a_decade_or_more_where_it_is_short(
    make: Callable[..., Json], values: list[float], texts: list[str]
) -> None:
    made = make("what", values, log=True)
    assert (made["type"], made["ticktext"]) == ("log", texts)


@pytest.mark.parametrize(("largest", "each"), [(3, True), (8, True), (9, False), (80_000, False)])
def test_each_of_few_counts_has_a_tick(largest: int, each: bool) -> None:
    assert (count_axis("step", largest).get("dtick") == 1) == each
