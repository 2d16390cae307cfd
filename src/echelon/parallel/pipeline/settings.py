"""What is chosen of a pipeline, the schedules that there are, and what they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.core.errors import UserError, unknown
from echelon.core.hints import Style as TensorStyle

Style = Literal["loop", "v"]
Types = tuple[torch.dtype | None, torch.dtype | None]


@dataclass(frozen=True)
class ScheduleKind:
    """One schedule.

    Attributes:
        torch_name: its class in `torch.distributed.pipelining`.
        words: what it does, and the paper.
        stages_per_rank: that it needs at least; those with 1 take no more.
        style: which rank has which stage: stage s on rank s mod p, or down the ranks and up again.
        exact: whether it takes no more stages per rank.
    """

    torch_name: str
    words: str
    stages_per_rank: int
    style: Style = "loop"
    exact: bool = True


SCHEDULES = {
    "gpipe": ScheduleKind("ScheduleGPipe", "all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)", 1),
    "1f1b": ScheduleKind("Schedule1F1B", "one forward, one backward (Narayanan et al. 2019, PipeDream-flush)", 1),
    "looped_bfs": ScheduleKind(
        "ScheduleLoopedBFS", "gpipe over several stages a rank (Lamy-Poirier 2023, arXiv:2211.05953)", 2, exact=False
    ),
    "interleaved": ScheduleKind(
        "ScheduleInterleaved1F1B",
        "1f1b over several stages a rank (Narayanan et al. 2021, arXiv:2104.04473)",
        2,
        exact=False,
    ),
    "zero_bubble": ScheduleKind(
        "ScheduleInterleavedZeroBubble",
        "interleaved, with the weights' part of backward where ranks would wait (Qi et al. 2023, arXiv:2401.10241, H1)",
        2,
        exact=False,
    ),
    "zbv": ScheduleKind("ScheduleZBVZeroBubble", "zero bubble on stages in a V (same paper, section 6)", 2, "v"),
    "dualpipev": ScheduleKind("ScheduleDualPipeV", "forwards beside backwards on a V (DeepSeek-AI 2025)", 2, "v"),
}


@dataclass(frozen=True)
class PipelineSettings:
    """How a model is cut, and in which order micro-batches go through it.

    Attributes:
        schedule: one of `SCHEDULES`.
        microbatches: parts of a batch; 0: as many as the schedule needs to fill the ranks. 1 is layer-wise model
            parallelism.
        cuts: names of the steps that stages begin with, but the first; empty: balanced by measured time.
        samples: of a whole batch on this rank, to be cut into micro-batches; 0: not known.
        autocast: type that autocast gives to matrix products; None: no autocast.
        parameters: type of the copies of the parameters that forward uses in training; None: the parameters.
        sharded: whether `fully_shard` makes these copies, which it does in evaluation too.
        recorded: how many steps, from the third on, are recorded as a timeline.
        data_group: ranks that go through the same stages together with other samples (fsdp), None where there are
            none: with BatchNorm they have to agree on the number of micro-batches of an uneven batch.
        styles: of tensor parallelism, by module: there is no cut where activations are split.
    """

    schedule: str = "1f1b"
    microbatches: int = 0
    cuts: tuple[str, ...] = ()
    samples: int = 0
    autocast: torch.dtype | None = None
    parameters: torch.dtype | None = None
    sharded: bool = False
    recorded: int = 2
    data_group: dist.ProcessGroup | None = None
    styles: Mapping[str, TensorStyle] = field(default_factory=dict)

    def types(self, training: bool) -> Types:
        """Return the types of what goes from stage to stage: of autocast and of narrow parameters."""
        return (self.autocast, self.parameters if training or self.sharded else None)


class PipelineResult(NamedTuple):
    """Of a batch, the same on every rank of the pipeline.

    Attributes:
        loss: the sum of the losses over the divisor, in float32 (float64 of a float64 model).
        score: the task's training score, as a number on the device.
        samples: targets.
    """

    loss: Tensor
    score: Tensor
    samples: int


def schedule_kind(name: str) -> ScheduleKind:
    """Return a schedule.

    Raises:
        UserError: there is none of this name.
    """
    if name not in SCHEDULES:
        raise UserError(f"--parallel schedule={name}: {unknown('schedule', name, SCHEDULES)}")
    return SCHEDULES[name]


def stage_count(settings: PipelineSettings, ranks: int, units: int) -> int:
    """Return how many stages there are: what hand-made cuts say, else what the schedule needs at least.

    Args:
        units: blocks with parameters that the model has.

    Raises:
        UserError: the schedule does not take that many, or the model does not have them.
    """
    kind = schedule_kind(settings.schedule)
    stages = len(settings.cuts) + 1 if settings.cuts else ranks * kind.stages_per_rank
    least, more = ranks * kind.stages_per_rank, "" if kind.exact else " or a multiple"
    asked = f"--parallel pp={ranks},schedule={settings.schedule}"
    if stages < least or stages % ranks or (kind.exact and stages != least):
        raise UserError(
            f"{asked} needs {kind.stages_per_rank} stages per rank, that is {least}{more} in all; cuts at "
            f"{', '.join(settings.cuts)} make {stages}: give {least - 1} cuts, or leave cuts out"
        )
    if stages > units:
        single = ", or schedule=1f1b, which needs one stage per rank" if kind.stages_per_rank > 1 else ""
        raise UserError(
            f"{asked} needs {stages} stages, and the model has {units} blocks with parameters to make them of: "
            f"use pp={max(1, units // kind.stages_per_rank)} or less{single}"
        )
    return stages


def microbatch_count(settings: PipelineSettings, ranks: int, stages: int) -> int:
    """Return into how many micro-batches a batch is cut.

    Raises:
        UserError: the schedule does not take that many, a batch has fewer samples, or what is asked for does not
            divide it.
    """
    name, asked = settings.schedule, settings.microbatches
    count = asked or (stages if name == "dualpipev" else ranks)
    where = f"--parallel pp={ranks},schedule={name},microbatches={count}"
    if name in ("interleaved", "zero_bubble") and count > ranks and count % (count // ranks):
        raise UserError(f"{where}: use a multiple of {ranks}, such as {count // ranks * ranks}")
    if name == "dualpipev" and count < stages:
        raise UserError(f"{where} needs at least as many micro-batches as stages: microbatches={stages}")
    if settings.samples and count > settings.samples:
        raise UserError(
            f"{where}: a batch has {settings.samples} samples on each rank, and a micro-batch at least one: "
            f"use microbatches={settings.samples} or less, or a larger --batch-size"
        )
    if asked and settings.samples % count:
        fits = max(n for n in range(1, count) if settings.samples % n == 0)
        raise UserError(
            f"{where}: {count} micro-batches do not divide the {settings.samples} samples that a batch has on each "
            f"rank: use microbatches={fits}, or a --batch-size that they divide"
        )
    return count


def stage_ranks(kind: ScheduleKind, stages: int, ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage.

    >>> stage_ranks(SCHEDULES["interleaved"], 4, 2), stage_ranks(SCHEDULES["zbv"], 4, 2)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    if kind.style == "loop":
        return tuple(stage % ranks for stage in range(stages))
    return tuple(at if lap % 2 == 0 else ranks - 1 - at for lap, at in (divmod(s, ranks) for s in range(stages)))


def schedule_class(name: str, count: int, ranks: int, stages: int) -> tuple[type[Any], bool]:
    """Return torch's class for a schedule and a number of micro-batches, and whether it takes one stage per rank.

    The short batch at the end of an epoch may have fewer micro-batches than a schedule takes: then the simplest one
    on the same stages takes it, whose sums are the same.
    """
    if name == "1f1b" and count < ranks:
        name = "gpipe"
    elif name in ("interleaved", "zero_bubble") and count > ranks and count % (count // ranks):
        name = "looped_bfs"
    elif name == "dualpipev" and count < stages:
        name = "zbv"
    from torch.distributed.pipelining import schedules

    return getattr(schedules, SCHEDULES[name].torch_name), SCHEDULES[name].stages_per_rank == 1
