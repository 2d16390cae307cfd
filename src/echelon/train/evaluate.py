"""Evaluation: each sample once, whatever the number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.data.loader import EvalLoader
from echelon.train.metrics import Evaluation
from echelon.train.step import evaluating
from echelon.train.world import World


@dataclass(frozen=True)
class EvaluationReport:
    """Metrics over the whole evaluation set, the mean loss per sample, and the detail for the report."""

    loss: float
    samples: int
    seconds: float
    metrics: dict[str, float | None]
    detail: dict[str, Any]


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: EvalLoader,
    loss: Callable[[Tensor, Tensor], Tensor],
    world: World,
    classes: tuple[str, ...],
) -> EvaluationReport:
    """Evaluate a model on the data of all ranks; every rank gets the same report.

    Args:
        model: gives logits `(B, classes)`.
        loss: sums over samples.
    """
    began = time.perf_counter()
    evaluation = Evaluation(len(classes), world.device)
    totals = torch.zeros(2, dtype=torch.float64)
    with evaluating(model):
        for batch in loader:
            if not len(batch.targets):
                continue
            targets = batch.targets.to(world.device, non_blocking=True)
            logits = model(batch.inputs.to(world.device, non_blocking=True)).float()
            evaluation.update(logits, targets)
            totals += torch.tensor([float(loss(logits, targets)), len(targets)], dtype=torch.float64)
    if world.group is not None:
        totals = totals.to(world.device)
        dist.all_reduce(totals, group=world.group)
    total_loss, samples = totals.tolist()
    detail = evaluation.compute(world.group)
    detail["classes"] = list(classes)
    seconds = time.perf_counter() - began
    return EvaluationReport(total_loss / max(1.0, samples), round(samples), seconds, detail["metrics"], detail)
