"""Starts of a group that restarts together, agreed on among the machines of a run: pure state.

A *round* is one such start: the ranks of the machines that are there, and the address where their process group meets.
A round ends when a rank dies, when a machine is lost or comes, or when all ranks have ended; after all but the last,
the next one forms. A run on one machine is the case of one machine: it has the same rounds, and no socket.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from echelon.core.address import STORE_VARIABLE
from echelon.core.errors import LEFT, UserError
from echelon.core.terms import Term, TermFolder, machine_prefix, member_name
from echelon.launch.plan import ROUND_VARIABLE

LAST_CALL_S = 2.0  # a run on some of its machines waits so long for more of them before it starts
LOST_S = 6.0  # a machine that is silent for so long is gone
SUSPECT_S = 2.5  # the same, while members complain that others are lost
PAUSED_S = 2.0  # a leader that has heard nobody for so long, itself included, was stopped
INCIDENT_S = 30.0  # what dies within so long of the first one died of the same, such as a machine's lack of memory
_RANKS = "ranks"


DEATH, LEAVE, STOP = "death", "leave", "stop"


@dataclass(frozen=True)
class Loss:
    """What another machine has lost, in words; `cause`: a death, it was asked to leave, or all are asked to stop."""

    words: str
    cause: str = DEATH


@dataclass(frozen=True)
class Round:
    """One start of a group.

    Attributes:
        number: rises with each start; 0 is none.
        environment: for all processes of the machine.
        first_rank: of the machine's processes in the run; None: they are no ranks of a group that spans the job.
        machine: the machine's number.
        beside: how many machines had come beside the others since it began, with this one; 0: it began with them.
        others: for the machine that leads, the names of the members of other machines, by rank.
        elastic: survivors of a death are told who is left, as the first machine decides: one with other devices would
            not.
    """

    number: int
    environment: Mapping[str, str]
    first_rank: int | None = None
    machine: int = 0
    beside: int = 0
    others: tuple[str, ...] = ()
    elastic: bool = False

    @property
    def name(self) -> str:
        """What only the ranks started in it know."""
        return self.environment[ROUND_VARIABLE]


@dataclass(frozen=True)
class Ready:
    """A machine's processes have not begun, or have ended with round `after`, because of `death` if one died there.

    Attributes:
        failures: the errors of processes that failed: type, message, step and place in the code.
    """

    after: int = 0
    death: str = ""
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Running:
    """A machine's processes run in a round."""

    round: int


@dataclass(frozen=True)
class Finished:
    """A machine's processes have ended by themselves: done, or stopped after a checkpoint."""

    round: int
    stopped: bool


@dataclass(frozen=True)
class Left:
    """A machine goes and does not come back.

    Attributes:
        stops: its command was asked to stop the whole run.
    """

    reason: str = ""
    stops: bool = False


State = Ready | Running | Finished | Left


@dataclass(frozen=True)
class Go:
    """Start the processes."""

    round: Round


@dataclass(frozen=True)
class Continue:
    """Go on as you are; `reason`: what is waited for."""

    reason: str = ""


@dataclass(frozen=True)
class Leave:
    """End the processes, for another round follows; gracefully: after a checkpoint."""

    gracefully: bool


@dataclass(frozen=True)
class Over:
    """No round follows: the run is `completed`, `stopped` or `failed`; for this machine alone: `left`.

    Attributes:
        reason: why it failed.
        no_restart: why no restart follows the death that is the reason.
    """

    status: str
    reason: str = ""
    no_restart: str = ""


Order = Go | Continue | Leave | Over


