"""What lossy ways to agree cost in accuracy in a short run of `echelon train`: differences to all-reduce, by seed.

python -m benchmarks.accuracy [--seeds 8] [--workers 2] [--only "topk(0.01)"]

An image set of 16x16 PNG files is made from a seed of its own; a small SE-ResNet with BatchNorm is trained on it for
188 steps of 128 images, by each way with each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor, nn

from benchmarks._common import REPOSITORY, command_line, environment_line

WAYS = {
    "allreduce": ("allreduce", "none"),
    "local(8, overlap=2), sign": ("local(8, overlap=2)", "sign"),
    "diloco(20), int8": ("diloco(20)", "int8"),
    "topk(0.01)": ("allreduce", "topk(0.01)"),
    "powersgd(2)": ("allreduce", "powersgd(2)"),
}
SIDE, CLASSES, TRAIN, TEST = 16, 10, 6016, 3000
DEADLINE_S = 1800.0


class Block(nn.Module):
    """Two convolutions with BatchNorm, channels weighed by squeeze and excitation, and a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.weigh = nn.Sequential(nn.Linear(outer, outer // 4), nn.ReLU(), nn.Linear(outer // 4, outer), nn.Sigmoid())
        self.short = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, images: Tensor) -> Tensor:
        """Return [N, outer, H / stride, W / stride]."""
        features = self.way(images)
        weighed: Tensor = features * self.weigh(features.mean((2, 3)))[:, :, None, None] + self.short(images)
        return weighed.relu()


def se_resnet(*_: object, **__: object) -> nn.Module:
    """Return a network of 0.3 million parameters for small images."""
    blocks = [Block(16, 16, 2), Block(16, 32, 2), Block(32, 64, 2), Block(64, 128, 1)]
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def _smooth(pattern: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(pattern.astype(np.float32)).resize((24, 24), Image.Resampling.BICUBIC))


def make_images(folder: Path, seed: int) -> None:
    """Write a set of classes of three smooth patterns each, shifted, scaled and noisy, as PNG files in folders."""
    draw = np.random.default_rng(seed)
    coarse = draw.standard_normal((CLASSES, 3, 6, 6))
    patterns = np.stack([[_smooth(pattern) for pattern in of_class] for of_class in coarse])
    for part, count in (("train", TRAIN), ("test", TEST)):
        for number in range(count):
            of_class = number % CLASSES
            pattern, (top, left) = patterns[of_class, draw.integers(3)], draw.integers(0, 24 - SIDE + 1, 2)
            image = pattern[top : top + SIDE, left : left + SIDE] * draw.uniform(0.7, 1.3)
            values = np.clip(128 + 45 * (image + 0.9 * draw.standard_normal((SIDE, SIDE))), 0, 255)
            place = folder / part / f"class{of_class}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.astype(np.uint8)).save(place / f"{number:05d}.png")


def top1(data: Path, run: Path, way: tuple[str, str], seed: int, workers: int) -> float:
    """Train once; return the accuracy on the test images in percent.

    Raises:
        CalledProcessError: the run failed.
    """
    sync, compression = way
    command = [
        sys.executable, "-m", "echelon", "train", str(data), "--model", "benchmarks.accuracy:se_resnet", "--trust",
        "--epochs", "4", "--batch-size", "128", "--augment", "none", "--loaders", "0", "--workers", str(workers),
        "--seed", str(seed), "--sync", sync, "--compression", compression, "--run", str(run),
    ]  # fmt: skip
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL, env=path)
    return 100 * float(json.loads((run / "summary.json").read_text())["metrics"]["top1"])


def interval(differences: list[float]) -> tuple[float, float, float]:
    """Return mean and 90% interval (Student's t) of paired differences; NaN bounds for a single one."""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return mean, float("nan"), float("nan")
    from scipy.stats import t

    half = float(t.ppf(0.95, len(differences) - 1)) * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def main() -> None:
    """Measure seed by seed, and print the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=list(WAYS))
    args = parser.parse_args()
    print(environment_line(command_line("benchmarks.accuracy")), flush=True)
    chosen = {name: way for name, way in WAYS.items() if args.only in (None, name) or name == "allreduce"}
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder) / "images", seed=1)
        found: dict[str, list[float]] = {name: [] for name in chosen}
        for seed in range(args.seeds):
            for name, way in chosen.items():
                run = Path(folder) / f"run-{seed}-{len(found[name])}-{list(chosen).index(name)}"
                found[name].append(top1(Path(folder) / "images", run, way, seed, args.workers))
            for name, values in found.items():
                mean, low, high = interval([a - b for a, b in zip(values, found["allreduce"], strict=True)])
                cells = f"{statistics.mean(values):.2f} | {mean:+.2f} | {low:+.2f} to {high:+.2f}"
                print(f"| {name} | {len(values)} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
