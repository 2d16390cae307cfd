"""Steps that took far longer than the others, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.units import format_seconds
from echelon.observe.phases import Phase
from echelon.records.kinds import Checkpoint, SlowStep
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.timing import Timing

MOST = 50
_MOSTLY = 0.5


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
    explained = [
        ExplainedStep(slow.step, slow.seconds, slow.median_s, _cause(record, timing, slow), _critical(record, slow))
        for slow in record.of(SlowStep)
    ]
    return sorted(explained, key=lambda s: -s.seconds)[:MOST]


def _critical(record: RunRecord, slow: SlowStep) -> int | None:
    """Return the rank that waited least in a step: the last to be ready for communication."""
    windows = [w for w in record.windows if w.t <= slow.t and w.step - w.count < slow.step <= w.step]
    if not windows or len(windows[-1].waits) < 2:
        return None
    place = slow.step - (windows[-1].step - windows[-1].count) - 1
    waits = [rank[place] for rank in windows[-1].waits]
    return waits.index(min(waits))


def _cause(record: RunRecord, timing: Timing | None, slow: SlowStep) -> str:
    """Name the phase that grew most on any rank, with what is known to have happened then."""
    about = [f"just after {' and '.join(dict.fromkeys(slow.after))}" if slow.after else "", _saving(record, slow)]
    collected = [seconds or 0.0 for seconds in slow.gc_s]
    if collected and max(collected) >= _MOSTLY * (slow.seconds - slow.median_s):
        rank = max(range(len(collected)), key=collected.__getitem__)
        about.insert(0, f"garbage collection on rank {rank} ({format_seconds(collected[rank])})")
    else:
        about.insert(0, _grown(slow.phase_names, slow.phases, timing))
    return "; ".join(part for part in about if part) or "unknown"


def _grown(names: Sequence[str], rows: Sequence[Sequence[float] | None], timing: Timing | None) -> str:
    """Say which phase of which rank grew most; communication only where no rank's own work did: others wait there."""
    grown: dict[tuple[str, int], float] = {}
    for rank, row in enumerate(rows):
        usual = timing.by_rank[rank] if timing and rank < len(timing.by_rank) else {}
        for name, seconds in zip(names, row or (), strict=False):
            grown[name, rank] = seconds - usual.get(name, 0.0)
    if not grown:
        return ""
    work = {key: s for key, s in grown.items() if key[0] != Phase.COMMUNICATE}
    waiting = max((s for key, s in grown.items() if key[0] == Phase.COMMUNICATE), default=0.0)
    (name, rank), seconds = max(work.items(), key=lambda item: item[1]) if work else (("", 0), 0.0)
    if seconds >= _MOSTLY * waiting:
        return f"{'input' if name == Phase.DATA else name} on rank {rank} (+{format_seconds(seconds)})"
    return f"communication (+{format_seconds(waiting)})"


def _saving(record: RunRecord, slow: SlowStep) -> str:
    """Whether a checkpoint was being written in the background."""
    for saved in record.of(Checkpoint):
        if saved.t - saved.total_s + saved.blocked_s <= slow.t <= saved.t:
            return "while a checkpoint was written"
    return ""
