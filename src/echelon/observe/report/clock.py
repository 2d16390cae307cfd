"""A run's own time: from the command to its end, without the pauses between a stop and a resume."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.observe.report.records import Mark, RunRecord


@dataclass(frozen=True)
class Sitting:
    """One uninterrupted stretch in unix seconds: from the command (or the resume) to its end."""

    begin: float
    end: float
    recorded_s: float | None

    @property
    def seconds(self) -> float:
        """What the run recorded as its duration, else the time between its first and last record."""
        return self.end - self.begin if self.recorded_s is None else self.recorded_s


def sittings(record: RunRecord) -> list[Sitting]:
    """Split a record at each `end`; the last stretch may lack one, and reaches to the last record."""
    found: list[Sitting] = []
    begin: float | None = None
    for mark in record.marks:
        if begin is None:
            if mark.kind == "end":
                continue
            begin = _launched(mark, found[-1].end if found else None)
        if mark.kind == "end":
            found.append(Sitting(begin, max(begin, mark.t), mark.number("seconds")))
            begin = None
    if begin is not None:
        found.append(Sitting(begin, max(begin, record.last_t or begin), None))
    return found


def _launched(mark: Mark, after: float | None) -> float:
    launched = mark.number("launched_t") if mark.kind == "start" else None
    if launched is None or launched > mark.t or (after is not None and launched < after):
        return mark.t
    return launched


def elapsed_s(stretches: list[Sitting], t: float) -> float:
    """Seconds of the run's own time at a unix time."""
    passed = 0.0
    for stretch in stretches:
        passed += min(max(t - stretch.begin, 0.0), stretch.end - stretch.begin)
    return passed