class Rounds(Protocol):
    """What a group's supervisor asks what to do."""

    def order(self, state: State) -> Order:
        """Return what follows from the state of this machine's processes; asked again and again."""

    def saved(self, checkpoints: int) -> None:
        """Note that checkpoints of new steps were saved."""

    def checkpoints_told(self) -> int:
        """Return of how many new checkpoints another machine has told since the last call."""

    def resize(self, workers: int) -> None:
        """Begin later starts of the group with so many processes of this machine."""

    def open_terms(self, round_: Round) -> TermFolder | None:
        """Return the folder of a round's terms, which it makes; None: survivors of a death do not go on."""

    def begin_anew(self) -> None:
        """Begin another round, because members are lost without which the others cannot go on."""

    @property
    def restarts_left(self) -> int | None:
        """How many restarts are left until a new checkpoint; None: another machine counts them."""

    def lead(self, round_: Round) -> TermLead | None:
        """Return with what this machine makes the terms of a round now; None: another machine does."""


@dataclass(frozen=True)
class TermLead:
    """With what a machine makes terms.

    Attributes:
        publish: lets members know a term, once it counts; None: at once.
        members: of the newest term, where another machine made those before; empty: of the start of this round.
        after: terms have numbers above this one.
        store: where the members of a term meet; empty: where those of the start did.
        holds: members are to wait for now, because other machines may be about to go on without this one.
    """

    publish: Callable[[Term], None] | None = None
    members: tuple[str, ...] = ()
    after: int = 0
    store: str = ""
    holds: bool = False


class Restarts:
    """How many deaths are followed by a restart, over all groups of a job: a number for each progress.

    A checkpoint of a new step restores one, up to the number. Groups that die within `INCIDENT_S` of each other are one
    incident, which counts once; a group that dies again counts again, or a run that always dies would never end.
    """

    def __init__(self, most: int) -> None:
        self._most = self.left = most
        self._incident_s = -math.inf  # when it began
        self._dead: set[str] = set()  # in the incident
        self._failures: dict[str, frozenset[str]] = {}  # of each group's last death

    def saved(self, checkpoints: int) -> None:
        """Note that checkpoints of new steps were saved."""
        if checkpoints:  # survivors may have gone on without those that no restart was left for
            self.left = min(self._most, max(0, self.left) + checkpoints)

    def take(self, group: str, failures: Sequence[str], now: float) -> str:
        """Take a death of a group; returns why no restart follows, or nothing.

        Args:
            failures: what its processes failed with: two that are the same were at the same step.
        """
        before, self._failures[group] = self._failures.get(group, frozenset()), frozenset(failures)
        if before & self._failures[group]:
            return "no restart: it failed in the same way twice, at no later step"
        if now - self._incident_s > INCIDENT_S or group in self._dead:
            self._incident_s, self._dead = now, set()
            self.left -= 1
        self._dead.add(group)
        if self.left >= 0:
            return ""
        used = ", all with no new checkpoint in between" if self._most else ""
        return f"no restarts are left (--max-restarts {self._most}{used})"


