"""Study folders as a study would leave them, with planted truths: what each candidate costs is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.records.file import Recorder
from echelon.records.kinds import RunEnd
from echelon.study import Study, open_study, planned_runs
from echelon.study.base import PlannedRun
from echelon.study.folder import run_folder

T0 = 1_750_000_000.0
PHASES = ["data", "forward", "backward", "communicate", "update", "other"]
EPOCHS, STEPS, BATCH = 6, 20, 128


@dataclass(frozen=True)
class Planted:
    """The truth about a candidate. `noise` moves its accuracy by the seed, `jitter` its speed."""

    compute_s: float = 0.03
    communicate_s: float = 0.02
    bytes_per_step: float = 2e6
    final: float = 0.95
    rate: float = 4.0
    finite: bool = True
    status: str = "completed"
    message: str = ""
    noise: float = 0.002
    jitter: float = 0.01
    pause_s: float = 0.005  # of each evaluation
    epochs: int = EPOCHS
    staleness: Mapping[str, int] | None = None
    density: float | None = None
    affinity: tuple[str, ...] = ("0-1", "0-1")
    layout: Mapping[str, int] | None = None


def make_study(folder: Path, study: Study, truths: Mapping[str, Planted], torn: str = "") -> Path:
    """Write a study's folder; candidates without a truth are left out: their runs are missing."""
    open_study(folder, study)
    ends = Recorder(folder)
    for run in planned_runs(study):
        truth = truths.get(run.candidate)
        if truth is None:
            continue
        if truth.status != "refused":
            write_run(run_folder(folder, run.name), run, truth)
        ends.write(RunEnd(run.name, truth.status, truth.message, 30.0))
    ends.close()
    if torn:
        record = run_folder(folder, torn) / "record.jsonl"
        record.write_text(record.read_text() + '{"t": 1750000')
    return folder


def write_run(folder: Path, run: PlannedRun, truth: Planted) -> None:
    """Write the folder of one run."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("data: {source: digits}\n")
    lines = tell(run, truth)
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def tell(run: PlannedRun, truth: Planted) -> list[dict[str, Any]]:
    """The record of one run."""
    chance = random.Random(f"{run.candidate} {run.terms} {run.seed}")
    slower = 1 + chance.gauss(0, truth.jitter)
    final = truth.final + random.Random(run.seed).gauss(0, truth.noise)
    epochs = truth.epochs if truth.status == "completed" else truth.epochs // 2
    t, lines = T0 + 3, [{**_start(run), "affinity": list(truth.affinity), "layout": truth.layout}]
    for epoch in range(epochs):
        step_s = (truth.compute_s + truth.communicate_s) * slower
        t += step_s * STEPS
        lines.append(_steps(t, epoch, truth, slower))
        share = (epoch + 1) / truth.epochs
        top1 = final - (final - 0.1) * math.exp(-truth.rate * share) if final > 0.15 else final
        t += truth.pause_s
        lines.append(_evaluation(t, epoch, top1, truth))
    if truth.staleness:
        beat = {"name": "server0", "step": STEPS * epochs, "staleness": dict(truth.staleness)}
        lines.append({"t": t, "kind": "server", **beat})
    if truth.status == "completed":
        lines.append({"t": t + 0.1, "kind": "end", "status": "completed", "seconds": t + 0.1 - T0})
    else:
        lines.append({"t": t + 0.1, "kind": "end", "status": truth.status, "message": truth.message})
    return lines


def _start(run: PlannedRun) -> dict[str, Any]:
    return {
        "t": T0 + 3, "kind": "start", "attempt": 0, "world_size": 2, "hosts": ["node-a"], "device": "cpu", "threads": 1,
        "parameters": 98_026, "model": "mlp", "data": "digits", "classes": [str(i) for i in range(10)],
        "train_size": STEPS * BATCH, "eval_size": 5000, "batch_size": BATCH, "steps_per_epoch": STEPS, "epochs": EPOCHS,
        "start_step": 0, "start_epoch": 0, "launched_t": T0,
        "environment": {"python": "3.11.7", "torch": "2.11.0", "cpu": "2-core example CPU", "gpus": []},
    }  # fmt: skip


def _steps(t: float, epoch: int, truth: Planted, slower: float) -> dict[str, Any]:
    parts = [0.04, 0.26, 0.56, 0.0, 0.1, 0.04]
    one = [share * truth.compute_s for share in parts]
    one[3] = truth.communicate_s
    rows = [[s * STEPS * slower for s in one] for _ in range(2)]
    first = epoch * STEPS
    steps = range(first, first + STEPS)
    losses = [2.3 * math.exp(-0.03 * i) + 0.1 if truth.finite else float("nan") for i in steps]
    return {
        "t": t, "kind": "steps", "epoch": epoch, "step": (epoch + 1) * STEPS, "losses": losses, "correct": 1000,
        "samples": STEPS * BATCH, "lr": 0.1, "seconds": sum(one) * STEPS * slower, "phases": rows,
        "phase_names": PHASES, "wire_bytes": truth.bytes_per_step * STEPS, "memory_bytes": [4.1e8, 4.2e8],
        "density": truth.density if truth.density is None else truth.density * (2 if epoch == 0 else 1),
    }  # fmt: skip


def _evaluation(t: float, epoch: int, top1: float, truth: Planted) -> dict[str, Any]:
    return {
        "t": t, "kind": "evaluation", "epoch": epoch, "step": (epoch + 1) * STEPS,
        "loss": 0.3 if truth.finite else float("nan"),
        "metrics": {"top1": top1, "macro_f1": top1 - 0.002}, "seconds": truth.pause_s, "samples": 5000,
    }  # fmt: skip
