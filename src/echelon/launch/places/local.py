"""This machine: processes are forked from a server that has already imported PyTorch, so they start at once.

Helps: Runs on the machine where you give the command. It is the default.
Needs: nothing.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import ModuleType

from echelon.core.patience import may_pass
from echelon.core.spec import Quantity
from echelon.core.stop import STOP_SIGNALS
from echelon.core.units import format_seconds
from echelon.launch.fork_server import IMPORTING
from echelon.launch.places.base import Event, Exited, Place, PlaceFailed, Process, Started, checked_grace
from echelon.launch.process import is_stopped, run_process

_FILES_FOR_A_START = 8
_END_S = 30.0  # in which a process that was killed is gone


@dataclass(eq=False)
class Local(Place):
    """Settings of `local`.

    Attributes:
        grace: how long a stop may take, such as 60s: the time after which whatever started the run kills it (`docker
            stop -t`, `TimeoutStopSec` of systemd). A checkpoint that is not saved by then is given up. Left out: 10m.
    """

    grace: Quantity | None = None

    runs_here = True

    def __post_init__(self) -> None:
        """Start nothing yet.

        Raises:
            ValueError: no run ends in so short a time.
        """
        self.stop_s = checked_grace("grace", self.grace)
        self._running: dict[str, BaseProcess] = {}
        self._waiting: list[Process] = []  # for files that may be opened
        self._waits_since_s: float | None = None
        self._happened: list[Event] = []

    def start(self, processes: Sequence[Process]) -> None:
        """Fork the processes; later while the fork server still imports, and where too few files may be opened.

        Raises:
            PlaceFailed: the fork server died.
        """
        self._waiting += processes
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting:
            if IMPORTING.goes_on():  # a request would be answered only then, and no signal be heeded meanwhile
                return
            if lack := _lack_of_files():
                self._wait(lack)
                return
            process = self._waiting.pop(0)
            context = multiprocessing.get_context("forkserver")
            child = context.Process(target=run_process, args=(process,), name=process.name)
            try:
                with _without_main():
                    child.start()
            except (EOFError, ConnectionError) as error:
                reason = f"{process.name} cannot start: the process that all are forked from died"
                raise PlaceFailed(reason) from error
            self._running[process.name] = child
            self._happened.append(Started(process.name, child.pid or 0, socket.gethostname()))
        self._waits_since_s = None

    def _wait(self, reason: str) -> None:
        name, now = self._waiting[0].name, time.monotonic()
        if self._waits_since_s is None:
            self._waits_since_s = now
            logging.getLogger(__name__).warning("%s cannot start yet: %s", name, reason)
        if now - self._waits_since_s > self.patience_s:
            raise PlaceFailed(f"{name} could not start for {format_seconds(self.patience_s)}: {reason}")

    def events(self, timeout_s: float) -> list[Event]:
        """Return what happened since the last call; wait for it at most so long.

        Raises:
            PlaceFailed: what waits to be started has waited for too long.
        """
        self._start_waiting()
        events, self._happened = self._happened, []
        sentinels = {child.sentinel: name for name, child in self._running.items()}
        importing = [IMPORTING.pipe] if self._waiting and IMPORTING.pipe >= 0 else []
        for sentinel in wait([*sentinels, *importing], timeout=0 if events else timeout_s):
            if sentinel in importing:
                continue
            name = sentinels[sentinel]  # type: ignore[index]
            child = self._running.pop(name)
            child.join()
            events.append(Exited(name, child.exitcode or 0))
        return events

    def signal(self, names: Sequence[str], signum: int) -> None:
        """Send a signal to processes; those that have ended are left out, those that wait to be started end by it."""
        ends = signum == signal.SIGKILL or signum in STOP_SIGNALS
        ended = [process for process in self._waiting if ends and process.name in names]
        self._waiting = [process for process in self._waiting if process not in ended]
        self._happened += [Exited(process.name, -signum) for process in ended]
        for name in names:
            child = self._running.get(name)
            if child is not None and child.exitcode is None and child.pid is not None:
                with suppress(ProcessLookupError):  # it ended a moment ago, and is not yet known to have
                    os.kill(child.pid, signum)

    def is_silent(self, name: str) -> bool:
        """Whether a process is stopped by a signal or a debugger."""
        child = self._running.get(name)
        return child is not None and is_stopped(child.pid)

    def close(self) -> None:
        """Kill what still runs, and wait until it is gone, unless the kernel holds it."""
        self._waiting.clear()
        self.signal(list(self._running), signal.SIGKILL)
        ends = time.monotonic() + _END_S
        for child in self._running.values():
            child.join(max(0.0, ends - time.monotonic()))
            if child.exitcode is None:
                _forget(child)
        self._running.clear()


PLACE = Local


def _forget(child: BaseProcess) -> None:
    """Let a process count as ended, which this one would else wait for when it ends itself."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, child.sentinel)
    os.close(nothing)
    child.join()


def _lack_of_files() -> str:
    """Return why a process cannot be started: a fork takes a connection and two pipes here; empty where it can.

    It is not tried without: the fork server ends when a request breaks off.
    """
    with ExitStack() as opened:
        try:
            for _ in range(_FILES_FOR_A_START):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if not may_pass(error):
                raise
            return error.strerror or str(error)
    return ""


@contextmanager
def _without_main() -> Iterator[None]:
    """Let a child start without importing this process's script again; what it needs of it travels by value.

    `multiprocessing` tells a child where `__main__` comes from: an empty module comes from nowhere.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
