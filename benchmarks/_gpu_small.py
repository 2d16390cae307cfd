"""Small images and a model of short layers, for `benchmarks.gpu --small`: where the host sets the pace."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks._common import markdown_table, median
from echelon.records.file import read_records
from echelon.records.kinds import Steps

IMAGES, SIDE, BATCH, EPOCHS = 50_000, 32, 128, 3
_WAYS: dict[str, tuple[str, ...]] = {
    "eager": (),
    "compiled": ("--compile",),
    "compiled, CUDA graphs": ("--compile", "--compile-mode", "reduce-overhead"),
}


def small(args: argparse.Namespace) -> str:
    """Train in each way; returns a table of images per second: of the first epoch, and of the last one."""
    images, epochs = (IMAGES, EPOCHS) if args.device == "cuda" else (1_000, 2)
    rows = []
    for name, arguments in _WAYS.items():
        windows = _windows(args.device, arguments, images, epochs)
        per_epoch = -(-images // BATCH)
        first = [w for w in windows if per_epoch // 4 < w.step <= per_epoch] or windows[:1]
        last = [w for w in windows if w.step - w.count >= (epochs - 1) * per_epoch]
        rates = [median([w.samples / w.seconds for w in part]) for part in (first, last)]
        hand = _hand(args.device, arguments, images)
        rows.append([name, *(f"{rate:,.0f}" for rate in rates), f"{hand:,.0f}", f"{rates[1] / hand:.2f}"])
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    head = f"**resnet18, {images:,} images of {SIDE}x{SIDE}, batch {BATCH}, bf16, flip_crop**"
    head += "; images per second. By hand: the images lie on the GPU, and are cropped and mirrored there\n\n"
    columns = ["", "first epoch, from loaders", "last epoch, from the GPU", "by hand", "last epoch / by hand"]
    return head + markdown_table(columns, rows)


def _windows(device: str, arguments: tuple[str, ...], images: int, epochs: int) -> list[Steps]:
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "echelon", "train", "benchmarks.gpu_data:synthetic", "--run", str(run)]
        command += ["--workers", "1", "--device", device, "--batch-size", str(BATCH), "--epochs", str(epochs)]
        command += ["--precision", "bf16", "--augment", "flip_crop", "--eval-every", "0", "--model", "timm/resnet18"]
        command += arguments
        variables = {"ECHELON_BENCH_IMAGES": str(images), "ECHELON_BENCH_SIDE": str(SIDE)}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **variables}
        )
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no word"])[-1])
        return list(read_records(run, Steps))


def _hand(device: str, arguments: Sequence[str], images: int) -> float:
    command = [sys.executable, "-m", "benchmarks._gpu_hand", "--model", "resnet18", "--precision", "bf16", "--fused"]
    command += ["--kept", str(images), "--device", device, "--batch", str(BATCH), "--image", str(SIDE)]
    command += ["--steps", "300" if device == "cuda" else "5", "--warm-up", "50" if device == "cuda" else "2"]
    command += [] if "--compile" in arguments else ["--no-compile"]
    command += ["--mode", "reduce-overhead"] if "reduce-overhead" in arguments else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["images_per_s"])
