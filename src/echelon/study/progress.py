"""How far each run of a study has come: read from the end of its record while it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from echelon.core.task import BEFORE_TASKS, Metric
from echelon.records.file import Detail, RecordReader
from echelon.records.kinds import Evaluation, Record, Start, Steps
from echelon.reporting.live.state import most_steps
from echelon.reporting.report.records import load_run
from echelon.reporting.report.timing import measure
from echelon.study.base import COMPLETED, PlannedRun

CUT_SHORT = "cut short"  # the study ended while this run went on: it is repeated from its start
UNFINISHED = ("waiting", "running", CUT_SHORT)


@dataclass(frozen=True)
class Progress:
    """What a run's record says so far: `value` of its primary metric; `done` is a share of the run's steps."""

    done: float = 0.0
    value: float | None = None
    samples_per_s: float | None = None
    total_steps: int = 0
    primary: Metric = BEFORE_TASKS.primary


@dataclass
class RunStatus:
    """Status of one planned run, the seconds that it has taken, its progress, and why it ended.

    Attributes:
        waited_s: how long the study was occupied with it, once it is over.
    """

    run: PlannedRun
    status: str = "waiting"
    seconds: float = 0.0
    progress: Progress = field(default_factory=Progress)
    message: str = ""
    waited_s: float = 0.0

    @property
    def occupied_s(self) -> float:
        """How long another like it will occupy the study."""
        return max(self.seconds, self.waited_s)


class Tail:
    """Follows one run's record: each `read` looks only at what was added."""

    def __init__(self, folder: Path) -> None:
        self._reader = RecordReader(folder, (Start, Steps, Evaluation), Detail.SAMPLED)
        self._folder, self._progress = folder, Progress()

    def read(self) -> Progress:
        """Return how far the run is now; an incomplete last line is left for the next call."""
        replaced, records = self._reader.read()
        if replaced:
            self._progress = Progress()
        for record in records:
            self._progress = _after(self._progress, record, self._folder)
        return self._progress


def progress_at_end(folder: Path) -> Progress:
    """Return how far a run that is over came; its rate is the report's: the mean of the steps after warm-up."""
    timing = measure(load_run(folder)) if folder.is_dir() else None
    return replace(Tail(folder).read(), samples_per_s=timing.samples_per_s if timing else None)


def _after(progress: Progress, record: Record, folder: Path) -> Progress:
    match record:
        case Start():
            steps = record.steps_per_epoch * record.epochs
            most = most_steps(folder)
            return replace(progress, total_steps=min(steps, most or steps), primary=record.task.primary)
        case Steps():
            done = record.step / progress.total_steps if progress.total_steps else 0.0
            return replace(progress, done=min(1.0, done), samples_per_s=record.samples_per_s)
        case Evaluation():
            return replace(progress, value=record.metrics.get(progress.primary.name, progress.value))
    return progress


def seconds_left(states: Sequence[RunStatus]) -> float:
    """Estimate the seconds that are left: each run as long as those like it, the running one less what is done."""
    left = 0.0
    for state in states:
        if state.status in UNFINISHED:
            done_s = state.seconds if state.status == "running" else 0.0  # what was cut short begins anew
            left += max(0.0, _expected_s(state, states) - done_s)
    return left


def running_at_once(states: Sequence[RunStatus]) -> int:
    """Return how many runs go on now, at least 1: the others are taken to go on as many at once."""
    return max(1, sum(state.status == "running" for state in states))


def _expected_s(state: RunStatus, states: Sequence[RunStatus]) -> float:
    """Return the mean seconds of completed runs of the same candidate and terms, or of the same terms, or of all."""
    done = [s for s in states if s.status == COMPLETED and s.seconds]
    same_terms = [s for s in done if s.run.terms == state.run.terms]
    same = [s for s in same_terms if s.run.candidate == state.run.candidate]
    known = same or same_terms or done
    return fmean(s.occupied_s for s in known) if known else 0.0
