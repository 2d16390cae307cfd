"""Predicted gains beside measured ones: from the baseline's record to the table, the page and the words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.study import Study
from echelon.study.base import COMPLETED, Candidate
from echelon.study.folder import run_folder
from echelon.study.grid import planned_runs
from echelon.study.predictions import check_predictions, not_predicted
from echelon.study.report import StudyReport
from echelon.study.tables import RunRow
from echelon.study.write import write_study
from tests.unit.study.fixtures import Planted, make_study

BF16, TOPK, LOCAL = "compression=bf16", "compression=topk(0.01)", "sync=local(period=8)"
TRUTHS = {
    "sync=allreduce": Planted(jitter=0.0),
    BF16: Planted(communicate_s=0.01, jitter=0.0),
    TOPK: Planted(communicate_s=0.02, jitter=0.0),
    LOCAL: Planted(communicate_s=0.0025, jitter=0.0),
}
WAYS = [  # settings, period, bytes of a rank, coding seconds
    ({"strategy.compression": "none"}, 1, 1e6, 0.0),
    ({"strategy.compression": "bf16"}, 1, 5e5, 0.0),
    ({"strategy.compression": "topk(density=0.01)"}, 1, 1e4, 0.001),
    ({"strategy.sync": "local(period=8)"}, 8, 1e6, 0.0),
]


@pytest.fixture(name="folder")
def study_folder(tmp_path: Path) -> Path:
    candidates = (
        Candidate("sync=allreduce", {"strategy.sync": "allreduce"}),
        Candidate(BF16, {"strategy.compression": "bf16"}),
        Candidate(TOPK, {"strategy.compression": "topk(0.01)"}),
        Candidate(LOCAL, {"strategy.sync": "local(period=8)"}),
    )
    study = Study({"data.source": "digits"}, candidates, seeds=(0, 1))
    make_study(tmp_path, study, TRUTHS)
    rows = [
        {"settings": settings, "period": period, "wire_bytes": sent, "rounds": 0, "coding_s": coding_s, "tail": 1.0}
        for settings, period, sent, coding_s in WAYS
    ]
    told = {"t": 1.0, "kind": "alternatives", "now": WAYS[0][0], "latency_s": 0.0, "rows": rows}
    for run in planned_runs(study):
        if run.candidate == "sync=allreduce":
            with (run_folder(tmp_path, run.name) / "record.jsonl").open("a") as file:
                file.write(json.dumps(told) + "\n")
    return tmp_path


def checked(report: StudyReport) -> dict[str, tuple[float, float, bool]]:
    found = check_predictions(report.study, report.runs)
    return {c.candidate: (round(c.predicted, 2), round(c.measured, 2), c.holds) for c in found}


def test_each_prediction_stands_beside_what_was_measured(folder: Path) -> None:
    report = write_study(folder)
    # A step of 30 + 20 ms: half the bytes take 10, a hundredth 0.2 and 1 to encode, one exchange in eight steps 2.5.
    assert checked(report) == {BF16: (1.25, 1.25, True), TOPK: (1.6, 1.0, False), LOCAL: (1.53, 1.53, True)}
    said = next(word for word in report.words if word.startswith("Gains of whole runs"))
    assert "compression=bf16 1.25x (measured 1.25x)" in said and "2 of 3 within 15%" in said
    summary = json.loads((folder / "summary.json").read_text())
    assert [p["holds"] for p in summary["predictions"]] == [True, False, True]
    assert "predicted from the baseline" in (folder / "report.html").read_text()


def test_they_outlive_the_runs(folder: Path) -> None:
    before = checked(write_study(folder))
    for run in planned_runs(write_study(folder).study):
        (run_folder(folder, run.name) / "record.jsonl").unlink()
        (run_folder(folder, run.name) / "config.yaml").unlink()
        run_folder(folder, run.name).rmdir()
    assert checked(write_study(folder)) == before


def test_whose_gain_is_not_predicted_is_told_with_the_reason(tmp_path: Path) -> None:
    candidates = (
        Candidate("sync=allreduce", {"strategy.sync": "allreduce"}),
        Candidate("sync=local(period=4)", {"strategy.sync": "local(period=4)"}),
        Candidate("lr=1", {"optimizer.lr": "1"}),
        Candidate("as it is", {}),
    )
    study = Study({"data.source": "digits"}, candidates, seeds=(0, 1))
    report = write_study(make_study(tmp_path, study, {c.label: Planted() for c in candidates}))
    found = {p.candidate: p.reason for p in report.unpredicted}
    assert found.keys() == {"sync=local(period=4)", "lr=1"}
    assert "another lr" in found["lr=1"] and "few ways" in found["sync=local(period=4)"]
    assert sum("predicted gain" in word for word in report.words) == 2
    assert "Without a predicted gain: lr=1 (" in (tmp_path / "report.html").read_text()
    assert len(json.loads((tmp_path / "summary.json").read_text())["not_predicted"]) == 2


def test_without_predictions_nothing_is_said() -> None:
    study = Study({}, (Candidate("a", {}), Candidate("b", {"strategy.compression": "bf16"})), seeds=(0,))
    rows = [RunRow("r0", "a", "", 0, COMPLETED, "", step_s=0.1), RunRow("r1", "b", "", 0, COMPLETED, "", step_s=0.05)]
    assert check_predictions(study, rows) == []
    rates = Study({}, (Candidate("a", {}), Candidate("b", {"optimizer.lr": "1"})), seeds=(0,))
    assert not_predicted(rates, rows) == []  # nobody expects one of a study of learning rates
