"""A run's own time: from the command to its end, without the pauses between a stop and a resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from echelon.records.events import Event
from echelon.records.kinds import CommandEnd, CommandRefused, End, Evaluation, Record, Start, Steps
from echelon.reporting.report.records import RunRecord


@dataclass(frozen=True)
class Sitting:
    """One uninterrupted stretch in unix seconds: from the command (or the resume) to its end.

    Attributes:
        launched_t: when its command was given, as its first start says.
    """

    begin: float
    end: float
    recorded_s: float | None
    launched_t: float | None = None

    @property
    def seconds(self) -> float:
        """What the run recorded as its duration, else the time between its first and last record."""
        return self.end - self.begin if self.recorded_s is None else self.recorded_s

    def closed(self, command: CommandEnd) -> Sitting:
        """Return it with the time of its command, which ends later than training, and began even where that did not."""
        begin = min(self.begin, command.t - command.seconds)
        return replace(self, begin=begin, end=max(self.end, command.t), recorded_s=command.seconds)


def sittings(record: RunRecord) -> list[Sitting]:
    """Split a record at each `end`, and where a command took up what another, that was killed, had begun.

    A stretch begins with the command that a start names, else with its first record, and ends with its command where
    that recorded its end; the last one may lack an end, and reaches to the last record. What is recorded between an
    end and the next start or event belongs to none, nor does what a command recorded that was refused.
    """
    counted = _counted(record)
    stretches: list[Sitting] = []
    lines: list[Record] = []  # of the present stretch, steps and evaluations left out
    for line in counted:
        if isinstance(line, CommandEnd) and stretches and _closes(line, stretches[-1], lines):
            stretches[-1], lines = stretches[-1].closed(line), []
        elif isinstance(line, End) and not lines:
            stretches.append(Sitting(line.t, line.t, line.seconds))
        elif isinstance(line, Steps | Evaluation) or not (lines or isinstance(line, Start | Event)):
            continue
        elif isinstance(line, End):
            _add(stretches, _stretch([*lines, line], stretches))
            lines = []
        else:
            if isinstance(line, Start) and _is_of_another_command(line, lines):
                before = [earlier for earlier in lines if earlier.t < (line.launched_t or line.t)]
                lines = lines[len(before) :]
                _add(stretches, _stretch(before, stretches, _last_t(counted, line.launched_t)))
            lines.append(line)
    if lines:
        _add(stretches, _stretch(lines, stretches, max(line.t for line in counted)))
    return stretches


def _counted(record: RunRecord) -> Sequence[Record]:
    """Return the lines of a record without those of commands that were refused."""
    refused = [(line.t - line.seconds, line.t) for line in record.of(CommandRefused)]
    return [line for line in record.records if not any(begin <= line.t <= end for begin, end in refused)]


def _closes(command: CommandEnd, last: Sitting, lines: Sequence[Record]) -> bool:
    """Whether a command that ends is that of the last stretch, with events between, such as a profile's."""
    return not lines or (command.t - command.seconds <= last.end and not any(isinstance(line, Start) for line in lines))


def _add(stretches: list[Sitting], later: Sitting) -> None:
    """Append a stretch, or prolong the last one: where a machine joins, ranks end and start again under one command."""
    if stretches and later.launched_t is not None and stretches[-1].launched_t == later.launched_t:
        later = replace(later, begin=stretches.pop().begin)
    stretches.append(later)


def _stretch(lines: Sequence[Record], earlier: Sequence[Sitting], last_t: float | None = None) -> Sitting:
    """Return a stretch from its lines; `last_t`: the last moment of one without an end."""
    start, last = next((line for line in lines if isinstance(line, Start)), None), lines[-1]
    launched_t = None if start is None else start.launched_t
    begin = lines[0].t if start is None else _launched(start, lines[0].t, earlier[-1].end if earlier else None)
    if isinstance(last, End):
        return Sitting(begin, max(begin, last.t), last.seconds, launched_t)
    return Sitting(begin, max(begin, last.t, last_t or begin), None, launched_t)


def _is_of_another_command(start: Start, lines: Sequence[Record]) -> bool:
    """Whether a start was launched by another command than the stretch's so far, which recorded no end."""
    before = next((line.launched_t for line in lines if isinstance(line, Start)), None)
    return before is not None and start.launched_t is not None and start.launched_t > before


def _last_t(lines: Sequence[Record], before_t: float | None) -> float | None:
    """Return the latest moment of lines before another one."""
    return max((line.t for line in lines if before_t is not None and line.t < before_t), default=None)


def _launched(start: Start, begin: float, after: float | None) -> float:
    """When the command of a start was given, unless that lies in the future or in an earlier stretch."""
    launched = start.launched_t
    if launched is None or launched > start.t or (after is not None and launched < after):
        return begin
    return launched


def elapsed_s(stretches: list[Sitting], t: float) -> float:
    """Seconds of the run's own time at a unix time."""
    return sum(min(max(t - stretch.begin, 0.0), stretch.end - stretch.begin) for stretch in stretches)
