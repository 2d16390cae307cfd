"""The command of one run of a study: it is started, looked at, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from echelon.records.segments import RECORD_FILE
from echelon.study.base import PlannedRun
from echelon.study.folder import OUTPUT_FOLDER
from echelon.study.settings import arguments_of

POLL_S = 1.0
SILENCE_S = 1800.0
END_S = 90.0  # beyond what the run's place gives, for a command that does not end by itself


@dataclass(eq=False)
class RunCommand:
    """`echelon train ...` of a run, in a process and session of its own.

    Attributes:
        folder: the run's.
        silent: it has recorded nothing for half an hour, and is given up; a queue may hold one back for as long as it
            likes, and has time limits of its own.
    """

    run: PlannedRun
    folder: Path
    process: subprocess.Popen[bytes]
    errors: Path
    silent: bool = False
    began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._heard_s, self._size = time.monotonic(), -1
        self._queued = self.run.place.cluster() is not None

    @classmethod
    def start(cls, path: Path, run: PlannedRun, folder: Path) -> RunCommand:
        """Start it; what it prints goes to files of the study's folder `path`."""
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
        return cls(run, folder, process, stderr)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or is to be given up."""
        if self.process.poll() is not None:
            return True
        record = self.folder / RECORD_FILE
        size = record.stat().st_size if record.exists() else 0
        if size != self._size:
            self._heard_s, self._size = time.monotonic(), size
        self.silent = not self._queued and time.monotonic() - self._heard_s > SILENCE_S
        return self.silent

    def wait(self) -> None:
        """Wait for its end, a second at most."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(POLL_S)

    def outcome(self) -> tuple[int, str]:
        """Return the exit code of a command that has ended, and its last line on stderr; given up, it has failed."""
        if self.silent:
            return 1, f"it recorded nothing for {SILENCE_S / 60:.0f} minutes and was ended"
        lines = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return self.process.returncode, lines[-1].removeprefix("echelon: ") if lines else ""


def end_all(commands: Iterable[RunCommand]) -> None:
    """End commands that still run: all are asked first, for a run that is asked writes down where it is."""
    going = [each for each in commands if each.process.poll() is None]
    for each in going:
        each.process.terminate()
    began_s = time.monotonic()
    for each in going:
        within_s = each.run.place.longest_stop_s() + END_S
        try:
            each.process.wait(max(0.0, began_s + within_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait(END_S)
