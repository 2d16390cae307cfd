"""Do what is missing of a flow as jobs of a cluster's own queue, each waiting for those that it reads from.

The queue holds the order: the jobs go on when this command ends, and the next one finds them again by their names.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from echelon.core.errors import UserError
from echelon.core.stop import Stopped, stop_on_signals
from echelon.flows.base import Flow, FlowStep, step_folder
from echelon.flows.child import hashes_of, is_done
from echelon.flows.driver import FlowOutcome, Say
from echelon.flows.fingerprint import fingerprint
from echelon.flows.page import write_page
from echelon.flows.state import STOPPED, completed_end, last_line, only_driver
from echelon.launch.places.cluster import ChainedJob, JobPhase, JobState, PlaceSilent, TakesChains
from echelon.records.kinds import FlowStepEnd

POLL_S = 2.0
_GONE_S = 600.0  # a queue that is silent for so long is left
_SETTLE_S = 10.0  # until a job that seems over is: it may be queued again
JOBS_FOLDER = "jobs"
_GOOD_DIGITS = 8


def run_chained(flow: Flow, folder: Path, place: TakesChains, say: Say) -> FlowOutcome:
    """Submit what is missing of a flow, and follow it to its end.

    Raises:
        UserError: another command follows the flow, or the place refuses a job.
    """
    with only_driver(folder), stop_on_signals(raises=True):
        jobs: dict[str, str] = {}
        try:
            kept = _submit(flow, folder, place, say, jobs)
            _follow(flow, folder, place, say, jobs)
        except Stopped as stop:
            for name, job in jobs.items():
                _stop(place, name, job, say)
            return FlowOutcome("stopped", folder, signum=stop.signum)
        finally:
            write_page(flow, folder)
    ran = [name for name in jobs if completed_end(step_folder(folder, name)) is not None]
    lines = {name: last_line(step_folder(folder, name)) for name in jobs if name not in ran}
    failed = [name for name, line in lines.items() if line is not None]
    blocked = [name for name, line in lines.items() if line is None]
    return FlowOutcome("partial" if lines else "completed", folder, ran, kept, failed, blocked)


def _submit(flow: Flow, folder: Path, place: TakesChains, say: Say, jobs: dict[str, str]) -> list[str]:
    """Submit a job for each step that is not done, of a matrix those that wait for the same ones as one array.

    Returns those that are done.
    """
    kept: list[str] = []
    (folder / JOBS_FOLDER).mkdir(exist_ok=True)
    sorter = TopologicalSorter({name: step.before for name, step in flow.steps.items()})
    sorter.prepare()
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=list(flow.steps).index)
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in ready:
            step = flow.steps[name]
            waits_for = [jobs[before] for before in step.before if before in jobs]
            if not waits_for and _is_done(flow, folder, step):
                kept.append(name)
                say(f"{name}: kept")
            else:
                alike.setdefault((step.group, *waits_for), []).append(name)
        for (_, *waits_for), names in alike.items():
            _submit_alike(flow, folder, place, say, jobs, _Alike(names, waits_for))
        sorter.done(*ready)
    return kept


@dataclass(frozen=True)
class _Alike:
    """Steps of one entry of the file that wait for the same jobs."""

    steps: Sequence[str]
    after: Sequence[str]


def _submit_alike(flow: Flow, folder: Path, place: TakesChains, say: Say, jobs: dict[str, str], alike: _Alike) -> None:
    """Submit those steps whose jobs the queue does not know."""
    step = flow.steps[alike.steps[0]]
    of_group = [name for name, other in flow.steps.items() if other.group == step.group]
    numbers = {name: of_group.index(name) for name in alike.steps}
    try:
        known = place.chained(_job_name(folder, step.group))
    except PlaceSilent as silent:
        raise UserError(str(silent)) from None
    missing = {number: name for name, number in numbers.items() if number not in known}
    given = place.submit_chained(_job(folder, step, missing, alike.after)) if missing else {}
    for name, number in numbers.items():
        jobs[name] = given[number] if number in given else known[number]
        say(f"{name}: job {jobs[name]}{'' if number in given else ' goes on'}")


def _is_done(flow: Flow, folder: Path, step: FlowStep) -> bool:
    return is_done(flow, folder, step, fingerprint(flow, step, lambda before: hashes_of(folder, before)))


def _job_name(folder: Path, group: str) -> str:
    """Return how the queue calls the jobs of an entry of the file."""
    digest = hashlib.sha256(f"{folder.resolve()}\0{group}".encode()).hexdigest()[:_GOOD_DIGITS]
    return f"echelon-{group[:60]}-{digest}"


def _job(folder: Path, step: FlowStep, names: Mapping[int, str], after: Sequence[str]) -> ChainedJob:
    """Return the job of a step and its like: the same process as here, tried as often as the step may be.

    Args:
        names: of the steps, by their number among all of the matrix.
    """
    whole, needs = folder.resolve(), step.resources
    child = [sys.executable, "-m", "echelon.flows.child", "0", str(whole)]
    commands = {number: [*child, name, str(step.retry)] for number, name in names.items()}
    name = _job_name(folder, step.group)
    script = whole / JOBS_FOLDER / f"{name}{f'-{min(names)}' * bool(step.axes)}.sh"
    return ChainedJob(
        name, script, commands, bool(step.axes), after, needs.cores, needs.memory_bytes, needs.gpus, needs.time_s
    )


@dataclass
class _Followed:
    """What is known of a step's job.

    Attributes:
        said: the last that was told of it.
        over_since_s: since when it has seemed over; 0: it does not.
        is_over: for good.
    """

    said: str = ""
    over_since_s: float = 0.0
    is_over: bool = False

    def look(self, state: JobState, step_ended: bool) -> None:
        """Take a new state. A job that is queued again, as after its node's failure, seems over for a moment."""
        now = time.monotonic()
        self.over_since_s = (self.over_since_s or now) if state.phase is JobPhase.ENDED else 0.0
        self.is_over = bool(self.over_since_s) and (step_ended or now - self.over_since_s > _SETTLE_S)


def _follow(flow: Flow, folder: Path, place: TakesChains, say: Say, jobs: Mapping[str, str]) -> None:
    """Wait until no job waits or runs, saying how they fare.

    Raises:
        UserError: the queue does not answer for ten minutes.
    """
    followed = {name: _Followed() for name in jobs}
    heard_s = time.monotonic()
    while going := [name for name in jobs if not followed[name].is_over]:
        for name in going:
            try:
                state = place.state(jobs[name])
            except PlaceSilent as silent:
                if time.monotonic() - heard_s > _GONE_S:
                    raise UserError(f"{silent}; the jobs may go on: the same command finds them again") from None
                continue
            heard_s = time.monotonic()
            known = followed[name]
            line = last_line(step_folder(folder, name))
            known.look(state, isinstance(line, FlowStepEnd) and line.status != STOPPED)
            word = f"ended: {_result(folder, name)}" if known.is_over else state.text
            if word != known.said:
                say(f"{name}: {word}")
            known.said = word
        write_page(flow, folder)
        time.sleep(POLL_S)


def _result(folder: Path, name: str) -> str:
    line = last_line(step_folder(folder, name))
    if isinstance(line, FlowStepEnd):
        return f"{line.status}{f' ({line.message})' if line.message else ''}"
    return "not begun" if line is None else "cut short"


def _stop(place: TakesChains, name: str, job: str, say: Say) -> None:
    try:
        if place.state(job).phase is not JobPhase.ENDED:
            place.stop(job)
    except (PlaceSilent, UserError) as error:
        say(f"{name}: job {job} may go on: {error}")
