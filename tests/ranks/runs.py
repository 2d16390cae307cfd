"""Runs of the command line as a user starts them: subprocesses with a hard deadline, faults by signal, nothing left.

    with Runs(tmp_path) as runs:
        run = runs.start("train", "digits", "--workers", "2", folder="first")
        run.wait_for_step(10)
        os.kill(run.pids()[1], signal.SIGKILL)
        assert run.end() == 0

Every process of a run inherits a mark in its environment, so that what a run leaves behind is found whatever happened
to its parents. Waiting for a run's record is a poll with a deadline, never a guess of how long something takes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_S = 300.0  # for a busy machine: an idle one needs a tenth
POLL_S = 0.02
LEAVE_S = 30.0
MARK = "ECHELON_TEST_MARK"
SMALL = ("--threads", "1", "--device", "cpu")
Record = dict[str, Any]


class TooLate(AssertionError):
    """Something awaited did not happen before the deadline; the message ends with what the run printed."""


@dataclass
class Run:
    """One started command."""

    process: subprocess.Popen[bytes]
    folder: Path
    output: Path
    mark: str

    def records(self, kind: str = "", name: str = "") -> list[Record]:
        """Return the records so far, of one kind, and for events of one name."""
        found = read_lines(self.folder)
        return [r for r in found if (not kind or r["kind"] == kind) and (not name or r.get("name") == name)]

    def events(self, name: str) -> list[Record]:
        """Return the events of one name."""
        return self.records("event", name)

    def wait_for(self, ready: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
        """Wait until `ready()` is true and return it.

        Raises:
            TooLate: it was not in time, or the command ended before.
        """
        end = time.monotonic() + deadline_s
        while True:
            ended = self.process.poll() is not None
            if value := ready():
                return value
            if ended or time.monotonic() > end:
                raise TooLate(f"{what}: {'the run ended before' if ended else 'not in time'}\n{self.text()}")
            time.sleep(POLL_S)

    def wait_for_step(self, step: int, after_t: float = 0.0) -> Record:
        """Wait for the first window of steps that ends at `step` or later and was written after a moment."""

        def found() -> Record | None:
            return next((r for r in self.records("steps") if r["step"] >= step and r["t"] > after_t), None)

        record: Record = self.wait_for(found, f"step {step}")
        return record

    def pids(self) -> list[int]:
        """Return the process ids of the ranks, from the newest start."""
        pids: list[int] = self.records("start")[-1]["pids"]
        return pids

    def end(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the command's end; returns its exit code.

        Raises:
            TooLate: it did not end.
        """
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise TooLate(f"the command did not end\n{self.text()}") from None

    def text(self) -> str:
        """Return what the command printed to both outputs."""
        return self.output.read_text(errors="replace") + self.errors()

    def errors(self) -> str:
        """Return what the command printed to stderr."""
        return self.output.with_suffix(".err").read_text(errors="replace")

    def summary(self) -> dict[str, Any]:
        """Return `summary.json`."""
        numbers: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return numbers

    def losses(self) -> dict[int, float]:
        """Return the loss of every step, from 1; a step that was trained again counts as it was the last time."""
        return losses_of(self.folder)

    def check_stopped(self, signum: int) -> int:
        """Return the last step of a run that a signal asks to stop, once it has ended.

        Raises:
            AssertionError: it left no checkpoint of its last step, no end, no report, processes, or another exit code.
        """
        code = self.end()
        assert code == 128 + signum, f"exit code {code}: {self.text()[-2000:]}"
        assert self.left_behind() == [], "processes were left"
        last, saved = self.records("steps")[-1]["step"], self.records("checkpoint")[-1]
        assert saved["step"] == last, f"the last step was {last}, the checkpoint is of step {saved['step']}"
        evaluated = any(e["step"] == last for e in self.records("evaluation"))  # and was saved for that
        assert saved["reason"] == "stop" or evaluated, f"the last checkpoint is of {saved['reason']}"
        assert [e["status"] for e in self.records("end")] == ["stopped"], self.records("end")
        assert self.summary()["status"] == "stopped" and (self.folder / "report.html").exists(), "no report"
        assert not self.events("worker_died") and "Traceback" not in self.text(), self.text()[-2000:]
        return int(last)

    def left_behind(self, deadline_s: float = LEAVE_S) -> list[int]:
        """Return the processes of this run that live on past a deadline."""
        end = time.monotonic() + deadline_s
        while (alive := marked_processes(self.mark)) and time.monotonic() < end:
            time.sleep(POLL_S)
        return alive


@dataclass
class Runs:
    """Starts runs below a folder; at its end every process of theirs is gone, or the test fails."""

    root: Path
    started: list[Run] = field(default_factory=list)

    def start(
        self,
        *arguments: str | Path,
        folder: str | Path = "",
        prefix: Sequence[str] = (),
        program: Sequence[str] = (sys.executable, "-m", "echelon"),
        environment: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
    ) -> Run:
        """Start a command in a session of its own; with a folder, `--run` is added to its arguments.

        Args:
            arguments: what follows the program's name.
            folder: the run's folder, below `root`, for the record and, unless it is "", `--run`.
            prefix: put before the program, such as a network namespace's.
            inherited: open files that it gets.
        """
        number = len(self.started)
        mark = f"{os.getpid()}-{id(self)}-{number}"
        path = self.root / folder
        where = ["--run", str(path)] if folder and arguments and arguments[0] == "train" else []
        output = self.root / f"command-{number}.out"
        state = str(self.root / "state")  # what this user's runs remember: nothing of it outlives the test
        env = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark, "XDG_STATE_HOME": state, **(environment or {})}
        with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
            process = subprocess.Popen(
                [*prefix, *program, *map(str, arguments), *where],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=self.root, env=env, start_new_session=True,
                pass_fds=inherited,
            )  # fmt: skip
        run = Run(process, path, output, mark)
        self.started.append(run)
        return run

    def train(self, data: str | Path, *arguments: str | Path, folder: str) -> Run:
        """Start `echelon train DATA` with one thread a worker."""
        return self.start("train", data, *SMALL, *arguments, folder=folder)

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        grace_s = LEAVE_S if kind is None else 0.0
        left = [run for run in self.started if run.process.poll() is None or run.left_behind(grace_s)]
        for run in left:
            for pid in marked_processes(run.mark):
                _kill(pid)
            run.process.wait(LEAVE_S)
        if left and kind is None:
            raise AssertionError("runs left processes behind:\n" + "\n".join(run.text()[-2000:] for run in left))


def read_lines(folder: Path) -> list[Record]:
    """Return a run's record as others read it: the JSON of each line that is whole."""
    file = folder / "record.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]


def losses_of(folder: Path) -> dict[int, float]:
    """Return the loss of every step of a run, from 1."""
    losses: dict[int, float] = {}
    for window in (r for r in read_lines(folder) if r["kind"] == "steps"):
        first = window["step"] - len(window["losses"]) + 1
        losses.update(enumerate(window["losses"], first))
    return losses


def marked_processes(mark: str) -> list[int]:
    """Return the living processes that inherited a mark (zombies are not living)."""
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid in _pids() if wanted in _read(Path(f"/proc/{pid}/environ")).split(b"\0") and state(pid) != "Z"]


def state(pid: int) -> str:
    """Return the state letter of a process (R, S, T, Z, ...); empty when it is gone."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(b") ")[2][:1].decode()


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process ended meanwhile
        return b""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
