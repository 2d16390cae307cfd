"""Run what is missing of a study: ordinary runs, each a command in a process of its own.

On this machine one follows the other, for runs beside each other disturb each other's times; on a cluster several go on
at once, each a job of its queue, or all of a stage one array of it (`study.array`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from echelon.config import Resolved, build
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.core.stop import Stopped, signal_name, stop_on_signals
from echelon.launch.places.cluster import JobPhase, PlaceFiles
from echelon.records.file import Recorder, newest
from echelon.records.kinds import CommandEnd, End, RunEnd, StudyStart
from echelon.reporting.report import write_shared_script
from echelon.run.elsewhere import state_of
from echelon.study.array import QueuedRuns, array_cluster
from echelon.study.base import COMPLETED, PlannedRun, Study
from echelon.study.collect import collect
from echelon.study.commands import POLL_S, RunCommand, end_all
from echelon.study.file import write_choices
from echelon.study.folder import (
    WARM_UP_FOLDER,
    discard,
    is_over,
    locked,
    read_ends,
    run_folder,
)
from echelon.study.grid import planned_runs
from echelon.study.stages import best_rates, epochs_in_time, rate_runs, time_runs

AT_ONCE = 4  # on a cluster, whose queue has the last word
WARM_UP_STEPS = "20"
_SIGNALLED = 128  # exit codes above it


class StudyStopped(Exception):
    """The study was asked to stop by a signal; the run that went on has ended."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal_name(signum)}")
        self.signum = signum


class StudyObserver(Protocol):
    """Receives the events of a study."""

    def began(
        self, runs: Sequence[PlannedRun], ends: Mapping[str, RunEnd], over: frozenset[str], follows: str = ""
    ) -> None:
        """Receive all runs, how they ended as far as that is known, and the names of those that are not run again."""

    def started(self, run: PlannedRun, folder: Path) -> None:
        """Receive the run that starts, and its folder."""

    def queued(self, words: str) -> None:
        """Receive what was handed over to a cluster's queue."""

    def goes_on(self) -> None:
        """Redraw: about a second has passed."""

    def ended(self, run: PlannedRun, end: RunEnd) -> None:
        """Receive how a run ended."""


@dataclass(frozen=True)
class How:
    """How a study's runs are started.

    Attributes:
        retry: refused and failed runs again, too.
        at_once: so many go on at the same time.
        elsewhere: they are jobs of a cluster.
    """

    retry: bool = False
    at_once: int = 1
    elsewhere: bool = False

    @property
    def pace(self) -> str:
        """It in words."""
        return "one after the other" if self.at_once == 1 else f"up to {self.at_once} at once"

    @classmethod
    def of(cls, study: Study, at_once: int = 0, retry: bool = False) -> How:
        """Return how the runs of a study are started.

        Args:
            at_once: as asked for; 0: one on this machine, four on a cluster.

        Raises:
            UserError: several at once on this machine.
        """
        elsewhere = all(place.cluster() is not None for place in {run.place for run in planned_runs(study)})
        if at_once > 1 and not elsewhere:
            raise UserError(
                f"--at-once {at_once} is for runs on a cluster (--on): on one machine they disturb each other's times"
            )
        return cls(retry, at_once or (AT_ONCE if elsewhere else 1), elsewhere)


def run_study(
    path: Path, study: Study, observer: StudyObserver, how: How | None = None, given_t: float | None = None
) -> None:
    """Start the runs that are missing, in their order; what is refused or fails stops no other.

    Args:
        how: left out: as the study's places have it.
        given_t: when the command was given, in unix seconds; None: now.

    Raises:
        StudyStopped: a signal asked it to stop.
        UserError: the study goes on already in another process.
    """
    with locked(path):
        write_shared_script(path)
        record = Recorder(path)
        record.write(StudyStart(time.time() if given_t is None else given_t))
        try:
            with stop_on_signals(raises=True):
                for runs, follows in _stages(path, study):
                    _run_missing(path, (runs, follows), observer, record, how or How.of(study))
        except Stopped as stop:
            raise StudyStopped(stop.signum) from None
        finally:
            record.close()


def _stages(path: Path, study: Study) -> Iterator[tuple[list[PlannedRun], str]]:
    """Yield the runs of each stage, and in words which follow: these are chosen, and written down, once it is over."""
    if study.tune_lr:
        yield rate_runs(study), " for learning rates; those of the study follow"
        rates = best_rates(study, collect(path, study)[0])
        study = write_choices(path, replace(study, choices=replace(study.choices, rates=rates)))
    yield planned_runs(study), "; those that end in equal time follow" if study.equal_time else ""
    if study.equal_time:
        seconds, epochs = epochs_in_time(study, collect(path, study)[0])
        study = write_choices(path, replace(study, choices=replace(study.choices, seconds=seconds, epochs=epochs)))
        yield time_runs(study), ""


