"""What lies in a study's folder, and how each run ended."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from echelon.core.errors import UserError
from echelon.records.file import newest, read_records
from echelon.records.going import LOCK_FILE
from echelon.records.kinds import End, RunEnd, Start
from echelon.study.base import COMPLETED, PlannedRun
from echelon.study.settings import arguments_of, short_name

RUNS_FOLDER = "runs"
OUTPUT_FOLDER = "output"
WARM_UP_FOLDER = "warm-up"
SETTLED = ("refused", "failed")  # with completed, what is not run again


def run_folder(study: Path, name: str) -> Path:
    """Return a run's folder."""
    return study / RUNS_FOLDER / name


def command_of(run: PlannedRun, folder: Path) -> str:
    """Return the command that does one run, as one would type it."""
    return shlex.join(["echelon", "train", *arguments_of(run.settings), "--run", str(folder)])


def read_ends(study: Path) -> dict[str, RunEnd]:
    """Return how each run ended last, as the study recorded it; a torn last line is left out."""
    return {end.run: end for end in read_records(study, RunEnd)}


def is_over(study: Path, run: PlannedRun, ends: Mapping[str, RunEnd], retry: bool = False) -> bool:
    """Return whether a run is not to be started again: it completed, or was refused, or failed.

    Args:
        retry: refused and failed runs are.

    Raises:
        UserError: it completed with other settings than the study has now.
    """
    end = ends.get(run.name)
    changed = _changed(run, end.settings) if end is not None and end.settings else ""
    if end is not None and end.status in SETTLED and not changed and not retry:
        return True
    if not completed(run_folder(study, run.name)):
        return False
    if changed:
        raise UserError(f"{study}: {run.name} completed with {changed}: put that back, or choose another --run")
    return True


def _changed(run: PlannedRun, before: Mapping[str, str]) -> str:
    """Return the first setting that a run was given otherwise before, in words; where it ran may change."""
    for name in sorted({*run.settings, *before} - {"launch.on"}):
        then, now = before.get(name, "its default"), run.settings.get(name, "its default")
        if then != now:
            return f"{short_name(name)} {then}, which is {now} now"
    return ""


def completed(folder: Path) -> bool:
    """Return whether a run's own record says that it came to its end."""
    last = next(newest(folder, Start, End), None)
    return isinstance(last, End) and last.status == COMPLETED


def discard(folder: Path) -> None:
    """Remove a run that was cut short: times before and after a pause are not those of one run."""
    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def locked(study: Path) -> Iterator[None]:
    """Hold the lock of a study's folder while it goes.

    Raises:
        UserError: it goes on already, or cannot be written.
    """
    try:
        fd = os.open(study / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"--run {study} cannot be written: {error.strerror}") from None
    with os.fdopen(fd, "r+"):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"a study goes on in {study}: wait for it, or choose another --run") from None
        yield
