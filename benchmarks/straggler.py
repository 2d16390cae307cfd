"""A straggler: 4 workers, one of which is slowed, under every way to agree; then accuracy at equal samples.

    python -m benchmarks.straggler [--seconds 8] [--repeats 3] [--slow 4] [--step 0.1]      # samples/s
    python -m benchmarks.straggler accuracy [--seeds 3] [--seconds 300]                      # CIFAR-10

Every way is a run of `echelon train`, whose model sleeps in its forward pass: `--step` seconds for a worker's batch,
times `--slow` in the worker that begins first, which stands for its device's time without using this machine's cores.

Samples/s: a batch of 32 for each worker and update (of 128 for all, where they share one) through a small network. The
yardstick is what the same four workers do alone, each for itself, measured in turn with the others.

Accuracy: does anything that is done about staleness help? CIFAR-10, 25,600 training images drawn once, 3 epochs of
batches of 64 (each an update), a CNN of 34 k parameters, SGD without momentum (as in Zheng et al. 2017), all 10,000
test images. Staleness follows from the stated times and not from this machine's load.

Results are appended to `benchmarks/results`; `--summary` writes both tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks import _common as common
from benchmarks._cifar import DEVIATION, MEAN, arrays
from benchmarks._together import TrainCommand, training
from echelon.data import Source, from_datasets
from echelon.models.base import ModelInput
from echelon.records.file import read_records
from echelon.records.kinds import ServerWindow

TITLE = "A straggler: 4 workers, one 4x slower"
WORKERS, SAMPLES = 4, 32
ALONE = "each alone"
RATE_WAYS = (
    ALONE,
    "allreduce",
    "local(8)",
    "ps(mode=sync)",
    "ps(mode=sync, backup=1)",
    "ps(mode=ssp, staleness=3)",
    "ps(mode=async)",
)
TRAIN, BATCH, EPOCHS, LR = 25_600, 64, 3, 0.2
STEP_S, SLOW = 0.06, 4.0
SETTING = ["parts", TRAIN, BATCH, EPOCHS, LR, STEP_S, SLOW]
ACCURACY_WAYS = (
    "ps(mode=sync)",
    "ps(mode=async)",
    "ps(mode=async, compensation=adaptive)",
    "ps(mode=async, by_staleness=true)",
    "ps(mode=ssp, staleness=3)",
    "ps(mode=async, parts=1)",
    "ps(mode=async, parts=1, by_staleness=true)",
)
_PACE = "ECHELON_BENCH_STRAGGLER"  # seconds of a batch, how much slower one worker is, a folder where it is chosen


class Slept(nn.Module):
    """A network whose forward pass in training takes as long as the environment says."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self._pause_s: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (N, ...) to logits (N, classes)."""
        if self.training:
            if self._pause_s is None:
                step_s, slow, folder = json.loads(os.environ[_PACE])
                self._pause_s = step_s * (slow if _is_first(Path(folder)) else 1.0)
            time.sleep(self._pause_s)
        logits: Tensor = self.layers(x)
        return logits


def _is_first(folder: Path) -> bool:
    try:
        (folder / "slow").touch(exist_ok=False)
    except FileExistsError:  # another worker is the slow one
        return False
    return True


def small(data: ModelInput) -> nn.Module:
    """Return a small network: its gradients are what travels."""
    return Slept(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, data.classes)))


def cnn(data: ModelInput) -> nn.Module:
    """Return a small CNN without batch statistics, so that parameters are all there is."""
    return Slept(nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, data.classes),
    ))  # fmt: skip


def numbers() -> Source:
    """Return random inputs (64,) of 10 classes."""
    inputs, labels = torch.randn(100_000, 64), torch.arange(100_000) % 10
    return from_datasets(TensorDataset(inputs, labels), TensorDataset(inputs[:10], labels[:10]))


