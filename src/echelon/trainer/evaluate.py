"""Evaluation: each sample once, whatever the number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.core.axes import Axis
from echelon.data.base import Batch
from echelon.data.loader import EvalLoader
from echelon.trainer.metrics import Evaluation
from echelon.trainer.step import evaluating
from echelon.trainer.world import World

_MOST_DIMS = 8
_TYPES = (torch.float32, torch.float64, torch.float16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class EvaluationReport:
    """Metrics over the whole evaluation set, the mean loss per sample, and the detail for the report."""

    loss: float
    samples: int
    seconds: float
    metrics: dict[str, float | None]
    detail: dict[str, Any]


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
    with _without_gradients(world), evaluating(model):
        for inputs, wanted in _batches(loader, world):
            logits = model(inputs.to(world.device, non_blocking=True)).float()
            if wanted is None:
                continue
            targets = wanted.to(world.device, non_blocking=True)
            evaluation.update(logits, targets)
            totals += torch.tensor([float(loss(logits, targets)), len(targets)], dtype=torch.float64)
    if world.data_group is not None:
        totals = totals.to(world.device)
        dist.all_reduce(totals, group=world.data_group)
    total_loss, samples = totals.tolist()
    detail = evaluation.compute(world.data_group)
    detail["classes"] = list(classes)
    seconds = time.perf_counter() - began
    return EvaluationReport(total_loss / max(1.0, samples), round(samples), seconds, detail["metrics"], detail)


def _without_gradients(world: World) -> torch.inference_mode | torch.no_grad:
    """Sharded parameters are gathered in the forward pass, and a gathered one may not be an inference tensor."""
    return torch.no_grad() if world.placement and world.placement.layout.splits else torch.inference_mode()


def _batches(loader: EvalLoader, world: World) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield inputs and targets; where forward is collective, blank inputs too, so that all have as many batches."""
    group = world.placement.group(Axis.FSDP) if world.placement else None
    batches = iter(loader)
    if group is None:
        yield from ((batch.inputs, batch.targets) for batch in batches if len(batch.targets))
        return
    first = next(batches, None)
    most, blank = _agreed(len(loader), first, group, world.device)  # before the first forward, which is collective too
    done = 0
    for batch in chain([first] if first else [], batches):
        done += 1
        yield (batch.inputs, batch.targets) if len(batch.targets) else (blank, None)
    for _ in range(done, most):
        yield blank, None


def _agreed(own: int, first: Batch | None, group: dist.ProcessGroup, device: torch.device) -> tuple[int, Tensor]:
    """Return the most batches that a rank has, and blank inputs of one sample as those of who has any."""
    facts = torch.zeros(2 + _MOST_DIMS, dtype=torch.int64)
    if first is not None:
        shape = first.inputs.shape[1:]
        facts[:2] = torch.tensor([own, _TYPES.index(first.inputs.dtype)])
        facts[2 : 2 + len(shape)] = torch.tensor(shape)
    facts = facts.to(device)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=group)
    most, kind, *shape_ = facts.tolist()
    return most, torch.zeros((1, *(size for size in shape_ if size)), dtype=_TYPES[kind])
