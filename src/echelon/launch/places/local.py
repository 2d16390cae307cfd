"""This machine: processes are forked from a server that has imported what they need, so a start takes no imports."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import ClassVar

from echelon.launch.places.base import Event, Exited, Place, PlaceFailed, Process, Started
from echelon.launch.process import is_stopped, run_process


class Local(Place):
    """Processes of this machine, children of the fork server (`start_import_server`)."""

    name: ClassVar[str] = "local"

    def __init__(self) -> None:
        """Start nothing yet."""
        self._running: dict[str, BaseProcess] = {}
        self._started: list[Event] = []

    def start(self, processes: Sequence[Process]) -> None:
        """Fork the processes.

        Raises:
            PlaceFailed: the fork server died.
        """
        context = multiprocessing.get_context("forkserver")
        for process in processes:
            child = context.Process(target=run_process, args=(process,), name=process.name)
            try:
                child.start()
            except (EOFError, ConnectionError) as error:
                reason = f"{process.name} cannot start: the process that all are forked from died"
                raise PlaceFailed(reason) from error
            self._running[process.name] = child
            self._started.append(Started(process.name, child.pid or 0, socket.gethostname()))

    def events(self, timeout_s: float) -> list[Event]:
        """Return what happened since the last call; wait for it at most so long."""
        events, self._started = self._started, []
        sentinels = {child.sentinel: name for name, child in self._running.items()}
        for sentinel in wait(list(sentinels), timeout=0 if events else timeout_s):
            name = sentinels[sentinel]  # type: ignore[index]
            child = self._running.pop(name)
            child.join()
            events.append(Exited(name, child.exitcode or 0))
        return events

    def signal(self, names: Sequence[str], signum: int) -> None:
        """Send a signal to processes; those that have ended are left out."""
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
        self.signal(list(self._running), signal.SIGKILL)
        for child in self._running.values():
            child.join()
        self._running.clear()


def start_import_server(modules: tuple[str, ...]) -> None:
    """Start the fork server, importing `modules` in the background; later calls do nothing.

    It runs beside the imports of the calling process, and ends when this process ends. Modules must not start threads
    or touch a GPU when imported.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["echelon.launch.import_server", *modules])
    forkserver.ensure_running()
