"""Accuracy at equal samples with a straggler: does anything that is done about staleness help?

CIFAR-10, 25,600 training images drawn once, 3 epochs of batches of 64 (each an update), a CNN of 34 k parameters, SGD
without momentum (as in Zheng et al. 2017), all 10,000 test images. Each worker's batch lasts at least `STEP_S`, four
times as long on worker 0, so that staleness follows from the stated times and not from this machine's load. The batches
are the same for all ways and differ by seed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import _common as common
from benchmarks._cifar import DEVIATION, MEAN, arrays
from benchmarks._straggler_roles import DEADLINE_S, WORKERS, Job, Work, lease_worker, process, queue, roles, staleness
from echelon.coordinator.messages import TrainTask

TRAIN, BATCH, EPOCHS, LR = 25_600, 64, 3, 0.2
STEP_S, SLOW = 0.06, 4.0
SETTING = ["drawn", TRAIN, BATCH, EPOCHS, LR, STEP_S, SLOW]
WAYS = (
    "ps(mode=sync)",
    "ps(mode=async)",
    "ps(mode=async, compensation=constant)",
    "ps(mode=async, compensation=adaptive)",
    "ps(mode=async, by_staleness=true)",
    "ps(mode=ssp, staleness=3)",
)


def model() -> nn.Module:
    """A small CNN without batch statistics, so that parameters are all there is."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10),
    )  # fmt: skip


def _batch(images: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normalised images (N, 3, 32, 32) and labels (N,)."""
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, DEVIATION))
    return (torch.from_numpy(images[rows]).float() - mean) / deviation, torch.from_numpy(labels[rows])


def _worker(rank: int, job: Job, seed: int, address: str, results: Any) -> None:
    images, labels = arrays("train")
    drawn = np.random.default_rng(0).permutation(len(labels))[:TRAIN]  # they lie by class

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return model()

    def compute(module: nn.Module, task: TrainTask) -> int:
        ends = time.perf_counter() + (0.0 if job.settings.aggregates else STEP_S * (SLOW if rank == 0 else 1.0))
        order = np.random.default_rng([seed, task.epoch]).permutation(TRAIN)
        batch = order[task.batch * BATCH : (task.batch + 1) * BATCH]
        rows = np.sort(drawn[batch[task.share :: task.shares]])
        inputs, targets = _batch(images, labels, rows)
        (functional.cross_entropy(module(inputs), targets, reduction="sum") / BATCH).backward()
        time.sleep(max(0.0, ends - time.perf_counter()))
        return len(rows)

    def review(module: nn.Module) -> None:
        results.put(_top1(module))

    client = lease_worker(rank, job, address, Work(build, compute, lambda task: BATCH // task.shares, review=review))
    client.close()


@torch.no_grad()
def _top1(module: nn.Module) -> float:
    images, labels = arrays("test")
    hits = 0
    for start in range(0, len(labels), 500):
        inputs, targets = _batch(images, labels, np.arange(start, min(start + 500, len(labels))))
        hits += int((module(inputs).argmax(1) == targets).sum())
    return hits / len(labels)


def train(way: str, seed: int) -> tuple[float, float]:
    """Train once; returns top-1 and mean staleness."""
    arrays("train")  # decoded here, once
    job, results = Job(way, LR, EPOCHS, TRAIN // BATCH), queue()
    with roles(job) as run:
        own = [process(_worker, rank, job, seed, run.address, results) for rank in range(WORKERS)]
        steps = EPOCHS * TRAIN // BATCH
        top1 = float(results.get(timeout=steps * STEP_S * SLOW + DEADLINE_S))
        for each in own:
            each.join(10)
            each.kill()
        run.wait()
        return top1, staleness(run.folder)


def measure(seeds: int, seconds: float) -> None:
    """Train all ways, seed by seed, those that are missing, until the time is up."""
    done = {(r["way"], r["seed"]) for r in _results()}
    ends = time.monotonic() + seconds
    for seed, way in itertools.product(range(seeds), WAYS):
        if (way, seed) in done or time.monotonic() > ends:
            continue
        began = time.monotonic()
        top1, stale = train(way, seed)
        found = {"way": way, "seed": seed, "top1": top1, "staleness": stale, "setting": SETTING}
        common.append_result("straggler_accuracy", found)
        print(f"seed {seed} {way}: {top1:.4f}, staleness {stale:.1f}, {time.monotonic() - began:.0f} s", flush=True)


def words() -> str:
    """Say what was trained, and what the numbers show."""
    seen = _by_way()
    plain = seen.get("ps(mode=async)", [])
    better = [
        way for way, runs in seen.items()
        if way.startswith("ps(mode=async,") and len(runs) == len(plain) > 1
        and all(a[0] > b[0] for a, b in zip(runs, plain, strict=True))
    ]  # fmt: skip
    verdict = f"Better than plain async with every seed: {', '.join(f'`{w}`' for w in better)}." if better else (
        "No remedy against staleness beats plain async with every seed here: no benefit is shown."
    )  # fmt: skip
    return (
        f"Accuracy at equal samples: CIFAR-10, {TRAIN:,} training images drawn once, {EPOCHS} epochs, batches of "
        f"{BATCH} (each an update), a CNN of three convolutions, SGD with learning rate {LR} and no momentum, all test "
        f"images. A worker's batch lasts {STEP_S} s, {STEP_S * SLOW:g} s on worker 0, so staleness follows from these "
        f"times; the machine was shared. {verdict}"
    )


def table() -> str:
    """Write mean and spread by way."""
    rows = []
    for way, runs in _by_way().items():
        values, stale = [r[0] for r in runs], [r[1] for r in runs]
        rows.append((way, len(values), f"{statistics.mean(values):.4f}", f"{min(values):.4f} to {max(values):.4f}",
                     f"{statistics.mean(stale):.1f}" if stale[0] == stale[0] else ""))  # fmt: skip
    return common.markdown_table(["sync", "seeds", "top-1, mean", "lowest to highest", "mean staleness"], rows)


def _results() -> list[dict[str, Any]]:
    return [r for r in common.read_results("straggler_accuracy") if r.get("setting") == SETTING]


def _by_way() -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    results = _results()
    for way in WAYS:
        runs = sorted((r["seed"], r["top1"], r["staleness"]) for r in results if r["way"] == way)
        if runs:
            found[way] = [(top1, stale) for _, top1, stale in runs]
    return found
