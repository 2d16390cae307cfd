"""A process of a job, from the inside: `python -m echelon.launch.process` reads its description from standard input."""

from __future__ import annotations

import importlib
import os
import signal
import sys

from echelon.launch.death import die_with_parent
from echelon.launch.link import enter
from echelon.launch.places.base import Process


def run_process(process: Process) -> None:
    """Become a process of a job: end with the parent, take the place in the network, then call the entry point."""
    die_with_parent()
    ignored = [
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
    ]  # may reach the whole group of processes: the supervisor decides
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
