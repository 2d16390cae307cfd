"""Do what is missing of a flow as jobs of a cluster's own queue.

Where the queue holds the order (Slurm), all are submitted at once, each waiting for those that it reads from, and go on
when this command ends. Elsewhere (Ray, Kubernetes) each is submitted when those have ended well, by this command. The
next command finds what goes on by its name.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.stop import Stopped, stop_on_signals
from echelon.flows.base import Flow, FlowStep, StepResources, step_folder
from echelon.flows.child import hashes_of, is_done
from echelon.flows.driver import FlowOutcome, Say
from echelon.flows.fingerprint import StepFingerprint, fingerprint
from echelon.flows.page import write_page
from echelon.flows.state import COMPLETED, STOPPED, last_line, only_driver, step_statuses
from echelon.launch.places.cluster import ArrayCluster, ChainedJob, JobPhase, JobState, PlaceSilent, TakesChains
from echelon.records.kinds import FlowStepEnd, FlowStepStart

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
        chain = _Chain(flow, folder, place, say)
        try:
            if place.holds_order:
                _submit(chain)
            _follow(chain)
        except Stopped as stop:
            for name, job in chain.jobs.items():
                _stop(place, name, job, say)
            chain.going = {}
            return FlowOutcome("stopped", folder, signum=stop.signum)
        finally:
            chain.show()
    ran = [name for name in chain.jobs if name in chain.done]
    rest = [name for name in flow.steps if name not in chain.done]
    failed = [name for name in rest if chain.done.issuperset(flow.steps[name].before)]
    blocked = [name for name in rest if name not in failed]
    return FlowOutcome("partial" if rest else "completed", folder, ran, chain.current, failed, blocked)


def _by_priority(flow: Flow) -> list[str]:
    """Return the names of steps in the order in which a queue is given those that could start."""
    return sorted(flow.steps, key=lambda name: -flow.steps[name].priority)  # of equal ones as in the file


@contextmanager
def _answering() -> Iterator[None]:
    """Refuse to go on where the queue does not answer."""
    try:
        yield
    except PlaceSilent as silent:
        raise UserError(str(silent)) from None


@dataclass
class _Chain:
    """A flow on its way through a queue.

    Attributes:
        jobs: how the queue calls the job of each step that has one.
        current: steps that needed no job.
        done: those, and steps whose jobs have ended well.
        handed: steps that this command has submitted or kept, with the newest line of their records then: what stood
            there before says nothing of the job.
        numbers: of each step among the jobs of its entry of the file, by the entry.
        going: the jobs that are not over, as far as is known.
    """

    flow: Flow
    folder: Path
    place: TakesChains
    say: Say
    jobs: dict[str, str] = field(default_factory=dict)
    current: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    handed: dict[str, FlowStepStart | FlowStepEnd | None] = field(default_factory=dict)
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    going: dict[str, str] = field(default_factory=dict)

    def line(self, name: str) -> FlowStepStart | FlowStepEnd | None:
        """Return the newest line of a step's record that was written since it was handed over."""
        line = last_line(step_folder(self.folder, name))
        return line if line != self.handed[name] else None

    def now(self, name: str) -> StepFingerprint:
        """Return the fingerprint of a step whose predecessors are done."""
        return fingerprint(self.flow, self.flow.steps[name], lambda before: hashes_of(self.folder, before))

    def take(self, name: str) -> None:
        """Note that a step is about to be submitted, or needs no job."""
        self.handed[name] = last_line(step_folder(self.folder, name))

    def needs_no_job(self, name: str) -> bool:
        """Whether a step whose predecessors are done is done too; then it is noted."""
        if not is_done(self.flow, self.folder, self.flow.steps[name], self.now(name)):
            return False
        self.current.append(name)
        self.done.add(name)
        self.say(f"{name}: kept")
        return True

    def ended_well(self, name: str) -> bool:
        """Whether a step's job came to a good end; without a new line its process may have found the step done."""
        if name in self.done or name not in self.handed:
            return name in self.done
        if (line := self.line(name)) is not None:
            return isinstance(line, FlowStepEnd) and line.status == COMPLETED
        step = self.flow.steps[name]
        return all(map(self.ended_well, step.before)) and is_done(self.flow, self.folder, step, self.now(name))

    def show(self) -> None:
        """Write the flow's page."""
        write_page(self.flow, self.folder, step_statuses(self.flow, self.folder, self.going.keys()))

    def result(self, name: str) -> str:
        """Return in words how a step's job has ended."""
        line = self.line(name)
        if isinstance(line, FlowStepEnd):
            return f"{line.status}{f' ({line.message})' if line.message else ''}"
        return COMPLETED if name in self.done else "not begun" if line is None else "cut short"

    def known(self, name: str) -> dict[int, str]:
        """Return how the queue calls the jobs of a name that go on, by their numbers.

        Raises:
            UserError: it does not answer.
        """
        with _answering():
            return self.place.chained(name)

    def numbered(self, group: str, goes_on: bool) -> dict[str, int]:
        """Return the number of each step of an entry of the file among its jobs.

        Args:
            goes_on: the queue has jobs of the entry: their numbers stay those of the steps that they were given for.
        """
        if group not in self.numbers:
            names = _numbered(self.flow, self.folder, group, goes_on)
            (self.folder / JOBS_FOLDER).mkdir(exist_ok=True)
            write_atomic(_numbers_file(self.folder, group), json.dumps(names))
            self.numbers[group] = {name: number for number, name in enumerate(names)}
        return self.numbers[group]

    def submit(self, job: ChainedJob) -> dict[int, str]:
        """Submit a job; returns how the queue calls each of it, by its number."""
        return self.place.submit_chained(job)

    def submit_ready(self) -> bool:
        """Submit the steps whose predecessors have all ended well; returns whether one of them needed no job."""
        before = len(self.current)
        for name in _by_priority(self.flow):
            if name in self.handed or not self.done.issuperset(self.flow.steps[name].before):
                continue
            self.take(name)
            if not self.needs_no_job(name):
                _submit_alike(self, _Alike([name], []))
        return len(self.current) > before


