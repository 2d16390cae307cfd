"""A container without an init: its first process has to reap orphans and pass signals on."""

from __future__ import annotations

import os
import signal

_PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT),
)


def leave_first_process() -> None:
    """As process 1, go on in a child, and stay behind as its init; any other process goes on as it is.

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
