"""The one that starts, watches, restarts and ends the processes of a run, whatever they do and wherever they are.

It knows groups: a group starts as one and ends as one. Processes that restart alone are groups of one. What follows a
death is asked of the group's rounds (`launch/rounds.py`); how a process is started is the place's.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from echelon.core.errors import (
    LEFT_EXIT_CODE,
    RESCUED_EXIT_CODE,
    STOPPED_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    JobFailed,
    UserError,
)
from echelon.core.stop import StopFlag, signal_name
from echelon.core.terms import machine_prefix
from echelon.core.units import format_seconds
from echelon.launch.changes import Change
from echelon.launch.culprit import Living
from echelon.launch.members import GroupMembers
from echelon.launch.places.base import Event, Exited, Job, Place, PlaceFailed, Process, Restart, Started
from echelon.launch.rounds import (
    Continue,
    Finished,
    Go,
    Leave,
    Left,
    Order,
    Over,
    OwnRounds,
    Ready,
    Restarts,
    Round,
    Rounds,
    Running,
    State,
)

TICK_S = 0.1
LOOK_S = 1.0  # between looks for new checkpoints
GRACE_S = 10.0
LEAVE_S = 60.0  # at least, in which a round that others join saves; longer where a stop may take longer
ASK_AGAIN_S = 1.0
KILL_S = 30.0  # in which a process that was killed is gone, unless the kernel holds it
RESCUE_S = 30.0  # in which survivors save what they have trained
TERM_S = 1.5  # in which they hear who is left, on whichever machine
JOINT_S = 2.0  # in which the first machine says that the whole run is being stopped


@dataclass(frozen=True)
class Death:
    """A process that ended when it should not have; a negative exit code is a signal.

    Without an exit code it lives, but does not run (SIGSTOP, a debugger) while the others wait for it.

    Attributes:
        rank: in the group that spans the job, where there is one.
        others: names and process ids of the rest of its group, which ended with it.
        hang: what it was in while others waited for it; then it did not end by itself.
        because: what made it fail, where it is not to blame.
        log: as of `Living`.
    """

    name: str
    host: str
    pid: int
    exit_code: int | None
    rank: int | None = None
    others: tuple[tuple[str, int], ...] = ()
    hang: str = ""
    because: str = ""
    log: str = ""

    def __str__(self) -> str:
        who = f"{self.name if self.rank is None else f'rank {self.rank}'} (pid {self.pid} on {self.host})"
        if self.hang:
            return f"{who} {self.hang}"
        if self.exit_code is None:
            return f"{who} does not answer: its process is stopped (SIGSTOP)"
        how = signal_name(-self.exit_code) if self.exit_code < 0 else f"exit code {self.exit_code}"
        return f"{who} died: {how}{f' ({self.because})' if self.because else ''}"


@dataclass(frozen=True)
class Aftermath:
    """What follows a death.

    Attributes:
        no_restart: why its group does not start again; empty: it does.
        restarts_left: how many more do until a new checkpoint; None: not known here.
        others: what the others of its group do, where they go on; empty: they end with it.
    """

    no_restart: str = ""
    restarts_left: int | None = None
    others: str = ""


@dataclass(frozen=True)
class Remedy:
    """What was done against what a process died of.

    Attributes:
        eased: what has been changed for the next start, which costs no restart then; empty: nothing.
        hopeless: why no restart would help; empty: it may.
    """

    eased: str = ""
    hopeless: str = ""


def _nothing(*_: object) -> None:
    """Do nothing."""


def _no_other(_: int) -> Process:
    raise UserError("no more processes can be started")


def _as_it_is(death: Death, living: Sequence[Living]) -> Death:
    return death


@dataclass(frozen=True)
class Watch:
    """What the supervisor tells.

    Attributes:
        on_death: a death, and what follows.
        on_stop: the run was asked to stop; called again and again until it has.
        on_start: a process began.
        on_wait: what a group waits for before it starts.
        on_look: all processes that run; again and again.
        explain: a death whose group's other processes still run, and these; returns it as it is to be told, which may
            be of another process of its group.
        remedy: does something against what a death was of, where it can.
        failures: what the processes of a death failed with, and at which step; none where that is not known.
        saved: how many checkpoints of new steps there are since the last call.
        changes: of the members that a user has asked for since the last call.
        another: a process beyond those of the job, by its number from 0; raises `UserError` where there can be none.
        on_asked: ranks of other machines were asked to leave: their process ids by their names.
        on_leave: a process has left, as it was asked to; how many of its group go on.
        on_go: all processes of this machine were asked to leave the others.
        on_stop_here: a signal, by its number, asks this machine, which is not the first one, to stop the whole run.
        on_refused: a change is not made, and why.
    """

    on_death: Callable[[Death, Aftermath], None]
    on_stop: Callable[[], None] = _nothing
    on_start: Callable[[Started], None] = _nothing
    on_wait: Callable[[str], None] = _nothing
    on_look: Callable[[Sequence[Living]], None] = _nothing
    explain: Callable[[Death, Sequence[Living]], Death] = _as_it_is
    remedy: Callable[[Death], Remedy] = lambda _: Remedy()
    failures: Callable[[Death], Sequence[str]] = lambda _: ()
    saved: Callable[[], int] = lambda: 0
    changes: Callable[[], Sequence[Change]] = tuple
    another: Callable[[int], Process] = _no_other
    on_asked: Callable[[Mapping[str, int]], None] = _nothing
    on_leave: Callable[[Started, int], None] = _nothing
    on_go: Callable[[], None] = _nothing
    on_stop_here: Callable[[int], None] = _nothing
    on_refused: Callable[[str], None] = _nothing

    def looking(self, look: Callable[[], None]) -> Watch:
        """Return a watch that looks at something more, again and again."""

        def both(living: Sequence[Living]) -> None:
            """Look at all."""
            self.on_look(living)
            look()

        return replace(self, on_look=both)


class FirstMachineGone(Exception):
    """The scheduler that this machine's roles belong to is gone with its machine; the user has been told."""


