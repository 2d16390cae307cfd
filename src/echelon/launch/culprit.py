"""Who the others wait for: a judgement on what all processes of a job are at, as data in and data out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from echelon.core.units import format_seconds
from echelon.observe.notes import SERVING, START, Note
from echelon.observe.phases import CALLBACKS, Phase
from echelon.observe.stacks import Stack
from echelon.observe.tcp import TcpState

_DOING = {
    START: "starting",
    Phase.DATA: "loading data",
    Phase.FORWARD: "in forward (model code)",
    Phase.BACKWARD: "in backward",
    Phase.COMMUNICATE: "in communication",
    Phase.UPDATE: "in the optimizer's update",
    Phase.OTHER: "between two steps",
    "evaluation": "in an evaluation",
    "checkpoint": "saving a checkpoint",
    "recording": "recording",
    CALLBACKS: "in callbacks",
    SERVING: "serving",
}
_PARTS_OF_STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
TIMES_USUAL = 10.0
_NAMED = 8  # ranks, before they are counted


@dataclass(frozen=True)
class Living:
    """A process of a job that runs: `rank` is None where it is no rank of a group that spans the job.

    Attributes:
        log: the name of its log: of what it was started as, while ranks change in a group whose survivors go on.
    """

    name: str
    host: str
    pid: int
    rank: int | None = None
    log: str = ""

    def __str__(self) -> str:
        return self.name if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True)
class StuckLoader:
    """A loader process of a rank that does not wait for work; `stack` is None when it is stopped."""

    pid: int
    stack: Stack | None


@dataclass(frozen=True)
class Observed:
    """What a process is at.

    Attributes:
        still_s: seconds since its activity last changed.
        stack: of its main thread; None where it was not asked, or gave none.
        is_stopped: it lives but does not run (SIGSTOP, a debugger).
        loader: one of its loader processes, where it waits for them.
        tcp: its connections to others.
        usual_s: the longest of its activities so far; 0: not known, or it has not trained yet.
    """

    process: Living
    note: Note
    still_s: float
    stack: Stack | None = None
    is_stopped: bool = False
    loader: StuckLoader | None = None
    tcp: TcpState | None = None
    usual_s: float = 0.0

    def shortened(self, calls: int) -> Observed:
        """Return the same with so many calls of each stack, and those that it is judged by."""
        stack, loader = self.stack and self.stack.shortened(calls), self.loader
        if loader is not None:
            loader = replace(loader, stack=loader.stack and loader.stack.shortened(calls))
        return replace(self, stack=stack, loader=loader)

    @property
    def waits(self) -> bool:
        """Whether it waits for other processes."""
        if self.is_stopped:
            return False
        if self.note.failed or self.note.activity == SERVING:
            return True
        if self.stack is None or self.stack.telling is None:
            return self.note.activity == Phase.COMMUNICATE
        if self.stack.is_in_user_code:
            return False
        return self.stack.waits or self.note.activity == Phase.COMMUNICATE

    @property
    def line(self) -> str:
        """The innermost call of the user's code, or else of any; of a stuck loader process where there is one."""
        loader = self.loader.stack if self.loader else None
        stack = loader if loader is not None else self.stack
        return str(stack.of_user or stack.telling or stack.frames[0]) if stack is not None else ""

    @property
    def is_out_of_step(self) -> bool:
        """Whether it takes ten times as long for a part of a step as it ever did: no other has to wait to see it."""
        return self.note.activity in _PARTS_OF_STEP and self.usual_s > 0 and self.still_s > TIMES_USUAL * self.usual_s


@dataclass(frozen=True)
class Elsewhere:
    """What processes of other machines are at; `is_complete`: all machines have told."""

    observed: tuple[Observed, ...] = ()
    is_complete: bool = True


@dataclass(frozen=True)
class Hang:
    """The process that others wait for.

    Attributes:
        since_s: when its activity began, by `time.monotonic`.
        changes: of its activity until then: more of them, and it hangs no longer.
        line: its innermost call, of the user's code where there is one.
        waiting: who waits for it.
        collective: in which the others wait; empty: in several, or none by name.
    """

    process: Living
    activity: str
    step: int
    since_s: float
    changes: int
    is_stopped: bool
    line: str
    waiting: tuple[Living, ...]
    collective: str
    loader_pid: int | None = None
    stack: Stack | None = None

    @property
    def is_in_step(self) -> bool:
        """Whether it hangs by itself in a part of a step: not at its start, in an evaluation, or stopped by someone."""
        return self.activity in _PARTS_OF_STEP and not self.is_stopped

    def sentence(self, now_s: float) -> str:
        """Say who hangs, in what and for how long, and who waits for it."""
        return f"{self.process} (pid {self.process.pid} on {self.process.host}) {self.about(now_s)}"

    def about(self, now_s: float) -> str:
        """Say in what and for how long it hangs, and who waits for it."""
        text = self.in_words(format_seconds(max(0.0, now_s - self.since_s)))
        if not self.waiting:
            return text
        waits = "waits" if len(self.waiting) == 1 else "wait"
        where = f" in {self.collective}" if self.collective else ""
        return f"{text}; {name_all(self.waiting)} {waits} for it{where}"

    def in_words(self, seconds: str) -> str:
        """Say what it is in and since when."""
        at = f", at step {self.step}" if self.step else ""
        line = f" ({self.line})" if self.line else ""
        if self.is_stopped:
            doing = _DOING.get(self.activity, self.activity)
            return f"does not answer: its process has been stopped (SIGSTOP) for {seconds}, {doing}{at}"
        loader = f", whose loader process {self.loader_pid} is stuck" if self.loader_pid else ""
        return f"has been {_DOING.get(self.activity, self.activity)} for {seconds}{at}{loader}{line}"


