"""Steps that took far longer than the others, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.units import format_seconds
from echelon.observe.phases import Phase
from echelon.reporting.report.records import RunRecord, TimelineEntry
from echelon.reporting.report.timing import Timing

MOST = 50
_MOSTLY = 0.5


@dataclass(frozen=True)
class SlowStep:
    """A step, how long it took, how long steps took then, and in words what it spent the time on.

    `waited_for` is the rank that the others waited for; None where that was not recorded.
    """

    step: int
    seconds: float
    median_s: float
    cause: str
    waited_for: int | None = None


def find_slow_steps(record: RunRecord, timing: Timing | None) -> list[SlowStep]:
    """List the steps that were recorded as slow, the slowest first; at most 50."""
    found = []
    for mark in record.of_kind("slow_step"):
        step, seconds, median_s = (mark.number(key) for key in ("step", "seconds", "median_s"))
        if step is not None and seconds is not None and median_s is not None:
            cause = _cause(record, timing, mark, seconds - median_s)
            found.append(SlowStep(int(step), seconds, median_s, cause, _critical(record, mark, int(step))))
    return sorted(found, key=lambda s: -s.seconds)[:MOST]


def _critical(record: RunRecord, mark: TimelineEntry, step: int) -> int | None:
    """Return the rank that waited least in a step: the last to be ready for communication."""
    told = [w for w in record.windows if w.t <= mark.t and w.step - w.steps < step <= w.step]
    if not told or len(told[-1].waits) < 2:
        return None
    place = step - (told[-1].step - told[-1].steps) - 1
    waits = [rank[place] for rank in told[-1].waits]
    return waits.index(min(waits))


def _cause(record: RunRecord, timing: Timing | None, mark: TimelineEntry, over_s: float) -> str:
    """Name the phase that grew most on any rank, with what is known to have happened then."""
    names = [str(n) for n in mark.details.get("phase_names") or ()]
    rows = _rows(mark.details.get("phases"), len(names))
    about = [_after(mark), _saving(record, mark)]
    collected = [s if isinstance(s, int | float) else 0.0 for s in mark.details.get("gc_s") or ()]
    if collected and max(collected) >= _MOSTLY * over_s:
        rank = max(range(len(collected)), key=collected.__getitem__)
        about.insert(0, f"garbage collection on rank {rank} ({format_seconds(collected[rank])})")
    else:
        about.insert(0, _grown(names, rows, timing))
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
    own = {key: s for key, s in grown.items() if key[0] != Phase.COMMUNICATE}
    waiting = max((s for key, s in grown.items() if key[0] == Phase.COMMUNICATE), default=0.0)
    (name, rank), seconds = max(own.items(), key=lambda item: item[1]) if own else (("", 0), 0.0)
    if seconds >= _MOSTLY * waiting:
        return f"{'input' if name == Phase.DATA else name} on rank {rank} (+{format_seconds(seconds)})"
    return f"communication (+{format_seconds(waiting)})"


def _rows(value: object, width: int) -> list[list[float] | None]:
    rows: list[list[float] | None] = []
    for row in value if isinstance(value, list) else []:
        whole = isinstance(row, list) and len(row) == width and all(isinstance(s, int | float) for s in row)
        rows.append([float(s) for s in row] if whole else None)
    return rows


def _after(mark: TimelineEntry) -> str:
    names = mark.details.get("after")
    said = " and ".join(dict.fromkeys(str(n) for n in names)) if isinstance(names, list) else ""
    return f"just after {said}" if said else ""


def _saving(record: RunRecord, mark: TimelineEntry) -> str:
    """Whether a checkpoint was being written in the background."""
    for saved in record.of_kind("checkpoint"):
        total_s, blocked_s = saved.number("total_s") or 0.0, saved.number("blocked_s") or 0.0
        if saved.t - total_s + blocked_s <= mark.t <= saved.t:
            return "while a checkpoint was written"
    return ""
