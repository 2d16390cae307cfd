"""A disk that takes nothing for a while: tried again with growing pauses, told once, and in order afterwards."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.core.lines import WaitingLines, append_line
from echelon.core.patience import LONGEST_PAUSE_S, DiskNotice, Patience, may_pass

FULL = OSError(errno.ENOSPC, "No space left on device")


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def patience(limit_s: float = 60.0) -> tuple[Patience, Clock, list[DiskNotice]]:
    clock, told = Clock(), list[DiskNotice]()
    return Patience(Path("run"), limit_s, told.append, clock), clock, told


def test_it_is_told_once_and_once_more_when_everything_works_again() -> None:
    disk, clock, told = patience()
    disk.failed("checkpoint", FULL)
    clock.now += 5
    disk.failed("record.jsonl", FULL)
    disk.failed("checkpoint", FULL)
    assert [n.message for n in told] == [
        "cannot write to run (checkpoint: No space left on device); training goes on, and it is tried again for 1m 0s"
    ]
    clock.now += 7
    disk.worked("checkpoint")
    assert len(told) == 1 and disk.fails("record.jsonl")
    disk.worked("record.jsonl")
    assert told[1].seconds == 12 and told[1].message == "writing to run works again after 12 s"
    disk.worked("record.jsonl")
    assert len(told) == 2


def test_pauses_grow_and_nothing_is_tried_within_one() -> None:
    disk, clock, _ = patience(limit_s=1e9)
    pauses, tries = [], 0

    def action() -> None:
        nonlocal tries
        tries += 1
        raise FULL

    for _ in range(8):
        assert not disk.attempt("checkpoint", action)
        assert disk.waits("checkpoint") and not disk.attempt("checkpoint", action)
        before = clock.now
        while disk.waits("checkpoint"):
            clock.now += 0.01
        pauses.append(clock.now - before)
    assert tries == 8
    assert pauses == sorted(pauses) and pauses[0] < 0.5 and pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.1)


def test_the_run_ends_when_it_lasts_too_long_but_not_for_what_it_can_do_without() -> None:
    disk, clock, _ = patience(limit_s=600)
    disk.failed("checkpoint", FULL)
    disk.failed("curves", FULL, essential=False)
    clock.now += 599
    disk.failed("checkpoint", FULL)
    clock.now += 2
    disk.failed("curves", FULL, essential=False)
    with pytest.raises(UserError, match=r"run: checkpoint could not be written for 10m 1s, longer than --io-patience"):
        disk.failed("checkpoint", FULL)


def test_what_does_not_pass_is_raised_at_once() -> None:
    disk, _, told = patience()
    with pytest.raises(PermissionError):
        disk.failed("checkpoint", PermissionError(errno.EACCES, "no"))
    assert not told and not may_pass(ValueError()) and not may_pass(FileNotFoundError(errno.ENOENT, ""))


class Disk:
    """`os.write` with a disk that takes `room` bytes more: first a part, then nothing."""

    def __init__(self) -> None:
        self.room = 1 << 20
        self._write = os.write

    def __call__(self, fd: int, data: bytes) -> int:
        if not self.room:
            raise FULL
        taken = self._write(fd, data[: self.room])
        self.room -= taken
        return taken


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr("echelon.core.lines.os.write", disk)
    return disk


class Log:
    """A file of lines."""

    def __init__(self, path: Path, patience: Patience, most_bytes: int | None = None) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.lines = WaitingLines(path.name, lambda line: append_line(self.fd, line), patience, most_bytes)


def test_lines_wait_for_the_disk_and_come_in_order(tmp_path: Path, disk: Disk) -> None:
    short, clock, told = patience()
    file, other = Log(tmp_path / "log", short).lines, Log(tmp_path / "log", patience()[0]).lines
    file.append(b"one\n")
    disk.room = 2
    file.append(b"two\n")  # a part of it is taken, and cut off again
    file.append(b"three\n")
    assert file.waiting == 2 and len(told) == 1
    disk.room = 1 << 20
    other.append(b"four\n")  # another process
    file.append(b"five\n")
    assert file.waiting == 3
    clock.now += 1
    file.append(b"six\n")
    assert file.waiting == 0 and len(told) == 2
    assert (tmp_path / "log").read_text().split() == ["one", "four", "two", "three", "five", "six"]


def test_the_oldest_lines_are_dropped_when_too_many_wait(tmp_path: Path, disk: Disk) -> None:
    short, clock, _ = patience()
    file = Log(tmp_path / "log", short, most_bytes=12).lines
    disk.room = 0
    for number in range(6):
        file.append(b"%d..\n" % number)
    assert file.lost == 3
    disk.room, clock.now = 100, clock.now + 1
    file.flush()
    assert (tmp_path / "log").read_text().split() == ["3..", "4..", "5.."]


def test_the_last_lines_are_waited_for_within_patience_and_no_longer(tmp_path: Path, disk: Disk) -> None:
    file = Log(tmp_path / "log", Patience(tmp_path, 0.5, lambda _: None)).lines
    disk.room = 0
    file.append(b"one\n")
    with pytest.raises(UserError, match="log could not be written"):
        file.flush()
    assert (tmp_path / "log").read_bytes() == b""
