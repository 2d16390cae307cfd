"""Who died, when, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.units import format_seconds
from echelon.reporting.report.clock import Sitting, elapsed_s
from echelon.reporting.report.records import RunRecord, TimelineEntry

_DEATHS = ("worker_died",)


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
    """List deaths in order; a cost that was not recorded is measured from what came before and after.

    Of several deaths before one restart, the last carries the cost.
    """
    incidents = []
    for i, mark in enumerate(record.marks):
        if mark.kind != "event" or mark.name not in _DEATHS:
            continue
        after = record.marks[i + 1 :]
        next_start = next((j for j, m in enumerate(after) if m.kind in ("start", "end")), None)
        window = after[: next_start + 1] if next_start is not None else after
        not_the_last = any(m.kind == "event" and m.name in _DEATHS for m in window)
        continued = not_the_last or (next_start is not None and after[next_start].kind == "start")
        cost, lost = (None, None) if not_the_last or not continued else _cost(record, mark, window)
        incidents.append(Incident(elapsed_s(stretches, mark.t), mark.message, cost, lost, continued))
    return incidents


def _cost(
    record: RunRecord, death: TimelineEntry, until_start: Sequence[TimelineEntry]
) -> tuple[float | None, int | None]:
    told = [death, *until_start]
    start = until_start[-1]
    cost = next((m.number("seconds") for m in told if m.kind == "event" and m.number("seconds") is not None), None)
    lost = next((m.number("lost_steps") for m in told if m.number("lost_steps") is not None), None)
    if cost is None:
        first = next((w for w in record.windows if w.t > start.t), None)
        cost = max(0.0, first.t - first.seconds - death.t) if first else None
    if lost is None:
        before = [w.step for w in record.windows if w.t <= start.t]
        lost = max(0.0, before[-1] - (start.number("start_step") or 0)) if before else 0.0
    return cost, int(lost)


def count_restarts(record: RunRecord) -> int:
    """Count restarts after a death; a resume by the user is none."""
    said = sum(m.kind == "event" and m.name == "restarted" for m in record.marks)
    seen, died = 0, False
    for mark in record.marks:
        if mark.kind == "event" and mark.name in _DEATHS:
            died = True
        elif mark.kind in ("start", "end"):
            seen += died and mark.kind == "start"
            died = False
    return max(said, seen)
