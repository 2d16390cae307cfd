"""A run that goes on and on: memory, open files, threads and disk do not grow with it.

An hour for each strategy; ECHELON_SOAK_S makes it shorter or longer.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from tests.attack.scenario import Scenario
from tests.ranks.runs import Run, Runs, marked_processes

SOAK_S = float(os.environ.get("ECHELON_SOAK_S", "3600"))
SAMPLES = 120
SETTLED = 0.4  # of the time: libraries are loaded, pages that were shared at the fork are the process's own
MB = 1e6
MOST_MB_PER_HOUR = 3.0  # what an allocator drifts by; it becomes less with time, a leak does not


@dataclass(frozen=True)
class Sample:
    """What a process has at a moment: resident bytes, open files, threads."""

    seconds: float
    resident: int
    files: int
    threads: int


@dataclass(frozen=True)
class Slope:
    """Growth in an hour, and the half of its 95% interval, of a straight line through the samples."""

    per_hour: float
    within: float

    def __str__(self) -> str:
        return f"{self.per_hour:+.2f} ± {self.within:.2f}"


def slope(seconds: list[float], values: list[float]) -> Slope:
    """Fit a line; neighbouring samples are alike, so the interval is that of means of tenths."""
    groups = [g for g in np.array_split(np.arange(len(values)), 10) if len(g)]
    x = np.array([np.mean([seconds[i] for i in g]) for g in groups]) / 3600
    y = np.array([np.mean([values[i] for i in g]) for g in groups])
    (per_hour, _), covariance = np.polyfit(x, y, 1, cov=True)
    return Slope(float(per_hour), 2.3 * float(np.sqrt(covariance[0][0])))


def sampled(run: Run, seconds: float) -> Iterator[dict[int, Sample]]:
    """Yield what each process of a run has, again and again, for as long as it is to go on."""
    began = time.monotonic()
    for number in range(SAMPLES):
        due = began + (number + 1) * seconds / SAMPLES
        while time.monotonic() < due:
            time.sleep(min(1.0, max(0.0, due - time.monotonic())))
        assert run.process.poll() is None, f"the run ended: {run.text()[-500:]}"
        samples = {}
        for pid in marked_processes(run.mark):
            try:
                process = psutil.Process(pid)
                resident, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
            except psutil.NoSuchProcess:
                continue
            samples[pid] = Sample(time.monotonic() - began, resident, files, threads)
        yield samples


def soak(sync: str, folder: Path) -> str:
    """Train with a strategy; every process that lived through must not have grown."""
    with Runs(folder) as runs:
        run = runs.train("digits", "--sync", sync, "--workers", "2", "--epochs", "1000000", folder="run")
        run.wait_for_step(20)
        rows: dict[int, list[Sample]] = {}
        disk: list[tuple[float, float]] = []
        for samples in sampled(run, SOAK_S):
            for pid, sample in samples.items():
                rows.setdefault(pid, []).append(sample)
            now = next(iter(samples.values())).seconds
            disk.append((now, sum(p.stat().st_size for p in run.folder.rglob("*.jsonl*")) / MB))
        steps = run.records("steps")[-1]["step"]
        run.process.send_signal(signal.SIGTERM)
        run.end()
    lasting = [r[int(SETTLED * SAMPLES) :] for r in rows.values() if len(r) >= 0.9 * SAMPLES]
    assert len(lasting) >= 3, "processes did not live through"
    slopes = [slope([s.seconds for s in r], [s.resident / MB for s in r]) for r in lasting]
    worst = max(slopes, key=lambda s: s.per_hour - s.within)
    assert worst.per_hour - worst.within < MOST_MB_PER_HOUR, f"a process grows by {worst} MB an hour"
    for name in ("files", "threads"):
        grown = [
            statistics.median(getattr(s, name) for s in r[-10:]) - statistics.median(getattr(s, name) for s in r[:10])
            for r in lasting
        ]
        assert max(grown) <= 1, f"{name} grow by {max(grown):g}"
    late = disk[int(SETTLED * SAMPLES) :]
    written = slope([t for t, _ in late], [mb for _, mb in late])
    return (
        f"{steps} steps in {SOAK_S:g} s; resident MB an hour, of {len(lasting)} processes: at most {worst}; files and "
        f"threads constant; record and journal {written} MB an hour"
    )


SCENARIOS = tuple(
    Scenario(
        name, f"With {sync} memory, files and threads do not grow with the run's length.", partial(soak, sync), False
    )
    for name, sync in (
        ("allreduce", "allreduce"), ("local", "local(8)"), ("ps-sync", "ps(mode=sync)"), ("ps-async", "ps(mode=async)"),
    )
)  # fmt: skip
