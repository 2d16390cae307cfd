"""What a study says of a run that it started."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.records.file import Recorder
from echelon.records.kinds import CommandEnd
from echelon.reporting.report.records import load_run
from echelon.reporting.report.summary import summarise
from echelon.study import from_tries, planned_runs
from echelon.study.execute import How, command_seconds
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
