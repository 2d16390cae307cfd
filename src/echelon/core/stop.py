"""Signals that ask a process to stop: the terminal's Ctrl-C and Ctrl-\\, its end, a service manager's SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def signal_name(signum: int) -> str:
    """Return a signal's name, such as SIGKILL; real-time signals have none but their number.

    >>> signal_name(9), signal_name(45)
    ('SIGKILL', 'signal 45')
    """
    return signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"


class Stopped(BaseException):
    """A signal asked this process to stop: not an Exception, so that nothing on the way swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal_name(signum)}")
        self.signum = signum


def stopped_exit_code(signum: int) -> int:
    """Return a command's exit code after a signal, as shells have it: 128 + signal.

    SIGTERM's where this process had none, but another machine of the run had.

    >>> stopped_exit_code(2), stopped_exit_code(0)
    (130, 143)
    """
    return 128 + (signum or signal.SIGTERM)


class StopFlag:
    """Set once a signal asked this process to stop.

    Attributes:
        signum: the first one that came; 0: none did.
        raises: whether it also raises `Stopped` where it comes, once; else who holds the flag looks at it.
    """

    def __init__(self, raises: bool = False) -> None:
        self.signum, self.raises = 0, raises

    def __bool__(self) -> bool:
        return self.signum != 0

    def ask(self) -> None:
        """Ask to stop as SIGTERM does."""
        self.signum = self.signum or signal.SIGTERM

    def _set(self, signum: int, frame: FrameType | None) -> None:
        first, self.signum = not self.signum, self.signum or signum
        if first and self.raises:
            raise Stopped(signum)


@contextmanager
def stop_on_signals(raises: bool = False) -> Iterator[StopFlag]:
    """Turn signals into a flag, or an exception, while the block runs; the handlers of before come back after it.

    Signals that are ignored when it begins stay so: `nohup` and a shell's background jobs mean that. Outside the main
    thread, where Python allows no handlers, nothing is changed.
    """
    flag = StopFlag(raises)
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    handlers = {s: signal.getsignal(s) for s in STOP_SIGNALS}
    before = {s: handler for s, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for signum in before:
        signal.signal(signum, flag._set)
    try:
        yield flag
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def stop_at_once() -> None:
    """Let the signals that ask to stop raise `Stopped` in the main thread from now on, also in a container's first
    process, for which the kernel ignores what has no handler. Ctrl-C and ignored signals stay as they are.
    """

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        """Raise."""
        raise Stopped(signum)

    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, stop)
