"""A process that we start ends when the one that started it ends, however that happened."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

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
