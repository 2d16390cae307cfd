"""Appending to `record.jsonl` from several processes, and sealing it: it becomes a segment, and a new one begins.

Whoever appends holds a shared lock on the file, and looks before whether it still has the name; whoever seals it holds
the exclusive one while it changes the name. So no line lands in a file that was sealed, and nobody waits for longer
than two renames take. A process that dies at any moment leaves the record whole: its locks go with it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from echelon.core.lines import append_line
from echelon.records.segments import RECORD_FILE, Segment, all_segments

HEAD_FILE = ".record-head"
_LOCK_S = 1.0
_POLL_S = 0.001
_COMPACT_END_S = 5.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class AppendedFile:
    """A run's `record.jsonl`, open for appending by the threads of this process.

    It is opened again where another process sealed it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD_FILE
        self._fd = self._open()
        self._can_lock = True
        self._one_thread = threading.Lock()  # a checkpoint is recorded by the thread that wrote it

    def _open(self) -> int:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        _end_torn_line(self._path, fd)
        return fd

    @property
    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self._fd).st_size

    def append(self, line: bytes) -> None:
        """Append a line, whole or not at all.

        Raises:
            OSError: what kept it from being written.
        """
        with self._one_thread:
            locked = self._lock_current()
            try:
                append_line(self._fd, line)
            finally:
                if locked:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock_current(self) -> bool:
        """Share the lock of the file that has the name now; False: it cannot be had (in a second), and is not needed.

        It is not, for what is sealed last is not merged before the next is sealed.
        """
        deadline_s = time.monotonic() + _LOCK_S
        while time.monotonic() < deadline_s:
            if not self._lock(fcntl.LOCK_SH):
                if not self._can_lock:
                    return False
                time.sleep(_POLL_S)
            elif self._is_current() or not self._reopen():
                return True
        return False

    def _lock(self, how: int) -> bool:
        if not self._can_lock:
            return False
        try:
            fcntl.flock(self._fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logging.warning("%s: this file system has no locks (%s): the record stays one file", self._path, error)
            self._can_lock = False
            return False
        return True

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _reopen(self) -> bool:
        """Open the file that has the name; False: its folder is gone, and the one that is open stays."""
        try:
            fd = self._open()
        except FileNotFoundError:
            return False
        os.close(self._fd)
        self._fd = fd
        return True

    def seal(self, head: bytes) -> bool:
        """Make the file the newest segment, and begin a new one with a line; False: another process is at the file."""
        with self._one_thread:
            return self._seal(head)

    def _seal(self, head: bytes) -> bool:
        if not self._lock(fcntl.LOCK_EX):
            return False
        if not self._is_current():
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            return False
        folder = self._path.parent
        beginning = folder / HEAD_FILE
        beginning.write_bytes(head)
        number = max((segment.last for segment in all_segments(folder)), default=0) + 1
        self._path.rename(folder / Segment(number, number, 0).name)
        with suppress(FileExistsError):  # another process appends already
            os.link(beginning, self._path)
        beginning.unlink()
        self._reopen()
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _end_torn_line(path: Path, fd: int) -> None:
    size = os.fstat(fd).st_size
    if size:
        with path.open("rb") as file:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                os.write(fd, b"\n")


class Compaction:
    """Merges sealed segments in a process of its own, at the lowest priority, so that no step waits for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin, unless one goes on.

        Raises:
            OSError: the system starts no process.
        """
        if self._process is None or self._process.poll() is not None:
            command = (sys.executable, "-m", "echelon.records.compact", str(self._folder), str(os.getpid()))
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        """Wait a while for it to end, then end it: what it did not come to is done the next time."""
        if self._process is None:
            return
        try:
            self._process.wait(_COMPACT_END_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
