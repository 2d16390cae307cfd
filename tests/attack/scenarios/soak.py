"""A run that goes on and on: memory, open files, threads and disk do not grow with it.

An hour for each strategy; ECHELON_SOAK_S makes it shorter or longer, ECHELON_SOAK_SAMPLES names a file for the samples.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from echelon.records.file import newest
from echelon.records.kinds import Start, Steps
from tests.attack.scenario import Scenario
from tests.ranks.runs import Run, Runs, marked_processes

SOAK_S = float(os.environ.get("ECHELON_SOAK_S", "3600"))
SAMPLES_FILE = os.environ.get("ECHELON_SOAK_SAMPLES", "")
SAMPLES = 120
START_S = 1800.0  # it may have a tenth of a processor
SETTLED = 0.4  # of the time: libraries are loaded, pages that were shared at the fork are the process's own
MB = 1e6
MOST_MB_PER_HOUR = 3.0  # what an allocator drifts by; it becomes less with time, a leak does not


@dataclass(frozen=True)
class Sample:
    """What a process has at a moment: resident bytes of its own (`own_bytes`), open files, threads."""

    seconds: float
    own: int
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
        assert run.process.poll() is None, f"the run ended with {run.process.poll()}: {run.text()[-500:]}"
        samples = {}
        for pid in marked_processes(run.mark):
            try:
                process = psutil.Process(pid)
                own, files, threads = own_bytes(pid), process.num_fds(), process.num_threads()
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                continue
            samples[pid] = Sample(time.monotonic() - began, own, files, threads)
        yield samples


def own_bytes(pid: int) -> int:
    """Return the memory that a process holds, in bytes: anonymous and shared, not pages of files.

    Those of libraries leave and return as the kernel sees fit, on a busy machine by megabytes an hour.
    """
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem") if name in lines)


def lines_bytes(folder: Path) -> int:
    """Return the bytes of a run's record and journal; folders beside them come and go."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            if ".jsonl" in name:
                with suppress(FileNotFoundError):
                    total += os.stat(os.path.join(path, name)).st_size  # noqa: PTH116, PTH118
    return total


def role_of(run: Run, pid: int) -> str:
    """Return what a process of a run is."""
    if pid == run.process.pid:
        return "the launcher"
    ranks = next(newest(run.folder, Start)).pids
    return f"rank {ranks.index(pid)}" if pid in ranks else f"process {pid}"


def soak(sync: str, folder: Path) -> str:
    """Train with a strategy; every process that lived through must not have grown."""
    with Runs(folder) as runs:
        run = runs.train("digits", "--sync", sync, "--workers", "2", "--epochs", "1000000", folder="run")
        run.wait_for(lambda: run.records("steps"), "a step", START_S)
        rows: dict[str, list[Sample]] = {}
        disk: list[tuple[float, float]] = []
        for samples in sampled(run, SOAK_S):
            for pid, sample in samples.items():
                rows.setdefault(role_of(run, pid), []).append(sample)
            now = next(iter(samples.values())).seconds
            disk.append((now, lines_bytes(run.folder) / MB))
        steps = next(newest(run.folder, Steps)).step
        run.process.send_signal(signal.SIGTERM)
        run.end()
    if SAMPLES_FILE:
        Path(SAMPLES_FILE).write_text(json.dumps({name: [vars(s) for s in row] for name, row in rows.items()}))
    lasting = {name: row[int(SETTLED * SAMPLES) :] for name, row in rows.items() if len(row) >= 0.9 * SAMPLES}
    assert len(lasting) >= 3, "processes did not live through"
    slopes = {name: (memory_slope(row), memory_slope(row[-len(row) // 2 :])) for name, row in lasting.items()}
    name, (slope_all, slope_late) = max(slopes.items(), key=lambda item: min(s.per_hour - s.within for s in item[1]))
    drift = f"{slope_all} MB an hour ({slope_late} in the last half)"
    goes_on = all(s.per_hour - s.within > MOST_MB_PER_HOUR for s in (slope_all, slope_late))  # a warm-up slows down
    assert not goes_on, f"{name} grows by {drift}"
    for what in ("files", "threads"):
        grown = {
            name: statistics.median(getattr(s, what) for s in row[-10:])
            - statistics.median(getattr(s, what) for s in row[:10])
            for name, row in lasting.items()
        }
        most = max(grown, key=grown.__getitem__)
        assert grown[most] <= 1, f"{what} of {most} grow by {grown[most]:g}"
    late = disk[int(SETTLED * SAMPLES) :]
    written = slope([t for t, _ in late], [mb for _, mb in late])
    return (
        f"{steps} steps in {SOAK_S:g} s; of {len(lasting)} processes {name} grows most: by {drift}; files and threads "
        f"constant; record and journal {written} MB an hour"
    )


def memory_slope(row: list[Sample]) -> Slope:
    """Return how a process's memory grows, in MB."""
    return slope([s.seconds for s in row], [s.own / MB for s in row])


SCENARIOS = tuple(
    Scenario(
        name, f"With {sync} memory, files and threads do not grow with the run's length.", partial(soak, sync), False
    )
    for name, sync in (
        ("allreduce", "allreduce"), ("local", "local(8)"), ("diloco", "diloco(8)"), ("easgd", "easgd(8)"),
        ("ps-sync", "ps(mode=sync)"), ("ps-async", "ps(mode=async)"), ("ps-ssp", "ps(mode=ssp)"),
    )
)  # fmt: skip
