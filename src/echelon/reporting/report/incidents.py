"""Who died, when, and what it cost; steps that took far longer than the others, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.units import format_seconds
from echelon.observe.phases import Phase
from echelon.records.events import Event, HangSeen, Restarted, Resumed, SlowProcess, WorkerDied
from echelon.records.kinds import Checkpoint, End, Record, SlowStep, Start
from echelon.reporting.report.clock import Sitting, elapsed_s
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.timing import Timing

MOST_SLOW_STEPS = 50
_MOSTLY = 0.5


@dataclass(frozen=True)
class Incident:
    """A death: seconds into the run, the sentence, seconds until the next step began, and steps done again."""

    at_s: float
    message: str
    cost_s: float | None
    lost_steps: int | None
    continued: bool

    def sentence(self, step_s: float | None) -> str:
        """Say it in words; `step_s` turns steps done again into seconds."""
        said = self.message.rstrip(".") or "A worker died"
        text = f"At {format_seconds(self.at_s)}: {said}."
        if not self.continued:
            return f"{text} The run did not continue."
        parts = []
        if self.cost_s is not None:
            parts.append(f"{format_seconds(self.cost_s)} until the next step began")
        if self.lost_steps:
            again = f" ({format_seconds(self.lost_steps * step_s)})" if step_s else ""
            parts.append(f"{self.lost_steps} step{'s' * (self.lost_steps > 1)} done again{again}")
        return f"{text} It cost {' and '.join(parts)}." if parts else text


def find_incidents(record: RunRecord, stretches: list[Sitting]) -> list[Incident]:
    """List deaths in order, and hangs that ended by themselves; a cost that was not recorded is measured.

    Of several deaths before one restart, the last carries the cost. A hang that a death follows is in its sentence.
    """
    lines = [line for line in record.records if isinstance(line, Start | End | Event)]
    incidents = []
    for i, death in enumerate(lines):
        after = lines[i + 1 :]
        if isinstance(death, SlowProcess) or (isinstance(death, HangSeen) and not _ends_with_death(after)):
            incidents.append(Incident(elapsed_s(stretches, death.t), death.message, None, None, True))
        if not isinstance(death, WorkerDied):
            continue
        bound = next((j for j, line in enumerate(after) if isinstance(line, Start | End)), None)
        until = after[: bound + 1] if bound is not None else after
        not_the_last = any(isinstance(line, WorkerDied) for line in until)
        restarted = bound is not None and isinstance(after[bound], Start)
        continued = not_the_last or restarted or _completed(until) or _was_told_late(lines[:i])
        if (stall_s := _stall_before(record, death, lines[:i])) is not None:
            cost, lost = stall_s, None
        elif not_the_last or not restarted:
            cost, lost = None, None
        elif _goes_on(after[len(until) :]):
            cost, lost = _stall_s(record, lines[:i], until), None
        else:
            cost, lost = _cost(record, death, until)
        incidents.append(Incident(elapsed_s(stretches, death.t), death.message, cost, lost, continued))
    return incidents


def _ends_with_death(after: Sequence[Record]) -> bool:
    """Whether of what followed a hang a death came first."""
    return isinstance(next((line for line in after if isinstance(line, Start | End | WorkerDied)), None), WorkerDied)


def _completed(until: Sequence[Record | None]) -> bool:
    """Whether a run came to its end without a start after a death, as where a process alone is started again."""
    return any(isinstance(line, End) and line.status == "completed" for line in until[-1:])


def _was_told_late(before: Sequence[Record]) -> bool:
    """Whether a run had completed when a death came into its record, as one that another machine tells."""
    return _completed([next((line for line in reversed(before) if isinstance(line, Start | End)), None)])


def _cost(record: RunRecord, death: WorkerDied, until_start: Sequence[Record]) -> tuple[float | None, int]:
    """Return the seconds until the next step began, and the steps done again; `until_start` ends with the start."""
    *events, start = (death, *until_start)
    assert isinstance(start, Start)
    told = [line for line in events if isinstance(line, WorkerDied | Restarted)]
    cost = next((line.seconds for line in told if line.seconds is not None), None)
    counted = [line for line in events if isinstance(line, WorkerDied | Restarted | Resumed)]
    lost = next((line.lost_steps for line in counted if line.lost_steps is not None), None)
    if cost is None:
        first = next((w for w in record.windows if w.t > start.t), None)
        cost = max(0.0, first.t - first.seconds - death.t) if first else None
    if lost is None:
        before = [w.step for w in record.windows if w.t <= start.t]
        lost = max(0, before[-1] - start.start_step) if before else 0
    return cost, lost


def _goes_on(after: Sequence[Record]) -> bool:
    """Whether a start is no restart but a term of those who are left: `after`: what follows it in the record."""
    return any(isinstance(line, Event) and line.name == "members" for line in after[:1])


def _stall_before(record: RunRecord, death: WorkerDied, before: Sequence[Record]) -> float | None:
    """Return the stall where survivors had recorded their new term already when the death was; None: they had not."""
    newest = next((i for i in reversed(range(len(before))) if isinstance(before[i], Start)), None)
    if newest is None or not _goes_on(before[newest + 1 :]):
        return None
    term, former = before[newest], next((x for x in reversed(before[:newest]) if isinstance(x, Start)), None)
    told = any(isinstance(line, WorkerDied) for line in before[newest:])
    trained = any(term.t < w.t <= death.t for w in record.windows)
    assert isinstance(term, Start)
    if told or trained or former is None or (term.world_size or 0) >= (former.world_size or 0):
        return None
    return _stall_s(record, before[:newest], [term])


def _stall_s(record: RunRecord, before: Sequence[Record], until_start: Sequence[Record]) -> float | None:
    """Return the seconds in which those who were left made no step; None: the start that follows is of another cause.

    A machine's death is told once it was silent for a while: what counts is the time without steps.
    """
    start, former = until_start[-1], next((line for line in reversed(before) if isinstance(line, Start)), None)
    assert isinstance(start, Start)
    if former is None or (start.world_size or 0) > (former.world_size or 0):  # a newcomer's
        return None
    last = next((w for w in reversed(record.windows) if w.t <= start.t), None)
    first = next((w for w in record.windows if w.t > start.t), None)
    return None if last is None or first is None else max(0.0, first.t - last.t - first.seconds)


def count_restarts(record: RunRecord) -> int:
    """Count restarts after a death; a resume by the user is none."""
    seen, died = 0, False
    for line in record.records:
        if isinstance(line, WorkerDied):
            died = True
        elif isinstance(line, Start | End):
            seen += died and isinstance(line, Start)
            died = False
    return max(len(record.of(Restarted)), seen)


@dataclass(frozen=True)
class ExplainedStep:
    """A step, how long it took, how long steps took then, and in words what it spent the time on.

    `waited_for` is the rank that the others waited for; None where that was not recorded.
    """

    step: int
    seconds: float
    median_s: float
    cause: str
    waited_for: int | None = None


def find_slow_steps(record: RunRecord, timing: Timing | None) -> list[ExplainedStep]:
    """List the steps that were recorded as slow, the slowest first; at most 50."""
    slowest = sorted(record.of(SlowStep), key=lambda s: -s.seconds)[:MOST_SLOW_STEPS]
    return [_explained(record, timing, slow) for slow in slowest]


def _explained(record: RunRecord, timing: Timing | None, slow: SlowStep) -> ExplainedStep:
    grown = _most_grown(slow.phase_names, slow.phases, timing)
    late = grown.rank if grown.phase == Phase.UPDATE else None  # others wait for it in the step that follows
    waited_for = _critical(record, slow) if late is None else late
    return ExplainedStep(slow.step, slow.seconds, slow.median_s, _cause(record, slow, grown), waited_for)


def _critical(record: RunRecord, slow: SlowStep) -> int | None:
    """Return the rank that waited least in a step: the last to be ready for communication."""
    if slow.waited_for is not None:
        return slow.waited_for
    before = (w for w in reversed(record.windows) if w.t <= slow.t)
    window = next((w for w in before if w.step - w.count < slow.step <= w.step), None)
    return slow.critical_rank(window) if window is not None else None


def _cause(record: RunRecord, slow: SlowStep, grown: _Grown) -> str:
    """Name the phase that grew most on any rank, with what is known to have happened then."""
    about = [f"just after {' and '.join(dict.fromkeys(slow.after))}" if slow.after else "", _saving(record, slow)]
    collected = [seconds or 0.0 for seconds in slow.gc_s]
    if collected and max(collected) >= _MOSTLY * (slow.seconds - slow.median_s):
        rank = max(range(len(collected)), key=collected.__getitem__)
        about.insert(0, f"garbage collection on rank {rank} ({format_seconds(collected[rank])})")
    else:
        about.insert(0, grown.words)
    return "; ".join(part for part in about if part) or "unknown"


@dataclass(frozen=True)
class _Grown:
    """The phase that took so much longer than usual, and on which rank: None of communication, where all wait."""

    phase: str = ""
    rank: int | None = None
    seconds: float = 0.0

    @property
    def words(self) -> str:
        """What is said of it; empty where nothing grew."""
        where = f" on rank {self.rank}" if self.rank is not None else ""
        return f"{self.phase}{where} (+{format_seconds(self.seconds)})" if self.phase else ""


def _most_grown(names: Sequence[str], rows: Sequence[Sequence[float] | None], timing: Timing | None) -> _Grown:
    """Return what grew most; communication only where no rank's own work did: others wait there."""
    grown: dict[tuple[str, int], float] = {}
    for rank, row in enumerate(rows):
        usual = timing.by_rank[rank] if timing and rank < len(timing.by_rank) else {}
        for name, seconds in zip(names, row or (), strict=False):
            grown[name, rank] = seconds - usual.get(name, 0.0)
    if not grown:
        return _Grown()
    work = {key: s for key, s in grown.items() if key[0] != Phase.COMMUNICATE}
    waiting = max((s for key, s in grown.items() if key[0] == Phase.COMMUNICATE), default=0.0)
    (name, rank), seconds = max(work.items(), key=lambda item: item[1]) if work else (("", 0), 0.0)
    if seconds >= _MOSTLY * waiting:
        return _Grown(name, rank, seconds)
    return _Grown("communication", None, waiting)


def _saving(record: RunRecord, slow: SlowStep) -> str:
    """Whether a checkpoint was being written in the background."""
    for saved in record.of(Checkpoint):
        if saved.t - saved.total_s + saved.blocked_s <= slow.t <= saved.t:
            return "while a checkpoint was written"
    return ""
