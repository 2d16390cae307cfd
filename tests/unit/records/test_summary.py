"""A run's summary is read by its types, whichever version wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.records.summary import SUMMARY_FILE, PredictedStep, RunSummary, read_summary


def test_what_a_version_did_not_know_is_none_or_empty() -> None:
    old = {"metrics": {"top1": 0.5, "top5": None}, "best_top1": 0.75, "steps": 30, "wall_s": None, "classes": 10}
    summary = RunSummary.of(old)
    assert (summary.best, summary.steps, summary.wall_s, summary.words) == (0.75, 30, None, ())
    assert dict(summary.metrics) == {"top1": 0.5, "top5": None}
    assert RunSummary.of({}) == RunSummary()


def test_predictions_that_cannot_be_read_are_left_out() -> None:
    rows = [{"settings": {"strategy.sync": "local(8)"}, "then_s": 0.5}, {"then_s": 1}, "none", {"settings": {}}]
    assert list(RunSummary.of({"predictions": rows}).predictions) == [PredictedStep({"strategy.sync": "local(8)"}, 0.5)]


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"steps": "many"}), json.dumps({"metrics": {"top1": "good"}})])
def test_a_file_that_is_no_summary_is_refused_with_the_way_out(tmp_path: Path, text: str) -> None:
    assert not read_summary(tmp_path), "there is none yet"
    (tmp_path / SUMMARY_FILE).write_text(text)
    with pytest.raises(UserError, match=r"summary.json .*: `echelon report` writes it again"):
        RunSummary.of(read_summary(tmp_path))
