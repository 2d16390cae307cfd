"""Do what is missing of a flow as jobs of a cluster's own queue.

Where the queue holds the order (Slurm), all are submitted at once, each waiting for those that it reads from, and go on
when this command ends. Elsewhere (Ray, Kubernetes) each is submitted when those have ended well, by this command. The
next command finds what goes on by its name.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from pathlib import Path

from echelon.core.errors import UserError
from echelon.core.stop import Stopped, stop_on_signals
from echelon.flows.base import Flow, FlowStep, StepResources, step_folder
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
            (folder / JOBS_FOLDER).mkdir(exist_ok=True)
            chain = _Chain(flow, folder, place, say, jobs)
            kept = _submit(chain) if place.holds_order else []
            _follow(chain, kept)
        except Stopped as stop:
            for name, job in jobs.items():
                _stop(place, name, job, say)
            return FlowOutcome("stopped", folder, signum=stop.signum)
        finally:
            write_page(flow, folder)
    ran = [name for name in jobs if completed_end(step_folder(folder, name)) is not None]
    rest = [name for name in flow.steps if name not in ran and name not in kept]
    failed = [name for name in rest if name in jobs and last_line(step_folder(folder, name)) is not None]
    blocked = [name for name in rest if name not in failed]
    return FlowOutcome("partial" if rest else "completed", folder, ran, kept, failed, blocked)


def _by_priority(flow: Flow) -> list[str]:
    """Return the names of steps in the order in which a queue is given those that could start."""
    return sorted(flow.steps, key=lambda name: -flow.steps[name].priority)  # of equal ones as in the file


@dataclass
class _Chain:
    """A flow on its way through a queue.

    Attributes:
        jobs: how the queue calls the job of each step that has one.
        handed: steps that this command has submitted or kept.
    """

    flow: Flow
    folder: Path
    place: TakesChains
    say: Say
    jobs: dict[str, str]
    handed: set[str] = field(default_factory=set)

    def is_done(self, name: str) -> bool:
        """Whether a step needs no job."""
        step = self.flow.steps[name]
        now = fingerprint(self.flow, step, lambda before: hashes_of(self.folder, before))
        return is_done(self.flow, self.folder, step, now)

    def known(self, name: str) -> dict[int, str]:
        """Return how the queue calls the jobs of a name that go on, by their numbers.

        Raises:
            UserError: it does not answer.
        """
        try:
            return self.place.chained(name)
        except PlaceSilent as silent:
            raise UserError(str(silent)) from None

    def submit(self, job: ChainedJob) -> dict[int, str]:
        """Submit a job; returns how the queue calls each of it, by its number."""
        return self.place.submit_chained(job)

    def submit_ready(self, ended: Set[str]) -> list[str]:
        """Submit the steps whose predecessors have all ended well; returns those that are done already.

        Args:
            ended: steps that are over for good, or kept.
        """
        kept = []
        for name in _by_priority(self.flow):
            step = self.flow.steps[name]
            if name in self.handed or not {*step.before} <= ended:
                continue
            if any(completed_end(step_folder(self.folder, before)) is None for before in step.before):
                continue  # one failed
            self.handed.add(name)
            if self.is_done(name):
                kept.append(name)
                self.say(f"{name}: kept")
            else:
                _submit_alike(self, _Alike([name], []))
        return kept


class _Shown(_Chain):
    """Jobs that are shown, and not submitted: what waits for one calls it by its name and number."""

    def known(self, name: str) -> dict[int, str]:
        """Return nothing: what goes on is shown too."""
        return {}

    def submit(self, job: ChainedJob) -> dict[int, str]:
        """Show a job."""
        self.say(self.place.chained_text(job if self.place.holds_order else replace(job, after=())))
        return {number: f"{job.name}-{number}" for number in job.commands}


def queued_jobs(flow: Flow, folder: Path, place: TakesChains) -> dict[str, str]:
    """Return how the queue calls the job of each step that has one that waits or runs.

    Raises:
        UserError: it does not answer.
    """
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, step in flow.steps.items():
        groups[step.group].append(name)
    chain, found = _Chain(flow, folder, place, lambda _: None, {}), {}
    for group, names in groups.items():
        jobs = chain.known(_job_name(folder, group))
        found.update({names[number]: job for number, job in jobs.items() if number < len(names)})
    return found


def stop_queued(flow: Flow, folder: Path, place: TakesChains, say: Say) -> list[str]:
    """End the jobs of a flow, those that wait for others first; returns the steps that had one.

    Raises:
        UserError: the queue does not answer.
    """
    jobs = queued_jobs(flow, folder, place)
    names = [*TopologicalSorter({name: step.before for name, step in flow.steps.items()}).static_order()]
    stopped = [name for name in reversed(names) if name in jobs]
    for name in stopped:
        _stop(place, name, jobs[name], say)
    return stopped


def chained_texts(flow: Flow, folder: Path, place: TakesChains) -> list[str]:
    """Return exactly what would be submitted of a flow, a text a job or array."""
    texts: list[str] = []
    _submit(_Shown(flow, folder, place, texts.append, {}))
    return [text for text in texts if "\n" in text]


def _submit(chain: _Chain) -> list[str]:
    """Submit a job for each step that is not done, of a matrix those that need and wait for the same as one array.

    Returns those that are done.
    """
    flow, jobs, kept = chain.flow, chain.jobs, list[str]()
    sorter = TopologicalSorter({name: step.before for name, step in flow.steps.items()})
    sorter.prepare()
    while sorter.is_active():
        order = _by_priority(flow)
        ready = sorted(sorter.get_ready(), key=order.index)
        alike: dict[tuple[str, StepResources, tuple[str, ...]], list[str]] = {}
        for name in ready:
            step = flow.steps[name]
            waits_for = tuple(jobs[before] for before in step.before if before in jobs)
            chain.handed.add(name)
            if not waits_for and chain.is_done(name):
                kept.append(name)
                chain.say(f"{name}: kept")
            else:
                alike.setdefault((step.group, step.resources, waits_for), []).append(name)
        for (_, _, waits_for), names in alike.items():
            _submit_alike(chain, _Alike(names, waits_for))
        sorter.done(*ready)
    return kept


@dataclass(frozen=True)
class _Alike:
    """Steps of one entry of the file that need the same and wait for the same jobs."""

    steps: Sequence[str]
    after: Sequence[str]


def _submit_alike(chain: _Chain, alike: _Alike) -> None:
    """Submit those steps whose jobs the queue does not know."""
    flow, folder, jobs = chain.flow, chain.folder, chain.jobs
    step = flow.steps[alike.steps[0]]
    of_group = [name for name, other in flow.steps.items() if other.group == step.group]
    numbers = {name: of_group.index(name) for name in alike.steps}
    known = chain.known(_job_name(folder, step.group))
    missing = {number: name for name, number in numbers.items() if number not in known}
    given = chain.submit(_job(folder, step, missing, alike.after)) if missing else {}
    for name, number in numbers.items():
        jobs[name] = given[number] if number in given else known[number]
        chain.say(f"{name}: job {jobs[name]}{'' if number in given else ' goes on'}")


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


def _follow(chain: _Chain, kept: list[str]) -> None:
    """Wait until no job waits or runs, saying how they fare; where the queue holds no order, submit what can begin.

    Args:
        kept: steps that are done; those that need no job are added.

    Raises:
        UserError: the queue does not answer for ten minutes, or refuses a job.
    """
    flow, folder, say, jobs = chain.flow, chain.folder, chain.say, chain.jobs
    followed: defaultdict[str, _Followed] = defaultdict(_Followed)
    heard_s = time.monotonic()
    while True:
        over = {name for name in jobs if followed[name].is_over}
        while new := chain.submit_ready({*over, *kept}):
            kept += new
        if not (going := [name for name in jobs if not followed[name].is_over]):
            return
        for name in going:
            try:
                state = chain.place.state(jobs[name])
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