class _Shown(_Chain):
    """Jobs that are shown, and not submitted: what waits for one calls it by its name and number."""

    def known(self, name: str) -> dict[int, str]:
        """Return nothing: what goes on is shown too."""
        return {}

    def numbered(self, group: str, goes_on: bool) -> dict[str, int]:
        """Return the numbers that new jobs have; none is noted."""
        return {name: number for number, name in enumerate(_numbered(self.flow, self.folder, group, goes_on))}

    def submit(self, job: ChainedJob) -> dict[int, str]:
        """Show a job."""
        self.say(self.place.chained_text(job if self.place.holds_order else replace(job, after=())))
        return {number: f"{job.name}-{number}" for number in job.commands}


def queued_jobs(flow: Flow, folder: Path, place: TakesChains) -> dict[str, str]:
    """Return how the queue calls the job of each step that has one that waits or runs.

    Raises:
        UserError: it does not answer.
    """
    found: dict[str, str] = {}
    for group in dict.fromkeys(step.group for step in flow.steps.values()):
        with _answering():
            jobs = place.chained(_job_name(folder, group))
        names = _numbered(flow, folder, group, goes_on=bool(jobs))
        found.update({names[number]: job for number, job in jobs.items() if number < len(names)})
    return found


def stop_queued(flow: Flow, folder: Path, place: TakesChains, say: Say) -> list[str]:
    """End the jobs of a flow, those that wait for others first; returns the steps that had one.

    Raises:
        UserError: the queue does not answer.
    """
    jobs = queued_jobs(flow, folder, place)
    names = [*flow.sorter().static_order()]
    stopped = [name for name in jobs if name not in flow.steps]  # the file has them no more
    stopped += [name for name in reversed(names) if name in jobs]
    for name in stopped:
        _stop(place, name, jobs[name], say)
    return stopped


def chained_texts(flow: Flow, folder: Path, place: TakesChains) -> list[str]:
    """Return exactly what would be submitted of a flow, a text a job or array."""
    texts: list[str] = []
    _submit(_Shown(flow, folder, place, texts.append))
    return [text for text in texts if "\n" in text]


def _submit(chain: _Chain) -> None:
    """Submit a job for each step that is not done, of a matrix those that need and wait for the same as one array."""
    flow, jobs, sorter = chain.flow, chain.jobs, chain.flow.sorter()
    sorter.prepare()
    while sorter.is_active():
        order = _by_priority(flow)
        ready = sorted(sorter.get_ready(), key=order.index)
        alike: dict[tuple[str, StepResources, tuple[str, ...]], list[str]] = {}
        for name in ready:
            step = flow.steps[name]
            waits_for = tuple(jobs[before] for before in step.before if before in jobs)
            chain.take(name)
            if waits_for or not chain.needs_no_job(name):
                alike.setdefault((step.group, step.resources, waits_for), []).append(name)
        for (_, _, waits_for), names in alike.items():
            _submit_alike(chain, _Alike(names, waits_for))
        sorter.done(*ready)


@dataclass(frozen=True)
class _Alike:
    """Steps of one entry of the file that need the same and wait for the same jobs."""

    steps: Sequence[str]
    after: Sequence[str]


