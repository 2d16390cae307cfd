"""A study's own time: of all its commands, each from its process's start to its end, and how much of it runs took."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from echelon.core.units import format_seconds
from echelon.records.file import Recorder, newest, read_records
from echelon.records.kinds import CommandEnd, RunEnd, StudyStart


@dataclass(frozen=True)
class StudyTime:
    """Seconds that a study took, pauses between a stop and a continuation left out, and those of its runs' commands.

    `overlaps`: several of them went on at once.
    """

    seconds: float
    runs_s: float
    overlaps: bool = False

    @property
    def says(self) -> str:
        """A sentence on both, and on what the rest is."""
        if self.overlaps:
            return (
                f"The study took {format_seconds(self.seconds)}; its runs, of which several went on at once, took "
                f"{format_seconds(self.runs_s)} together."
            )
        rest_s = max(0.0, self.seconds - self.runs_s)
        return (
            f"The study took {format_seconds(self.seconds)}: {format_seconds(self.runs_s)} in its runs, "
            f"{format_seconds(rest_s)} in all else: its own start, the warm-up, between the runs, this report."
        )


def end_command(study: Path) -> None:
    """Record that the command which began last is about to end; nothing where the record has no such beginning."""
    start = next(newest(study, StudyStart), None)
    if start is None:
        return
    record = Recorder(study)
    record.write(CommandEnd(max(0.0, time.time() - start.launched_t)))
    record.close()


def study_time(study: Path) -> StudyTime | None:
    """Return what a study took; None where its record does not tell when it began, as in earlier versions.

    A command that recorded no end was killed: it took until the last line that it wrote.
    """
    lines = read_records(study, StudyStart, RunEnd, CommandEnd)
    if not lines or not isinstance(lines[0], StudyStart):
        return None
    seconds = runs_s = waited_s = 0.0
    begun_t: float | None = None
    last_t = 0.0
    for line in lines:
        if isinstance(line, CommandEnd):
            seconds, begun_t = seconds + line.seconds, None
        elif isinstance(line, RunEnd):
            runs_s, waited_s = runs_s + line.seconds, waited_s + line.waited_s
        elif isinstance(line, StudyStart):
            seconds += last_t - begun_t if begun_t is not None else 0.0
            begun_t = line.launched_t
        last_t = line.t
    seconds += last_t - begun_t if begun_t is not None else 0.0
    return StudyTime(seconds, runs_s, overlaps=waited_s > seconds)
