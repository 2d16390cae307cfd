"""Runs of a study as one array of a cluster's queue: all are handed over at once, and the queue lets so many go on.

The queue starts each again as it does a run that came alone, after a preemption or a time limit, and the commands for
runs (`echelon stop`, `logs`, `watch`) serve each. What goes on after a study's command was lost is followed again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.config import build
from echelon.core.errors import UserError
from echelon.core.stop import stopped_exit_code
from echelon.core.units import many
from echelon.launch.places.cluster import ArrayCluster, JobPhase, JobState, PlaceFiles, PlaceSilent, RunArray
from echelon.run.defaults import with_task_defaults
from echelon.run.elsewhere import ASK_S, GONE_S, SETTLE_S, stop, submitted_together
from echelon.run.machine import say
from echelon.run.start import prepare_elsewhere
from echelon.study.base import PlannedRun
from echelon.study.commands import END_S, POLL_S
from echelon.study.folder import OUTPUT_FOLDER, discard, run_folder


def array_cluster(runs: Sequence[PlannedRun]) -> ArrayCluster | None:
    """Return the place that takes runs as one array; None: they have several places, or one that takes none.

    Raises:
        UserError: its settings are impossible.
    """
    places = {run.place for run in runs}
    cluster = places.pop().cluster() if len(places) == 1 else None
    return cluster if isinstance(cluster, ArrayCluster) else None


@dataclass(eq=False)
class QueuedRun:
    """A run that the queue has.

    Attributes:
        state: of its job, as the queue said last.
        begun_s: when it was first seen to run, by the monotonic clock; None: it was not yet.
        refused: why it was not handed over; empty: it was.
    """

    run: PlannedRun
    folder: Path
    state: JobState = JobState(JobPhase.WAITS, "")  # noqa: RUF009 - frozen
    begun_s: float | None = None
    refused: str = ""
    _over_since_s: float = 0.0

    @property
    def files(self) -> PlaceFiles:
        """What the run and its place tell each other by."""
        return PlaceFiles(self.folder)

    @property
    def waited_s(self) -> float:
        """Seconds since it was first seen to run."""
        return 0.0 if self.begun_s is None else time.monotonic() - self.begun_s

    def is_over(self) -> bool:
        """Whether it has ended; a job that is queued again may seem over for a moment."""
        if self.refused:
            return True
        if self.state.phase is not JobPhase.ENDED:
            self._over_since_s = 0.0
            return False
        self._over_since_s = self._over_since_s or time.monotonic()
        return self.files.ended() is not None or time.monotonic() - self._over_since_s > SETTLE_S

    def outcome(self) -> tuple[int, str]:
        """Return the exit code that a command for it alone would have, and why."""
        taken_away = (stopped_exit_code(0), "") if self.files.stop.exists() else (1, self.state.text)
        return self.files.ended() or taken_away


class QueuedRuns:
    """Runs of a study that one cluster's queue has, followed together: one question to the queue for all of them."""

    def __init__(self, cluster: ArrayCluster, going: Sequence[QueuedRun]) -> None:
        self._cluster, self.going = cluster, list(going)
        self._asked_s, self._heard_s = 0.0, time.monotonic()

    @classmethod
    def handed_over(
        cls, path: Path, runs: Sequence[PlannedRun], cluster: ArrayCluster, at_once: int
    ) -> tuple[QueuedRuns, str]:
        """Hand runs over but for those that the queue has from an earlier command; returns them, and what was done.

        Raises:
            UserError: the queue refuses them.
        """
        kept = list(_still_queued(path, runs, cluster))
        known = {each.run.name for each in kept}
        new, submissions = [], []
        for run in runs:
            if run.name in known:
                continue
            folder = run_folder(path, run.name)
            discard(folder)
            try:
                described = with_task_defaults(build(None, run.settings)).config
                submissions.append(prepare_elsewhere(replace(described, run=str(folder))))
            except UserError as refused:
                new.append(QueuedRun(run, folder, refused=str(refused)))
            else:
                new.append(QueuedRun(run, folder))
        words = [f"since an earlier command: {many(len(kept), 'run')}"] if kept else []
        if submissions:
            script = (path / OUTPUT_FOLDER / "array.sh").absolute()
            script.parent.mkdir(exist_ok=True)
            try:
                jobs = submitted_together(cluster, RunArray(path.absolute().name, script, submissions, at_once))
            except UserError:
                for each in new:
                    discard(each.folder)
                raise
            words.append(
                f"jobs {jobs[0]} to {jobs[-1]}: {many(len(jobs), 'run')} as an array, at most {at_once} at once"
            )
        return cls(cluster, [*kept, *new]), "; ".join(words)

    def look(self) -> tuple[list[QueuedRun], list[QueuedRun]]:
        """Return the runs that have begun since the last look, and those that are over, which are left from now on.

        Raises:
            UserError: the place has been silent for too long.
        """
        if time.monotonic() - self._asked_s >= ASK_S:
            self._ask()
        begun = [each for each in self.going if each.begun_s is None and each.state.phase is JobPhase.RUNS]
        for each in begun:
            each.begun_s = time.monotonic()
        over = [each for each in self.going if each.is_over()]
        self.going = [each for each in self.going if each not in over]
        return begun, over

    def _ask(self) -> None:
        self._asked_s, jobs = time.monotonic(), {each: each.files.job() for each in self.going if not each.refused}
        if not jobs:
            return
        try:
            states = self._cluster.states([*jobs.values()])
        except PlaceSilent as silent:
            if time.monotonic() - self._heard_s > GONE_S:
                raise UserError(f"{silent}; {len(jobs)} runs may go on") from None
            return
        self._heard_s = time.monotonic()
        for each, job in jobs.items():
            each.state = states[job]

    def stop(self) -> None:
        """Take runs that wait from the queue, let the others save a checkpoint, and wait for their ends."""
        for each in reversed(self.going):  # those that wait first, which would take the place of those that end
            try:
                stop(each.folder, self._cluster)
            except UserError as silent:
                say(f"{each.folder} may go on: {silent}")
        ends_s = time.monotonic() + self._cluster.stop_s + END_S
        while self.going and time.monotonic() < ends_s:
            if not self.look()[1]:
                time.sleep(POLL_S)


def _still_queued(path: Path, runs: Sequence[PlannedRun], cluster: ArrayCluster) -> Iterator[QueuedRun]:
    """Yield the runs that the queue has from an earlier command of the study.

    Raises:
        UserError: the place does not answer.
    """
    found = [QueuedRun(run, run_folder(path, run.name)) for run in runs]
    jobs = {each: job for each in found if (job := each.files.job())}
    try:
        states = cluster.states([*jobs.values()]) if jobs else {}
    except PlaceSilent as silent:
        raise UserError(f"{silent}: what goes on of the study is not known now") from None
    for each, job in jobs.items():
        each.state = states[job]
        if each.state.phase is not JobPhase.ENDED:
            yield each