class _Cifar(Dataset[tuple[Tensor, int]]):
    """Normalised images (3, 32, 32) of some rows, and their labels."""

    def __init__(self, part: str, rows: int) -> None:
        self._images, labels = arrays(part)
        self._rows = np.random.default_rng(0).permutation(len(labels))[:rows]  # they lie by class
        self.targets = labels[self._rows].tolist()
        self._mean, self._deviation = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, DEVIATION))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = torch.from_numpy(self._images[self._rows[index]].astype(np.float32))
        return (pixels - self._mean) / self._deviation, self.targets[index]


def cifar() -> Source:
    """Return the drawn training images, and all test images."""
    return from_datasets(_Cifar("train", TRAIN), _Cifar("test", 10_000))


def _command(run: Path, data: str, model: str, way: str, *more: str) -> list[str]:
    workers = ["--workers", "1"] if way == ALONE else ["--workers", str(WORKERS), "--sync", way]
    return [
        *(sys.executable, "-m", "echelon", "train", f"benchmarks.straggler:{data}", "--trust", "--run", str(run)),
        *("--model", f"benchmarks.straggler:{model}", *workers, "--threads", "1", "--device", "cpu"),
        *("--optimizer", "sgd", "--weight-decay", "0", "--schedule", "constant", "--augment", "none", *more),
    ]


def _pace(step_s: float, slow: float, folder: str) -> dict[str, str]:
    return {_PACE: json.dumps([step_s, slow, folder])}


def rate(way: str, seconds: float, step_s: float, slow: float) -> float:
    """Return samples/s of all workers together under one way to agree."""
    size = str(SAMPLES * (1 if way == ALONE else WORKERS))
    with tempfile.TemporaryDirectory(prefix="straggler-") as folder:
        runs = [Path(folder) / f"run{i}" for i in range(WORKERS if way == ALONE else 1)]
        more = ["--batch-size", size, "--epochs", "1000", "--eval-every", "0", "--lr", "0.01"]
        commands = [
            TrainCommand(run, _command(run, "numbers", "small", way, *more), _pace(step_s, slow, folder))
            for run in runs
        ]
        with training(way, commands):
            time.sleep(seconds)
        return sum(float(json.loads((run / "summary.json").read_text())["samples_per_s"]) for run in runs)


def measure_rates(args: argparse.Namespace) -> None:
    """Measure samples/s, ways in turn."""
    started = time.time()
    for turn, way in common.interleave(RATE_WAYS, args.repeats):
        found = rate(way, args.seconds, args.step, args.slow)
        common.append_result("straggler", {"way": way, "turn": turn, "samples_per_s": found, "started": started})
        print(f"{turn} {way}: {found:.0f} samples/s", flush=True)


def accuracy(way: str, seed: int) -> tuple[float, float]:
    """Train once; returns top-1 and mean staleness (NaN without a count of it)."""
    arrays("train")  # decoded here, once
    lease_s = STEP_S if "parts=1" in way else STEP_S / WORKERS
    step_s = 0.0 if "mode=sync" in way else lease_s  # where all wait for all, time changes nothing
    more = [
        "--batch-size",
        str(BATCH),
        "--epochs",
        str(EPOCHS),
        "--lr",
        str(LR),
        "--momentum",
        "0",
        "--seed",
        str(seed),
    ]
    with tempfile.TemporaryDirectory(prefix="straggler-") as folder:
        run = Path(folder) / "run"
        command = [*_command(run, "cifar", "cnn", way, *more), "--eval-every", str(EPOCHS)]
        subprocess.run(
            command, env={**os.environ, **_pace(step_s, SLOW, folder)}, stdout=subprocess.DEVNULL, check=True
        )
        counts = read_records(run, ServerWindow)[-1].staleness
        total = sum(counts.values())
        mean = sum(int(age) * n for age, n in counts.items()) / total if total else float("nan")
        return float(json.loads((run / "summary.json").read_text())["metrics"]["top1"]), mean


