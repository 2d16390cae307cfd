"""A process that we start: it ends when the one that started it ends, however that happened.

`python -m echelon.launch.process` becomes a process of a job, whose description it reads from standard input.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path

from echelon.core.files import allow_open_files
from echelon.core.output import outlive_readers
from echelon.core.stop import STOP_SIGNALS
from echelon.core.terms import MEMBER_VARIABLE, TERMINAL_VARIABLE
from echelon.launch.link import enter
from echelon.launch.places.base import Process

IMPORTS_VARIABLE = "ECHELON_IMPORTS"  # names a pipe that is open as long as the fork server imports
MODULES_VARIABLE = "ECHELON_MODULES"  # names what it imports, with spaces between
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int = 0) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; nothing elsewhere).

    Args:
        parent: its process id, where that is known: one that died before is noticed. (That the parent is process 1 says
            nothing: in a container it may be the true one.)

    Raises:
        OSError: the kernel refused.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def is_stopped(pid: int | None) -> bool:
    """Whether a process is stopped by a signal or a debugger (Linux; False elsewhere, and where nothing is known)."""
    return _state(pid) in ("T", "t")


def is_debugged(pid: int | None) -> bool:
    """Whether a debugger has stopped a process (Linux; False elsewhere, and where nothing is known)."""
    return _state(pid) == "t"


def _state(pid: int | None) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:  # it is gone, or no file is left to read with
        return ""


def run_process(process: Process) -> None:
    """Become a process of a job: end with the parent, take the place in the network, then call the entry point."""
    die_with_parent()
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)
    allow_open_files()
    _set_signals(process.stops_on_signal)
    if process.folder:
        os.chdir(process.folder)
    if process.host is not None:
        enter(process.host)
    os.environ.update(process.environment)
    if process.log:
        if MEMBER_VARIABLE in os.environ:  # it may come to lead
            os.environ[TERMINAL_VARIABLE] = str(os.dup(1))
        descriptor = os.open(process.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    outlive_readers()
    module, _, function = process.entry.partition(":")
    getattr(importlib.import_module(module), function)(*process.args)


def _set_signals(stops_on_signal: bool) -> None:
    """Leave to the supervisor what may reach the whole group of processes; SIGTERM is its word, whoever ignored it."""
    for signum in STOP_SIGNALS:
        heeds = stops_on_signal and signum == signal.SIGTERM
        signal.signal(signum, signal.SIG_DFL if heeds else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked where it was forked from


if __name__ == "__main__":
    run_process(Process.from_json(sys.stdin.read()))
