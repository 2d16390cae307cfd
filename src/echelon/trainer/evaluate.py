"""Evaluation: each sample once, whatever the number of ranks."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import psutil
import torch
import torch.distributed as dist
from torch import nn

from echelon.core.axes import Axis
from echelon.core.figure import ReportSection
from echelon.core.task import sampling_interval
from echelon.data.loader import EvalLoader
from echelon.models.trial import evaluating
from echelon.parallel.blocks import kept_gathered
from echelon.tasks import nest
from echelon.tasks.base import ChosenSample, EvaluationResult, Metrics, PendingSection, StreamedMetrics, Task
from echelon.tasks.gathering import RowMessages
from echelon.tasks.nest import Nest
from echelon.trainer.precision import autocast_to
from echelon.trainer.world import World

_SHARE_OF_FREE = 0.25  # of memory, that a model may take which is whole for a while


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class EvaluationReport:
    """What the evaluation set gave, the mean loss per unit, and what reports show of its samples.

    Attributes:
        section: that reports show of what the model has generated.
        collect: begins to bring together what reports show of samples; all ranks call it together, or none.
        test: what that gave; None: there is none, or the weights are not the best so far.
    """

    loss: float
    samples: int
    seconds: float
    result: EvaluationResult
    section: ReportSection | None = None
    collect: Callable[[], PendingSection | None] = _nothing
    test: EvaluationReport | None = None

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Metrics over the whole evaluation set; None: undefined."""
        return self.result.metrics


def evaluate(
    model: nn.Module,
    loader: EvalLoader,
    task: Task,
    world: World,
    advance: Callable[[], None] = _nothing,
    autocast: torch.dtype | None = None,
) -> EvaluationReport:
    """Evaluate a model on the data of all ranks; every rank gets the same report.

    Args:
        advance: is called after each batch of this rank.
        autocast: type of matrix products and the like, as in training; None: that of the parameters.
    """
    began, task = time.perf_counter(), task.for_evaluation()
    metrics, examples, place = task.metrics(world.device), task.examples(), loader.first
    chosen = _Chosen(task.generation_samples, loader.total)
    totals = torch.zeros(3, dtype=torch.float64)
    streamed = _begin_stream(metrics, loader, world)
    with torch.no_grad(), evaluating(model):  # not inference_mode, in which gathered parameters and 8-bit floats fail

        def outputs_of(inputs: Nest) -> Nest:
            """Return what the model makes of inputs."""
            with autocast_to(autocast, world.device):
                return nest.exact(nest.call(model, nest.to_device(inputs, world.device)))

        for given, wanted in batches_of_all(loader, world):
            inputs = nest.to_device(given, world.device)
            outputs = outputs_of(inputs)
            if wanted is None:
                continue
            targets = nest.to_device(wanted, world.device)
            metrics.update(outputs, targets)
            if examples is not None:
                examples.update(inputs, outputs, targets, place, not loader.bad_images)
            chosen.update(inputs, targets, place)
            loss, samples = float(task.loss_sum(outputs, targets)), nest.rows(targets)
            place += samples
            totals += torch.tensor([loss, task.units(targets), samples], dtype=torch.float64)
            advance()
        if streamed is not None:
            streamed.flush()
        with _gathered(model, world):
            generated = task.generated(outputs_of, chosen.samples, world.data_group)
    if world.data_group is not None:
        totals = totals.to(world.device)
        dist.all_reduce(totals, group=world.data_group)
    total_loss, units, samples = totals.tolist()
    result = metrics.compute(world.data_group)
    result = replace(result, metrics={**generated.metrics, **result.metrics})
    collect = _nothing if examples is None else functools.partial(examples.section, world.data_group)
    seconds = time.perf_counter() - began
    return EvaluationReport(
        total_loss / max(1.0, units), round(samples), seconds, result, section=generated.section, collect=collect
    )


def _begin_stream(metrics: Metrics, loader: EvalLoader, world: World) -> StreamedMetrics | None:
    """Let the rows that metrics need of all ranks travel while they are made.

    Not between GPUs, whose links are fast, nor where forward itself is collective: it may use the same group, and ranks
    whose samples could not all be read have a message full after another batch.

    Returns:
        the metrics, where they are such.
    """
    group = world.data_group
    if group is None or dist.get_backend(group) != "gloo" or not isinstance(metrics, StreamedMetrics):
        return None
    if _forward_group(world) is not None:
        return None
    metrics.stream(RowMessages(group, loader.batch_size, -(-loader.most // loader.batch_size)), loader.total)
    return metrics


@contextmanager
def _gathered(model: nn.Module, world: World) -> Iterator[None]:
    """Hold a model that is sharded whole while it writes, token by token, where each rank has room for it.

    Else each token would gather all layers once more.
    """
    group = world.placement.group(Axis.FSDP) if world.placement is not None else None
    if group is None:
        yield
        return
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    has_room = torch.tensor([int(whole <= _SHARE_OF_FREE * _free_bytes(world.device))], device=world.device)
    dist.all_reduce(has_room, op=dist.ReduceOp.MIN, group=group)
    with kept_gathered(model) if has_room else nullcontext():
        yield


def _free_bytes(device: torch.device) -> int:
    """Return the memory that this rank may still take: on a machine, its part of what is free there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class _Chosen:
    """Collects this rank's samples of those that a task generates for: every k-th, whatever the number of ranks.

    Args:
        most: samples over all ranks; 0: none.
        total: samples of the evaluation set.
    """

    def __init__(self, most: int, total: int) -> None:
        self._every = sampling_interval(most, total) if most else 0
        self.samples: list[ChosenSample] = []

    def update(self, inputs: Nest, targets: Nest, place: int) -> None:
        """Look at a batch whose first sample stands at `place` in the evaluation set."""
        if not self._every:
            return
        for i in range(-place % self._every, nest.rows(targets), self._every):
            row = slice(i, i + 1)
            self.samples.append(ChosenSample(place + i, nest.take(inputs, row), nest.take(targets, row)))


def _forward_group(world: World) -> dist.ProcessGroup | None:
    """Return the ranks that one forward pass works together with: they gather layers, or have each other's rows."""
    if world.placement is None:
        return None
    return world.placement.table_group or world.placement.group(Axis.FSDP)


def batches_of_all(loader: EvalLoader, world: World) -> Iterator[tuple[Nest, Nest | None]]:
    """Yield inputs and targets; where forward is collective, all have as many batches: some have no targets."""
    group = _forward_group(world)
    if group is None:
        yield from ((batch.inputs, batch.targets) for batch in loader if nest.rows(batch.targets))
        return
    most = torch.tensor([len(loader)], device=world.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)  # before the first forward, which is collective too
    done = 0
    for batch in loader:
        done += 1
        yield (batch.inputs, batch.targets) if nest.rows(batch.targets) else (nest.first_sample(batch.inputs), None)
    for _ in range(done, int(most)):
        yield loader.example(), None
