"""Run what is missing of a study: one ordinary run after the other, each a command in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from echelon.config import RunConfig, build
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.core.stop import Stopped, signal_name, stop_on_signals
from echelon.launch.places import stop_seconds
from echelon.records.file import Recorder, newest
from echelon.records.kinds import CommandEnd, End, RunEnd, StudyStart
from echelon.records.segments import RECORD_FILE
from echelon.reporting.report import write_shared_script
from echelon.study.base import COMPLETED, PlannedRun, Study
from echelon.study.collect import collect
from echelon.study.file import write_choices
from echelon.study.folder import (
    OUTPUT_FOLDER,
    WARM_UP_FOLDER,
    discard,
    is_over,
    locked,
    read_ends,
    run_folder,
)
from echelon.study.grid import planned_runs
from echelon.study.settings import arguments_of
from echelon.study.stages import best_rates, epochs_in_time, rate_runs, time_runs

POLL_S = 1.0
SILENCE_S = 1800.0
END_S = 90.0  # beyond what the run's place gives, for a command that does not end by itself
WARM_UP_STEPS = "20"
_SIGNALLED = 128  # exit codes above it


class StudyStopped(Exception):
    """The study was asked to stop by a signal; the run that went on has ended."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal_name(signum)}")
        self.signum = signum


class StudyObserver(Protocol):
    """Receives the events of a study."""

    def began(self, runs: Sequence[PlannedRun], ends: Mapping[str, RunEnd], over: frozenset[str]) -> None:
        """Receive all runs, how they ended as far as that is known, and the names of those that are not run again."""

    def started(self, run: PlannedRun, folder: Path) -> None:
        """Receive the run that starts, and its folder."""

    def goes_on(self) -> None:
        """Redraw: about a second has passed."""

    def ended(self, run: PlannedRun, end: RunEnd) -> None:
        """Receive how a run ended."""


def run_study(
    path: Path, study: Study, observer: StudyObserver, retry: bool = False, given_t: float | None = None
) -> None:
    """Start the runs that are missing, in their order; what is refused or fails stops no other.

    Args:
        retry: start refused and failed runs again, too.
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
                for runs in _stages(path, study):
                    _run_missing(path, runs, observer, record, retry)
        except Stopped as stop:
            raise StudyStopped(stop.signum) from None
        finally:
            record.close()


def _stages(path: Path, study: Study) -> Iterator[list[PlannedRun]]:
    """Yield the runs of each stage; what the next one does is chosen, and written down, once these are over."""
    if study.tune_lr:
        yield rate_runs(study)
        rates = best_rates(study, collect(path, study)[0])
        study = write_choices(path, replace(study, choices=replace(study.choices, rates=rates)))
    yield planned_runs(study)
    if study.equal_time:
        seconds, epochs = epochs_in_time(study, collect(path, study)[0])
        study = write_choices(path, replace(study, choices=replace(study.choices, seconds=seconds, epochs=epochs)))
        yield time_runs(study)


def _run_missing(
    path: Path, runs: Sequence[PlannedRun], observer: StudyObserver, record: Recorder, retry: bool
) -> None:
    ends = read_ends(path)
    over = frozenset(run.name for run in runs if is_over(path, run, {} if retry else ends))
    observer.began(runs, ends, over)
    missing = [run for run in runs if run.name not in over]
    _warm_up(path, missing, observer)
    for run in missing:
        observer.started(run, run_folder(path, run.name))
        end = _run(path, run, observer)
        record.write(end)
        observer.ended(run, end)


def _warm_up(path: Path, missing: Sequence[PlannedRun], observer: StudyObserver) -> None:
    """Do the first steps of a run and throw them away: the first to come finds cold caches and a cool processor."""
    if not missing:
        return
    folder = path / WARM_UP_FOLDER
    discard(folder)
    first = missing[0]
    settings = {**first.settings, "training.max_steps": WARM_UP_STEPS}
    _command(path, PlannedRun(WARM_UP_FOLDER, first.candidate, first.terms, first.seed, settings), folder, observer)
    discard(folder)


def _run(path: Path, run: PlannedRun, observer: StudyObserver) -> RunEnd:
    folder = run_folder(path, run.name)
    discard(folder)
    began = time.monotonic()
    code, error = _command(path, run, folder, observer)
    waited_s = time.monotonic() - began
    return RunEnd(run.name, *_outcome(folder, code, error), command_seconds(folder, waited_s), waited_s)


def command_seconds(folder: Path, waited_s: float) -> float:
    """Return how long a run's command took, in seconds, as its own record and its report say.

    Args:
        waited_s: seconds from before the process was made until it was seen to have ended; returned for a run that
            did not come to record its command's end.
    """
    end = next(newest(folder, CommandEnd), None)
    return end.seconds if end else waited_s


def _command(path: Path, run: PlannedRun, folder: Path, observer: StudyObserver) -> tuple[int, str]:
    """Run one command to its end; returns its exit code and its last line on stderr."""
    output = path / OUTPUT_FOLDER
    output.mkdir(exist_ok=True)
    folder.parent.mkdir(exist_ok=True)
    stdout, stderr = output / f"{run.name}.txt", output / f"{run.name}.err.txt"
    arguments = ["train", *arguments_of(run.settings), "--run", str(folder)]
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "echelon.study.entry", str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip
        try:
            silent = _wait(process, folder, observer)
        finally:
            _stop(process, stop_seconds(run.settings.get("launch.on", "local")) + END_S)
    lines = stderr.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if silent:
        return process.returncode, f"it recorded nothing for {SILENCE_S / 60:.0f} minutes and was ended"
    return process.returncode, lines[-1].removeprefix("echelon: ") if lines else ""


def _wait(process: subprocess.Popen[bytes], folder: Path, observer: StudyObserver) -> bool:
    """Wait for a run's end; True when it recorded nothing for so long that it is given up."""
    heard, size = time.monotonic(), -1
    while True:
        try:
            process.wait(POLL_S)
            return False
        except subprocess.TimeoutExpired:
            observer.goes_on()
        record = folder / RECORD_FILE
        now = record.stat().st_size if record.exists() else 0
        if now != size:
            heard, size = time.monotonic(), now
        if time.monotonic() - heard > SILENCE_S:
            return True


def _stop(process: subprocess.Popen[bytes], within_s: float) -> None:
    """End what still runs: asked first, for a run that is asked writes down where it is."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)


def _outcome(folder: Path, code: int, error: str) -> tuple[str, str]:
    """Tell how a run ended, and why, from its record, and where that is silent from its exit code."""
    end = next(newest(folder, End), None)
    status, message = (end.status, end.message) if end else ("", "")
    if code == 0 and status == COMPLETED:
        return COMPLETED, ""
    if code == USER_ERROR_EXIT_CODE:
        return "refused", error or message
    if status == "stopped" and code > _SIGNALLED:
        return "stopped", "a signal stopped it"
    how = f"its command ended with {signal_name(-code) if code < 0 else f'exit code {code}'}"
    return "failed", message or error or how


def check_settings(study: Study, check: Callable[[RunConfig], object]) -> dict[str, str]:
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
            check(build(None, run.settings).config)
        except UserError as error:
            refused[name] = str(error)
    if len(refused) == len(runs):
        raise UserError(f"no run of this study can start: {next(iter(refused.values()))}")
    return refused
