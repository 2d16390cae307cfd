"""Evaluation: each sample once, whatever the number of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from echelon.core.axes import Axis
from echelon.data.loader import EvalLoader
from echelon.tasks import nest
from echelon.tasks.base import EvaluationResult, Task
from echelon.tasks.nest import Nest
from echelon.trainer.step import evaluating
from echelon.trainer.world import World


@dataclass(frozen=True)
class EvaluationReport:
    """What the evaluation set gave, and the mean loss per unit."""

    loss: float
    samples: int
    seconds: float
    result: EvaluationResult

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Metrics over the whole evaluation set; None: undefined."""
        return self.result.metrics


def evaluate(model: nn.Module, loader: EvalLoader, task: Task, world: World) -> EvaluationReport:
    """Evaluate a model on the data of all ranks; every rank gets the same report."""
    began = time.perf_counter()
    metrics = task.metrics(world.device)
    totals = torch.zeros(3, dtype=torch.float64)
    with _without_gradients(world), evaluating(model):
        for inputs, wanted in batches_of_all(loader, world):
            outputs = nest.exact(nest.call(model, nest.to_device(inputs, world.device)))
            if wanted is None:
                continue
            targets = nest.to_device(wanted, world.device)
            metrics.update(outputs, targets)
            loss, samples = float(task.loss_sum(outputs, targets)), nest.rows(targets)
            totals += torch.tensor([loss, task.units(targets), samples], dtype=torch.float64)
    if world.data_group is not None:
        totals = totals.to(world.device)
        dist.all_reduce(totals, group=world.data_group)
    total_loss, units, samples = totals.tolist()
    result = metrics.compute(world.data_group)
    seconds = time.perf_counter() - began
    return EvaluationReport(total_loss / max(1.0, units), round(samples), seconds, result)


def _without_gradients(world: World) -> torch.inference_mode | torch.no_grad:
    """Sharded parameters are gathered in the forward pass, and a gathered one may not be an inference tensor."""
    return torch.no_grad() if world.placement and world.placement.layout.splits else torch.inference_mode()


def batches_of_all(loader: EvalLoader, world: World) -> Iterator[tuple[Nest, Nest | None]]:
    """Yield inputs and targets; where forward is collective, blank inputs too, so that all have as many batches."""
    group = world.placement.group(Axis.FSDP) if world.placement else None
    if group is None:
        yield from ((batch.inputs, batch.targets) for batch in loader if nest.rows(batch.targets))
        return
    most = torch.tensor([len(loader)], device=world.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)  # before the first forward, which is collective too
    done = 0
    for batch in loader:
        done += 1
        yield (batch.inputs, batch.targets) if nest.rows(batch.targets) else (loader.blank(), None)
    for _ in range(done, int(most)):
        yield loader.blank(), None
