"""What a study says of a run that it started."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from echelon.core.errors import UserError
from echelon.records.file import Recorder
from echelon.records.kinds import CommandEnd, RunEnd
from echelon.reporting.report.records import load_run
from echelon.reporting.report.summary import summarise
from echelon.study import from_tries, open_study, planned_runs
from echelon.study.commands import RunCommand, end_all
from echelon.study.execute import How, command_seconds, run_study
from echelon.study.folder import discard, is_over, run_folder
from echelon.study.live import StudyDisplay
from tests.unit.study.fixtures import Planted, write_run


def test_what_a_run_took_is_what_its_own_report_says(tmp_path: Path) -> None:
    run = planned_runs(from_tries({}, ["sync=allreduce"], "1"))[0]
    folder = tmp_path / "run"
    write_run(folder, run, Planted())
    assert command_seconds(folder, 41.2) == 41.2  # it was killed before its command ended
    record = Recorder(folder)
    record.write(CommandEnd(41.0))
    record.close()
    assert command_seconds(folder, 41.2) == 41.0 == summarise(load_run(folder)).seconds


def test_a_run_that_left_no_folder_took_what_was_waited_for(tmp_path: Path) -> None:
    assert command_seconds(tmp_path / "refused", 1.5) == 1.5


def test_runs_follow_each_other_here_and_go_on_at_once_on_a_cluster() -> None:
    here = from_tries({}, ["sync=allreduce", "sync=local(8)"], "1")
    there = from_tries({"launch.on": "slurm(nodes=2)"}, ["sync=allreduce", "sync=local(8)"], "1")
    both = from_tries({}, ["on=local", "on=slurm(nodes=2)"], "1")
    assert How.of(here) == How.of(here, 1) == How() and How().pace == "one after the other"
    assert How.of(there) == How(at_once=4, elsewhere=True) and How.of(there).pace == "up to 4 at once"
    assert How.of(there, 9, retry=True) == How(True, 9, True) and How.of(there, 1).at_once == 1
    for study in (here, both):
        with pytest.raises(UserError, match="--at-once 2 is for runs on a cluster"):
            How.of(study, 2)


def test_a_run_completed_with_other_settings_is_not_taken_for_the_studys(tmp_path: Path) -> None:
    study = from_tries({"training.epochs": "6", "launch.on": "local"}, ["sync=allreduce"], "1")
    (run,) = planned_runs(study)
    write_run(run_folder(tmp_path, run.name), run, Planted())
    (edited,) = planned_runs(replace(study, base={"training.epochs": "9"}))
    done = {run.name: RunEnd(run.name, "completed", settings=dict(run.settings))}
    assert is_over(tmp_path, run, done) and is_over(tmp_path, edited, {run.name: RunEnd(run.name, "completed")})
    with pytest.raises(UserError, match=f"{run.name} completed with epochs 6, which is 9 now"):
        is_over(tmp_path, edited, done)
    refused = {run.name: RunEnd(run.name, "refused", settings=dict(run.settings))}
    discard(run_folder(tmp_path, run.name))
    assert is_over(tmp_path, run, refused) and not is_over(tmp_path, edited, refused)
    assert not is_over(tmp_path, run, refused, retry=True)


def test_a_run_that_a_queue_holds_back_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.study.commands.SILENCE_S", 0.0)
    for place, silent in (("local", True), ("slurm(nodes=1)", False)):
        (run,) = planned_runs(from_tries({"launch.on": place}, ["sync=allreduce"], "1"))
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        command = RunCommand(run, tmp_path / "run", process, tmp_path / "errors")
        assert command.is_over is silent
        end_all([command])
        process.communicate()
    command.silent = True
    assert command.outcome() == (1, "it recorded nothing for 0 minutes and was ended")


def test_runs_that_go_on_as_jobs_of_an_earlier_command_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = open_study(tmp_path / "study", from_tries({"launch.on": "slurm(nodes=1)"}, ["on=slurm", "on=ray"], "1"))
    job = run_folder(tmp_path / "study", planned_runs(study)[0].name) / "place" / "jobs"
    job.parent.mkdir(parents=True)
    job.write_text("7\n")
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho '7|RUNNING|None|node1|now'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="jobs of an earlier command go on there"):
        run_study(tmp_path / "study", study, StudyDisplay(tmp_path / "study", Console(quiet=True)), How(elsewhere=True))
    assert job.exists()
