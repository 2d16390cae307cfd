"""The fork server as a fork of this process, which has imported what both need: torch is imported once, not twice."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import wait
from typing import Any

from echelon.core.patience import PATIENCE_S

_FIRST = "torch"
_STANDARD = 3  # input, output, error


def imported_for_both(modules: Sequence[str]) -> bool:
    """Import what this process and its fork server need, where the server can be a fork of this process.

    Returns whether it can: on Linux, where torch has done nothing yet in this process. What OpenMP or CUDA keep in a
    process that has used them does not survive a fork.
    """
    if not modules or sys.platform != "linux" or _FIRST in sys.modules:
        return False
    for module in modules:
        importlib.import_module(module)
    return True


@contextmanager
def forked() -> Iterator[None]:
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
        _be_new()
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


def _be_new() -> None:
    """Let the fork begin as a Python of its own would: with no fork server, whose lock its parent holds meanwhile."""
    forkserver._forkserver.__init__()  # type: ignore[misc]
    resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
    tempfile.tempdir = None  # its parent's sockets may need another folder than the rest


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
