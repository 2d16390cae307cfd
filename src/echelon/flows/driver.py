"""Do what is missing of a flow on this machine: steps in processes of their own, bounded by cores, memory and GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from echelon.config.build import plain_word, setting_names
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.core.stop import Stopped, stop_on_signals
from echelon.core.units import format_seconds
from echelon.flows.base import Flow, FlowStep, StepResources, step_folder
from echelon.flows.child import STEP_VARIABLE, STOP_S, hashes_of, is_done
from echelon.flows.fingerprint import fingerprint
from echelon.flows.page import write_page
from echelon.flows.state import last_line, only_driver
from echelon.launch.plan import usable_cores, visible_gpus
from echelon.records.file import newest
from echelon.records.kinds import FlowStepEnd, FlowStepStart

POLL_S = 0.1
PAGE_S = 2.0
_KILL_S = 30.0
_OUTPUT_FILE = "driver.txt"
_TRAINS = ("train", "finetune", "compare")

Say = Callable[[str], None]


@dataclass(frozen=True)
class FlowOutcome:
    """How a flow ended.

    Attributes:
        status: `completed`; `partial`: a step failed; `stopped`.
        ran, kept, failed, blocked: names of steps: done now, done before, failed, and not begun because of these.
        signum: the signal that stopped it; 0: none.
    """

    status: str
    folder: Path
    ran: Sequence[str] = ()
    kept: Sequence[str] = ()
    failed: Sequence[str] = ()
    blocked: Sequence[str] = ()
    signum: int = 0


def machine_resources() -> StepResources:
    """Return what this machine has for steps."""
    return StepResources(usable_cores(), float(psutil.virtual_memory().total), visible_gpus())


def check_resources(flow: Flow, there: StepResources) -> None:
    """Refuse a step that asks for more than there is.

    Raises:
        UserError: names the step and its line.
    """
    for step in flow.steps.values():
        if lacking := step.resources.lacking(there):
            raise UserError(f"{step.where}: step {step.name} needs {lacking}")


def run_flow(flow: Flow, folder: Path, there: StepResources, say: Say) -> FlowOutcome:
    """Do what is missing of a flow; what fails stops what needs it and nothing else.

    Args:
        there: what all steps that go at a time may need together.
        say: is told what happens, a line at a time.

    Raises:
        UserError: another driver goes on in the folder, or a step needs more than there is.
    """
    check_resources(flow, there)
    for group in _without_gpus(flow) if there.gpus else ():
        say(f"{group}: runs on the CPU: give it `resources: {{gpus: 1}}` for a GPU")
    with only_driver(folder), stop_on_signals(raises=True):
        _end_leftovers(folder)
        driver = _Driver(flow, folder, there, say)
        try:
            driver.run()
        except Stopped as stop:
            driver.stop()
            return driver.outcome("stopped", stop.signum)
        finally:
            driver.stop()
            write_page(flow, folder)
        return driver.outcome("partial" if driver.failed else "completed")


def _without_gpus(flow: Flow) -> list[str]:
    """Return the entries of the file that train here, and ask neither for a GPU nor for a device."""
    steps = [step for step in flow.steps.values() if step.kind in _TRAINS and not step.resources.gpus]
    asked = {step.name: {setting_names().get(plain_word(name)) for name, _ in step.settings} for step in steps}
    return list(dict.fromkeys(step.group for step in steps if not asked[step.name] & {"launch.on", "training.device"}))


def _end_leftovers(folder: Path) -> None:
    """End processes of steps that a killed driver left; they end by themselves, only not at once.

    Raises:
        UserError: one does not end.
    """
    prefix = f"{folder.resolve()}{os.sep}"
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(STEP_VARIABLE, "").startswith(prefix):
                process.kill()
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    _, alive = psutil.wait_procs(found, timeout=_KILL_S)
    if alive:
        raise UserError(f"process {alive[0].pid} of a step of before does not end: end it, then start the flow again")


@dataclass
class _Going:
    """A step that goes on."""

    step: FlowStep
    process: subprocess.Popen[bytes]
    began: float
    gpus: Sequence[str]


@dataclass
class _Driver:
    """Starts steps whose turn it is and looks for those that ended.

    Of steps that could start the one of the highest priority does, of equal ones the first in the file; one that does
    not fit yet holds back those after it, so that a large one comes to its turn.
    """

    flow: Flow
    folder: Path
    there: StepResources
    say: Say
    ran: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    going: dict[str, _Going] = field(default_factory=dict)
    _tries: dict[str, int] = field(default_factory=dict)
    _ready: list[FlowStep] = field(default_factory=list)
    _looked_at: set[str] = field(default_factory=set)
    _page_t: float = 0.0

    def run(self) -> None:
        """Do all that can be done."""
        order = {name: i for i, name in enumerate(self.flow.steps)}
        sorter = self.flow.sorter()
        sorter.prepare()
        while True:
            self._ready += [self.flow.steps[name] for name in sorter.get_ready()]
            self._ready.sort(key=lambda step: (-step.priority, order[step.name]))
            done = self._start_ready()
            done += self._ended()
            for name in done:
                sorter.done(name)
            if done:
                continue
            if not self.going and not self._ready:
                return
            self._show()
            time.sleep(POLL_S)

    def _start_ready(self) -> list[str]:
        """Start what fits; returns the steps that were done already."""
        kept = []
        while self._ready:
            step = self._ready[0]
            if step.name not in self._looked_at and self._is_done(step):
                kept.append(step.name)
                self.kept.append(step.name)
                self.say(f"{step.name}: kept")
            elif step.resources.lacking(self._free()):
                break
            else:
                self._start(step)
            self._ready.pop(0)
        return kept

    def _is_done(self, step: FlowStep) -> bool:
        """Whether a step need not run; looked at once: to hash its data and outputs may take long."""
        self._looked_at.add(step.name)
        now = fingerprint(self.flow, step, lambda name: hashes_of(self.folder, name))
        if is_done(self.flow, self.folder, step, now):
            return True
        line = last_line(step_folder(self.folder, step.name))
        if line is not None:
            self.say(f"{step.name}: {_why_again(line, now.digest, self._parts_changed(step, now.changed))}")
        return False

    def _parts_changed(self, step: FlowStep, changed: Callable[[Mapping[str, str]], list[str]]) -> list[str]:
        before = next(iter(newest(step_folder(self.folder, step.name), FlowStepStart)), None)
        return changed(before.parts) if before is not None else []

    def _free(self) -> StepResources:
        taken = [going.step.resources for going in self.going.values()]
        return replace(
            self.there,
            cores=self.there.cores - sum(each.cores for each in taken),
            memory_bytes=self.there.memory_bytes - sum(each.memory_bytes for each in taken),
            gpus=self.there.gpus - sum(each.gpus for each in taken),
        )

    def _start(self, step: FlowStep) -> None:
        self._tries[step.name] = self._tries.get(step.name, 0) + 1
        where = step_folder(self.folder, step.name)
        where.mkdir(parents=True, exist_ok=True)
        gpus = self._free_devices()[: step.resources.gpus]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if self.there.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        file = self.folder / _OUTPUT_FILE
        entry = [sys.executable, "-m", "echelon.flows.child"]
        command = [*entry, str(os.getpid()), str(self.folder.resolve()), step.name]
        with file.open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        self.going[step.name] = _Going(step, process, time.monotonic(), gpus)
        self.say(f"{step.name}: started")

    def _free_devices(self) -> list[str]:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = given.split(",") if given else [str(i) for i in range(self.there.gpus)]
        taken = {gpu for going in self.going.values() for gpu in going.gpus}
        return [gpu for gpu in devices if gpu not in taken]

    def _ended(self) -> list[str]:
        """Take the steps that ended; returns those that are done."""
        done = []
        for name, going in list(self.going.items()):
            code = going.process.poll()
            if code is None and time.monotonic() - going.began > going.step.resources.time_s + 2 * STOP_S:
                _kill(going.process)
                code = going.process.wait(_KILL_S)
            if code is None:
                continue
            del self.going[name]
            took = format_seconds(time.monotonic() - going.began)
            if code == 0:
                done.append(name)
                self.ran.append(name)
                self.say(f"{name}: done in {took}")
            elif code != USER_ERROR_EXIT_CODE and self._tries[name] <= going.step.retry:
                self.say(f"{name}: failed ({self._why(name)}); tried again")
                self._ready.append(going.step)
            else:
                self.failed.append(name)
                self.say(f"{name}: failed after {took}: {self._why(name)}")
        return done

    def _why(self, name: str) -> str:
        line = last_line(step_folder(self.folder, name))
        if isinstance(line, FlowStepEnd) and line.message:
            return line.message
        return f"its process was ended; see {self.folder / _OUTPUT_FILE}"

    def _show(self) -> None:
        """Write the page again when some time has passed."""
        if time.monotonic() - self._page_t > PAGE_S:
            write_page(self.flow, self.folder)
            self._page_t = time.monotonic()

    def stop(self) -> None:
        """End all that goes on: asked first, for a run that is asked saves a checkpoint."""
        for going in self.going.values():
            if going.process.poll() is None:
                going.process.terminate()
        until = time.monotonic() + 2 * STOP_S + _KILL_S
        for going in self.going.values():
            try:
                going.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(going.process)
                going.process.wait(_KILL_S)
        self.going.clear()

    def outcome(self, status: str, signum: int = 0) -> FlowOutcome:
        """Return how it ended."""
        known = {*self.ran, *self.kept, *self.failed}
        blocked = [name for name in self.flow.steps if name not in known] if status == "partial" else []
        return FlowOutcome(status, self.folder, self.ran, self.kept, self.failed, blocked, signum)


def _why_again(line: FlowStepStart | FlowStepEnd, digest: str, changed: Sequence[str]) -> str:
    if line.fingerprint != digest:
        return f"again, for its {' and '.join(changed) or 'fingerprint'} changed"
    if isinstance(line, FlowStepEnd) and line.status == "completed":
        return "again, for its outputs are damaged"
    return "goes on" if isinstance(line, FlowStepStart) or line.status == "stopped" else "again, for it failed"


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
