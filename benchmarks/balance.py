"""Unequal workers: 4 of them, each held to a share of a core, one to a quarter of the others', with shares by speed.

    python -m benchmarks.balance [--ways alone off auto] [--seconds 20]      # as root, control groups of version 1
    python -m benchmarks.balance --summary

Every worker's processor time is bounded by a control group of its own (`cpu.cfs_quota_us` in a period of 10 ms): 40% of
a core, and 10% for the last one. So the machine's cores are enough for all at once, and the slow one is slow in all it
does: in computing, in communicating and in the loop itself.

The yardstick is what the same four workers do alone at the same time, each a run of its own with a quarter of the
batch. Samples/s are of the last `--seconds` of steps; `auto` has settled by then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks import _common as common
from benchmarks._together import TrainCommand, training
from echelon.data import Source, from_datasets
from echelon.models.base import ModelInput
from echelon.records.events import SharesDealt
from echelon.records.file import read_records
from echelon.records.kinds import Steps

TITLE = "Unequal workers: shares by speed"
PERIOD_US, SHARES = 10_000, (0.4, 0.4, 0.4, 0.1)
ALONE, OFF, AUTO = "alone", "off", "auto"
BATCH = 512
SETTLES_S = {ALONE: 4.0, OFF: 8.0, AUTO: 45.0}
_GROUPS = "ECHELON_BENCH_GROUPS"  # a control group for each worker of a run


def held(data: ModelInput) -> nn.Module:
    """Return a CNN of few parameters; the process that builds it goes to its control group."""
    groups = json.loads(os.environ[_GROUPS])
    Path(groups[int(os.environ.get("RANK", 0))], "cgroup.procs").write_text(str(os.getpid()))
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, data.classes),
    )  # fmt: skip


def images() -> Source:
    """Return random images (3, 32, 32) of 10 classes."""
    inputs, labels = torch.randn(20_480, 3, 32, 32), torch.arange(20_480) % 10
    return from_datasets(TensorDataset(inputs, labels), TensorDataset(inputs[:10], labels[:10]))


@contextmanager
def control_groups(shares: Sequence[float]) -> Iterator[list[Path]]:
    """Make a control group for each share of a core, below that of this process; gone at the end.

    Raises:
        OSError: it may not be made here.
    """
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    (own,) = (line.split(":", 2)[2] for line in lines if "cpu" in line.split(":", 2)[1].split(","))
    root = Path("/sys/fs/cgroup/cpu" + own.rstrip("/"))
    groups = [root / f"balance-{os.getpid()}-{i}" for i in range(len(shares))]
    try:
        for group, share in zip(groups, shares, strict=True):
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US * share)))
        yield groups
    finally:
        for group in groups:
            if group.exists():
                group.rmdir()


def _command(run: Path, way: str) -> list[str]:
    workers, batch = (1, BATCH // len(SHARES)) if way == ALONE else (len(SHARES), BATCH)
    balance = [] if way == ALONE else ["--balance", way]
    return [
        *(sys.executable, "-m", "echelon", "train", "benchmarks.balance:images", "--trust", "--run", str(run)),
        *("--model", "benchmarks.balance:held", "--workers", str(workers), "--batch-size", str(batch), *balance),
        *("--threads", "1", "--device", "cpu", "--epochs", "1000", "--eval-every", "0", "--lr", "0.01"),
        *("--loaders", "0", "--augment", "none"),
    ]


def rate(way: str, seconds: float) -> tuple[float, list[tuple[int, ...]]]:
    """Return samples/s of all workers in the last `seconds` of steps, and the shares that were dealt."""
    with tempfile.TemporaryDirectory(prefix="balance-") as folder, control_groups(SHARES) as groups:
        names = [str(group) for group in groups]
        of_runs = [[name] for name in names] if way == ALONE else [names]
        runs = [Path(folder) / f"run{i}" for i in range(len(of_runs))]
        commands = [
            TrainCommand(run, _command(run, way), {_GROUPS: json.dumps(its)})
            for run, its in zip(runs, of_runs, strict=True)
        ]
        with training(way, commands):
            time.sleep(SETTLES_S[way] + seconds)
        dealt = [tuple(event.sizes) for run in runs for event in read_records(run, SharesDealt)]
        return sum(last_rate(read_records(run, Steps), seconds) for run in runs), dealt


def last_rate(windows: Sequence[Steps], seconds: float) -> float:
    """Return samples/s of the last windows that took so many seconds together."""
    samples, took = 0, 0.0
    for window in reversed(windows):
        if took >= seconds:
            break
        samples, took = samples + window.samples, took + window.seconds
    return samples / took


def measure(args: argparse.Namespace) -> None:
    """Measure each way once."""
    for way in args.ways:
        found, dealt = rate(way, args.seconds)
        common.append_result("balance", {"way": way, "samples_per_s": found, "dealt": dealt})
        print(f"{way}: {found:.1f} samples/s {dealt}", flush=True)


def summary() -> None:
    """Write the table of all that was measured, beside what workers do alone."""
    rows = common.read_results("balance")
    by_way = {way: [row["samples_per_s"] for row in rows if row["way"] == way] for way in (ALONE, OFF, AUTO)}
    alone = common.median(by_way[ALONE])
    names = {ALONE: "each alone", OFF: "--balance off", AUTO: "--balance auto"}
    table = [
        [names[way], f"{common.median(found):.0f}", f"{common.median(found) / alone:.2f}",
         f"{min(found) / alone:.2f} to {max(found) / alone:.2f}", len(found)]
        for way, found in by_way.items()
    ]  # fmt: skip
    header = ("workers", "samples/s", "of the workers alone", "lowest to highest", "measured")
    where = common.environment_line("python -m benchmarks.balance", rows[-1]["environment"])
    common.update_section(TITLE, f"{where}\n\n{common.markdown_table(header, table)}")


def main() -> None:
    """Measure, or say what was measured."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--ways", nargs="+", default=[ALONE, OFF, AUTO], choices=[ALONE, OFF, AUTO])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--summary", action="store_true")
    args = parser.parse_args()
    summary() if args.summary else measure(args)


if __name__ == "__main__":
    main()
