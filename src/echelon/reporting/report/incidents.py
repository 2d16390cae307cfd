"""Who died, when, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.units import format_seconds
from echelon.records.events import Event, Restarted, Resumed, WorkerDied
from echelon.records.kinds import End, Record, Start
from echelon.reporting.report.clock import Sitting, elapsed_s
from echelon.reporting.report.records import RunRecord


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
    lines = [line for line in record.records if isinstance(line, Start | End | Event)]
    incidents = []
    for i, death in enumerate(lines):
        if not isinstance(death, WorkerDied):
            continue
        after = lines[i + 1 :]
        bound = next((j for j, line in enumerate(after) if isinstance(line, Start | End)), None)
        until = after[: bound + 1] if bound is not None else after
        not_the_last = any(isinstance(line, WorkerDied) for line in until)
        continued = not_the_last or (bound is not None and isinstance(after[bound], Start))
        cost, lost = (None, None) if not_the_last or not continued else _cost(record, death, until)
        incidents.append(Incident(elapsed_s(stretches, death.t), death.message, cost, lost, continued))
    return incidents


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
