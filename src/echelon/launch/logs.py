"""The logs of a run's processes, and what they print: where they lie, and that they do not grow without end."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOK_S = 10.0


def prepare_logs(logs: Path, elsewhere: Path | None) -> None:
    """Make a run's folder of logs; `elsewhere` it is there, and a link leads to it. What is there already stays."""
    if elsewhere is not None:
        elsewhere.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # it was there before, or another machine of the run was faster
            logs.symlink_to(elsewhere.absolute())
    Path(os.path.realpath(logs)).mkdir(parents=True, exist_ok=True)  # of a link what it leads to, on this machine


class LogLimit:
    """Shortens files that have become longer than a limit, now and then: the newest half of it is kept as `NAME.1`.

    Processes write on meanwhile (their files are opened for appending); lines written in the instant between the copy
    and the cut are lost.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit = folder, limit_bytes
        self._next_s = 0.0

    def look(self) -> None:
        """Shorten what is too long, where the last look is some seconds ago."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LOOK_S
        path = self._folder
        try:
            for path in (*self._folder.glob("*.out"), *self._folder.glob("*.log")):
                if path.stat().st_size > self._limit:
                    shorten(path, self._limit // 2)
        except OSError as error:  # training does not end for want of room for a log, or of a disk that answers
            logging.warning("%s cannot be shortened: %s", path, error)


@contextmanager
def kept_short(folder: Path, limit_bytes: int) -> Iterator[None]:
    """Shorten the files of a folder while this process itself writes them, where no launcher looks after it."""
    over = threading.Event()

    def look_again() -> None:
        """Look until it is over."""
        limit = LogLimit(folder, limit_bytes)
        while not over.wait(LOOK_S):
            limit.look()

    thread = threading.Thread(target=look_again, name="log limit", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        LogLimit(folder, limit_bytes).look()  # what was written since


def shorten(path: Path, keep_bytes: int) -> None:
    """Move the newest whole lines of a file, at most so many bytes, to `NAME.1`, and empty it.

    Raises:
        OSError: it cannot be done; the file is as before.
    """
    temporary = path.with_name(f".{path.name}.1.{os.getpid()}")
    try:
        with path.open("rb") as file, temporary.open("wb") as copy:
            if file.seek(0, os.SEEK_END) > keep_bytes:
                file.seek(-keep_bytes, os.SEEK_END)
                file.readline()  # its beginning is cut off
            else:
                file.seek(0)
            shutil.copyfileobj(file, copy)
        temporary.replace(path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
    finally:
        temporary.unlink(missing_ok=True)
