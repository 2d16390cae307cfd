"""The pipeline's timeline in the report and as a trace file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.reporting.report.charts_pipeline import pipeline_charts, write_trace
from echelon.reporting.report.records import load_run

ACTIONS = [
    [0, 0, 0, "forward", 0.0, 0.010],
    [1, 1, 0, "forward", 0.010, 0.020],
    [1, 1, 0, "input", 0.020, 0.030],
    [0, 0, 0, "weight", 0.030, 0.040],
]


def recorded(folder: Path, actions: object) -> Path:
    """Write a run's record with one step of a pipeline."""
    line = {"t": 1.0, "kind": "pipeline", "step": 3, "schedule": "zero_bubble", "actions": actions}
    (folder / "record.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def test_the_timeline_shows_ranks_and_kinds(tmp_path: Path) -> None:
    """A bar for each computation; the idle share in words."""
    chart = pipeline_charts(load_run(recorded(tmp_path, ACTIONS)))[0]
    assert [trace["name"].partition(",")[0] for trace in chart.traces] == ["forward", "backward", "backward"]
    assert chart.traces[0]["y"] == [0, 1] and chart.traces[0]["base"] == [0.0, 0.01]
    assert "Step 3 of zero_bubble: 1 micro-batches through 2 stages on 2 ranks" in chart.caption
    assert "for 50% of it" in chart.caption


@pytest.mark.parametrize("actions", [None, [], "torn", [[0, 0]], [[0, 0, 0, "forward", 0.0, float("nan")]]])
def test_a_strange_record_draws_nothing(tmp_path: Path, actions: object) -> None:
    """Rows that are not what they should be are left out."""
    assert pipeline_charts(load_run(recorded(tmp_path, actions))) == []


def test_the_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    """Complete events in microseconds, a thread per rank with its name."""
    assert write_trace(recorded(tmp_path, ACTIONS), tmp_path / "trace.json") == 1
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["tid"] for e in events if e["ph"] == "M"] == [0, 1]
    spans = [e for e in events if e["ph"] == "X"]
    assert spans[1]["ts"] == pytest.approx(10_000) and spans[1]["dur"] == pytest.approx(10_000)


def test_a_run_without_a_pipeline_has_no_trace(tmp_path: Path) -> None:
    """Said in words."""
    with pytest.raises(UserError, match="no recorded step of a pipeline"):
        write_trace(recorded(tmp_path, []), tmp_path / "trace.json")
