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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import ModuleType

from echelon.core.errors import UserError
from echelon.core.patience import PATIENCE_S, may_pass
from echelon.core.spec import Quantity
from echelon.core.stop import STOP_SIGNALS
from echelon.core.system import short_spins_inside
from echelon.core.units import format_seconds
from echelon.launch.forked_server import forked, imported_for_both
from echelon.launch.places.base import Event, Exited, Place, PlaceFailed, Process, Started, checked_grace
from echelon.launch.process import IMPORTS_VARIABLE, is_stopped, run_process

_LONGEST_FOLDER = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")  # of a Unix socket's path
_FILES_FOR_A_START = 8
Alone = Callable[[], AbstractContextManager[None]]
_OTHER_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


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
                os.kill(child.pid, signum)

    def is_silent(self, name: str) -> bool:
        """Whether a process is stopped by a signal or a debugger."""
        child = self._running.get(name)
        return child is not None and is_stopped(child.pid)

    def close(self) -> None:
        """Kill what still runs."""
        self._waiting.clear()
        self.signal(list(self._running), signal.SIGKILL)
        for child in self._running.values():
            child.join()
        self._running.clear()


PLACE = Local


class _Importing:
    """Whether the fork server still imports; there is one server in a process, as `multiprocessing` has it."""

    def __init__(self) -> None:
        self.pipe = -1
        self.ended = False  # by us: the server may still be dying
        self._until_s = 0.0

    def begins(self) -> None:
        """Give a server that is started now a named pipe, which it closes when it has imported, or dies."""
        if is_running():
            return  # there is one, which is asked as it is
        name = os.path.join(util.get_temp_dir(), "imports")  # noqa: PTH118  removed with the server's socket
        with suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108  of a server that has ended
        os.mkfifo(name, 0o600)
        self.pipe, self._until_s = os.open(name, os.O_RDONLY | os.O_NONBLOCK), time.monotonic() + PATIENCE_S
        os.environ[IMPORTS_VARIABLE] = name

    def goes_on(self) -> bool:
        """Return whether it does; False also after a time in which nothing was heard of the server."""
        if self.pipe < 0:
            return False
        if time.monotonic() < self._until_s and not wait([self.pipe], timeout=0):
            return True
        self.close()
        return False

    def close(self) -> None:
        """Look no more."""
        if self.pipe >= 0:
            os.close(self.pipe)
        self.pipe = -1


IMPORTING = _Importing()


def is_running() -> bool:
    """Whether this process has started the fork server, and not ended it; it may have died."""
    is_ended = IMPORTING.ended  # a while before it is gone
    return forkserver._forkserver._forkserver_pid is not None and not is_ended  # type: ignore[attr-defined]


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


def start_import_server(modules: tuple[str, ...], shared: tuple[str, ...] = (), alone: Alone = nullcontext) -> None:
    """Start the fork server, importing `modules` in the background; does nothing while one runs.

    It runs beside the calling process, and ends when that ends. Modules must not start threads or touch a GPU when
    imported.

    Args:
        shared: of the modules, those that the calling process needs as well. It imports them before it returns, once
            for both, if the server can be a fork of it.
        alone: entered for the fork: lets other threads of this process end meanwhile.

    Raises:
        UserError: no folder can hold the server's socket.
    """
    if IMPORTING.ended:  # while it dies it looks alive
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        IMPORTING.ended = False
    with alone():
        is_single = threading.active_count() == 1
    with short_spins_inside():
        is_shared = is_single and not is_running() and imported_for_both(shared)
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["echelon.launch.import_server", *modules, "echelon.launch.imports_done"]
    )
    unblocked, temporary = signal.pthread_sigmask(signal.SIG_BLOCK, []), tempfile.tempdir
    try:  # what is started inherits what is blocked: signals to the whole group end neither the server nor the tracker
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # starting the tracker let some pass again
        tempfile.tempdir = _folder_for_sockets()
        IMPORTING.begins()
        with short_spins_inside(), alone(), forked() if is_shared else nullcontext():
            forkserver.ensure_running()
    finally:
        os.environ.pop(IMPORTS_VARIABLE, None)
        tempfile.tempdir = temporary
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def end_import_server() -> None:
    """End the fork server, with whatever it forked that still runs; the next `start_import_server` starts another.

    It is not waited for: to free what it imported takes the kernel as long as a report takes.
    """
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is not None:
        IMPORTING.close()
        IMPORTING.ended = True
        os.kill(server, signal.SIGKILL)  # a child that was not waited for: the number is no other process's


def _folder_for_sockets() -> str:
    """Return a folder that can be written and whose path leaves room for a Unix socket's name: the temporary one.

    Another one where that does not fit, which is said.

    Raises:
        UserError: there is none.
    """
    try:
        wanted = tempfile.gettempdir()
    except FileNotFoundError:  # neither TMPDIR nor the system's folders can be written
        wanted = ""
    usable = [f for f in (wanted, *_OTHER_FOLDERS) if f and len(os.fsencode(f)) <= _LONGEST_FOLDER]
    for folder in usable:
        if os.access(folder, os.W_OK | os.X_OK):
            if folder != wanted:
                print(f"echelon: {wanted or 'TMPDIR'} is no place for sockets; they are in {folder}", file=sys.stderr)
            return folder
    raise UserError(
        "no folder for sockets: set TMPDIR to a folder that can be written and has a path of at most "
        f"{_LONGEST_FOLDER} bytes"
    )
