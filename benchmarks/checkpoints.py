"""Checkpoints of 303 M parameters: training time lost and seconds until they are on the disk, beside DCP's async_save.

A stack of linear layers with SGD and momentum (2.4 GB a checkpoint), one thread a process. `echelon train` and a
hand-written DDP loop with `torch.distributed.checkpoint.async_save` take turns; so does that loop with a `dd` of as
many bytes in place of a checkpoint, which is what the disk alone takes beside the same training. What is lost is the
time of steps from a checkpoint until it is on the disk, beyond the median of the same run's steps while nothing is
written.

    python -m benchmarks.checkpoints [--workers 1] [--rounds 2] [--every 10] [--count 4]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._checkpoints_hand import BATCH, FOLDER_OF_STAMPS, PARAMETERS, write_by_dd
from benchmarks._common import (
    REPOSITORY,
    append_result,
    command_line,
    environment_line,
    interleave,
    markdown_table,
    median,
    read_results,
    update_section,
)
from echelon.records.file import read_records
from echelon.records.kinds import Checkpoint

NAME, TITLE = "checkpoints", "Checkpoints of 300 million parameters"
WAYS = ("Echelon", "async_save", "dd")
N_BYTES = PARAMETERS * 8
DEADLINE_S = 600.0
MB = 1 << 20


@dataclass(frozen=True)
class Measured:
    """One run's checkpoints, in seconds each, and what they added to its processes' peak of memory.

    Attributes:
        quiet_s: the median step while nothing is written.
        pauses_s: by which the step that ends with the save is longer.
        beside_s: by which the steps until it is on the disk are longer, in sum.
        durable_s: from the save's begin.
        dd_s: of as many bytes right before the run, beside nothing.
        added_mb: of each process.
    """

    quiet_s: float
    pauses_s: list[float]
    beside_s: list[float]
    durable_s: list[float]
    dd_s: float
    added_mb: list[float]


def run(way: str, options: argparse.Namespace) -> Measured:
    """Train once."""
    steps = options.every * (options.count + 1) - 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        dd_s = write_by_dd(folder / "zeros", N_BYTES)
        (folder / "stamps").mkdir()
        variables = {FOLDER_OF_STAMPS: str(folder / "stamps"), "OMP_NUM_THREADS": "1"}
        if way == "Echelon":
            durable = _echelon(folder / "run", options, steps, variables)
        else:
            durable = _by_hand(folder, way, options, steps, variables)
        found = [
            [[float(word) for word in line.split()] for line in path.read_text().splitlines()]
            for path in sorted((folder / "stamps").iterdir())
        ]
        return _measured([stamps[-steps:] for stamps in found], durable[: options.count], options.every, dd_s)


def _echelon(folder: Path, options: argparse.Namespace, steps: int, variables: dict[str, str]) -> list[float]:
    command = [
        sys.executable, "-m", "echelon", "train", "digits", "--model", "benchmarks._checkpoints_hand:wide_stack",
        "--workers", str(options.workers), "--batch-size", str(BATCH), "--optimizer", "momentum", "--lr", "0.001",
        "--loaders", "0", "--threads", "1", "--max-steps", str(steps), "--checkpoint-every", str(options.every),
        "--keep-checkpoints", "1", "--run", str(folder), *options.options,
    ]  # fmt: skip
    _finish([subprocess.Popen(command, env={**os.environ, **variables}, cwd=REPOSITORY, stdout=subprocess.DEVNULL)])
    return [saved.total_s for saved in read_records(folder, Checkpoint)]


def _by_hand(folder: Path, way: str, options: argparse.Namespace, steps: int, variables: dict[str, str]) -> list[float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        sys.executable, "-m", "benchmarks._checkpoints_hand", str(folder), way, str(options.every), str(steps),
    ]  # fmt: skip
    place = {"WORLD_SIZE": str(options.workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    _finish(
        [
            subprocess.Popen(command, env={**os.environ, **variables, **place, "RANK": str(rank)}, cwd=REPOSITORY)
            for rank in range(options.workers)
        ]
    )
    durable: list[float] = json.loads((folder / "durable.json").read_text())
    return durable


def _finish(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    try:
        if any(process.wait(DEADLINE_S) for process in processes):
            raise RuntimeError(f"{processes[0].args!r} failed")
    finally:
        for process in processes:
            process.kill()


def _measured(ranks: list[list[list[float]]], durable: list[float], every: int, dd_s: float) -> Measured:
    times = [time for time, _ in ranks[0]]
    seconds = [after - before for before, after in pairwise(times)]
    saves = [every * (i + 1) - 1 for i in range(len(durable))]  # the steps that end with one
    disturbed: dict[int, list[int]] = {}
    for step, took in zip(saves, durable, strict=True):
        until = times[step] + median(seconds[1 : every - 1]) + took
        disturbed[step] = [i for i in range(step + 1, min(step + every, len(seconds))) if times[i] < until]
    busy = {*saves, *(i for steps in disturbed.values() for i in steps)}
    quiet = median(s for i, s in enumerate(seconds) if i >= 2 and i not in busy)
    return Measured(
        quiet,
        [seconds[step] - quiet for step in saves],
        [sum(seconds[i] - quiet for i in disturbed[step]) for step in saves],
        durable,
        dd_s,
        [(stamps[-1][1] - stamps[every - 1][1]) * 1024 / MB for stamps in ranks],
    )


def render(results: Sequence[dict[str, Any]]) -> str:
    """Write the table."""
    header = [
        "processes", "way", "checkpoints", "step, s", "pause, s", "lost beside the writing, s", "lost, s",
        "on the disk after, s", "dd alone, s", "added to the peak, MB",
    ]  # fmt: skip
    rows = []
    for workers, way in dict.fromkeys((r["workers"], r["way"]) for r in results):
        own = [r for r in results if (r["workers"], r["way"]) == (workers, way)]
        pauses = [s for r in own for s in r["pauses_s"]]
        beside = [s for r in own for s in r["beside_s"]]
        lost = [a + b for a, b in zip(pauses, beside, strict=True)]
        durable = [s for r in own for s in r["durable_s"]]
        added = " + ".join(f"{median(each):.0f}" for each in zip(*(r["added_mb"] for r in own), strict=True))
        times = [f"{median(v):.2f}" for v in (pauses, beside, lost, durable)]
        quiet, dd = median(r["quiet_s"] for r in own), median(r["dd_s"] for r in own)
        rows.append([workers, way, len(pauses), f"{quiet:.2f}", *times, f"{dd:.2f}", added])
    return markdown_table(header, rows)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--count", type=int, default=4, help="checkpoints a run")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--options", nargs="*", default=[], help="more options of echelon train")
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md and the raw results as they are")
    options = parser.parse_args()
    if shutil.disk_usage(tempfile.gettempdir()).free < 4 * N_BYTES:
        raise SystemExit(f"{tempfile.gettempdir()}: {4 * N_BYTES / 1e9:.0f} GB of free disk are needed")
    results = []
    for _, way in interleave(options.ways, options.rounds):
        results.append({"workers": options.workers, "way": way, **asdict(run(way, options))})
        print(way, results[-1], flush=True)
        if not options.print:
            append_result(NAME, {**results[-1], "command": command_line("benchmarks.checkpoints")})
    print(render(results))
    if not options.print:
        body = render(read_results(NAME))
        update_section(TITLE, f"{environment_line(command_line('benchmarks.checkpoints'))}\n\n{body}")


if __name__ == "__main__":
    main()
