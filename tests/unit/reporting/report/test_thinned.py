"""A report of a thinned record says what the report of the whole one said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.records.file import read_records, restart_steps, to_line
from echelon.records.thin import thinned
from echelon.reporting.report import write_report
from tests.unit.reporting.report.fixtures import LiveState, make_run

STORIES = {
    "plain": LiveState(epochs=6),
    "a death": LiveState(epochs=6, death_at=230),
    "a slow rank": LiveState(epochs=6, phases_s=((0.02, 0.02, 0.04, 0.06, 0.004, 0.002), (0.05,) * 2 + (0.01,) * 4)),
}
WEAK = ("notes", "words")  # they count windows


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return all plain values of a summary by their path."""
    if isinstance(value, dict):
        return {
            k: v for key, inner in value.items() if key not in WEAK for k, v in flat(inner, f"{name}.{key}").items()
        }
    if isinstance(value, list):
        return {k: v for i, inner in enumerate(value) for k, v in flat(inner, f"{name}[{i}]").items()}
    return {name: value}


@pytest.mark.parametrize("windows", [8, 64])
@pytest.mark.parametrize("story", list(STORIES.values()), ids=list(STORIES))
def test_a_thinned_record_gives_the_same_summary(tmp_path: Path, story: LiveState, windows: int) -> None:
    run = make_run(tmp_path / "run", story)
    before = flat(write_report(run).to_json())
    records = read_records(run)
    lines = [to_line(record) for record in thinned(records, windows, windows, restart_steps(run))]
    assert len(lines) < len(records) / 2
    (run / "record.jsonl").write_bytes(b"".join(lines))
    after = flat(write_report(run).to_json())
    assert after.keys() == before.keys()
    numbers = {name for name, value in before.items() if isinstance(value, float)}
    assert {n: after[n] for n in numbers} == pytest.approx({n: before[n] for n in numbers}, rel=1e-6, abs=1e-9)
    assert {n: after[n] for n in before.keys() - numbers} == {n: before[n] for n in before.keys() - numbers}
