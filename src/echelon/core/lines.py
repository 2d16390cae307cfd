"""Lines that several processes append to a file, and that survive a disk which takes nothing for a while."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from echelon.core.patience import Patience

_POLL_S = 0.05


class WaitingLines:
    """Appends lines, each with one write. Those that the disk does not take are kept, and written later in order.

    Attributes:
        lost: lines that were dropped, the oldest first, because too many waited.
    """

    def __init__(
        self, name: str, append: Callable[[bytes], None], patience: Patience, most_bytes: int | None = None
    ) -> None:
        """Take what appends one line to a file, whole or not at all.

        Args:
            name: of the file, as patience calls it.
            most_bytes: of lines that wait; None: any number.
        """
        self._name, self._append, self._patience, self._most_bytes = name, append, patience, most_bytes
        self._lock = threading.RLock()  # what is told of a failure may be a line of this file
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self.lost = 0

    @property
    def waiting(self) -> int:
        """Lines that are not on the disk yet."""
        return len(self._waiting)

    def append(self, line: bytes) -> None:
        """Append a line, which ends with a newline; or keep it, where the disk takes nothing now.

        Raises:
            OSError: waiting does not help.
            UserError: the disk has taken nothing for too long.
        """
        with self._lock:
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            while self._most_bytes is not None and self._waiting_bytes > self._most_bytes:
                self._waiting_bytes -= len(self._waiting.popleft())
                self.lost += 1
            self._patience.attempt(self._name, self._write)

    def flush(self) -> None:
        """Wait until everything is written, for as long as patience lasts.

        Raises:
            OSError: waiting does not help.
            UserError: the disk has taken nothing for too long, or is not waited for any more.
        """
        while True:
            with self._lock:
                if not self._waiting or self._patience.attempt(self._name, self._write):
                    return
                self._patience.check(self._name)
            time.sleep(_POLL_S)

    def _write(self) -> None:
        while self._waiting:
            line = self._waiting[0]
            self._append(line)
            self._waiting.popleft()
            self._waiting_bytes -= len(line)


def append_line(fd: int, line: bytes) -> None:
    """Append a line, or nothing: the part of it that a full disk takes is cut off again. Raises OSError."""
    taken = 0
    try:
        while taken < len(line):
            taken += os.write(fd, line[taken:])
    except OSError:
        end = os.lseek(fd, 0, os.SEEK_CUR)
        if taken and os.fstat(fd).st_size == end:  # nobody else has written behind it
            os.ftruncate(fd, end - taken)
        raise