def _submit_alike(chain: _Chain, alike: _Alike) -> None:
    """Submit those steps whose jobs the queue does not know.

    Raises:
        UserError: a job of an earlier command runs with what has changed since.
    """
    folder, jobs = chain.folder, chain.jobs
    step = chain.flow.steps[alike.steps[0]]
    known = chain.known(_job_name(folder, step.group))
    numbers = chain.numbered(step.group, goes_on=bool(known))
    for name in alike.steps:
        if numbers[name] in known:
            _check_current(chain, name, known[numbers[name]], bool(alike.after))
    missing = {numbers[name]: name for name in alike.steps if numbers[name] not in known}
    given = chain.submit(_job(folder, step, missing, alike.after)) if missing else {}
    for name in alike.steps:
        number = numbers[name]
        jobs[name] = given[number] if number in given else known[number]
        chain.say(f"{name}: job {jobs[name]}{'' if number in given else ' goes on'}")


def _check_current(chain: _Chain, name: str, job: str, waits: bool) -> None:
    """Refuse to take a job that runs for one of the step as it is now; one that waits will read the new description.

    Args:
        waits: what the step reads is made anew.

    Raises:
        UserError: it began with other settings, inputs, code or versions.
    """
    line = chain.handed[name]
    with _answering():
        begun = isinstance(line, FlowStepStart) and chain.place.state(job).phase is not JobPhase.WAITS
    if not isinstance(line, FlowStepStart) or not begun:
        return
    # its data is left out: the step itself may write to what it names
    changed = ["inputs"] if waits else [part for part in chain.now(name).changed(line.parts) if part != "data"]
    if changed:
        raise UserError(
            f"{name} runs as job {job}, and its {' and '.join(changed)} changed since it began: end it first: "
            f"echelon flow stop {chain.folder}"
        )


def _numbers_file(folder: Path, group: str) -> Path:
    return folder / JOBS_FOLDER / f"{_job_name(folder, group)}.json"


def _numbered(flow: Flow, folder: Path, group: str, goes_on: bool) -> list[str]:
    """Return the steps of an entry of the file in the order of their jobs' numbers.

    Args:
        goes_on: jobs of the entry do: those that they were given for come first, as they did.
    """
    file = _numbers_file(folder, group)
    before: list[str] = json.loads(file.read_bytes()) if goes_on and file.exists() else []
    return list(dict.fromkeys([*before, *(name for name, step in flow.steps.items() if step.group == group)]))


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


def _follow(chain: _Chain) -> None:
    """Wait until no job waits or runs, saying how they fare; where the queue holds no order, submit what can begin.

    Raises:
        UserError: the queue does not answer for ten minutes, or refuses a job.
    """
    followed: defaultdict[str, _Followed] = defaultdict(_Followed)
    heard_s = time.monotonic()
    while True:
        while chain.submit_ready():
            pass
        chain.going = {name: job for name, job in chain.jobs.items() if not followed[name].is_over}
        if not chain.going:
            return
        try:
            states = _states(chain.place, [*chain.going.values()])
        except PlaceSilent as silent:
            if time.monotonic() - heard_s > _GONE_S:
                raise UserError(f"{silent}; the jobs may go on: the same command finds them again") from None
            states = {}
        heard_s = time.monotonic() if states else heard_s
        for name, job in chain.going.items():
            if job in states:
                _look(chain, name, followed[name], states[job])
        chain.show()
        time.sleep(POLL_S)


def _states(place: TakesChains, jobs: Sequence[str]) -> dict[str, JobState]:
    """Return where jobs are, by one question where the place takes one for all.

    Raises:
        PlaceSilent: it does not answer now.
    """
    return place.states(jobs) if isinstance(place, ArrayCluster) else {job: place.state(job) for job in jobs}


def _look(chain: _Chain, name: str, known: _Followed, state: JobState) -> None:
    """Take a new state of a step's job, and say what is new."""
    line = chain.line(name)
    known.look(state, isinstance(line, FlowStepEnd) and line.status != STOPPED)
    if known.is_over and chain.ended_well(name):
        chain.done.add(name)
    word = f"ended: {chain.result(name)}" if known.is_over else state.text
    if word != known.said:
        chain.say(f"{name}: {word}")
    known.said = word


def _stop(place: TakesChains, name: str, job: str, say: Say) -> None:
    try:
        if place.state(job).phase is not JobPhase.ENDED:
            place.stop(job)
    except (PlaceSilent, UserError) as error:
        say(f"{name}: job {job} may go on: {error}")
