"""A run's own time: from the command to its end, without the pauses between a stop and a resume."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.records.events import Event
from echelon.records.kinds import End, Evaluation, Start, Steps
from echelon.reporting.report.records import RunRecord


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

    A stretch begins with the command that a start names, else with its first record; what is recorded between an
    end and the next start or event belongs to none.
    """
    stretches: list[Sitting] = []
    begin, started = None, False
    for line in record.records:
        if isinstance(line, Steps | Evaluation):
            continue
        if begin is None and not isinstance(line, Start | Event):
            if isinstance(line, End):
                stretches.append(Sitting(line.t, line.t, line.seconds))
            continue
        begin = line.t if begin is None else begin
        if isinstance(line, Start) and not started:
            begin, started = _launched(line, begin, stretches[-1].end if stretches else None), True
        if isinstance(line, End):
            stretches.append(Sitting(begin, max(begin, line.t), line.seconds))
            begin, started = None, False
    if begin is not None:
        stretches.append(Sitting(begin, max(begin, record.last_t or begin), None))
    return stretches


def wall_seconds(stretches: list[Sitting]) -> float:
    """Seconds from each command to the end of what it recorded, added up."""
    return sum(stretch.end - stretch.begin for stretch in stretches)


def _launched(start: Start, begin: float, after: float | None) -> float:
    """When the command of a start was given, unless that lies in the future or in an earlier stretch."""
    launched = start.launched_t
    if launched is None or launched > start.t or (after is not None and launched < after):
        return begin
    return launched


def elapsed_s(stretches: list[Sitting], t: float) -> float:
    """Seconds of the run's own time at a unix time."""
    return sum(min(max(t - stretch.begin, 0.0), stretch.end - stretch.begin) for stretch in stretches)