def measure_accuracy(args: argparse.Namespace) -> None:
    """Train all ways, seed by seed, those that are missing, until the time is up."""
    done = {(r["way"], r["seed"]) for r in _results()}
    ends = time.monotonic() + args.seconds
    for seed, way in itertools.product(range(args.seeds), ACCURACY_WAYS):
        if (way, seed) in done or time.monotonic() > ends:
            continue
        began = time.monotonic()
        top1, stale = accuracy(way, seed)
        found = {"way": way, "seed": seed, "top1": top1, "staleness": stale, "setting": SETTING}
        common.append_result("straggler_accuracy", found)
        print(f"seed {seed} {way}: {top1:.4f}, staleness {stale:.1f}, {time.monotonic() - began:.0f} s", flush=True)


def rate_table() -> str:
    """Write the last measurement's medians."""
    found = common.read_results("straggler")
    last = [r for r in found if r["started"] == found[-1]["started"]] if found else []
    seen = {
        way: [r["samples_per_s"] for r in sorted(last, key=lambda r: r["turn"]) if r["way"] == way] for way in RATE_WAYS
    }
    rows = [(way, f"{common.median(rates):.0f}", f"{common.paired_ratio(rates, seen[ALONE]):.2f}",
             f"{min(a / b for a, b in zip(rates, seen[ALONE], strict=False)):.2f}")
            for way, rates in seen.items() if rates]  # fmt: skip
    return common.markdown_table(["sync", "samples/s", "of the workers alone", "lowest round"], rows)


def accuracy_table() -> str:
    """Write mean and spread by way, and what they show."""
    seen = {way: sorted((r["seed"], r["top1"], r["staleness"]) for r in _results() if r["way"] == way)
            for way in ACCURACY_WAYS}  # fmt: skip
    plain = seen["ps(mode=async)"]
    better = [
        f"`{way}`" for way, runs in seen.items()
        if way.startswith("ps(mode=async,") and len(runs) == len(plain) > 1
        and all(a[1] > b[1] for a, b in zip(runs, plain, strict=True))
    ]  # fmt: skip
    rows = []
    for way, runs in seen.items():
        values, stale = [r[1] for r in runs], [r[2] for r in runs if r[2] == r[2]]
        if values:
            rows.append((way, len(values), f"{statistics.mean(values):.4f}", f"{min(values):.4f} to {max(values):.4f}",
                         f"{statistics.mean(stale):.1f}" if stale else ""))  # fmt: skip
    table = common.markdown_table(["sync", "seeds", "top-1, mean", "lowest to highest", "mean staleness"], rows)
    return (
        f"Accuracy at equal samples: CIFAR-10, {TRAIN:,} training images drawn once, {EPOCHS} epochs, batches of "
        f"{BATCH}, a CNN of three convolutions, SGD with learning rate {LR} and no momentum, all test images. A "
        f"worker's batch lasts {STEP_S} s, a part of one that much less, on one of them {SLOW:g} times as long, so "
        "staleness (in updates) follows from these times. Better than plain async with every seed: "
        f"{', '.join(better) or 'nothing'}.\n\n{table}"
    )


def _results() -> list[dict[str, Any]]:
    return [r for r in common.read_results("straggler_accuracy") if r.get("setting") == SETTING]


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["rate", "accuracy"], default="rate")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a measurement; accuracy: begin no run after it")
    parser.add_argument("--step", type=float, default=0.1)
    parser.add_argument("--slow", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--summary", action="store_true", help="write both tables from the results that there are")
    args = parser.parse_args()
    if args.summary:
        about = (
            "Samples/s: a batch of 32 takes 0.1 s (a sleep), 0.4 s on one worker; the yardstick is the same workers "
            "without communication. A batch that a backup made superfluous does not count."
        )
        where = common.environment_line("python -m benchmarks.straggler [accuracy]")
        common.update_section(TITLE, "\n\n".join([where, about, rate_table(), accuracy_table()]))
    elif args.what == "accuracy":
        measure_accuracy(args)
    else:
        measure_rates(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
