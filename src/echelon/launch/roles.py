"""Processes with different roles, each restarted alone: a worker's death does not touch the others.

Elastic restarts a group as one, because collectives need everyone. Roles of a parameter server do not: here each is
a process of its own, forked from the import server, and only the dead one is started again. A worker whose model is
split is a team of processes, which do need each other: when one dies, its team ends and starts again.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from echelon.core.errors import USER_ERROR_EXIT_CODE
from echelon.launch.death import die_with_parent
from echelon.launch.link import Host, enter
from echelon.launch.plan import ROUND_VARIABLE

GRACE_S = 10.0
STOP_S = 60.0


@dataclass(frozen=True)
class Role:
    """One process: `entry` is `package.module:function`, called with `args`.

    `leads`: the run ends when all that lead have ended. `shows`: its output goes to the terminal, not to a file.
    `host`: the network namespace that it lives in; None: this machine's own. `team`: processes of one name start and
    end together; empty: it is alone.
    """

    name: str
    entry: str
    args: tuple[Any, ...]
    leads: bool = False
    shows: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    host: Host | None = None
    team: str = ""


@dataclass(frozen=True)
class RoleDeath:
    """A process that ended when it should not have; a negative exit code is a signal.

    `others`: names and process ids of the rest of its team, which ended with it.
    """

    name: str
    host: str
    pid: int
    exit_code: int
    others: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        how = signal.Signals(-self.exit_code).name if self.exit_code < 0 else f"exit code {self.exit_code}"
        return f"{self.name} (pid {self.pid} on {self.host}) died: {how}"


@dataclass(frozen=True)
class RoleWatch:
    """What the launcher tells: each death with the restarts that are left, and that the run was asked to stop."""

    on_death: Callable[[RoleDeath, int], None]
    on_stop: Callable[[], None]
    on_start: Callable[[str, int], None] = lambda name, pid: None


class RolesFailed(Exception):
    """Processes died more often than restarts were allowed (its words are then the last death's), or did worse."""


class RoleRefused(Exception):
    """A process refused the user's input: it has said why in the run's record."""


def run_roles(roles: list[Role], max_restarts: int, log_dir: Path, watch: RoleWatch) -> bool:
    """Run all roles until the leading ones have ended; returns whether the run was asked to stop.

    Raises:
        RoleRefused: a role refused its input.
        RolesFailed: restarts are used up.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    supervisor = _Supervisor(roles, max_restarts, log_dir, watch)
    former = {s: signal.signal(s, supervisor.ask_to_stop) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        return supervisor.run()
    finally:
        supervisor.end_all()
        for signum, handler in former.items():
            signal.signal(signum, handler)


class _Supervisor:
    def __init__(self, roles: list[Role], max_restarts: int, log_dir: Path, watch: RoleWatch) -> None:
        self._roles = {role.name: role for role in roles}
        self._teams: dict[str, list[Role]] = {}
        for role in roles:
            self._teams.setdefault(role.team or role.name, []).append(role)
        self._restarts_left, self._log_dir, self._watch = max_restarts, log_dir, watch
        self._running: dict[str, BaseProcess] = {}
        self._asked = False
        self._stop_by = 0.0

    def ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        self._asked = True

    def run(self) -> bool:
        for team in self._teams.values():
            self._start_all(team)
        while True:
            sentinels = {process.sentinel: (name, process) for name, process in self._running.items()}
            for ready in wait(list(sentinels), timeout=0.2):
                name, process = sentinels[ready]  # type: ignore[index]
                if self._running.get(name) is process and self._ended(name):  # else it ended with its team
                    return self._stop_by > 0
            self._heed_stop()

    def _heed_stop(self) -> None:
        if self._asked and not self._stop_by:
            self._stop_by = time.monotonic() + STOP_S
            self._watch.on_stop()
        if self._stop_by and time.monotonic() > self._stop_by:
            raise RolesFailed(f"the run did not end within {STOP_S:g} s of being asked to stop")

    def _start_all(self, team: list[Role]) -> None:
        """Start a team, with a name of this start in its environment that no other one has."""
        started = uuid.uuid4().hex
        for role in team:
            self._start(replace(role, environment={**role.environment, ROUND_VARIABLE: started}))

    def _start(self, role: Role) -> None:
        log = None if role.shows else str(self._log_dir / f"{role.name}.out")
        process = multiprocessing.get_context("forkserver").Process(target=_enter, args=(role, log), name=role.name)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise RolesFailed(f"{role.name} cannot start: the process that all roles are forked from died") from error
        self._running[role.name] = process
        self._watch.on_start(role.name, process.pid or 0)

    def _ended(self, name: str) -> bool:
        """Deal with a process that ended; whether the run is over."""
        process, role = self._running.pop(name), self._roles[name]
        process.join()
        if process.exitcode == USER_ERROR_EXIT_CODE:
            raise RoleRefused(name)
        if not process.exitcode:
            return role.leads and not any(self._roles[other].leads for other in self._running)
        self._restarts_left -= 1
        self._watch.on_death(self._end_team(role, process), self._restarts_left)
        if self._restarts_left < 0:
            raise RolesFailed
        self._start_all(self._teams[role.team or role.name])
        return False

    def _end_team(self, role: Role, process: BaseProcess) -> RoleDeath:
        """End what is left of the team of a process that died; returns the death that the others' followed.

        Raises:
            RoleRefused: one of them refused the user's input.
        """
        members = {role.name: process}
        for other in self._teams[role.team or role.name]:
            if (running := self._running.pop(other.name, None)) is not None:
                members[other.name] = running
        dead = {name: each.exitcode for name, each in members.items() if each.exitcode}
        if USER_ERROR_EXIT_CODE in dead.values():
            raise RoleRefused(role.name)
        for each in members.values():
            each.kill()
            each.join()
        # What a peer's death leads to is an error; a signal came from outside.
        first = next((name for name, code in dead.items() if code < 0), role.name)
        others = tuple((name, each.pid or 0) for name, each in members.items() if name != first)
        return RoleDeath(first, socket.gethostname(), members[first].pid or 0, dead[first], others)

    def end_all(self) -> None:
        """Give every process a moment to end by itself, then end it."""
        ends = time.monotonic() + (GRACE_S if not any(sys.exc_info()) else 0.5)
        for process in self._running.values():
            process.join(max(0.0, ends - time.monotonic()))
        for process in self._running.values():
            if process.is_alive():
                process.kill()
        for process in self._running.values():
            process.join()


def _enter(role: Role, log: str | None) -> None:
    """Run in the process: ends with its parent, takes its place in the network, then calls the entry point."""
    die_with_parent()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # may reach the whole group: the launcher decides
        signal.signal(signum, signal.SIG_IGN)
    if role.host is not None:
        enter(role.host)
    os.environ.update(role.environment)
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    module, _, function = role.entry.partition(":")
    getattr(importlib.import_module(module), function)(*role.args)
