"""A command ends in the time that its place gives, or at a signal, though the disk takes no report."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.core.stop import StopFlag
from echelon.records.file import Recorder, read_records
from echelon.records.kinds import CommandEnd
from echelon.run.closing import close_run


class FullDisk:
    """Takes no report, and asks to stop at one of the attempts."""

    def __init__(self, stop: StopFlag, signal_at: int) -> None:
        self._stop, self._signal_at, self.attempts = stop, signal_at, 0

    def __call__(self, path: Path, known: object) -> None:
        self.attempts += 1
        if self.attempts == self._signal_at:
            self._stop.ask()
        raise OSError(errno.ENOSPC, "No space left on device")


def closed(
    run: Path, stop: StopFlag, signal_at: int, monkeypatch: pytest.MonkeyPatch, stop_s: float, patience_s: float
) -> float:
    """Close a run whose report no disk takes; returns how long that took, in seconds."""
    disk, began = FullDisk(stop, signal_at), time.monotonic()
    monkeypatch.setattr("echelon.reporting.report.write_report", disk)
    record = Recorder(run, patience_s=patience_s)
    try:
        close_run(run, record, stop, stop_s)
    finally:
        record.close()
    assert disk.attempts
    return time.monotonic() - began


def test_a_signal_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    stop = StopFlag()
    assert closed(tmp_path, stop, 2, monkeypatch, stop_s=600.0, patience_s=600.0) < 20
    assert f"`echelon report {tmp_path}` writes it" in capsys.readouterr().err
    assert list(read_records(tmp_path, CommandEnd))


def test_a_run_that_was_stopped_waits_as_long_as_its_place_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = StopFlag()
    stop.ask()
    assert 0.5 < closed(tmp_path, stop, 0, monkeypatch, stop_s=2.0, patience_s=600.0) < 20


def test_without_a_signal_patience_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="longer than --io-patience"):
        closed(tmp_path, StopFlag(), 0, monkeypatch, stop_s=2.0, patience_s=1.0)
