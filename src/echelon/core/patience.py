"""Patience with a disk: what cannot be written for a while is tried again, with growing pauses, and said once."""

from __future__ import annotations

import errno
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from echelon.core.errors import UserError
from echelon.core.units import format_seconds

PATIENCE_S = 600.0
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
_LOOK_S = 0.25
_PASSING = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS),  # room may come
        *(errno.EIO, errno.EROFS, errno.ESTALE, errno.EREMOTEIO, errno.ENOLCK, errno.EBUSY, errno.EAGAIN, errno.EINTR),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),  # a network disk
        *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENOTCONN, errno.ETIMEDOUT, errno.ESHUTDOWN),
        *(errno.ENODEV, errno.ENXIO),
    )
)

R = TypeVar("R")


def may_pass(error: BaseException) -> bool:
    """Whether an error may be gone when the same is tried again later: a full disk, a network disk that is away.

    >>> may_pass(OSError(errno.ENOSPC, "no space")), may_pass(PermissionError(errno.EACCES, "no"))
    (True, False)
    """
    return isinstance(error, OSError) and error.errno in _PASSING


@dataclass(frozen=True)
class DiskNotice:
    """What a user is told: that writing fails (`seconds` is None), or that it works again after some seconds."""

    message: str
    what: str
    reason: str
    seconds: float | None = None


@dataclass
class _Trouble:
    since_s: float
    reason: str
    pause_s: float
    next_s: float


class Patience:
    """How long one process goes on while a run's folder cannot be written. Threads may share it.

    Several things may fail at once: this is told once, and once more when all of them work again.

    Attributes:
        limit_s: for how long something may fail before the run ends; infinity: it never does for that.
        tell: is given each notice.
        trains: whether training goes on meanwhile.
        cut: why nothing is waited for any more, as after a signal; empty: it is.
    """

    def __init__(
        self,
        folder: Path | str,
        limit_s: float = PATIENCE_S,
        tell: Callable[[DiskNotice], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self.limit_s, self._clock = folder, limit_s, clock
        self.tell = tell or print_notice
        self._lock = threading.RLock()
        self._troubles: dict[str, _Trouble] = {}
        self._since_s = 0.0
        self._first = ("", "")
        self.trains = True
        self.cut: Callable[[], str] = str

    def failed(self, what: str, error: OSError, essential: bool = True) -> float:
        """Note that `what` could not be written; returns the seconds until it is to be tried again.

        Args:
            essential: the run ends when this fails for longer than the limit.

        Raises:
            OSError: the error, where waiting does not help.
            UserError: it has failed for too long.
        """
        if not may_pass(error):
            raise error
        reason = error.strerror or str(error)
        with self._lock:
            now = self._clock()
            first = not self._troubles
            trouble = self._troubles.setdefault(what, _Trouble(now, reason, FIRST_PAUSE_S / 2, now))
            trouble.reason, trouble.pause_s = reason, min(2 * trouble.pause_s, LONGEST_PAUSE_S)
            trouble.next_s = now + trouble.pause_s
            if essential and now - trouble.since_s >= self.limit_s:
                raise self._over(what, trouble, now) from error
            if first:
                self._since_s, self._first = now, (what, reason)
        if first:
            self.tell(self._fails(what, reason))
        return trouble.pause_s

    def worked(self, what: str) -> None:
        """Note that `what` was written."""
        if what not in self._troubles:
            return
        with self._lock:
            self._troubles.pop(what, None)
            seconds = self._clock() - self._since_s
            what, reason = self._first
            over = not self._troubles
        if over:
            after = f"writing to {self._folder} works again after {format_seconds(seconds)}"
            self.tell(DiskNotice(after, what, reason, seconds))

    def waits(self, what: str) -> bool:
        """Whether `what` failed, and it is too early to try it again."""
        trouble = self._troubles.get(what)
        return trouble is not None and self._clock() < trouble.next_s

    def fails(self, what: str) -> bool:
        """Whether `what` could not be written the last time."""
        return what in self._troubles

    def attempt(self, what: str, action: Callable[[], object], essential: bool = True) -> bool:
        """Try to write once, unless it is too early; returns whether it was written.

        Args:
            essential: the run ends when this fails for longer than the limit.

        Raises:
            OSError: waiting does not help.
            UserError: it has failed for too long.
        """
        if self.waits(what):
            return False
        try:
            action()
        except OSError as error:
            self.failed(what, error, essential)
            return False
        self.worked(what)
        return True

    def insist(self, what: str, action: Callable[[], R]) -> R:
        """Write, and wait while that fails.

        Raises:
            OSError: waiting does not help.
            UserError: it has failed for too long, or is not waited for any more.
        """
        while True:
            try:
                result = action()
            except OSError as error:
                self._pause(self.failed(what, error), what)
                continue
            self.worked(what)
            return result

    def give_up(self) -> None:
        """Wait for nothing any more: the run has ended for another reason, and what it leaves is tried once."""
        self.limit_s = 0.0

    def _pause(self, seconds: float, what: str) -> None:
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            self.check(what)
            time.sleep(min(left, _LOOK_S))

    def check(self, what: str) -> None:
        """Refuse to wait for `what`, which fails, where nothing is waited for any more.

        Raises:
            UserError: why (`cut`).
        """
        if reason := self.cut():
            raise UserError(f"{self._folder}: {what} could not be written ({self._troubles[what].reason}): {reason}")

    def _fails(self, what: str, reason: str) -> DiskNotice:
        how_long = "until the run ends" if math.isinf(self.limit_s) else f"for {format_seconds(self.limit_s)}"
        goes_on = f"{'training goes on, and ' * self.trains}it is tried again {how_long}"
        return DiskNotice(f"cannot write to {self._folder} ({what}: {reason}); {goes_on}", what, reason)

    def _over(self, what: str, trouble: _Trouble, now: float) -> UserError:
        seconds = now - trouble.since_s
        lasted = f" for {format_seconds(seconds)}, longer than --io-patience" if seconds >= 1 else ""
        return UserError(
            f"{self._folder}: {what} could not be written{lasted}: {trouble.reason}; "
            f"free or mend the disk, then continue with `echelon resume {self._folder}`"
        )


def print_notice(notice: DiskNotice) -> None:
    """Print a notice for the user, beside the progress."""
    try:
        print(f"echelon: {notice.message}", file=sys.stderr, flush=True)
    except OSError:  # this output is a file on the same disk: nobody reads it now
        return