def _run_missing(
    path: Path, stage: tuple[Sequence[PlannedRun], str], observer: StudyObserver, record: Recorder, how: How
) -> None:
    runs, follows = stage
    ends = read_ends(path)
    over = frozenset(run.name for run in runs if is_over(path, run, ends, how.retry))
    observer.began(runs, ends, over, follows)
    missing = deque(run for run in runs if run.name not in over)
    cluster = array_cluster(missing) if missing and how.elsewhere else None
    if cluster is not None:
        queued, words = QueuedRuns.handed_over(path, missing, cluster, how.at_once)
        observer.queued(words)
        _follow(queued, observer, record)
        return
    _check_left(path, missing)
    if missing and not how.elsewhere:
        _warm_up(path, missing[0], observer)
    going: list[RunCommand] = []
    try:
        while missing or going:
            while missing and len(going) < how.at_once:
                going.append(_started(path, missing.popleft(), observer))
            ended = [each for each in going if each.is_over]
            for each in ended:
                end_all([each])
                going.remove(each)
                end = _end_of(each.run, each.folder, each.outcome(), time.monotonic() - each.began_s)
                record.write(end)
                observer.ended(each.run, end)
            if not ended:
                going[0].wait()
                observer.goes_on()
    finally:
        end_all(going)


def _check_left(path: Path, runs: Iterable[PlannedRun]) -> None:
    """Refuse to start runs that go on as jobs of an earlier command, which still write into their folders.

    Raises:
        UserError: some do, or their place does not answer.
    """
    left = []
    for run in runs:
        folder, cluster = run_folder(path, run.name), run.place.cluster()
        job = PlaceFiles(folder).job()
        if job and cluster is not None and state_of(cluster, job).phase is not JobPhase.ENDED:
            left.append(str(folder))
    if left:
        raise UserError(
            f"{', '.join(left)}: jobs of an earlier command go on there: wait for their ends, or end each with "
            "`echelon stop`, then continue the study"
        )


def _follow(queued: QueuedRuns, observer: StudyObserver, record: Recorder) -> None:
    """Follow the runs of an array until all are over; what stops the study stops them."""
    try:
        while queued.going:
            begun, over = queued.look()
            for each in begun:
                observer.started(each.run, each.folder)
            for each in over:
                outcome = (USER_ERROR_EXIT_CODE, each.refused) if each.refused else each.outcome()
                end = _end_of(each.run, each.folder, outcome, each.waited_s)
                record.write(end)
                observer.ended(each.run, end)
            if not over:
                time.sleep(POLL_S)
                observer.goes_on()
    finally:
        queued.stop()


def _started(path: Path, run: PlannedRun, observer: StudyObserver) -> RunCommand:
    folder = run_folder(path, run.name)
    observer.started(run, folder)
    discard(folder)
    return RunCommand.start(path, run, folder)


def _warm_up(path: Path, first: PlannedRun, observer: StudyObserver) -> None:
    """Do the first steps of a run and throw them away: the first to come finds cold caches and a cool processor."""
    folder = path / WARM_UP_FOLDER
    discard(folder)
    settings = {**first.settings, "training.max_steps": WARM_UP_STEPS}
    run = PlannedRun(WARM_UP_FOLDER, first.candidate, first.terms, first.seed, settings)
    command = RunCommand.start(path, run, folder)
    try:
        while not command.is_over:
            command.wait()
            observer.goes_on()
    finally:
        end_all([command])
    discard(folder)


def _end_of(run: PlannedRun, folder: Path, outcome: tuple[int, str], waited_s: float) -> RunEnd:
    seconds = command_seconds(folder, waited_s)
    return RunEnd(run.name, *_outcome(folder, *outcome), seconds, waited_s, dict(run.settings))


def command_seconds(folder: Path, waited_s: float) -> float:
    """Return how long a run's command took, in seconds, as its own record and its report say.

    Args:
        waited_s: seconds from before the process was made until it was seen to have ended; returned for a run that
            did not come to record its command's end.
    """
    end = next(newest(folder, CommandEnd), None)
    return end.seconds if end else waited_s


def _outcome(folder: Path, code: int, error: str) -> tuple[str, str]:
    """Tell how a run ended, and why, from its record, and where that is silent from its exit code."""
    end = next(newest(folder, End), None)
    status, message = (end.status, end.message) if end else ("", "")
    if code == 0 and status == COMPLETED:
        return COMPLETED, ""
    if code == USER_ERROR_EXIT_CODE:
        return "refused", error or message
    if status in ("stopped", "") and code > _SIGNALLED:  # empty: before it had begun
        return "stopped", "a signal stopped it"
    how = f"its command ended with {signal_name(-code) if code < 0 else f'exit code {code}'}"
    return "failed", (message if status == "failed" else "") or error or message or how


def refused_settings(study: Study, check: Callable[[Resolved], object]) -> dict[str, str]:
    """Return why runs cannot start, by candidate (and terms), as far as that is known before anything starts.

    Args:
        check: refuses what this machine, or a combination of choices, cannot do.

    Raises:
        UserError: no run can start.
    """
    refused: dict[str, str] = {}
    runs = {run.title: run for run in planned_runs(study)}  # seeds make no difference
    for name, run in runs.items():
        try:
            check(build(None, run.settings))
        except UserError as error:
            refused[name] = str(error)
    if len(refused) == len(runs):
        raise UserError(f"no run of this study can start: {next(iter(refused.values()))}")
    return refused
