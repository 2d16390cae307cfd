"""The server that a machine's processes are forked from: it has imported what they need, so they start at once.

In a command of ours it is a fork of the command, which has imported what both need: torch is imported once, not twice.
Elsewhere it is a Python of its own.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import wait
from typing import Any

from echelon.core.errors import UserError
from echelon.core.patience import PATIENCE_S
from echelon.core.stop import STOP_SIGNALS
from echelon.core.system import short_spins_inside
from echelon.launch.process import IMPORTS_VARIABLE, MODULES_VARIABLE

Alone = Callable[[], AbstractContextManager[None]]
_LONGEST_FOLDER = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")  # of a Unix socket's path
_OTHER_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_FIRST = "torch"
_STANDARD = 3  # input, output, error


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


def start_import_server(modules: tuple[str, ...], shared: tuple[str, ...] = (), alone: Alone = nullcontext) -> None:
    """Start the fork server, importing `modules` in the background; does nothing while one runs.

    It runs beside the calling process, and ends when that ends. Modules must not start threads or touch a GPU when
    imported. One that cannot be imported is left to the processes that need it, which say why.

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
    sockets = _folder_for_sockets()  # where there is none, what is imported has no place for temporary files either
    with alone():
        is_single = threading.active_count() == 1
    with short_spins_inside():
        is_shared = is_single and not is_running() and _imported_for_both(shared)
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["echelon.launch.import_server", "echelon.launch.imports_done"]
    )
    unblocked, temporary = signal.pthread_sigmask(signal.SIG_BLOCK, []), tempfile.tempdir
    try:  # what is started inherits what is blocked: signals to the whole group end neither the server nor the tracker
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # starting the tracker let some pass again
        tempfile.tempdir = sockets
        os.environ[MODULES_VARIABLE] = " ".join(modules)
        IMPORTING.begins()
        with short_spins_inside(), alone(), _forked() if is_shared else nullcontext():
            forkserver.ensure_running()
    finally:
        for variable in (IMPORTS_VARIABLE, MODULES_VARIABLE):
            os.environ.pop(variable, None)
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


def _imported_for_both(modules: Sequence[str]) -> bool:
    """Import what this process and its fork server need, where the server can be a fork of this process.

    Returns whether it can: on Linux, where torch has done nothing yet in this process. What OpenMP or CUDA keep in a
    process that has used them does not survive a fork.

    What is imported stays: the collector of cycles, which would take a fifth of the time, does not look at it now, nor
    in the fork, where it would take a copy of every page.
    """
    if not modules or sys.platform != "linux" or _FIRST in sys.modules:
        return False
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        gc.enable()
    gc.freeze()
    return True


@contextmanager
def _forked() -> Iterator[None]:
    """Fork what `multiprocessing` starts inside in a Python of its own; not where other threads may hold locks."""
    if threading.active_count() > 1:
        yield
        return
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _fork  # type: ignore[assignment]  # of the arguments that it gets here
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def _fork(_: object, arguments: Sequence[Any], passed: Sequence[int]) -> int:
    """Run a command of `python -c` in a fork; returns its process id once it has let go of all but the given files."""
    sys.stdout.flush()
    sys.stderr.flush()
    held, holds = os.pipe()
    if pid := os.fork():
        os.close(holds)
        wait([held], timeout=PATIENCE_S)
        os.close(held)
        return pid
    code = 1
    try:
        _let_go_of_files(passed)
        _forget_parent()
        at = arguments.index("-c")
        sys.argv = ["-c", *arguments[at + 2 :]]
        exec(arguments[at + 1], {})
        code = 0
    except SystemExit:
        code = 0
    except Exception:  # noqa: BLE001  what a Python of its own would do: say it and end
        traceback.print_exc()
    finally:
        os._exit(code)


def _forget_parent() -> None:
    """Forget what a new Python would not have: the fork server, whose lock the parent holds, and its folders."""
    forkserver._forkserver.__init__()  # type: ignore[misc]
    resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
    tempfile.tempdir = None


def _let_go_of_files(kept: Sequence[int]) -> None:
    """Close all files but the kept ones and the standard ones, locks among them.

    Their numbers stay taken: objects of this process that still have them would close what comes to have them next.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  numbers, not paths
        number = int(name)
        if number >= _STANDARD and number not in (*kept, nothing):
            try:
                os.dup2(nothing, number, inheritable=False)
            except OSError:  # the listing's own
                continue
