"""A run's own time: from the command to its end, without the pauses between a stop and a resume."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.reporting.report.records import RunRecord, TimelineEntry


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
    """Split a record at each `end`; the last stretch may lack one, and reaches to the last record.

    A stretch begins with the command that a start names, else with its first mark; what is recorded between an
    end and the next start or event belongs to none.
    """
    found: list[Sitting] = []
    begin, started = None, False
    for mark in record.marks:
        if begin is None and mark.kind not in ("start", "event"):
            if mark.kind == "end":
                found.append(Sitting(mark.t, mark.t, mark.number("seconds")))
            continue
        begin = mark.t if begin is None else begin
        if mark.kind == "start" and not started:
            begin, started = _launched(mark, begin, found[-1].end if found else None), True
        if mark.kind == "end":
            found.append(Sitting(begin, max(begin, mark.t), mark.number("seconds")))
            begin, started = None, False
    if begin is not None:
        found.append(Sitting(begin, max(begin, record.last_t or begin), None))
    return found


def _launched(start: TimelineEntry, begin: float, after: float | None) -> float:
    """When the command of a start was given, unless that lies in the future or in an earlier stretch."""
    launched = start.number("launched_t")
    if launched is None or launched > start.t or (after is not None and launched < after):
        return begin
    return launched


def elapsed_s(stretches: list[Sitting], t: float) -> float:
    """Seconds of the run's own time at a unix time."""
    passed = 0.0
    for stretch in stretches:
        passed += min(max(t - stretch.begin, 0.0), stretch.end - stretch.begin)
    return passed
