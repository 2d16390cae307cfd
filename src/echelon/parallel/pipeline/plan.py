"""Which rank gets which part of a model: decided before anything is split, and shown by a dry run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints
from echelon.parallel.pipeline.chain import ChainStep, Unit, check_tied, units_of
from echelon.parallel.pipeline.cuts import balanced, cuts_by_hand, measure_units, stages_of
from echelon.parallel.pipeline.find_chain import MAKES_CHAIN, declares_chain, find_chain, no_chain
from echelon.parallel.pipeline.settings import (
    SCHEDULES,
    PipelineSettings,
    microbatch_count,
    stage_count,
    stage_ranks,
)
from echelon.parallel.pipeline.traced_chain import check_chain
from echelon.tasks import nest
from echelon.tasks.nest import Nest


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
        rank: in the pipeline.
        steps: of the model's chain.
        numel: numbers in its parameters.
        seconds: measured, for forward and backward of one micro-batch; None where cuts are made by hand.
    """

    rank: int
    steps: tuple[ChainStep, ...]
    numel: int
    seconds: float | None

    def __str__(self) -> str:
        first, last = self.steps[0].name, self.steps[-1].name
        time = "" if self.seconds is None else f", {self.seconds * 1000:.2f} ms a micro-batch"
        return f"{first} to {last}: {self.numel:,} parameters{time}, on rank {self.rank}"


def plan_stages(
    model: nn.Module, hints: Hints | None, settings: PipelineSettings, ranks: int, example: Nest
) -> tuple[StagePlan, ...]:
    """Decide where a model is cut; with a process group, all ranks call it and take rank 0's measurement.

    Args:
        model: on any device, meta included.
        example: inputs of at least one sample, of any values, on the device that is to be measured.

    Raises:
        UserError: the model is no chain, has too few blocks for the schedule, or a cut does not fit it.
    """
    units = units_of(find_chain(model, hints), settings.styles)
    if not declares_chain(model, hints):
        _check_together(model, units, example, settings.autocast)
    count = stage_count(settings, ranks, len(units))
    where = stage_ranks(SCHEDULES[settings.schedule], count, ranks)
    times: Sequence[float] | None = None
    if settings.cuts:
        cuts = cuts_by_hand(settings.cuts, units)
    elif count == len(units):
        cuts = tuple(range(1, count))
    else:
        microbatches = microbatch_count(settings, ranks, count)
        times = _shared_times(model, units, _as_microbatch(example, settings.samples // microbatches))
        cuts = balanced(times, count)
    stages = stages_of(units, cuts)
    check_tied(model, stages)
    edges = [0, *cuts, len(units)]
    seconds = [None if times is None else sum(times[a:b]) for a, b in pairwise(edges)]
    return tuple(
        StagePlan(rank, steps, sum(step.numel for step in steps), taken)
        for rank, steps, taken in zip(where, stages, seconds, strict=True)
    )


def _check_together(model: nn.Module, units: Sequence[Unit], example: Nest, autocast: torch.dtype | None) -> None:
    """Try a traced chain on every rank; where one finds another output, all refuse.

    Raises:
        UserError: names the unit, or says that outputs differ.
    """
    problem = check_chain(model, units, example, autocast)
    wrong = torch.tensor([float(bool(problem))], device=nest.leaves(example)[0].device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(wrong)
    if wrong.item():
        reason = problem or "as another rank says, its modules one after the other give other outputs"
        raise no_chain(type(model).__name__, MAKES_CHAIN, reason)


def _as_microbatch(example: Nest, samples: int) -> Nest:
    """Repeat samples until there are as many as in a micro-batch: small ones would show overheads alone."""
    device = nest.leaves(example)[0].device
    return nest.take(example, torch.arange(samples, device=device) % nest.rows(example)) if samples else example


def _shared_times(model: nn.Module, units: Sequence[Unit], example: Nest) -> list[float]:
    """Measure on rank 0 of the world: every replica has to be cut alike, whatever the load on its machine.

    Raises:
        UserError: a unit cannot run by itself; on all ranks, which would else wait for the first one's times.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    device = nest.leaves(example)[0].device
    times = torch.zeros(len(units), device=device)
    failure: Exception | None = None
    if alone or dist.get_rank() == 0:
        try:
            times += torch.tensor(measure_units(model, units, example), device=device)
        except Exception as error:  # noqa: BLE001  a model's forward may raise any
            failure = error
            times += torch.nan
    if not alone:
        dist.broadcast(times, src=0)
    if times.isnan().any():
        reason = f": {str(failure).partition(chr(10))[0]}" if failure is not None else ", as the first rank says"
        raise UserError(
            f"--parallel pp: a block of {type(model).__name__} cannot run by itself{reason}; use fsdp=N for this model"
        ) from failure
    return [float(each) for each in times.tolist()]
