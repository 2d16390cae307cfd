"""The groups of `benchmarks.gpu_all`: each runs in a process of its own and prints a row as soon as it has one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks._gpu_checks import SANITIZED, Row, codecs, feed, versions
from benchmarks._gpu_ranks import nccl
from benchmarks._gpu_runs import runs, together
from benchmarks._gpu_sums import sums


def timings(device: str) -> Iterator[Row]:
    """Let `benchmarks.gpu` time ResNet-50, alone on the device."""
    if device != "cuda":
        yield Row("images per second", "skipped", "no CUDA device here")
        return
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--print",
        "--rounds",
        "1",
        "--models",
        "resnet50",
        "--no-compile",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) > 1:
            yield Row(f"ResNet-50: {cells[0]}", "ok", " / ".join(cells[1:]))
    if done.returncode:
        yield Row("ResNet-50", "FAILS", (done.stderr.strip().splitlines() or ["no word"])[-1][:200])


@dataclass(frozen=True)
class Group:
    """Rows that are found together, the seconds that they may take, and variables of their process."""

    rows: Callable[[str], Iterator[Row]]
    limit_s: float
    variables: tuple[tuple[str, str], ...] = ()


GROUPS: dict[str, Group] = {
    "versions": Group(versions, 15.0),
    "codecs": Group(codecs, 40.0),
    "feed": Group(feed, 35.0),
    "feed-sanitized": Group(feed, 35.0, ((SANITIZED, "1"),)),
    "nccl": Group(nccl, 95.0),
    "sums": Group(sums, 40.0),
    "runs": Group(runs, 110.0),
    "together": Group(together, 140.0),
    "timings": Group(timings, 90.0),
}
"""In ten minutes together, the timings last: what fails before them is told in any case."""


def group_rows(name: str, device: str, only: Sequence[str] = ()) -> Iterator[Row]:
    """Find a group's rows; of whole runs those whose names begin with one of `only`, where there are some."""
    if name in ("runs", "together"):
        find = runs if name == "runs" else together
        yield from find(device, tuple(only))
    else:
        yield from GROUPS[name].rows(device)