class StopCut(Exception):
    """Processes did not end in the time that the place gives for it after a signal to stop, and were ended."""


class Refused(Exception):
    """A process refused the user's input: it has said why in the run's record."""


def supervise(job: Job, place: Place, watch: Watch, stop: StopFlag, rounds: Rounds | None = None) -> bool:
    """Run a job until the processes that lead have ended; returns whether it was stopped.

    Args:
        stop: set by a signal that asks the run to stop.
        rounds: of the groups that restart together; None: each is on its own.

    Raises:
        Refused: a process refused its input.
        JobFailed: restarts are used up.
        StopCut: the run was asked to stop, and did not within the place's time.
        UserError: the place cannot run the job, or the machines do not meet.
    """
    supervisor = _Supervisor(job, place, watch, stop, rounds)
    try:
        return supervisor.run()
    except PlaceFailed as failure:
        raise JobFailed(str(failure)) from failure
    finally:
        supervisor.end_all(GRACE_S if not any(sys.exc_info()) else 0.5)


class _Group:
    """Processes that start and end together, and the state of their round."""

    def __init__(
        self,
        processes: tuple[Process, ...],
        rounds: Rounds,
        members: GroupMembers | None = None,
        restart: Restart = Restart.TOGETHER,
    ) -> None:
        self.processes, self.rounds, self.members = processes, rounds, members
        self.rescues = restart is Restart.RESCUED
        self.rescue_since = 0.0
        self.state: State = Ready()
        self.over: Over | None = None
        self.round: Round | None = None
        self.alive: set[str] = set()
        self.exit_codes: dict[str, int] = {}
        self.started: dict[str, Started] = {}
        self._ranks: dict[str, int] = {}  # that processes were started as
        self.death: Death | None = None  # not told yet
        self.leave_by = 0.0
        self.left: list[Process] = []
        self.undecided = False  # the first machine has yet to say whether the others go on
        self.empty_since: float | None = None  # while that is so and nobody lives here

    @property
    def leads(self) -> bool:
        """Whether the run waits for this group's end."""
        return any(process.leads for process in self.processes)

    @property
    def heeds_signals(self) -> bool:
        """Whether a signal stops the processes after a checkpoint; else they are told by a message."""
        return all(process.stops_on_signal for process in self.processes)

    def begin(self, round_: Round) -> list[Process]:
        """Enter a round; returns the processes as they are to be started in it."""
        self.round, self.state = round_, Running(round_.number)
        self.alive = {process.name for process in self.processes}
        self.exit_codes, self.started, self.leave_by, self.undecided, self.rescue_since = {}, {}, 0.0, False, 0.0
        if self.members is not None:
            folder = self.rounds.open_terms(round_)
            self.members.begin(round_, folder, self.rounds.lead(round_))
        return [self._as_started(p, i) for i, p in enumerate(self.processes)]

    @property
    def has_left(self) -> bool:
        """Whether the group has left a run that goes on."""
        return LEFT_EXIT_CODE in self.exit_codes.values()

    @property
    def takes_in(self) -> bool:
        """Whether a process may be started beside the others."""
        return (
            self.goes_on and isinstance(self.state, Running) and self.members is not None and not self.members.closing
        )

    @property
    def goes_on(self) -> bool:
        """Whether the others go on without one of them."""
        return self.members is not None and not self.rescues

    def let_go(self, name: str) -> None:
        """Be without a process from now on, in later rounds too."""
        self.left += [process for process in self.processes if process.name == name]
        self._hold([process for process in self.processes if process.name != name])

    def take_in(self, process: Process) -> None:
        """Be with one more process from now on, in later rounds too."""
        self._hold([*self.processes, process])

    def _hold(self, processes: Sequence[Process]) -> None:
        assert self.members is not None
        self.processes = tuple(processes)
        self.members.names = [process.name for process in processes]
        self.rounds.resize(len(processes))

    def start_again(self, name: str) -> Process:
        """Return a process as it is to be started beside the others of its group, which go on."""
        assert self.members is not None
        self.members.start_again(name)
        self.alive.add(name)
        local = [process.name for process in self.processes].index(name)
        return self._as_started(self.processes[local], local)

    def death_of(self, name: str, exit_code: int) -> Death:
        """Return the death of a process whose group goes on."""
        started = self.started[name]
        return Death(name, started.host, started.pid, exit_code, self._rank(name), log=self._log(name))

    def _as_started(self, process: Process, local: int) -> Process:
        """Return a process as it is to be started in the round, with a log of its own where machines share a disk."""
        assert self.round is not None
        log, prefix = process.log, machine_prefix(self.round.machine, 0)
        if log and prefix:
            log = str(Path(log).with_name(f"{prefix}{Path(log).name}"))
        return replace(process, environment=self._environment(process, local), log=log)

    def _environment(self, process: Process, local: int) -> dict[str, str]:
        assert self.round is not None
        values = {**process.environment, **self.round.environment}
        if self.members is not None:
            values |= self.members.environment(process.name)
        if self.round.first_rank is not None:
            self._ranks[process.name] = self.round.first_rank + local
            values |= {"RANK": str(self._ranks[process.name]), "LOCAL_RANK": str(local)}
        return values

    def _rank(self, name: str) -> int | None:
        """Return the rank of a process in the group that spans the job, where there is one."""
        at_start = self._ranks.get(name)
        return at_start if at_start is None or self.members is None else self.members.rank_of(name, at_start)

    def _log(self, name: str) -> str:
        at_start = self._ranks.get(name)
        return name if at_start is None else f"rank{at_start}"

    def living(self) -> list[Living]:
        """Return the processes that have begun and not ended."""
        started = [self.started[name] for name in sorted(self.alive & self.started.keys())]
        return [Living(s.name, s.host, s.pid, self._rank(s.name), self._log(s.name)) for s in started]

    def failed(self, is_silent: Callable[[str], bool]) -> bool:
        """Whether a process died; then `death` names the one that the others' ends followed."""
        well = (0, STOPPED_EXIT_CODE, LEFT_EXIT_CODE, RESCUED_EXIT_CODE)
        deaths: dict[str, int | None] = {n: c for n, c in self.exit_codes.items() if c not in well}
        if not deaths:
            return False
        if USER_ERROR_EXIT_CODE in deaths.values():
            raise Refused(next(n for n, c in deaths.items() if c == USER_ERROR_EXIT_CODE))
        deaths |= {name: None for name in self.alive if is_silent(name)}
        # A signal came from outside; who does not answer made others fail; an error is what a peer's death leads to.
        name, code = min(deaths.items(), key=lambda item: -0.5 if item[1] is None else min(item[1], 1))
        begun = [p.name for p in self.processes if p.name != name and p.name in self.started]
        others = tuple((other, self.started[other].pid) for other in begun)
        started = self.started[name]
        self.death = Death(
            name, started.host, started.pid, code, self._rank(name), others, log=self._log(name)
        )  # fmt: skip
        return True


