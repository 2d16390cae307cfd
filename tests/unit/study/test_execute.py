"""What a study says of a run that it started."""

from __future__ import annotations

from pathlib import Path

from echelon.records.file import Recorder
from echelon.records.kinds import CommandEnd
from echelon.reporting.report.records import load_run
from echelon.reporting.report.summary import summarise
from echelon.study import from_tries, planned_runs
from echelon.study.execute import command_seconds
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
