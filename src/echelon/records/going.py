"""Whether a run or a study goes on: what its folder and the kernel say."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.core.errors import UserError
from echelon.core.files import open_plain, write_atomic
from echelon.core.own import continuing
from echelon.records.decode import decode
from echelon.records.file import newest
from echelon.records.kinds import Start

LOCK_FILE = ".lock"  # held by whoever runs it
LAUNCH_FILE = "launch.json"
_LOCKS = Path("/proc/locks")


@dataclass(frozen=True)
class Launch:
    """How a run was started last, and whether that command has ended.

    Attributes:
        launched_t: when the command was given, in unix seconds; None: not known.
        command: as one would type it.
        rendezvous: where its machines met.
        by: the process that wrote this: its machine and number.
    """

    launched_t: float | None = None
    command: str = ""
    rendezvous: str = ""
    ended: bool = False
    by: str = ""

    def seconds_since(self) -> float:
        """Seconds since the command was given; 0 where that is not known."""
        return time.time() - self.launched_t if self.launched_t is not None else 0.0


def is_held(folder: Path) -> bool | None:
    """Whether a process of this machine holds a folder's lock; None: it has none, or this system does not tell.

    Only looks: taking the lock, even for an instant, could refuse a run that starts in that instant.
    """
    holders = _holders(folder)
    return None if holders is None else bool(holders)


def holder(folder: Path) -> int | None:
    """Return the process of this machine that holds a folder's lock; None: there is none, or nobody tells."""
    return next(iter(_holders(folder) or ()), None)


def signal_holder(folder: Path, *signals: int) -> int:
    """Send the process of this machine that holds a folder's lock the first of some signals that it does not ignore.

    Returns:
        which one; 0: there is no such process.

    Raises:
        UserError: it is another user's.
    """
    pid = holder(folder)
    if pid is None:
        return 0
    try:
        ignored = int(re.findall(r"^SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0], 16)
        signum = next((signum for signum in signals if not ignored >> (signum - 1) & 1), signals[-1])
        os.kill(pid, signum)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:
        raise UserError(f"{folder} is another user's: process {pid}") from None
    return signum


def _holders(folder: Path) -> list[int] | None:
    """Return the processes that hold a folder's lock; None: it has none, or this system does not tell."""
    if not _LOCKS.exists():
        return None
    try:
        number = str((folder / LOCK_FILE).stat().st_ino)
    except FileNotFoundError:
        return None
    of_number = (f for f in _locks() if f[1] == "FLOCK" and f[5].rpartition(":")[2] == number)
    return [int(fields[4]) for fields in of_number if _may_hold(fields, folder)]


def _may_hold(fields: list[str], folder: Path) -> bool:
    """Whether a lock can be a folder's: files of other disks may have its file's number.

    The kernel names disks otherwise than `stat` does on some file systems. What the process that took the lock has open
    tells, where that lives and may be looked at; another one may hold it in its place.
    """
    try:
        there = (folder / LOCK_FILE).stat()
        opened = [entry.stat() for entry in Path(f"/proc/{fields[4]}/fd").iterdir() if entry.exists()]
    except OSError:
        return True
    same = [each for each in opened if each.st_ino == there.st_ino]
    return not same or any(each.st_dev == there.st_dev for each in same)


def _locks() -> list[list[str]]:
    """Return the fields of each lock that is held."""
    return [line.split() for line in _LOCKS.read_text().splitlines() if "->" not in line]  # these only wait for it


def is_deserted(folder: Path, start: Start | None) -> bool:
    """Whether nobody holds a run's lock and all ranks of its newest start, on this machine, have died."""
    if start is None or not start.pids or not is_local(start) or is_held(folder) is not False:
        return False
    return not any(_is_alive(pid) for pid in start.pids)


def _is_alive(pid: int) -> bool:
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not after_name.startswith(b"Z")


def read_launch(folder: Path) -> Launch:
    """Return how a run was started, as far as its folder says."""
    try:
        with open_plain(folder / LAUNCH_FILE) as file:
            return decode(Launch, json.loads(file.read()))
    except (FileNotFoundError, NotADirectoryError, UserError, AttributeError, TypeError, ValueError, RecursionError):
        return Launch()


def take_launch_from_record(folder: Path) -> None:
    """Note, where a machine goes on with the record of another one, that the run was started when that says.

    Raises:
        OSError: the folder cannot be written.
    """
    begun = next(newest(folder, Start), None)
    if begun is not None and begun.launched_t is not None:
        launch = replace(read_launch(folder), launched_t=begun.launched_t)
        write_atomic(folder / LAUNCH_FILE, json.dumps(vars(launch)))


def resumed_by(folder: Path, run: object = "") -> str:
    """Return what continues the run of a folder, as one would type it; `run`: how it is named there."""
    begun = next(newest(folder, Start), None)
    return continuing(run or folder, begun.objects if begun is not None else ())


def is_local(start: Start | None, launch: Launch | None = None) -> bool:
    """Whether all of a run's ranks, and the command that started them, are on this machine, as far as is known."""
    by = launch.by.rpartition(":")[0] if launch is not None else ""
    hosts = ([] if start is None else [*start.hosts]) + [by] * bool(by)
    return all(host == socket.gethostname() for host in hosts)
