"""Learning rates and equal time: what is chosen from planted runs, written down, run next and said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.study import from_tries, load_study, open_study, planned_runs, write_study
from echelon.study.base import COMPLETED, Choices, PlannedRun, Stage, Study
from echelon.study.collect import collect
from echelon.study.equal_time import compare_in_time
from echelon.study.file import checked, write_choices
from echelon.study.folder import run_folder
from echelon.study.stages import (
    all_runs,
    best_rates,
    check_stages,
    epochs_in_time,
    epochs_of,
    rate_of_settings,
    rate_runs,
    time_runs,
)
from echelon.study.tables import RunRow
from tests.unit.study.fixtures import EPOCHS, Planted, write_run

BASE, INT8 = "sync=allreduce", "compression=int8"
STUDY = replace(from_tries({"training.epochs": str(EPOCHS)}, [BASE, INT8], "3"), tune_lr=True, equal_time="baseline")
SLOW, FAST = Planted(jitter=0.0), Planted(compute_s=0.024, communicate_s=0.001, jitter=0.0)
"""An epoch and its evaluation take 1.005 s and 0.505 s."""


def write(folder: Path, runs: list[PlannedRun], truth_of: Callable[[PlannedRun], Planted]) -> None:
    for run in runs:
        write_run(run_folder(folder, run.name), run, truth_of(run))


def at_rate(run: PlannedRun) -> Planted:
    """0.2 is the best learning rate of one candidate, and the greatest that is tried of the other."""
    lr = float(run.settings["optimizer.lr"])
    best = 0.2 if run.candidate == BASE else 0.4
    return Planted(final=0.95 - 0.1 * abs(best - lr), noise=0.0, epochs=2)


def tuned(folder: Path) -> Study:
    open_study(folder, STUDY)
    write(folder, rate_runs(STUDY), at_rate)
    rates = best_rates(STUDY, collect(folder, STUDY)[0])
    return write_choices(folder, replace(STUDY, choices=Choices(rates)))


def timed(folder: Path) -> Study:
    study = tuned(folder)
    write(folder, planned_runs(study), lambda run: SLOW if run.candidate == BASE else FAST)
    seconds, epochs = epochs_in_time(study, collect(folder, study)[0])
    return write_choices(folder, replace(study, choices=replace(study.choices, seconds=seconds, epochs=epochs)))


def test_each_candidate_takes_the_rate_that_was_best_for_it(tmp_path: Path) -> None:
    tried = rate_runs(STUDY)
    assert [run.settings["optimizer.lr"] for run in tried[:5]] == ["0.025", "0.05", "0.1", "0.2", "0.4"]
    assert {(run.seed, run.settings["training.epochs"]) for run in tried} == {(0, "2")}
    study = tuned(tmp_path)
    assert study.choices.rates == {BASE: "0.2", INT8: "0.4"}
    assert {(r.candidate, r.settings["optimizer.lr"]) for r in planned_runs(study)} == {(BASE, "0.2"), (INT8, "0.4")}
    assert load_study(tmp_path / "study.yaml") == study
    assert open_study(tmp_path, STUDY) == study  # going on with it chooses nothing anew
    assert best_rates(study, []) == study.choices.rates


def test_rates_and_epochs_are_those_that_the_task_suggests(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("a,y\n" + "\n".join(f"{i},{0.5 * i}" for i in range(40)))
    settings = {"data.source": str(table), "task": "regression", "data.target": "y"}
    assert (rate_of_settings(settings), epochs_of(settings)) == (0.002, 30)
    study = replace(from_tries(settings, [BASE, INT8], "1"), tune_lr=True)
    tried = rate_runs(study)
    assert {run.settings["training.epochs"] for run in tried} == {"8"}
    assert [run.settings["optimizer.lr"] for run in tried[:5]] == ["0.0005", "0.001", "0.002", "0.004", "0.008"]


def test_the_same_candidate_twice_is_tuned_once() -> None:
    twice = replace(STUDY, candidates=from_tries({}, [BASE, BASE], "1").candidates)
    assert len(rate_runs(twice)) == 5


def test_a_rate_that_never_ended_a_run_is_left_as_it_is(tmp_path: Path) -> None:
    open_study(tmp_path, STUDY)
    write(tmp_path, rate_runs(STUDY), lambda run: Planted(status="failed", epochs=2))
    assert best_rates(STUDY, collect(tmp_path, STUDY)[0]) == {}


def test_a_rate_whose_loss_was_not_finite_is_not_chosen(tmp_path: Path) -> None:
    open_study(tmp_path, STUDY)
    write(tmp_path, rate_runs(STUDY), lambda run: replace(at_rate(run), finite=run.settings["optimizer.lr"] != "0.2"))
    assert best_rates(STUDY, collect(tmp_path, STUDY)[0])[BASE] == "0.1"


@pytest.mark.parametrize("wrong", ["lr=abc", "epochs=ten", "max_steps=1k"])
def test_a_candidate_that_is_refused_is_refused_alone(wrong: str) -> None:
    study = replace(from_tries({}, [BASE, wrong], "1"), tune_lr=True, equal_time="baseline")
    assert checked(study) is study
    assert {run.candidate for run in rate_runs(study)} == {BASE}


def test_runs_that_stopped_early_count_in_equal_time() -> None:
    study = replace(
        from_tries({"training.epochs": "10", "training.early_stop": "2"}, [BASE, INT8], "1"), equal_time="1h"
    )
    study = replace(study, choices=Choices({}, {"": 3600.0}, {"": {BASE: 10, INT8: 20}}))
    rows = [
        RunRow("a", BASE, "", 0, "completed", "", run_s=60.0, epochs=6.0, metric="top1", metrics={"top1": 0.9}),
        RunRow("b", INT8, "", 0, "completed", "", run_s=60.0, epochs=6.0, metrics={"top1": 0.9}),
        RunRow(
            "time-b", INT8, "", 0, "completed", "", stage=Stage.TIME, run_s=70.0, epochs=7.0, metrics={"top1": 0.95}
        ),
    ]
    (group,) = compare_in_time(study, rows)
    assert {s.candidate: s.value for s in group.step_statuses} == {BASE: 0.9, INT8: 0.95}


def test_equal_time_is_the_epochs_that_end_in_it(tmp_path: Path) -> None:
    study = timed(tmp_path)
    assert study.choices.seconds[""] == pytest.approx(6.03, abs=0.01)
    assert study.choices.epochs[""] == {BASE: 6, INT8: 11}  # 12 would take 6.06 s
    assert [(r.candidate, r.settings["training.epochs"]) for r in time_runs(study)] == [(INT8, "11")] * 3
    assert load_study(tmp_path / "study.yaml") == study
    given = replace(study, equal_time="0.9s", choices=Choices(study.choices.rates))
    assert epochs_in_time(given, collect(tmp_path, given)[0]) == ({"": 0.9}, {"": {BASE: 0, INT8: 1}})


def test_what_came_of_it_is_said_and_stands_in_table_and_page(tmp_path: Path) -> None:
    study = timed(tmp_path)
    write(tmp_path, time_runs(study), lambda run: replace(FAST, epochs=11, final=0.97))
    report = write_study(tmp_path)
    assert len(report.runs) == 6 and report.completed == len(report.all_runs) == len(all_runs(study)) == 19
    said = "\n".join(report.words)
    assert "19 of" not in said and "6 of 6 runs completed" in said
    assert "After 6.03 s from the first step, what sync=allreduce takes, each with" in said
    assert f"the best first: {INT8} 9" in said and "(11 epochs, ended at 5.56 s, final accuracy +1.9" in said
    assert f"{INT8} 0.4 (the end of what was tried: further may be better)" in said and f"{BASE} 0.2;" in said
    assert "10 runs in" in said
    rows = {row.run: row for row in report.all_runs}
    assert {row.stage for row in rows.values()} == {"learning rates", "", "equal time"}
    assert {row.lr for row in report.runs} == {0.2, 0.4} and all(r.status == COMPLETED for r in rows.values())
    page = (tmp_path / "report.html").read_text()
    assert "After 6.03 s from the first step, the best first" in page and "epochs ended by then" in page
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [s["candidate"] for s in summary["equal_time"][0]["step_statuses"]] == [INT8, BASE]
    assert summary["learning_rates"] == {BASE: "0.2", INT8: "0.4"}


def test_before_its_runs_are_there_equal_time_says_what_is_missing(tmp_path: Path) -> None:
    study = timed(tmp_path)
    said = "\n".join(write_study(tmp_path).words)
    assert f"{INT8} is not known (no run of 11 epochs completed)" in said
    assert study.choices.epochs[""][INT8] == 11


@pytest.mark.parametrize(
    ("time", "base", "words"),
    [
        ("soon", {}, "; or baseline"),
        ("60s", {"training.max_steps": "9"}, "give --epochs instead of --max-steps"),
    ],
)
def test_what_equal_time_cannot_be_is_refused(time: str, base: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_stages(replace(STUDY, equal_time=time, base=base))
