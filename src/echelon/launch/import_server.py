"""Imported by the fork server alone, before all else: it ends with the process that started it, and imports the others.

By itself it would notice only when its imports are done, seconds later. Terminals, service managers and `timeout`
signal whole groups of processes at once: the server blocks that, for all that it forked ends with it, and its parent
may want to save first. This is work at import, and meant to be: it is the one moment at which the server runs anything
of ours.

Nor does the collector of cycles look at what is imported, which stays: `imports_done` turns it on again.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import signal
from contextlib import suppress

from echelon.core.stop import STOP_SIGNALS
from echelon.launch.process import IMPORTS_VARIABLE, MODULES_VARIABLE, die_with_parent

die_with_parent()  # one that died before closed a pipe, which the server notices once its imports are done
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
gc.disable()
_server = os.getpid()


def _heed_sigterm() -> None:
    """Let SIGTERM reach a process as soon as it is forked, one that came meanwhile too."""
    if os.getppid() == _server:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


os.register_at_fork(after_in_child=_heed_sigterm)


def told_when_imported() -> int:
    """Hold the pipe open by which the parent knows that imports go on; returns its descriptor, -1 without one."""
    pipe = os.environ.pop(IMPORTS_VARIABLE, "")
    if not pipe:
        return -1
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENXIO):  # nobody listens: the parent has ended, and this process with it
            os._exit(1)
        raise


def import_modules() -> None:
    """Import what processes are to find imported; `multiprocessing` would let a broken library end the server."""
    for name in os.environ.pop(MODULES_VARIABLE, "").split():
        with suppress(Exception):  # a process that needs it imports it again, and fails as the record can tell
            importlib.import_module(name)


IMPORTS = told_when_imported()  # `imports_done` closes it
import_modules()
