"""One trial of the chaos benchmark: a run of which a role is killed, and what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._common import REPOSITORY

PAUSE_BEGINS_S = 0.3
WANTED_TOP1 = 0.95


@dataclass(frozen=True)
class Setting:
    """What is trained in each trial."""

    mode: str = "async"
    servers: int = 2
    replicas: int = 0
    workers: int = 2
    epochs: int = 15
    timeout_s: float = 90.0
    order: str = "ready"

    @property
    def sync(self) -> str:
        """The spec of the run's sync."""
        order = "" if self.order == "ready" else f", order={self.order}"
        return f"ps(mode={self.mode}, servers={self.servers}, replicas={self.replicas}, snapshot_every=20{order})"


@dataclass(frozen=True)
class Trial:
    """What one trial gave. `share` is how far the run was when it was struck; negative: while it started.

    `recovery_s`: from the kill to the update that ends the longest pause which begins then (NaN: none was needed).
    """

    seed: int
    mode: str
    replicas: int
    victim: str
    share: float
    status: str
    seconds: float
    top1: float
    counted_once: bool
    lost: int
    recovery_s: float

    @property
    def kept(self) -> bool:
        """Whether every promise was kept; without a standby a server may lose updates, if it says so."""
        counted = self.counted_once or self.mode != "async" or (not self.replicas and self.lost > 0)
        return self.status == "completed" and self.top1 >= WANTED_TOP1 and counted


