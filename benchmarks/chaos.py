"""Chaos: trials that each kill (-9) a random role of a run at a random moment.

    python -m benchmarks.chaos --trials 100 [--replicas 1] [--mode async] [--out FILE]

Each trial trains digits with 2 workers and 2 servers and must finish, with every batch of every epoch counted exactly
once (async; under a server's death only with replicas=1) and a top-1 of at least 0.95. The time from the kill to the
next update of the survivors is read from the scheduler's journal. Exit code 1 when a trial broke a promise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """What is trained in each trial."""

    mode: str = "async"
    servers: int = 2
    replicas: int = 0
    workers: int = 2
    epochs: int = 20
    timeout_s: float = 180.0

    @property
    def sync(self) -> str:
        """The spec of the run's sync."""
        return f"ps(mode={self.mode}, servers={self.servers}, replicas={self.replicas}, snapshot_every=20)"


@dataclass(frozen=True)
class Trial:
    """What one trial gave."""

    victim: str
    at_s: float
    status: str
    seconds: float
    top1: float
    counted_once: bool
    lost: int
    recovery_s: float


def run_trial(setting: Setting, seed: int, victim: str = "", folder: Path | None = None) -> Trial:
    """Run once, killing a role (a random one by default) at a random moment of the training."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        path = (folder or Path(temporary)) / "run"
        command = [
            sys.executable, "-m", "echelon", "train", "digits", "--sync", setting.sync, "--workers",
            str(setting.workers), "--threads", "1", "--epochs", str(setting.epochs), "--eval-every", "0",
            "--batch-size", "64", "--lr", "0.05", "--seed", str(seed), "--run", str(path),
        ]  # fmt: skip
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            name, killed_t, share = _strike(process, path, setting, draw, victim)
            process.wait(max(1.0, setting.timeout_s - (time.monotonic() - began)))
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            process.kill()
            process.wait()
        return _judge(path, setting, (name, killed_t, share), time.monotonic() - began, hung)


def _strike(
    process: subprocess.Popen[bytes], path: Path, setting: Setting, draw: random.Random, victim: str
) -> tuple[str, float, float]:
    """Kill a role once a random share of the run's steps is done."""
    share = draw.uniform(0.02, 0.9)
    journal = path / "ps" / "scheduler.jsonl"
    ends = time.monotonic() + setting.timeout_s
    while process.poll() is None and time.monotonic() < ends:
        entries = _lines(journal)
        setup = next((e for e in entries if e["kind"] == "setup"), None)
        done = sum(e["kind"] == "done" for e in entries)
        if setup and done >= share * setup["info"]["steps_per_epoch"] * setting.epochs:
            break
        time.sleep(0.01)
    pids = {e["role"]: e["pid"] for e in _lines(path / "record.jsonl") if e["kind"] == "process"}
    name = victim or draw.choice(sorted(pids))
    if name in pids:
        with contextlib.suppress(ProcessLookupError):  # then the run has failed already, and is judged so
            os.kill(pids[name], signal.SIGKILL)
    return name, time.time(), share


def _judge(path: Path, setting: Setting, strike: tuple[str, float, float], seconds: float, hung: bool) -> Trial:
    name, killed_t, share = strike
    entries, record = _lines(path / "ps" / "scheduler.jsonl"), _lines(path / "record.jsonl")
    setup = next((e["info"] for e in entries if e["kind"] == "setup"), {"steps_per_epoch": 0})
    done = Counter(e["task"] for e in entries if e["kind"] == "done" and not e["late"])
    whole = setup["steps_per_epoch"] * setting.epochs
    counted = setting.mode != "async" or (set(done) == set(range(whole)) and set(done.values()) == {1})
    after = [e["t"] for e in entries if e["kind"] == "done" and e["t"] > killed_t]
    lost = sum(r.get("lost", 0) for r in record if r.get("name") == "server_settled")
    summary = path / "summary.json"
    values: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    status = "hung" if hung else str(values.get("status", "failed"))
    top1 = float((values.get("metrics") or {}).get("top1") or 0.0)
    return Trial(name, share, status, seconds, top1, counted and (lost == 0 or not setting.replicas), lost,
                 min(after) - killed_t if after else float("nan"))  # fmt: skip


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    entries = []
    for line in file.read_text().splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue  # the line that is being written
    return entries


def main() -> int:
    """Run the trials, print one line each and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--mode", default="async")
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--victim", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    setting = Setting(mode=given.mode, replicas=given.replicas, epochs=given.epochs)
    trials = []
    for i in range(given.trials):
        trial = run_trial(setting, given.seed + i, given.victim)
        trials.append(trial)
        print(json.dumps(asdict(trial)), flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
    finished = sum(t.status == "completed" for t in trials)
    once = sum(t.counted_once for t in trials)
    good = sum(t.top1 >= 0.95 for t in trials)
    recoveries = [t.recovery_s for t in trials if t.recovery_s == t.recovery_s]
    median = statistics.median(recoveries) if recoveries else float("nan")
    print(f"{finished}/{len(trials)} finished, {once} counted each sample once, {good} reached 0.95, "
          f"{sum(t.lost for t in trials)} updates lost; kill to next update {median:.3f} s (median)")  # fmt: skip
    return 0 if finished == once == good == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
