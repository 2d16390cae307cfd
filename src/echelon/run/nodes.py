"""Who takes part in a run now, from its record; and members that are asked to leave it while it goes on."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from echelon.config import RunConfig, load_run_config
from echelon.core.errors import UserError, unknown
from echelon.launch.changes import Change, ask
from echelon.records.events import ChangeRefused, WorkerDied, WorkerGone, WorkerLeft
from echelon.records.file import newest, read_records
from echelon.records.going import holder, read_launch
from echelon.records.kinds import ProcessStarted, Record, ServerWindow, Start, Steps, WorkerJoined, WorkerWindow
from echelon.run.resolve import has_servers, nodes_of, place_of
from echelon.trainer.folder import CONFIG_FILE

WORKER = "worker"
ANSWER_S = 60.0
_LOOK_S = 0.1
_RECENT_S = 10.0


@dataclass(frozen=True)
class NodeMember:
    """A process that takes part in a run.

    Attributes:
        role: worker, server, standby or scheduler.
        since_t: when it joined, in unix seconds.
        steps: that it had a part in since then.
        share: of all samples of the steps that it works on.
    """

    name: str
    role: str
    host: str = ""
    pid: int | None = None
    since_t: float | None = None
    steps: float | None = None
    share: float | None = None
    steps_per_s: float | None = None


def members_of(run: Path) -> list[NodeMember]:
    """Return who takes part in a run that goes on, as far as its record tells."""
    begun_t = read_launch(run).launched_t or 0.0
    start = next(takewhile(lambda start: start.t >= begun_t, newest(run, Start)), None)
    config = load_run_config(run / CONFIG_FILE)
    if start is not None and not start.served and not has_servers(config):
        return _ranks(run, begun_t)
    return _roles(run, begun_t)


def _ranks(run: Path, begun_t: float) -> list[NodeMember]:
    """Return the ranks of the newest start; a group whose members change has a start for each change."""
    starts = _starts(run, begun_t)
    last, window = starts[-1], next(newest(run, Steps), None)
    step = max(last.start_step, window.step if window is not None and window.t >= begun_t else 0)
    rate = window.count / window.seconds if window is not None and window.t >= last.t and window.seconds else None
    total = sum(last.shares) or 1
    members = []
    for rank, process in enumerate(zip(last.hosts, last.pids, strict=True)):
        joined = next(s for s in starts if process in zip(s.hosts, s.pids, strict=True))
        share = last.shares[rank] / total if len(last.shares) == last.world_size else 1 / max(1, last.world_size)
        members.append(
            NodeMember(
                f"rank{rank}", WORKER, *process, joined.t, step - joined.start_step,
                None if last.splits_model else share, rate,
            )
        )  # fmt: skip
    return members


def _starts(run: Path, begun_t: float) -> list[Start]:
    return [start for start in read_records(run, Start) if start.t >= begun_t]


def _roles(run: Path, begun_t: float) -> list[NodeMember]:
    """Return the workers, servers and the scheduler of a run whose members come and go."""
    kinds = (WorkerJoined, ProcessStarted, ServerWindow, WorkerGone, WorkerLeft, WorkerDied)
    members: dict[str, NodeMember] = {}
    for record in read_records(run, *kinds):
        if record.t >= begun_t:
            _take(members, record)
    windows = list(takewhile(lambda w: w.t >= begun_t, newest(run, WorkerWindow)))
    if windows:
        _count(members, windows)
    order = {role: number for number, role in enumerate(("scheduler", "server", "standby", WORKER))}
    return sorted(members.values(), key=lambda member: (order[member.role], len(member.name), member.name))


def _take(members: dict[str, NodeMember], record: Record) -> None:
    match record:
        case WorkerJoined(name=name):
            known = members.get(name)
            if known is None or known.pid != record.pid:
                members[name] = NodeMember(name, WORKER, record.host or "", record.pid, record.t)
        case ProcessStarted(role=name) if not name.startswith(WORKER):
            members[name] = NodeMember(name, _role(name), record.host or "", record.pid, record.t)
        case ServerWindow(name=name):  # of another machine, which has a record of its own
            members.setdefault(name, NodeMember(name, _role(name), since_t=record.t))
        case WorkerGone(worker=name) | WorkerLeft(worker=name):
            members.pop(name, None)
        case WorkerDied(role=name) if name:
            members.pop(name, None)


def _role(name: str) -> str:
    return name.rstrip("0123456789.")


def _count(members: dict[str, NodeMember], windows: Sequence[WorkerWindow]) -> None:
    """Add what the workers have done, by the newest window, and how fast, by those shortly before it (newest first)."""
    last = windows[0]
    before = next((w for w in windows if last.t - w.t >= _RECENT_S), windows[-1])
    total = sum(last.clocks.get(name, 0.0) for name, member in members.items() if member.role == WORKER)
    for name, done in last.clocks.items():
        if name in members:
            seconds = last.t - before.t
            rate = max(0.0, done - before.clocks.get(name, 0.0)) / seconds if seconds else None
            members[name] = replace(members[name], steps=done, share=done / total if total else None, steps_per_s=rate)


def drain(run: Path, words: Sequence[str]) -> list[str]:
    """Let the workers of some names, or of hosts, leave a run of this machine; returns what the run says.

    Raises:
        UserError: it does not go on here, its workers cannot leave, or nobody would be left.
    """
    pid, members = _asked(run), members_of(run)
    _check_host(members)
    workers = [member for member in members if member.role == WORKER]
    if not workers:
        raise UserError(f"{run} has no record of workers here: give this command on the first machine, once they train")
    chosen: list[NodeMember] = []
    for word in words:
        found = [member for member in workers if word in (member.name, member.host)]
        if not found and any(word == member.name for member in members):
            raise UserError(f"{word} is no worker of {run}: only workers can leave")
        if not found:
            raise unknown("worker or host", word, {name for m in workers for name in (m.name, m.host) if name})
        chosen += [member for member in found if member not in chosen]
    _check_can_change(run, "leave")
    if len(chosen) == len(workers):
        raise UserError(f"nobody would be left to train: to end the run, use echelon stop {run}")
    names, pids = [member.name for member in chosen], [member.pid for member in chosen if member.pid is not None]

    def left() -> list[str]:
        """Return what the record says of those that have left."""
        events = takewhile(lambda event: event.t >= asked_t, newest(run, WorkerLeft))
        return [event.message for event in events if event.pid in pids][::-1]

    asked_t = time.time()
    ask(run, pid, Change(names, pids))
    later = f"{' and '.join(names)} will leave after what is under way"
    return _waited(run, _Asked(pid, asked_t), left, len(chosen), later)


def add(run: Path, count: int) -> list[str]:
    """Let more workers of this machine join a run; returns what the run says.

    Raises:
        UserError: it does not go on here, or cannot have them.
    """
    pid, members = _asked(run), members_of(run)
    _check_host(members)
    before = {member.pid for member in members}
    _check_can_change(run, "join")

    def joined() -> list[str]:
        """Return who has joined, by the record."""
        new = [m for m in members_of(run) if m.role == WORKER and m.pid not in before]
        return [f"{member.name} (pid {member.pid} on {member.host}) has joined" for member in new]

    asked = _Asked(pid, time.time())
    ask(run, pid, Change(add=count))
    return _waited(run, asked, joined, count, f"{count} more will join when they have started")


def _check_host(members: Sequence[NodeMember]) -> None:
    """Refuse what is asked on another machine than the one that leads, whose command would never see it.

    Raises:
        UserError: says which that is.
    """
    leads = next((m for m in members if m.role == "scheduler"), next((m for m in members if m.role == WORKER), None))
    if leads is not None and leads.host and leads.host != socket.gethostname():
        raise UserError(f"{leads.host} leads the run, and this is {socket.gethostname()}: give this command there")


def how_to_come(run: Path, host: str) -> str:
    """Return why another machine cannot be added from here, and what lets it join."""
    launch, config = read_launch(run), load_run_config(run / CONFIG_FILE)
    if place_of(config).cluster() is not None:
        again = f"echelon stop {run}, then echelon resume {run} with other machines in --on {config.launch.on}"
        return f"{host} cannot join a run that goes on at its place: use {again}"
    if launch.rendezvous and nodes_of(config).is_range:
        return f"{host} joins when the run's own command is given there: {launch.command}"
    if launch.rendezvous:
        described = config.launch.nodes
        return (
            f"{host} cannot join: the run has --nodes {described}; with a range, such as 1:4, machines may come. "
            f"One that the run has lost joins again when its own command is given there: {launch.command}"
        )
    return f"{host} cannot join a run of one machine: with --nodes 1:4 --rendezvous HOST:PORT machines may come"


def _asked(run: Path) -> int:
    """Return the process of this machine that is to be asked.

    Raises:
        UserError: there is none, or it is another user's.
    """
    pid = holder(run)
    if pid is None:
        raise UserError(f"{run} does not go on here: give this command on its first machine, while it runs")
    try:
        os.kill(pid, 0)
    except (PermissionError, ProcessLookupError):
        raise UserError(f"{run} is another user's: process {pid}") from None
    return pid


def _check_can_change(run: Path, what: str) -> None:
    """Refuse to let a worker leave, or join, where the others begin and end with it.

    Raises:
        UserError: says what works.
    """
    config = load_run_config(run / CONFIG_FILE)
    if has_servers(config):
        return
    first = next(iter(_starts(run, read_launch(run).launched_t or 0.0)), None)
    if (first is None or first.world_size > 1) and _survivors_go_on(config, first):
        return
    nodes = nodes_of(config)
    if nodes.is_range and what == "leave":  # its machine does
        return
    size = "--workers N" if nodes.most == 1 else "--nodes N"
    raise UserError(
        f"the workers of {run} begin and end together: use echelon stop {run}, then echelon resume {run} {size}; "
        f"one of them can {what} a run of several with --elastic on, or with --sync ps(...)"
    )


def _survivors_go_on(config: RunConfig, start: Start | None) -> bool:
    """Whether a run's workers were started as members that may leave and join."""
    from echelon.run.resolve import resolve
    from echelon.trainer.compatibility import survivors_go_on

    return survivors_go_on(resolve(config), start.world_size if start is not None else config.launch.workers)


@dataclass(frozen=True)
class _Asked:
    """The process that was asked, and when, in unix seconds."""

    pid: int
    t: float


def _waited(run: Path, asked: _Asked, done: Callable[[], list[str]], count: int, else_: str) -> list[str]:
    """Return what the record says once so much has been done, the run has ended, or after a minute.

    Args:
        else_: what is said where it takes longer.

    Raises:
        UserError: it was refused.
    """
    ends = time.monotonic() + ANSWER_S
    while True:
        goes_on = holder(run) == asked.pid
        refused = next(takewhile(lambda event: event.t >= asked.t, newest(run, ChangeRefused)), None)
        if refused is not None:
            raise UserError(refused.message)
        said = done()
        if len(said) >= count:
            return said
        if not goes_on:
            return [*said, f"{run} ended before"]
        if time.monotonic() > ends:
            return [*said, f"{else_}: echelon nodes {run} tells"]
        time.sleep(_LOOK_S)
