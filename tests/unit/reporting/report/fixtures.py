"""Run folders as a run would leave them, made from a seed: a believable training, with a death if wanted."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PHASES = ["data", "forward", "backward", "communicate", "update", "other"]
CIFAR = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
T0 = 1_750_000_000.0
WINDOW = 10
CONFIG = """\
data:
  source: data/cifar10
  batch_size: 256
  loaders: 1
model:
  name: resnet20
optimizer:
  name: sgd
  lr: 0.2
training:
  epochs: {epochs}
  seed: 0
strategy:
  parallel: dp=-1
  sync: allreduce
  compression: {compression}
  collective: auto
launch:
  workers: {workers}
"""


@dataclass(frozen=True)
class LiveState:
    """What the made-up run went through. `phases_s` are seconds per step for each rank."""

    phases_s: tuple[tuple[float, ...], ...] = (
        (0.020, 0.022, 0.044, 0.016, 0.004, 0.002),
        (0.022, 0.022, 0.045, 0.013, 0.004, 0.002),
    )
    epochs: int = 12
    steps_per_epoch: int = 60
    batch_size: int = 256
    death_at: int | None = None
    status: str | None = "completed"
    classes: list[str] = field(default_factory=lambda: list(CIFAR))
    compression: str = "none"
    wire_bytes_per_step: float = 2_180_000.0
    jitter: float = 0.04
    seed: int = 0


class Teller:
    """Writes the record line by line while a clock runs."""

    def __init__(self, story: LiveState) -> None:
        self.story = story
        self.random = random.Random(story.seed)
        self.t = T0
        self.lines: list[dict[str, Any]] = []

    def say(self, kind: str, **values: Any) -> None:
        self.lines.append({"t": round(self.t, 4), "kind": kind, **values})

    def start(self, attempt: int, step: int) -> None:
        story = self.story
        launched = T0 if attempt == 0 else self.t - 2.4
        self.t += 4.1 if attempt == 0 else 0.0
        n = len(story.phases_s)
        self.say(
            "start", attempt=attempt, world_size=n, hosts=["node-a"] * n, pids=list(range(4100, 4100 + n)),
            backend="gloo", device="cpu", threads=1, parameters=272_474, model="resnet20", data="data/cifar10",
            classes=story.classes, train_size=story.steps_per_epoch * story.batch_size, eval_size=10_000,
            batch_size=story.batch_size, steps_per_epoch=story.steps_per_epoch, epochs=story.epochs, start_step=step,
            start_epoch=step // story.steps_per_epoch, launched_t=launched,
            environment={
                "python": "3.12.4", "torch": "2.11.0", "platform": "Linux-6.1-x86_64", "cpu": "8-core example CPU",
                "gpus": [], "echelon": "0.1.0", "command": ["echelon", "train", "data/cifar10", "--workers", str(n)],
            },
        )  # fmt: skip

    def steps(self, first: int, last: int) -> None:
        story, slower = self.story, 1 + max(0.0, self.random.gauss(0, self.story.jitter))
        n = last - first + 1
        phases = [[s * n * slower * self.random.uniform(0.99, 1.01) for s in rank] for rank in story.phases_s]
        whole = max(sum(rank) for rank in phases)
        for rank in phases:
            rank[3] += whole - sum(rank)
        self.t += whole
        total = story.epochs * story.steps_per_epoch
        losses = [2.3 * math.exp(-3.2 * s / total) + 0.25 + self.random.gauss(0, 0.06) for s in range(first, last + 1)]
        accuracy = min(0.99, 0.92 - 0.8 * math.exp(-4 * last / total) + self.random.gauss(0, 0.01))
        sent = story.wire_bytes_per_step * n
        self.say(
            "steps", epoch=(last - 1) // story.steps_per_epoch, step=last, losses=losses, samples=n * story.batch_size,
            correct=round(accuracy * n * story.batch_size), lr=0.1 * (1 + math.cos(math.pi * last / total)),
            seconds=whole, phases=phases, phase_names=PHASES, wire_bytes=sent,
            wire_bytes_by_group={"convolutions": sent * 0.93, "linear": sent * 0.05, "norms and biases": sent * 0.02},
            memory_bytes=[412e6 + 3e6 * r for r in range(len(phases))],
        )  # fmt: skip

    def evaluation(self, step: int) -> None:
        share = step / (self.story.epochs * self.story.steps_per_epoch)
        top1 = 0.895 - 0.6 * math.exp(-5 * share) + self.random.gauss(0, 0.006)
        self.t += 1.3
        metrics = {
            "top1": top1, "top5": 1 - (1 - top1) * 0.06, "macro_f1": top1 - 0.002,
            "macro_precision": top1 + 0.001, "macro_recall": top1, "roc_auc": 1 - (1 - top1) * 0.08,
        }  # fmt: skip
        epoch = step // self.story.steps_per_epoch - 1
        loss = 2.2 * math.exp(-3.4 * share) + 0.33
        self.say("evaluation", epoch=epoch, step=step, loss=loss, metrics=metrics, seconds=1.3, samples=10_000)

    def checkpoint(self, step: int, reason: str) -> None:
        self.t += 0.05
        path = f"checkpoints/{step:08d}"
        self.say("checkpoint", step=step, blocked_s=0.05, total_s=0.4, n_bytes=2_200_000, path=path, reason=reason)

    def death(self, rank: int) -> None:
        said = f"rank {rank} on node-a (pid {4100 + rank}) was killed by signal 9"
        self.t += 0.2
        self.say("event", name="worker_died", message=said, rank=rank, host="node-a", pid=4100 + rank, signal=9)
        self.t += 2.2
        self.say("event", name="restarted", message="2 workers restarted from the checkpoint of step 360")


def tell(story: LiveState) -> list[dict[str, Any]]:
    """The records of a whole run: epochs of windows, evaluations, checkpoints, perhaps a death."""
    teller, step, attempt = Teller(story), 0, 0
    saved = 0
    teller.start(attempt, step)
    while step < story.epochs * story.steps_per_epoch:
        if story.death_at is not None and step >= story.death_at and attempt == 0:
            teller.death(1)
            attempt, step = 1, saved
            teller.start(attempt, step)
        teller.steps(step + 1, step + WINDOW)
        step += WINDOW
        if step % story.steps_per_epoch == 0:
            teller.evaluation(step)
            if step // story.steps_per_epoch % 2 == 0:
                teller.checkpoint(step, "after the epoch")
                saved = step
    if story.status is not None:
        teller.say("end", status=story.status, seconds=teller.t - T0, message="")
    return teller.lines


def evaluation_detail(classes: list[str], seed: int = 0) -> dict[str, Any]:
    """A last evaluation in detail: confusion with a few confusable neighbours, concave ROC curves."""
    chance, n = random.Random(seed), len(classes)
    per_class = 10_000 // n if n <= 100 else 50
    confusion = []
    for i in range(n):
        row = [0] * n
        wrong = round(per_class * chance.uniform(0.04, 0.2))
        for _ in range(wrong):
            row[(i + chance.choice([1, 1, 1, 2, 2, 3, n // 2])) % n] += 1
        row[i] += per_class - sum(row)
        confusion.append(row)
    recall = [row[i] / per_class for i, row in enumerate(confusion)]
    columns = [sum(row[j] for row in confusion) for j in range(n)]
    precision = [confusion[j][j] / max(1, columns[j]) for j in range(n)]
    f1 = [2 * p * r / (p + r) if p + r else 0.0 for p, r in zip(precision, recall, strict=True)]
    auc = [0.9 + 0.1 * r for r in recall]
    fpr = [(i / 100) ** 2 for i in range(101)]
    curves = {str(i): {"fpr": fpr, "tpr": [x ** ((1 - a) / a) for x in fpr]} for i, a in enumerate(auc)}
    mean = sum(auc) / n
    metrics = {"top1": sum(recall) / n, "top5": 0.99, "macro_f1": sum(f1) / n, "roc_auc": mean}
    return {
        "epoch": 12, "step": 720, "classes": classes, "metrics": metrics, "confusion": confusion,
        "per_class": {"precision": precision, "recall": recall, "f1": f1, "roc_auc": auc, "support": [per_class] * n},
        "roc": {"macro": {"fpr": fpr, "tpr": [x ** ((1 - mean) / mean) for x in fpr]}, **curves},
        "notes": ["ROC curves are computed from scores in 200 bins."],
    }  # fmt: skip


def make_run(folder: Path, story: LiveState | None = None, detail: bool = True) -> Path:
    """Write the folder of a run; returns it."""
    told = story or LiveState()
    folder.mkdir(parents=True, exist_ok=True)
    n = len(told.phases_s)
    (folder / "config.yaml").write_text(CONFIG.format(epochs=told.epochs, compression=told.compression, workers=n))
    write_record(folder, tell(told))
    if detail:
        (folder / "evaluation.json").write_text(json.dumps(evaluation_detail(told.classes)))
    return folder


def write_record(folder: Path, lines: list[dict[str, Any]], tail: str = "") -> None:
    """Write `record.jsonl`, perhaps with a torn last line."""
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
