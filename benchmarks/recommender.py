"""The example of recommendation as whole runs of `echelon train`, beside a dense DistributedDataParallel script.

CLICKS=FOLDER MOVIELENS=FILE python -m benchmarks.recommender [--data clicks] [--model dlrm]

2 processes of one thread on this machine, over loopback; of a run what its record says of the windows in the last
three quarters of its steps, its loader included; of the script by hand (`_recommender_hand`) the same quarters. They
take turns, and each figure is the median of its rounds. The log is what `examples/recommender.py` writes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._common import REPOSITORY, environment_line, interleave, markdown_table, median

WAYS = {
    "rows, whole tables": [],
    "rows, int8": ["--compression", "int8"],
    "rows, `table=2`": ["--parallel", "dp=2,table=2"],
    "`local(8)`": ["--sync", "local(8, warmup=0)"],
    "`ps(mode=async)`": ["--sync", "ps(mode=async)"],
}
BY_HAND = "dense DDP and Adam by hand"
DEADLINE_S = 240.0


def hand_rate(options: argparse.Namespace) -> tuple[float, float]:
    """Return samples/s of the script by hand, and NaN: it counts no bytes."""
    command = [sys.executable, "-m", "benchmarks._recommender_hand", options.data, options.model]
    told = _run([*command, str(options.batch), str(options.hand_steps)], REPOSITORY)
    return float(told.split()[-1]), float("nan")


def run_rate(options: argparse.Namespace, way: list[str]) -> tuple[float, float]:
    """Return samples/s of a run's steps, and the bytes that a step sends, of all ranks together."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "echelon", "train", f"recommender:{options.data}"),
            *(
                "--model",
                f"recommender:{options.model}",
                "--sparse-tables",
                "--optimizer",
                "sparse_adam",
                "--lr",
                "0.001",
            ),
            *("--weight-decay", "0", "--batch-size", str(options.batch), "--max-steps", str(options.steps)),
            *("--eval-every", "0", "--workers", "2", "--threads", "1", "--device", "cpu", "--run", f"{folder}/run"),
        ]
        _run([*command, *way], REPOSITORY / "examples")
        lines = [json.loads(line) for line in Path(folder, "run", "record.jsonl").read_text().splitlines()]
    windows = [
        line for line in lines if line["kind"] == "steps" and line["step"] > options.steps // 4 + len(line["losses"])
    ]
    steps = sum(len(window["losses"]) for window in windows)
    rate = sum(window["samples"] for window in windows) / sum(window["seconds"] for window in windows)
    return rate, sum(window["wire_bytes"] for window in windows) / steps


def _run(command: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("clicks", "movielens"), default="clicks")
    parser.add_argument("--model", choices=("dlrm", "two_tower"), default="dlrm")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--hand-steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    names = [name for name in (BY_HAND, *WAYS) if not options.only or any(part in name for part in options.only)]
    rates: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, float] = {}
    for _, name in interleave(names, options.rounds):
        rate, sent[name] = hand_rate(options) if name == BY_HAND else run_rate(options, WAYS[name])
        rates[name].append(rate)
        print(f"{name}: {rate:.0f} samples/s", file=sys.stderr, flush=True)
    rows = [
        [
            name,
            f"{median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})",
            f"{sent[name]:,.0f}" if sent[name] == sent[name] else "not counted",
        ]
        for name, found in rates.items()
    ]
    print(f"{options.model} on {options.data}, {options.batch} samples a step, 2 processes")
    print(markdown_table(["loop", "samples/s (least to most)", "bytes sent a step"], rows))
    print(environment_line(f"python -m benchmarks.recommender --data {options.data} --model {options.model}"))


if __name__ == "__main__":
    main()
