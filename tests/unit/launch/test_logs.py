"""Logs that do not grow without end, in the run's folder or elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from echelon.launch.logs import LogLimit, prepare_logs
from echelon.launch.process import is_stopped
from tests.unit.launch.no_files import no_file_left


def test_a_long_log_keeps_its_newest_lines_and_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "rank1.out"
    (tmp_path / "rank0.log").write_text("short\n")
    writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for i in range(1000):
        os.write(writer, f"line {i}\n".encode())
    limit = LogLimit(tmp_path, 4000)
    limit.look()
    os.write(writer, b"after\n")
    os.close(writer)
    lines = (tmp_path / "rank1.out.1").read_text().splitlines()
    assert path.read_text() == "after\n"
    assert lines[-1] == "line 999" and lines == [f"line {i}" for i in range(1000 - len(lines), 1000)]
    assert 1900 < (tmp_path / "rank1.out.1").stat().st_size <= 2000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0.log", "rank1.out", "rank1.out.1"]
    assert (tmp_path / "rank0.log").read_text() == "short\n"


def test_logs_may_lie_elsewhere_and_stay_where_they_are(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.parent.mkdir()
    prepare_logs(logs, tmp_path / "var" / "run")
    prepare_logs(logs, None)  # a resume that does not say so
    prepare_logs(logs, tmp_path / "other")
    assert (tmp_path / "run" / "logs").resolve() == tmp_path / "var" / "run"


def test_a_look_around_without_a_file_left_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("line\n" * 1000)
    limit = LogLimit(tmp_path, 4000)
    with no_file_left():
        limit.look()
        silent = is_stopped(os.getpid())
    assert not silent and [path.name for path in tmp_path.iterdir()] == ["rank0.log"]
