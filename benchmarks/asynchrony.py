"""What asynchronous workers cost in accuracy: whole runs of `echelon train`, paired by seed with all-reduce.

python -m benchmarks.asynchrony "DATA [option ...]" [...] [--seeds 8] [--first 0] [--workers 2 4] [--sync SPEC ...]

Each argument is what follows `echelon train`. For each seed it is trained with all-reduce and two workers, then with
each strategy and each number of workers, on the same samples; the last evaluation's metric is compared, in percent.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks._common import command_line, environment_line
from benchmarks.accuracy import interval

DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Way:
    """A strategy and a number of workers."""

    sync: str
    workers: int

    def __str__(self) -> str:
        return f"{self.sync}, {self.workers} workers"


BASE = Way("allreduce", 2)


def measure(given: str, way: Way, seed: int, run: Path, metric: str) -> float:
    """Train once; return the metric of the last evaluation in percent.

    Raises:
        CalledProcessError: the run failed.
    """
    command = [
        sys.executable, "-m", "echelon", "train", *shlex.split(given), "--workers", str(way.workers),
        "--sync", way.sync, "--seed", str(seed), "--threads", "1", "--device", "cpu", "--run", str(run),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)
    return 100 * float(json.loads((run / "summary.json").read_text())["metrics"][metric])


def main() -> None:
    """Measure seed by seed, and print the rows as they grow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="DATA")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sync", nargs="+", default=["ps(mode=async)"])
    parser.add_argument("--metric", default="top1")
    args = parser.parse_args()
    print(environment_line(command_line("benchmarks.asynchrony")), flush=True)
    ways = [BASE, *(Way(sync, workers) for sync in args.sync for workers in args.workers)]
    with tempfile.TemporaryDirectory() as folder:
        for number, given in enumerate(args.runs):
            found: dict[Way, list[float]] = {way: [] for way in ways}
            for seed in range(args.first, args.first + args.seeds):
                for i, way in enumerate(ways):
                    found[way].append(measure(given, way, seed, Path(folder) / f"{number}-{seed}-{i}", args.metric))
                _print(given, found)


def _print(given: str, found: dict[Way, list[float]]) -> None:
    print(f"\n{given}", flush=True)
    for way, values in found.items():
        mean, low, high = interval([a - b for a, b in zip(values, found[BASE], strict=True)])
        each = ", ".join(f"{value:.2f}" for value in values)
        cells = f"{statistics.mean(values):.2f} | {mean:+.2f} | {low:+.2f} to {high:+.2f} | {each}"
        print(f"| {way} | {len(values)} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
