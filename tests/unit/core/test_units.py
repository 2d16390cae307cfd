from __future__ import annotations

import pytest

from echelon.core.errors import UserError
from echelon.core.units import format_bytes, format_metric, format_seconds, parse_bits_per_s, parse_seconds, rounded


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("30s", 30), ("5m", 300), ("1.5 h", 5400)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "-5s", "5 parsecs"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a duration"):
        parse_seconds(text)


def test_rates() -> None:
    assert parse_bits_per_s("10mbit") == 1e7


def test_words() -> None:
    assert [format_bytes(n) for n in (12, 1500, 2.5e9)] == ["12 B", "1.5 kB", "2.5 GB"]
    assert [format_seconds(s) for s in (0.002, 3.21, 61, 7300)] == ["2 ms", "3.21 s", "1m 1s", "2h 1m"]


def test_what_comes_to_nothing_is_written_without_a_minus() -> None:
    assert f"{rounded(-0.0014, 2):+.2f}" == "+0.00" and f"{rounded(-0.004, 2):.0%}" == "0%"
    assert f"{rounded(-1.25, 2):+.2f}" == "-1.25"


def test_a_number_never_has_four_digits_before_its_unit() -> None:
    assert [format_bytes(n) for n in (999, 999.7, 999_600, 999_400)] == ["999 B", "1 kB", "1 MB", "999 kB"]
    assert [format_seconds(s) for s in (0.9994, 0.9996, 59.94, 59.96)] == ["999 ms", "1 s", "59.9 s", "1m 0s"]


def test_a_small_metric_is_not_nothing() -> None:
    assert [format_metric(v) for v in (0.0, 0.5, -2.0, 0.001, 2e-5)] == [
        "0.0000",
        "0.5000",
        "-2.0000",
        "0.0010",
        "2e-05",
    ]


def test_what_never_ends_is_said() -> None:
    assert format_seconds(float("inf")) == "never"