class Trainer:
    """A process that trains one run after the other, so that only the first pays for imports."""

    def __init__(self) -> None:
        self._answers, given = os.pipe()
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._chaos_trial", str(given)], stdin=subprocess.PIPE, text=True,
            stdout=subprocess.DEVNULL, stderr=self._said, pass_fds=[given], cwd=REPOSITORY,
        )  # fmt: skip
        os.close(given)

    def begin(self, request: dict[str, Any]) -> None:
        """Begin a run."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def ended(self, within_s: float) -> bool:
        """Wait for the end of the run, or of the process; whether it came in time."""
        readable, _, _ = select.select([self._answers], [], [], max(0.0, within_s))
        if readable:
            os.read(self._answers, 1)
        return bool(readable)

    @property
    def died(self) -> str:
        """What it said, when it has ended by itself; empty while it lives."""
        if self._process.poll() is None:
            return ""
        self._said.seek(0)
        return self._said.read()[-2000:] or "without a word"

    def close(self) -> None:
        """End the process, and with it all that it started."""
        self._process.kill()
        self._process.communicate()
        self._said.close()
        os.close(self._answers)


def serve(answers: int) -> None:
    """Train what is asked for on stdin, one request a line."""
    from echelon.api import train
    from echelon.core.errors import UserError

    for line in sys.stdin:
        with contextlib.suppress(UserError):  # the record says why; the trial is judged by it
            train(**json.loads(line))
        os.write(answers, b".")


@contextlib.contextmanager
def trainer() -> Iterator[Trainer]:
    """Give a trainer, and end it."""
    own = Trainer()
    try:
        yield own
    finally:
        own.close()


def run_trial(own: Trainer, setting: Setting, seed: int, victim: str = "", folder: Path | None = None) -> Trial:
    """Run once, killing a role (a random one by default) at a random moment.

    A trial that hung leaves a trainer that is of no use any more.

    Raises:
        RuntimeError: the trainer ended by itself, which no killed role may lead to.
    """
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        path = (folder or Path(temporary)) / "run"
        began = time.monotonic()
        own.begin({
            "data": "digits", "run": str(path), "sync": setting.sync, "workers": setting.workers, "threads": 1,
            "epochs": setting.epochs, "eval_every": 0, "batch_size": 64, "lr": 0.05, "seed": seed,
        })  # fmt: skip
        struck = _strike(own, path, setting, draw, victim)
        ended = own.ended(setting.timeout_s - (time.monotonic() - began))
        if own.died:
            raise RuntimeError(f"the trainer ended: {own.died}")
        trial = _judge(path, setting, struck, seed, time.monotonic() - began)
        return trial if ended else replace(trial, status="hung")


def _strike(own: Trainer, path: Path, setting: Setting, draw: random.Random, victim: str) -> tuple[str, float, float]:
    """Kill a role at a random moment; returns who, when, and how far the run was. Nobody: the run was over before."""
    share, ends = draw.uniform(-0.15, 1.02), time.monotonic() + setting.timeout_s
    if share < 0:
        while not _pids(path) and time.monotonic() < ends and not own.died:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 1.0))  # not for something to happen: this is the random moment
    elif not _reached(own, path, setting, min(share, 1.0), ends):
        return "", time.time(), share
    if share > 1:
        time.sleep(draw.uniform(0.0, 0.3))  # while the last copy is evaluated and written
    pids = _pids(path)
    name = victim or draw.choice(sorted(pids))
    try:
        os.kill(pids[name], signal.SIGKILL)
    except (ProcessLookupError, KeyError):
        return "", time.time(), share
    return name, time.time(), share


def _reached(own: Trainer, path: Path, setting: Setting, share: float, ends: float) -> bool:
    """Wait until a share of the tasks is done; false when the run is over, or takes too long."""
    wanted, done, read = float("inf"), 0, 0
    reports = setting.epochs * setting.workers  # each has a part of a step
    journal = path / "ps" / "scheduler.jsonl"
    while done < wanted:
        if (path / "ps" / "status.json").exists() or time.monotonic() > ends or own.died:
            return False
        new = journal.read_bytes()[read:] if journal.exists() else b""
        whole = new[: new.rfind(b"\n") + 1]
        read += len(whole)
        for entry in map(json.loads, whole.splitlines()):
            done += entry["kind"] == "done"
            if entry["kind"] == "setup":
                wanted = share * entry["setup"]["steps_per_epoch"] * reports
        time.sleep(0.005)
    return True


def _pids(path: Path) -> dict[str, int]:
    return {e["role"]: e["pid"] for e in _lines(path / "record.jsonl") if e["kind"] == "process"}


def _judge(path: Path, setting: Setting, strike: tuple[str, float, float], seed: int, seconds: float) -> Trial:
    name, killed_t, share = strike
    entries, record = _lines(path / "ps" / "scheduler.jsonl"), _lines(path / "record.jsonl")
    setup = next((e["setup"] for e in entries if e["kind"] == "setup"), {"steps_per_epoch": 0})
    done = Counter(e["task"] for e in entries if e["kind"] == "done" and not e["late"])
    whole = setup["steps_per_epoch"] * setting.epochs * setup.get("parts", 1)
    journal = setting.mode != "async" or (set(done) == set(range(whole)) and set(done.values()) == {1})
    summary = path / "summary.json"
    values: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    top1 = float((values.get("metrics") or {}).get("top1") or 0.0)
    lost = sum(r.get("lost", 0) for r in record if r.get("name") == "server_settled")
    times = [e["t"] for e in entries if e["kind"] == "done"]
    return Trial(seed, setting.mode, setting.replicas, name, share, str(values.get("status", "failed")), seconds, top1,
                 journal and whole > 0 and _versions(path) == {whole}, lost, _recovery(times, killed_t))  # fmt: skip


def _versions(path: Path) -> set[int]:
    """Return how many updates each key of the last checkpoint has counted."""
    from echelon.checkpoint import CheckpointStore

    if not (path / "checkpoints").exists():
        return set()
    store = CheckpointStore(path / "checkpoints", 1)
    try:
        found = store.newest()
    finally:
        store.close()
    return {int(state["version"]) for key, state in found[1]["ps"]["keys"].items()} if found else set()


def _recovery(times: list[float], killed_t: float) -> float:
    pauses = [(b - a, b) for a, b in pairwise(times) if b > killed_t and a < killed_t + PAUSE_BEGINS_S]
    return max(pauses)[1] - killed_t if pauses else float("nan")


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    entries = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the line that is being written
            entries.append(json.loads(line))
    return entries


if __name__ == "__main__":
    serve(int(sys.argv[1]))