class OwnRounds:
    """Rounds of a group that depends on nobody else: it starts again at once."""

    def __init__(self, name: str, restarts: Restarts, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._restarts, self._clock = name, restarts, clock
        self._number = 0

    def saved(self, checkpoints: int) -> None:
        """Note that checkpoints of new steps were saved."""
        self._restarts.saved(checkpoints)

    def checkpoints_told(self) -> int:
        """Return none: no other machine tells."""
        return 0

    def resize(self, workers: int) -> None:
        """Do nothing: no process is told how many there are."""

    def open_terms(self, round_: Round) -> None:
        """Do nothing: the group ends as a whole."""

    def begin_anew(self) -> None:
        """Do nothing: no machine is lost."""

    def lead(self, round_: Round) -> None:
        """Return nothing: there are no terms."""

    @property
    def restarts_left(self) -> int:
        """How many restarts are left until a new checkpoint."""
        return self._restarts.left

    def order(self, state: State) -> Order:
        """Return what follows from the state of the group's processes."""
        match state:
            case Running():
                return Continue()
            case Finished(stopped=stopped):
                return Over("stopped" if stopped else "completed")
            case Left():
                return Over("stopped")
        if state.death and (why := self._restarts.take(self._name, state.failures, self._clock())):
            return Over("failed", state.death, why)
        self._number += 1
        return Go(Round(self._number, {ROUND_VARIABLE: uuid.uuid4().hex}))


@dataclass(frozen=True)
class RoundSettings:
    """What a run asks of its machines.

    Attributes:
        least, most: machines that a round needs and takes.
        arrival_s: how long the first round is waited for.
        return_s: how long a lost machine is waited for, where fewer are too few.
        elastic: the others go on without a lost machine, and it joins them when it is back.
        rescues: the others save what they have trained, and all start again from there.
    """

    least: int = 1
    most: int = 1
    max_restarts: int = 0
    arrival_s: float = 600.0
    return_s: float = 120.0
    elastic: bool = False
    rescues: bool = False

    @property
    def has_terms(self) -> bool:
        """Whether survivors of a death are told who is left."""
        return self.elastic or self.rescues


@dataclass(frozen=True)
class MachineEntry:
    """A machine of a run, as another one has to know it that is to hold the rendezvous from then on."""

    name: str
    workers: int
    present: bool
    leaves: bool
    has_left: bool


@dataclass(frozen=True)
class PlacedRound:
    """The round that a machine is in."""

    machine: str
    round: Round


@dataclass(frozen=True)
class RoundsState:
    """What a rendezvous knows that another machine can go on with; machines are in the order of their numbers."""

    machines: tuple[MachineEntry, ...]
    number: int
    rounds: tuple[PlacedRound, ...]
    besides: int
    next_rank: int
    restarts_left: int

    def members(self) -> list[str]:
        """Return the members that the round began with, by rank."""
        order = {m.name: (i, m.workers) for i, m in enumerate(self.machines)}
        begun = sorted((p for p in self.rounds if not p.round.beside), key=lambda p: p.round.first_rank or 0)
        return [name for p in begun for name in _members(order[p.machine][1], order[p.machine][0])]


@dataclass
class _Machine:
    name: str
    workers: int
    seen: float
    present: bool = True
    state: State = field(default_factory=Ready)
    knows: bool = False  # that the run is over
    leaves: bool = False  # after a checkpoint, as it was asked to
    left_s: float | None = None  # when it was told that it has


class Machines(Protocol):
    """What is done for a run's machines where rounds alone do not say it."""

    def open_store(self, name: str) -> str:
        """Open a store for the round of a name; returns where it is."""

    def lose(self, name: str, round_: Round) -> bool:
        """Let the others go on without a machine that is in a round; returns whether that is tried."""

    def was_asked_to_leave(self, round_: Round) -> bool:
        """Whether the members of a machine that is in a round were asked to leave, while the others go on."""

    def takes_in(self, number: int) -> bool | None:
        """Whether a machine may come beside the others in a round now; None: its machines begin and end together."""

    def complain(self) -> bool:
        """Whether members have lost others, and nobody has said yet who that is."""


class Rendezvous:
    """Which machines are there, and their rounds. `handle(machine, state, now)` is the whole interface."""

    def __init__(self, terms: RoundSettings, now: float, machines: Machines) -> None:
        """Take the time, in seconds of any clock."""
        self._terms, self._does = terms, machines
        self._restarts = Restarts(terms.max_restarts)
        self._machines: dict[str, _Machine] = {}  # in the order of arrival: the order of ranks
        self._number = 0
        self._rounds: dict[str, Round] = {}  # the current one, by machine; empty while it forms
        self._besides = self._next_rank = 0  # since it began
        self._gracefully = False
        self._forming_since = self._handled_s = now
        self._enough_since: float | None = None
        self._holder = ""  # the machine where this state lives; that of the first one, where nothing else is said
        self.over: Over | None = None

    def state(self) -> RoundsState:
        """Return what another machine can go on with."""
        machines = [
            MachineEntry(m.name, m.workers, m.present, m.leaves, m.left_s is not None) for m in self._machines.values()
        ]
        rounds = [PlacedRound(name, round_) for name, round_ in self._rounds.items()]
        left = max(0, self._restarts.left)
        return RoundsState(tuple(machines), self._number, tuple(rounds), self._besides, self._next_rank, left)

    def take_over(self, state: RoundsState, holder: str, store: str, now: float) -> None:
        """Go on with what another machine knew, on the machine `holder`; ranks meet in its store from now on."""
        self._holder, self._number = holder, state.number
        self._besides, self._next_rank, self._restarts.left = state.besides, state.next_rank, state.restarts_left
        for p in state.rounds:
            environment = {**p.round.environment, STORE_VARIABLE: store}
            self._rounds[p.machine] = replace(p.round, environment=environment)
        for m in state.machines:
            runs = m.name in self._rounds
            self._machines[m.name] = _Machine(
                m.name, m.workers, now, m.present or m.name == holder, Running(state.number) if runs else Ready(),
                leaves=m.leaves, left_s=now if m.has_left else None,
            )  # fmt: skip

    def begin_after(self, number: int) -> None:
        """Give rounds numbers above one that machines may still be in."""
        self._number = number

    def give_up(self, name: str, now: float) -> None:
        """Take a machine for lost."""
        if name in self._machines and self._machines[name].present:
            self._go(self._machines[name], now)

    def forgive(self, now: float) -> None:
        """Begin anew to count for how long machines are silent: this one could not listen."""
        for machine in self._machines.values():
            machine.seen = now

    def _others(self) -> list[_Machine]:
        """Return the machines but for the one where this state lives."""
        holder = self._holder or next(iter(self._machines))
        return [m for m in self._machines.values() if m.name != holder]

    def admit(self, name: str, workers: int, now: float) -> int:
        """Let a machine take part; returns its number, which it keeps when it comes back.

        Raises:
            UserError: the run has all its machines.
        """
        machine = self._machines.get(name)
        others = [m for m in self._machines.values() if m.present and m.name != name]
        if (machine is None or not machine.present) and len(others) >= self._terms.most:
            raise UserError(f"the run has its {self._terms.most} machines already: use a larger --nodes on all of them")
        if machine is None:
            machine = self._machines[name] = _Machine(name, workers, now)
        if machine.left_s is not None and now - machine.left_s > LOST_S:  # its command was given again
            machine.leaves, machine.left_s = False, None
        machine.workers, machine.present, machine.seen = workers, machine.left_s is None, now
        return list(self._machines).index(name)

    def drain(self, ranks: Collection[int], now: float) -> str:
        """Let the machines of some ranks leave after a checkpoint; returns why they cannot, or nothing."""
        asked, missed = list[_Machine](), set(ranks)
        for m in self._machines.values():
            own = self._ranks(m.name)
            if own & set(ranks):
                asked.append(m)
                missed -= own
                if rest := own - set(ranks):
                    return f"its machine leaves as a whole, with rank {', '.join(map(str, sorted(rest)))}"
        stay = sum(m.present and not m.leaves for m in self._machines.values()) - sum(not m.leaves for m in asked)
        if missed or self.over is not None:
            return "the run has no such rank now"
        others = self._others()
        if any(m not in others for m in asked):
            return "the first machine leads the run"
        if stay < self._terms.least:
            return f"the run needs {self._terms.least} machines"
        for m in asked:
            m.leaves = True
        self._break_round(now, gracefully=True)
        return ""

    def _ranks(self, name: str) -> set[int]:
        """Return the ranks of a machine in the present round."""
        current = self._rounds.get(name)
        first = current.first_rank if current is not None else None
        return set() if first is None else set(range(first, first + self._machines[name].workers))

    def resize(self, name: str, workers: int) -> None:
        """Begin later rounds with so many workers of a machine."""
        self._machines[name].workers = workers

    def handle(self, name: str, state: State, now: float) -> Order:
        """Return what an admitted machine shall do, given the state of its processes."""
        machine = self._machines[name]
        if now - self._handled_s > PAUSED_S:  # this machine was stopped: what others said meanwhile waits to be read
            self.forgive(now)
        self._handled_s = now
        machine.seen, machine.present = now, machine.left_s is None
        self._expire(now)
        order = self._answer(machine, state, now)
        machine.knows = isinstance(order, Over)
        return order

    def _answer(self, machine: _Machine, state: State, now: float) -> Order:
        name, current = machine.name, self._rounds.get(machine.name)
        if isinstance(state, Finished) and current is not None and self._does.was_asked_to_leave(current):
            machine.leaves = True
            del self._rounds[name]
        if machine.leaves and self.over is None and not isinstance(state, Running):
            machine.left_s, machine.present, machine.state = machine.left_s or now, False, state
            return Over(LEFT)
        match state:
            case Ready():
                return self._ready(machine, state, now)
            case Running(round=number):
                machine.state = state
                if self.over is not None or (number == self._number and name in self._rounds):
                    return self.over or Continue()
                return Leave(self._gracefully and not self._rounds)
            case Finished():
                return self._finished(machine, state)
            case Left():
                self._go(machine, now)
                if self.over is None and not self._rounds:  # else the others go on
                    self.over = self._without(machine, state)
                return Over("stopped")

    def _without(self, machine: _Machine, left: Left) -> Over | None:
        """Return how the run ends where a machine leaves between two rounds; None: it goes on."""
        if left.stops:
            return Over("stopped")
        enough = sum(m.present for m in self._machines.values()) >= self._terms.least
        reason = f": {left.reason}" if left.reason else ""
        return None if enough else Over("failed", f"{machine.name} left the run{reason}")

    def saved(self, checkpoints: int) -> None:
        """Note that checkpoints of new steps were saved."""
        self._restarts.saved(checkpoints)

    @property
    def restarts_left(self) -> int:
        """How many restarts are left until a new checkpoint."""
        return self._restarts.left

    def close(self, reason: str) -> None:
        """End the run for all machines, if it has not ended; `reason` is why the first one leaves."""
        self.over = self.over or Over("failed", reason)

    def begin_anew(self, now: float) -> None:
        """Begin another round, because members are lost without which the others cannot go on."""
        self._break_round(now, gracefully=False)

    def all_know(self) -> bool:
        """Whether every machine that is there has been told that the run is over."""
        return all(m.knows or not m.present for m in self._others())

    def others(self) -> list[str]:
        """Return the machines that are there, but for the first one."""
        return [m.name for m in self._others() if m.present]

    def absent(self) -> list[str]:
        """Return the machines that were there and are gone."""
        return [m.name for m in self._machines.values() if not m.present]

    def _ready(self, machine: _Machine, state: Ready, now: float) -> Order:
        first_report = machine.state != state
        machine.state = state
        current = self._rounds.get(machine.name)
        if current is not None and first_report:  # its processes of this round are gone
            if state.death and (why := self._restarts.take(_RANKS, state.failures, now)):
                self.over = Over("failed", state.death, why)
            began_anew = not state.death and state.after < current.number  # with its supervisor
            if not (began_anew and self._does.lose(machine.name, current)):
                self._break_round(now, gracefully=False)
            else:
                del self._rounds[machine.name]
                if self._rounds:
                    return self._come_beside(machine)
        elif current is not None:  # the order to go has been lost, or not been heeded yet
            return Go(current)
        elif self._rounds and self._does.takes_in(self._number) is not None:  # it comes while the others run
            return self._come_beside(machine)
        elif self._rounds:
            self._break_round(now, gracefully=True)
        if self.over is None:
            self._form(now)
        current = self._rounds.get(machine.name)
        if self.over is not None or current is None:
            return self.over or Continue(self._waits_for())
        return Go(current)

    def _come_beside(self, machine: _Machine) -> Order:
        """Let a machine join the others in their round."""
        if self.over is not None:
            return self.over
        if not self._does.takes_in(self._number):
            return Continue("waiting for the others, who have yet to begin, or are about to end")
        any_round = next(iter(self._rounds.values()))
        self._besides += 1
        environment = {**any_round.environment, "LOCAL_WORLD_SIZE": str(machine.workers)}
        number = list(self._machines).index(machine.name)
        self._rounds[machine.name] = Round(
            self._number, environment, self._next_rank, number, self._besides, elastic=True
        )
        self._next_rank += machine.workers
        return Go(self._rounds[machine.name])

    def _finished(self, machine: _Machine, state: Finished) -> Order:
        machine.state = state
        if self.over is None and state.round != self._number:
            return Leave(gracefully=False)
        if self.over is None and not self._rounds:
            return Leave(self._gracefully)
        states = [self._machines[name].state for name in self._rounds]
        finished = [s for s in states if isinstance(s, Finished) and s.round == self._number]
        if self.over is None and len(finished) == len(states):
            self.over = Over("stopped" if any(s.stopped for s in finished) else "completed")
        return self.over or Continue()

    def _break_round(self, now: float, gracefully: bool) -> None:
        self._rounds, self._gracefully = {}, gracefully
        self._forming_since, self._enough_since = now, None

    def _form(self, now: float) -> None:
        """Begin a round if all that are there are ready and enough, and nobody else is waited for."""
        present = [m for m in self._machines.values() if m.present]
        if len(present) < self._terms.least or not all(isinstance(m.state, Ready) for m in present):
            self._enough_since = None
            return
        if self._enough_since is None:
            self._enough_since = now
        if len(present) < self._terms.most and now - self._enough_since < LAST_CALL_S:
            return
        name = uuid.uuid4().hex
        world, self._number, self._besides = sum(m.workers for m in present), self._number + 1, 0
        common = {
            "WORLD_SIZE": str(world), STORE_VARIABLE: self._does.open_store(name), ROUND_VARIABLE: name,
            "TORCHELASTIC_RESTART_COUNT": str(self._number - 1),
        }  # fmt: skip
        self._next_rank = 0
        order, elsewhere = list(self._machines), self._others()
        present.sort(key=lambda m: m in elsewhere)  # the first rank leads, where this state lives
        for m in present:
            number = order.index(m.name)
            of_others = (n for o in present if o in elsewhere for n in _members(o.workers, order.index(o.name)))
            others = () if m in elsewhere else tuple(of_others)
            environment = {**common, "LOCAL_WORLD_SIZE": str(m.workers)}
            self._rounds[m.name] = Round(
                self._number, environment, self._next_rank, number, others=others, elastic=self._terms.has_terms
            )
            self._next_rank += m.workers

    def _expire(self, now: float) -> None:
        for m in self._others():
            silent_s = now - m.seen
            done = isinstance(m.state, Finished) and m.name in self._rounds  # it has no more to say
            if not m.present or silent_s < SUSPECT_S or self.over or done:
                continue
            if silent_s > LOST_S or (m.name in self._rounds and self._does.complain()):
                self._go(m, now)
        waits_s = self._terms.return_s if self._number else self._terms.arrival_s
        present = sum(m.present for m in self._machines.values())
        if not self.over and not self._rounds and present < self._terms.least and now - self._forming_since > waits_s:
            self.over = Over("failed", f"gave up after {waits_s:g} s of {self._waits_for()}")

    def _go(self, machine: _Machine, now: float) -> None:
        machine.present, machine.state = False, Ready()
        current = self._rounds.get(machine.name)
        if current is not None and self._does.lose(machine.name, current):
            del self._rounds[machine.name]
        elif current is not None:
            self._break_round(now, gracefully=False)

    def _waits_for(self) -> str:
        present = sum(m.present for m in self._machines.values())
        if present >= self._terms.least:
            return "waiting for the other machines"
        missing = f"waiting for {self._terms.least - present} more of {self._terms.least} machines"
        return f"{missing} ({' and '.join(self.absent())} is lost)" if self.absent() else missing


def _members(workers: int, number: int) -> list[str]:
    """Return the names of the members that a machine begins with, as it names them itself."""
    prefix = machine_prefix(number, 0)
    return [member_name(f"{prefix}rank{i}", 0) for i in range(workers)]
