"""A process that we start: it ends when the one that started it ends, however that happened.

`python -m echelon.launch.process` becomes a process of a job, whose description it reads from standard input.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from pathlib import Path

from echelon.launch.link import enter
from echelon.launch.places.base import Process

_PR_SET_PDEATHSIG = 1


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies (Linux; nothing elsewhere).

    Raises:
        OSError: the kernel refused.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == 1:
        os.kill(os.getpid(), signum)


def is_stopped(pid: int | None) -> bool:
    """Whether a process is stopped by a signal or a debugger (Linux; False elsewhere, and when it is gone)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in ("T", "t")
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_process(process: Process) -> None:
    """Become a process of a job: end with the parent, take the place in the network, then call the entry point."""
    die_with_parent()
    ignored = [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]  # may reach the whole group: the supervisor decides
    if not process.stops_on_signal:
        ignored.append(signal.SIGTERM)
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)
    if process.folder:
        os.chdir(process.folder)
    if process.host is not None:
        enter(process.host)
    os.environ.update(process.environment)
    if process.log:
        descriptor = os.open(process.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    module, _, function = process.entry.partition(":")
    getattr(importlib.import_module(module), function)(*process.args)


if __name__ == "__main__":
    run_process(Process.from_json(sys.stdin.read()))