def _is_kill(exit_code: int) -> bool:
    """Whether a process was ended from outside, in the midst of its work."""
    return exit_code < 0 and exit_code != -signal.SIGTERM


class _Supervisor:
    def __init__(self, job: Job, place: Place, watch: Watch, stop: StopFlag, rounds: Rounds | None) -> None:
        self._place, self._watch, self._stop = place, watch, stop
        self._own_restarts = restarts = Restarts(job.max_restarts)
        self._restarts: list[Rounds | Restarts] = [rounds, restarts] if rounds is not None else [restarts]
        self._looked_s = 0.0
        self._groups: list[_Group] = []
        for group in job.groups:
            names = [process.name for process in group.processes]
            members = None
            if group.restart in (Restart.BESIDE, Restart.RESCUED):
                members = GroupMembers(names, go_on=group.restart is Restart.BESIDE)
            if group.restart is not Restart.ALONE:
                own = rounds or OwnRounds(names[0], restarts)
                self._groups.append(_Group(group.processes, own, members, group.restart))
            else:
                self._groups += [_Group((process,), OwnRounds(process.name, restarts)) for process in group.processes]
        self._by_name = {p.name: group for group in self._groups for p in group.processes}
        self._stop_by = self._ask_again_at = 0.0
        self._goes_since_s = self._goes_by = 0.0
        self._waits_for, self._waits_since_s = "", 0.0
        self._made = 0  # processes beyond those of the job

    def run(self) -> bool:
        """Run until the processes that lead have ended; returns whether the run was stopped."""
        while True:
            for group in self._groups:
                self._follow(group)
            leading = [group.over for group in self._groups if group.leads]
            if all(leading):
                told = self._stop_by > 0 and any(group.leads and not group.heeds_signals for group in self._groups)
                return told or any(over is not None and over.status == "stopped" for over in leading)
            self._take(self._place.events(TICK_S))
            for group in self._groups:
                if group.members is not None and isinstance(group.state, Running):
                    self._look_at_members(group, group.members)
            for change in self._watch.changes():
                self._make(change)
            self._watch.on_look(self._living())
            if time.monotonic() - self._looked_s >= LOOK_S:
                self._look_for_checkpoints()
            self._heed_stop()

    def _look_at_members(self, group: _Group, members: GroupMembers) -> None:
        """See to what the members of a group have said since."""
        members.closing = members.closing or self._stop_by > 0  # what is lost on another machine is gone on without
        assert group.round is not None
        members.take_lead(group.rounds.lead(group.round))
        members.look()
        if group.undecided or (group.rescue_since and group.exit_codes):
            self._settle(group)
        if members.is_broken:
            group.rounds.begin_anew()
        # Who is stopped (SIGSTOP) when the others' deadline is over is ended: they go on without it.
        silent = [name for name in members.suspects() if self._place.is_silent(name)]
        if late := members.too_late():
            members.closing = True
        self._place.signal([*silent, *late], signal.SIGKILL)

    def _make(self, change: Change) -> None:
        """Make a change of the members, or say why not."""
        try:
            if self._stop_by:
                raise UserError("the run is being stopped")
            if change.pids:
                self._let_leave(change)
            if change.add:
                self._let_join(change.add)
        except UserError as reason:
            self._watch.on_refused(str(reason))

    def _let_leave(self, change: Change) -> None:
        """Let members leave a group that can do without them.

        Raises:
            UserError: there is none, or they cannot.
        """
        pids = change.pids
        for group in self._groups:
            if group.members is not None and group.members.span_machines:
                self._let_ranks_leave(group.members, change)
                return
            names = [name for name in group.alive & group.started.keys() if group.started[name].pid in pids]
            if not names:
                continue
            can = group.members is not None and group.goes_on
            if why := group.members.drain(names) if can and group.members else "its group ends together":
                raise UserError(f"{' and '.join(names)} cannot leave: {why}")
            return
        raise UserError("who was asked to leave is no member now")

    def _let_ranks_leave(self, members: GroupMembers, change: Change) -> None:
        """Let members leave of whichever machines; those of others tell it there.

        Raises:
            UserError: they cannot.
        """
        pids = {int(name.removeprefix("rank")): pid for name, pid in zip(change.workers, change.pids, strict=False)}
        here = members.here(pids)
        if why := members.drain_ranks(pids):
            raise UserError(f"{' and '.join(change.workers)} cannot leave: {why}")
        self._watch.on_asked({f"rank{rank}": pid for rank, pid in pids.items() if rank not in here})

    def _let_join(self, count: int) -> None:
        """Start processes beside those that run: those that have left, and then new ones.

        Raises:
            UserError: there are none that can be started.
        """
        beside = next((group for group in self._groups if group.goes_on), None)
        left = [group for group in self._groups if group.over is not None and group.has_left]
        if beside is None and any(group.heeds_signals for group in self._groups):
            raise UserError("nobody can join: the processes begin and end together")
        if beside is not None and not beside.takes_in:
            raise UserError("nobody can join now: the others have yet to begin, or are about to end")
        for _ in range(count):
            if beside is not None:
                process = beside.left.pop() if beside.left else self._another()
                beside.take_in(process)
                self._by_name[process.name] = beside
                self._place.start([beside.start_again(process.name)])
            elif left:
                group = left.pop()
                group.over, group.state = None, Ready()
            else:
                process = self._another()
                group = _Group((process,), OwnRounds(process.name, self._own_restarts))
                self._groups.append(group)
                self._by_name[process.name] = group

    def _another(self) -> Process:
        process = self._watch.another(self._made)
        self._made += 1
        return process

    def _living(self) -> list[Living]:
        return [process for group in self._groups for process in group.living()]

    def _follow(self, group: _Group) -> None:
        """Do what the group's rounds order."""
        if group.over is not None:
            return
        if self._stop_by and isinstance(group.state, Ready) and group.heeds_signals:
            if self._stop.signum != signal.SIGTERM or not group.goes_on:  # else the others may go on
                group.rounds.order(Left(stops=True))
            group.over = Over("stopped")
            return
        order = group.rounds.order(group.state)
        told = self._tell_death(group, order)
        match order:
            case Go(round=round_) if isinstance(group.state, Ready):
                self._end_wait(had_begun=group.state.after > 0)
                self._place.start(group.begin(round_))
            case Leave(gracefully=gracefully):
                self._leave(group, gracefully)
            case Over(status=status, reason=reason):
                if status == "failed":
                    raise JobFailed("" if told else reason)
                if isinstance(group.state, Running):
                    self._leave(group, gracefully=True)
                else:
                    group.over = order
            case Continue(reason=reason) if reason and reason != self._waits_for:
                self._waits_since_s = self._waits_since_s or time.monotonic()
                self._waits_for = reason
                self._watch.on_wait(reason)
            case Continue(reason="") if isinstance(group.state, Running):
                self._end_wait(had_begun=True)

    def _end_wait(self, had_begun: bool) -> None:
        """Forget what is waited for; how long is told, unless it was for the first start."""
        if self._waits_for and had_begun:
            self._watch.on_wait(f"goes on after {format_seconds(time.monotonic() - self._waits_since_s)} of waiting")
        self._waits_for, self._waits_since_s = "", 0.0

    def _tell_death(self, group: _Group, order: Order) -> bool:
        """Tell of a group's death once it is known what follows; returns whether there was one."""
        death, group.death = group.death, None
        if death is not None:
            no_restart = order.no_restart or order.status if isinstance(order, Over) else ""
            self._watch.on_death(death, Aftermath(no_restart, group.rounds.restarts_left))
        return death is not None

    def _leave(self, group: _Group, gracefully: bool) -> None:
        """End a group's round: it is asked to, and has its time, or it is ended at once."""
        if isinstance(group.state, Finished):
            group.state = Ready(group.state.round)
        elif isinstance(group.state, Running):
            if gracefully and not group.leave_by:
                group.leave_by = time.monotonic() + max(LEAVE_S, self._place.saving_s)
                self._place.signal(sorted(group.alive), signal.SIGTERM)
            elif not gracefully and group.rescues and group.members and self._still_saves(group, group.members):
                return  # a process of another machine has died
            elif not gracefully or time.monotonic() > group.leave_by:
                self._kill(group)
                group.state = Ready(group.state.round)

    def _take(self, events: list[Event]) -> None:
        changed: dict[int, _Group] = {}
        for event in events:
            group = self._by_name[event.name]
            if isinstance(event, Started):
                group.started[event.name] = event
                self._watch.on_start(event)
            elif event.name in group.alive:
                group.alive.discard(event.name)
                # Who had not begun when it was ended did not die: it waited for files, or for imports.
                group.exit_codes[event.name] = event.exit_code if event.name in group.started else STOPPED_EXIT_CODE
                changed[id(group)] = group
        for group in changed.values():
            self._settle(group)

    def _settle(self, group: _Group) -> None:
        """Draw the conclusion from processes of a group that ended."""
        assert group.round is not None
        if group.members is not None and group.rescues and self._is_rescuing(group, group.members):
            return
        if group.members is not None and group.goes_on and self._goes_on(group, group.members):
            return
        number = group.round.number
        if group.failed(self._place.is_silent):
            assert group.death is not None
            stops = self._stop_by > 0 and group.heeds_signals
            had_begun = group.death.exit_code != -signal.SIGTERM  # else nothing in it has taken the signal for its word
            group.death = self._watch.explain(group.death, self._living())
            self._kill(group)
            if stops and had_begun:
                self._give_up(group, "no restart: the run was being stopped")  # over its last checkpoint
            if stops or group.leave_by:  # on its way out, before its first step: nothing follows
                group.death = None
                group.state = Finished(number, stopped=True) if self._stop_by else Ready(number)
            else:
                group.state = self._count_death(group, group.death)
        elif RESCUED_EXIT_CODE in group.exit_codes.values():  # who died was on another machine
            self._kill(group)
            group.state = Ready(number)
        elif not group.alive and self._stop_by and not group.exit_codes:  # they had not come to take part
            group.state = Ready(number)
        elif not group.alive:
            group.state = Finished(number, STOPPED_EXIT_CODE in group.exit_codes.values())

    def _is_rescuing(self, group: _Group, members: GroupMembers) -> bool:
        """Let the others of a group save what they have trained where some were killed; returns whether they still do.

        Once one of them says that all is saved, the rest is ended with the group.
        """
        codes = group.exit_codes
        if self._stop_by or not all(map(_is_kill, codes.values())) or members.lose(codes) is False:
            return False
        return self._still_saves(group, members)

    def _still_saves(self, group: _Group, members: GroupMembers) -> bool:
        """Whether those that are left of a group may still save what they have trained."""
        now = time.monotonic()
        group.rescue_since = group.rescue_since or now
        return bool(group.alive) and now < group.rescue_since + (RESCUE_S if members.have_lost else TERM_S)

    def _goes_on(self, group: _Group, members: GroupMembers) -> bool:
        """Let the others of a group go on where some were killed; returns whether they do.

        Not where a member failed by itself or is done: an error is all ranks' matter.
        """
        for name in members.booting():  # their ends are nobody else's
            if name in group.exit_codes:
                members.forget(name)
                code = group.exit_codes.pop(name)
                if not members.closing:
                    self._come_back_or_go(group, members, name, code)
        dead, stopping = dict(group.exit_codes), self._stop_by > 0 or group.leave_by > 0
        for name in [name for name, code in dead.items() if code == 0]:
            members.finish(name)
        if not dead:
            return bool(group.alive)
        can = all((_is_kill(code) and not stopping) or code == LEFT_EXIT_CODE for code in dead.values())
        went_on = members.lose(dead) if can else False
        if went_on is None and self._has_waited_empty(group):
            went_on = False
        group.undecided = went_on is None
        if went_on is False:
            for name in [name for name, code in dead.items() if code == LEFT_EXIT_CODE and not stopping]:
                self._come_back_or_go(group, members, name, group.exit_codes.pop(name))
            # Nobody is waited for that has yet to come, nor when the run stops.
            members.closing = True
            self._place.signal(members.booting(), signal.SIGKILL)
        elif went_on:
            group.exit_codes.clear()
            for name, code in dead.items():
                self._come_back_or_go(group, members, name, code)
            return bool(group.alive)
        return went_on is None

    def _has_waited_empty(self, group: _Group) -> bool:
        """Whether nobody of a group has lived here for longer than a disk or another machine is waited for."""
        now = time.monotonic()
        group.empty_since = None if group.alive else group.empty_since or now
        return group.empty_since is not None and now - group.empty_since > self._place.patience_s

    def _come_back_or_go(self, group: _Group, members: GroupMembers, name: str, exit_code: int) -> None:
        """Start a process again beside its group, unless it was asked to leave."""
        if not members.release(name):
            self._come_back(group, name, exit_code, members.are_waited_for)
            return
        group.let_go(name)
        self._watch.on_leave(group.started[name], len(group.processes))

    def _come_back(self, group: _Group, name: str, exit_code: int, is_waited_for: bool) -> None:
        """Start a process again beside its group, if restarts are left, and tell of its death.

        Raises:
            JobFailed: none are, and the others cannot go on without it.
        """
        if self._stop_by or not exit_code:
            return
        death = group.death_of(name, exit_code)
        if exit_code == -signal.SIGKILL:  # perhaps by the watch, which says why
            death = self._watch.explain(death, self._living())
        why = self._own_restarts.take(name, self._watch.failures(death), time.monotonic())
        left = None if why else self._own_restarts.left
        if is_waited_for and not group.alive:
            self._watch.on_death(death, Aftermath(why, left, "the others wait until it joins them again"))
            if why:
                raise JobFailed("")
        else:
            follows = f"the others go on without it ({why})" if why else "the others go on, and it joins them again"
            self._watch.on_death(death, Aftermath("", left, follows))
        if not why:
            self._place.start([group.start_again(name)])

    def _count_death(self, group: _Group, death: Death) -> Ready:
        """Return the state that follows a death; without one where it is to cost no restart."""
        assert group.round is not None
        self._look_for_checkpoints()  # before this death is counted
        remedy = self._watch.remedy(death)
        if remedy.hopeless:
            self._give_up(group, remedy.hopeless)
        if remedy.eased:
            return Ready(group.round.number)
        return Ready(group.round.number, str(death), tuple(self._watch.failures(death)))

    def _give_up(self, group: _Group, why: str) -> NoReturn:
        self._tell_death(group, Over("failed", no_restart=why))
        raise JobFailed("")

    def _look_for_checkpoints(self) -> None:
        self._looked_s = time.monotonic()
        if checkpoints := self._watch.saved() + sum(group.rounds.checkpoints_told() for group in self._groups):
            for restarts in self._restarts:
                restarts.saved(checkpoints)

    def _kill(self, group: _Group) -> None:
        """End what is left of a group, such as a rank that waits in a collective for a dead one.

        Nothing is lost by it: checkpoints are whole or absent.

        Raises:
            JobFailed: the kernel does not let go of one.
        """
        self._place.signal(sorted(group.alive), signal.SIGKILL)
        since_s, told_s = time.monotonic(), None
        while group.alive:
            for event in self._place.events(TICK_S):
                if isinstance(event, Exited) and event.name in group.alive:
                    group.alive.discard(event.name)
                else:
                    self._take([event])
            if group.alive and time.monotonic() - since_s > KILL_S:
                told_s = self._wait_for_kernel(group, told_s)

    def _wait_for_kernel(self, group: _Group, told_s: float | None) -> float:
        """Tell of processes that do not end though they were killed, and give up once that has lasted for too long.

        Returns:
            when it was told.
        """
        who = " and ".join(f"{process} (pid {process.pid})" for process in group.living())
        words = f"{who} cannot be ended: the kernel holds it in a call, as to a disk or a GPU that does not answer"
        patience_s = self._place.patience_s
        if told_s is None:
            self._watch.on_wait(f"{words}; waiting up to {format_seconds(patience_s)} for it (--io-patience)")
            told_s = time.monotonic()
        if self._stop or time.monotonic() - told_s > patience_s:
            raise JobFailed("" if self._tell_death(group, Over("failed", no_restart=words)) else words)
        return told_s

    def _heed_stop(self) -> None:
        if not self._stop:
            return
        now = time.monotonic()
        if not self._stop_by and self._goes_alone(now):
            return
        if not self._stop_by:
            self._stop_by = now + self._place.saving_s
            for group in self._groups:
                if group.members is not None and group.members.say_stop():
                    self._watch.on_stop_here(self._stop.signum)
                told = group.alive if group.heeds_signals else group.alive - group.started.keys()
                self._place.signal(sorted(told), signal.SIGTERM)
        if now >= self._ask_again_at:  # who is told by a message may not be listening yet, or have just died
            self._ask_again_at = now + ASK_AGAIN_S
            self._watch.on_stop()
        if now > self._stop_by:
            raise StopCut

    def _goes_alone(self, now: float) -> bool:
        """Let this machine leave the others, which go on, as a machine that is taken away; returns whether it does.

        Ctrl-C stops the whole run, and so do signals to all machines, as at the end of a job's time: then they save
        together. So it waits a moment for the first machine's word.
        """
        group = next((g for g in self._groups if g.members is not None and isinstance(g.state, Running)), None)
        if self._stop.signum != signal.SIGTERM or group is None or group.members is None:
            return self._goes_by > now  # its members have left, and the others are about to hear it
        if self._goes_by:
            return self._goes_by > now
        if not group.members.can_go:
            return False
        self._goes_since_s = self._goes_since_s or now
        if now - self._goes_since_s > JOINT_S:
            self._goes_by = now + self._place.saving_s / 2
            self._place.signal(group.members.booting(), signal.SIGKILL)
            group.members.closing = True
            group.members.go()
            self._watch.on_go()
        return True

    def end_all(self, grace_s: float) -> None:
        """Give every process a moment to end by itself, then end it."""
        ends = time.monotonic() + grace_s
        alive = {name for group in self._groups for name in group.alive}
        while alive and time.monotonic() < ends:
            alive -= {e.name for e in self._place.events(TICK_S) if isinstance(e, Exited)}
        self._place.close()