@dataclass(frozen=True)
class Standstill:
    """All processes wait for each other: no process is to blame, but what is between them.

    Attributes:
        since_s: when the last of them began to wait, by `time.monotonic`.
        changes: of activity of each until then.
        reason: what is between them, where that can be seen.
    """

    waiting: tuple[Living, ...]
    step: int
    since_s: float
    changes: tuple[tuple[Living, int], ...]
    reason: str

    def sentence(self, now_s: float) -> str:
        """Say who waits since when, and what is between them."""
        seconds = format_seconds(max(0.0, now_s - self.since_s))
        at = f", at step {self.step}" if self.step else ""
        return (
            f"no process computes: {name_all(self.waiting)} have waited for each other for {seconds}{at}{self.reason}"
        )


def find_standstill(observed: Sequence[Observed], now_s: float, still_s: float) -> Standstill | None:
    """Return that all wait for each other, and why as far as their connections and calls tell; None: they do not."""
    observed = [o for o in observed if o.note.activity != SERVING]
    if len(observed) < 2 or not all(o.waits and o.still_s >= still_s for o in observed):
        return None
    return Standstill(
        waiting=tuple(o.process for o in observed),
        step=max(o.note.step for o in observed),
        since_s=now_s - min(o.still_s for o in observed),
        changes=tuple((o.process, o.note.changes) for o in observed),
        reason=_unreachable(observed) or _different_calls(observed),
    )


def _unreachable(observed: Sequence[Observed]) -> str:
    """Say who gets no answer from which address, and who has it."""
    having = {address: o.process for o in observed if o.tcp is not None for address in o.tcp.own}
    pairs = [(o.process, address) for o in observed if o.tcp is not None for address in o.tcp.silent]
    if not pairs:
        return ""
    told = [f"{p} gets no answer from {a}{f' ({having[a]})' if a in having else ''}" for p, a in pairs[:_NAMED]]
    return f"; {', '.join(told)}: the link between them is cut or very slow"


def _different_calls(observed: Sequence[Observed]) -> str:
    calls = {str(o.process): o.stack.collective for o in observed if o.stack is not None and o.stack.collective}
    if len(set(calls.values())) < 2:
        return ""
    return f"; they are in different collectives: {', '.join(f'{who} in {call}' for who, call in calls.items())}"


def find_hang(observed: Sequence[Observed], now_s: float, still_s: float, independent: bool = False) -> Hang | None:
    """Return who the others wait for; None where nobody waits, or where all do (then it is no process).

    Args:
        now_s: by `time.monotonic`.
        still_s: who has changed its activity since then does not hang.
        independent: processes go on without each other, so that one may hang while nobody waits.
    """
    stuck = [o for o in observed if o.still_s >= still_s]
    waiting = [o for o in stuck if o.waits and o.note.activity != SERVING]
    acting = [o for o in stuck if not o.waits]
    if not waiting:
        acting = [o for o in acting if o.is_stopped or (independent and o.is_out_of_step)]
    if not acting:
        return None
    first = max(acting, key=lambda o: (o.is_stopped, o.still_s))
    calls = {o.stack.collective for o in waiting if o.stack is not None}
    return Hang(
        process=first.process,
        activity=first.note.activity,
        step=first.note.step,
        since_s=now_s - first.still_s,
        changes=first.note.changes,
        is_stopped=first.is_stopped,
        line=first.line,
        waiting=tuple(o.process for o in waiting),
        collective=calls.pop() if len(calls) == 1 else "",
        loader_pid=first.loader.pid if first.loader else None,
        stack=first.stack,
    )


def name_all(processes: Sequence[Living]) -> str:
    """Name several processes.

    >>> name_all([Living("a", "h", 1, 0), Living("b", "h", 2, 2)])
    'ranks 0, 2'
    >>> name_all([Living("worker0", "h", 1)])
    'worker0'
    """
    ranks = sorted(p.rank for p in processes if p.rank is not None)
    if len(processes) > _NAMED:
        return f"{len(processes)} others"
    if len(ranks) < len(processes):
        return ", ".join(sorted(str(p) for p in processes))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
