"""Run what is missing of a study: one ordinary run after the other, each a command in a process of its own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from echelon.config import RunConfig, build
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.records.file import RECORD_FILE, Recorder, read_records
from echelon.study.base import PlannedRun, Study
from echelon.study.folder import (
    ENDED,
    OUTPUT_FOLDER,
    WARM_UP_FOLDER,
    RunEnd,
    discard,
    is_over,
    locked,
    read_ends,
    run_folder,
)
from echelon.study.live import name_of
from echelon.study.plan import planned_runs
from echelon.study.rows import COMPLETED
from echelon.study.settings import arguments_of

POLL_S = 1.0
SILENCE_S = 1800.0
STOP_S = 90.0
WARM_UP_STEPS = "20"


class StudyStopped(Exception):
    """The study was asked to stop by a signal; the run that went on has ended."""


class Watch(Protocol):
    """Who is told how a study goes."""

    def began(self, runs: Sequence[PlannedRun], ends: Mapping[str, RunEnd], over: frozenset[str]) -> None:
        """All runs, how they ended as far as that is known, and the names of those that are not started again."""

    def started(self, run: PlannedRun, folder: Path) -> None:
        """A run starts in its folder."""

    def goes_on(self) -> None:
        """About a second has passed."""

    def ended(self, run: PlannedRun, end: RunEnd) -> None:
        """A run ended."""


class _Asked(BaseException):
    """A signal came: not an Exception, so that nothing on the way swallows it."""


def run_study(path: Path, study: Study, watch: Watch, retry: bool = False) -> None:
    """Start the runs that are missing, in their order; what is refused or fails stops no other.

    Args:
        retry: start refused and failed runs again, too.

    Raises:
        StudyStopped: SIGINT or SIGTERM came.
        UserError: the study goes on already in another process.
    """
    with locked(path):
        runs = planned_runs(study)
        ends = read_ends(path)
        over = frozenset(run.name for run in runs if is_over(path, run, {} if retry else ends))
        watch.began(runs, ends, over)
        record = Recorder(path)
        try:
            with _signals_raise():
                missing = [run for run in runs if run.name not in over]
                _warm_up(path, missing, watch)
                for run in missing:
                    watch.started(run, run_folder(path, run.name))
                    end = _run(path, run, watch)
                    record.write(ENDED, run=run.name, status=end.status, message=end.message, seconds=end.seconds)
                    watch.ended(run, end)
        except _Asked:
            raise StudyStopped from None
        finally:
            record.close()


def command_of(run: PlannedRun, folder: Path) -> str:
    """Return the command that does one run, as one would type it."""
    return shlex.join(["echelon", "train", *arguments_of(run.settings), "--run", str(folder)])


def _warm_up(path: Path, missing: Sequence[PlannedRun], watch: Watch) -> None:
    """Do the first steps of a run and throw them away: the first to come finds cold caches and a cool processor."""
    if not missing:
        return
    folder = path / WARM_UP_FOLDER
    discard(folder)
    first = missing[0]
    settings = {**first.settings, "training.max_steps": WARM_UP_STEPS}
    _command(path, PlannedRun(WARM_UP_FOLDER, first.candidate, first.terms, first.seed, settings), folder, watch)
    discard(folder)


def _run(path: Path, run: PlannedRun, watch: Watch) -> RunEnd:
    folder = run_folder(path, run.name)
    discard(folder)
    began = time.monotonic()
    code, words = _command(path, run, folder, watch)
    return _end(folder, code, words, time.monotonic() - began)


def _command(path: Path, run: PlannedRun, folder: Path, watch: Watch) -> tuple[int, str]:
    """Run one command to its end; returns its exit code and its last words on stderr."""
    output = path / OUTPUT_FOLDER
    output.mkdir(exist_ok=True)
    folder.parent.mkdir(exist_ok=True)
    said, failed = output / f"{run.name}.txt", output / f"{run.name}.err.txt"
    arguments = ["train", *arguments_of(run.settings), "--run", str(folder)]
    with said.open("wb") as out, failed.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "echelon.study.entry", *arguments],
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip
        try:
            silent = _wait(process, folder, watch)
        finally:
            _stop(process)
    lines = failed.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    words = lines[-1].removeprefix("echelon: ") if lines else ""
    if silent:
        words = f"it recorded nothing for {SILENCE_S / 60:.0f} minutes and was ended"
    return process.returncode, words


def _wait(process: subprocess.Popen[bytes], folder: Path, watch: Watch) -> bool:
    """Wait for a run's end; True when it recorded nothing for so long that it is given up."""
    heard, size = time.monotonic(), -1
    while True:
        try:
            process.wait(POLL_S)
            return False
        except subprocess.TimeoutExpired:
            watch.goes_on()
        record = folder / RECORD_FILE
        now = record.stat().st_size if record.exists() else 0
        if now != size:
            heard, size = time.monotonic(), now
        if time.monotonic() - heard > SILENCE_S:
            return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End what still runs: asked first, for a run that is asked writes down where it is."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_S)


def _end(folder: Path, code: int, words: str, seconds: float) -> RunEnd:
    """Tell how a run ended from its record, and where that is silent from its exit code."""
    ends = [record for record in read_records(folder) if record["kind"] == "end"]
    status, message = (str(ends[-1].get("status")), str(ends[-1].get("message") or "")) if ends else ("", "")
    if code == 0 and status == COMPLETED:
        return RunEnd(COMPLETED, "", seconds)
    if code == USER_ERROR_EXIT_CODE:
        return RunEnd("refused", words or message, seconds)
    if code == 0:
        return RunEnd("stopped", "a signal stopped it", seconds)
    how = f"its command ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    return RunEnd("failed", message or words or how, seconds)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the study in order; to be called in the main thread."""

    def ask(signum: int, frame: FrameType | None) -> None:
        for each in former:
            signal.signal(each, signal.SIG_IGN)  # once is enough: the run that goes on is being ended
        raise _Asked

    former = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    for signum in former:
        signal.signal(signum, ask)
    try:
        yield
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


def check_settings(study: Study, check: Callable[[RunConfig], None]) -> dict[str, str]:
    """Return why runs cannot start, by candidate (and terms), as far as that is known before anything starts.

    Args:
        check: refuses what this machine, or a combination of choices, cannot do.

    Raises:
        UserError: no run can start.
    """
    refused: dict[str, str] = {}
    runs = {name_of(run): run for run in planned_runs(study)}  # seeds make no difference
    for name, run in runs.items():
        try:
            check(build(None, run.settings).config)
        except UserError as error:
            refused[name] = str(error)
    if len(refused) == len(runs):
        raise UserError(f"no run of this study can start: {next(iter(refused.values()))}")
    return refused
