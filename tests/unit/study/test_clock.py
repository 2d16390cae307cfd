"""A study's own time: of its commands, and what of it its runs took."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from echelon.records.file import Recorder
from echelon.records.kinds import StudyStart
from echelon.study import from_tries, write_study
from echelon.study.clock import StudyTime, study_time
from tests.unit.study.fixtures import Planted, make_study


def record(folder: Path, *lines: tuple[float, str, dict[str, object]]) -> None:
    text = "".join(json.dumps({"t": t, "kind": kind, **values}) + "\n" for t, kind, values in lines)
    (folder / "record.jsonl").write_text(text)


def test_each_command_counts_from_its_process_to_its_end_and_one_that_was_killed_to_its_last_line(
    tmp_path: Path,
) -> None:
    record(
        tmp_path,
        (102.0, "study_start", {"launched_t": 100.0}),
        (120.0, "run", {"run": "a", "status": "completed", "seconds": 15.0}),
        (502.0, "study_start", {"launched_t": 500.0}),
        (520.0, "run", {"run": "b", "status": "completed", "seconds": 16.0}),
        (525.0, "command_end", {"seconds": 25.0}),
    )
    assert study_time(tmp_path) == StudyTime(20.0 + 25.0, 31.0)


def test_records_of_earlier_versions_do_not_tell_it(tmp_path: Path) -> None:
    assert study_time(tmp_path) is None
    record(tmp_path, (120.0, "run", {"run": "a", "status": "completed", "seconds": 15.0}))
    assert study_time(tmp_path) is None


def test_words_page_and_summary_tell_the_time_of_the_whole_study(tmp_path: Path) -> None:
    study = from_tries({}, ["sync=allreduce", "lr=1"], "1")
    folder = make_study(tmp_path / "s", study, {"sync=allreduce": Planted(), "lr=1": Planted()})
    ends = (folder / "record.jsonl").read_text()
    (folder / "record.jsonl").unlink()
    start = Recorder(folder)
    start.write(StudyStart(time.time() - 90.0))
    start.close()
    with (folder / "record.jsonl").open("a") as file:
        file.write(ends)
    report = write_study(folder, ends=True)
    assert report.took is not None and report.took.seconds == pytest.approx(90.0, abs=5.0)
    assert report.words[1] == report.took.says and "1m 0s in its runs" in report.words[1]
    assert report.words[1] in (page := (folder / "report.html").read_text()) and "1m 0s of it in runs" in page
    again = write_study(folder)  # a page that is written anew says the same
    assert again.took == report.took
    assert json.loads((folder / "summary.json").read_text())["seconds"] == report.took.seconds
