"""Signals that ask a process to stop: the terminal's Ctrl-C and Ctrl-\\, its end, a service manager's SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT)


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
        since_s: when that was, on the monotonic clock.
        count: how many came.
        raises: whether it also raises `Stopped` where it comes, once; else who holds the flag looks at it.
        waits: while it says so, a signal that has come does not count yet; None: it counts at once.
    """

    waits: Callable[[], bool] | None = None

    def __init__(self, raises: bool = False) -> None:
        self.signum, self.raises, self.since_s, self.count = 0, raises, 0.0, 0

    def __bool__(self) -> bool:
        return self.signum != 0 and not (self.waits is not None and self.waits())

    def ask(self) -> None:
        """Ask to stop as SIGTERM does."""
        self._note(signal.SIGTERM)

    def left_s(self, stop_s: float) -> float:
        """Return how many seconds are left of those that a stop may take; all of them before a signal has come."""
        return self.since_s + stop_s - time.monotonic() if self else stop_s

    def _note(self, signum: int) -> None:
        self.count += 1
        if not self.signum:
            self.signum, self.since_s = signum, time.monotonic()

    def _set(self, signum: int, frame: FrameType | None) -> None:
        first = not self
        self._note(signum)
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
    for handler in before.values():
        _take_over(flag, getattr(handler, "__self__", None))
    for signum in before:
        signal.signal(signum, flag._set)
    try:
        yield flag
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _AtOnce:
    """Raises `Stopped` for each signal, KeyboardInterrupt for Ctrl-C, and knows the first that came."""

    signum = 0

    def stop(self, signum: int, frame: FrameType | None) -> NoReturn:
        """Raise."""
        self.signum = self.signum or signum
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise Stopped(signum)


def _take_over(flag: StopFlag, before: object) -> None:
    """Set a flag where a signal came before it began, and raise as it does then.

    That signal's exception was swallowed on the way: libraries that are imported catch whatever comes, and what is
    raised in a finalizer goes no further.
    """
    if isinstance(before, _AtOnce) and before.signum and not flag:
        flag._set(before.signum, None)


def stop_if_asked() -> None:
    """Raise `Stopped` where a signal came and its exception was swallowed (`_take_over`)."""
    for signum in STOP_SIGNALS:
        _take_over(StopFlag(raises=True), getattr(signal.getsignal(signum), "__self__", None))


def stop_at_once() -> None:
    """Let the signals that ask to stop raise `Stopped` in the main thread from now on, also in a container's first
    process, for which the kernel ignores what has no handler. Ctrl-C raises what it does without; ignored signals stay
    as they are.
    """
    at_once = _AtOnce()
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, at_once.stop)


def leave_first_process() -> None:
    """As process 1 (a container without an init), go on in a child and stay behind as its init; else do nothing.

    The init passes signals on, reaps whoever ends (orphans of user code too), and ends with the child's exit code, or
    128 + signal. Whatever the child left behind is killed by the kernel then.
    """
    if os.getpid() != 1:
        return
    awaited = {*_PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        code = _reap(child)
        if code is not None:
            os._exit(code)
        signum = signal.sigwaitinfo(awaited).si_signo
        if signum != signal.SIGCHLD:
            os.kill(child, signum)  # it is there: it has not been reaped yet


def _reap(child: int) -> int | None:
    """Take the exit codes of all that ended; returns the child's, as a shell has it, if it is among them."""
    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
        if ended[0] == child:
            exit_code = os.waitstatus_to_exitcode(ended[1])
            return 128 - exit_code if exit_code < 0 else exit_code
    return None
