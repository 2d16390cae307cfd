"""The order in which each rank of a pipeline computes: that of torch's schedules, without ranks, model or messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from echelon.parallel.pipeline.settings import SCHEDULES, schedule_class, stage_ranks
from echelon.parallel.pipeline.timeline import Kind

_KINDS: dict[str, Kind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input",
    "BACKWARD_WEIGHT": "weight",
}


class Computation(NamedTuple):
    """A stage's work on a micro-batch; `kind` as in the timeline of a run."""

    stage: int
    microbatch: int
    kind: Kind


def computation_order(schedule: str, count: int, ranks: int, stages: int) -> tuple[tuple[Computation, ...], ...]:
    """Return what each rank computes for `count` micro-batches, in order.

    Like a run, it takes the schedule that stands in for one that does not take so few micro-batches.

    >>> [f"{each.kind[0]}{each.microbatch}" for each in computation_order("1f1b", 3, 2, 2)[0]]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    kind, single = schedule_class(schedule, count, ranks, stages)
    if single:
        ahead = count if kind.__name__ == SCHEDULES["gpipe"].torch_name else 0
        return tuple(_of_one_stage(stage, ahead or min(stages - stage, count), count) for stage in range(stages))
    return tuple(_of_several(kind, rank, schedule, (count, ranks, stages)) for rank in range(ranks))


def _of_one_stage(stage: int, ahead: int, count: int) -> tuple[Computation, ...]:
    """Return a stage's order: so many forwards, then a backward and a forward in turn."""
    order = [Computation(stage, i, "forward") for i in range(ahead)]
    for number in range(count):
        order.append(Computation(stage, number, "backward"))
        if ahead + number < count:
            order.append(Computation(stage, ahead + number, "forward"))
    return tuple(order)


def _of_several(kind: type[Any], rank: int, schedule: str, sizes: tuple[int, int, int]) -> tuple[Computation, ...]:
    count, ranks, stages = sizes
    mine = [s for s, at in enumerate(stage_ranks(SCHEDULES[schedule], stages, ranks)) if at == rank]
    stand_ins = [
        SimpleNamespace(stage_index=s, num_stages=stages, group_size=ranks, group_rank=rank, submod=None) for s in mine
    ]
    planned = kind(stand_ins, n_microbatches=count)
    found = []
    for action in planned.pipeline_order_with_comms[rank]:
        for each in action.sub_actions or (action,):
            if each.computation_type.name in _KINDS:
                found.append(Computation(each.stage_index, each.microbatch_index, _KINDS[each.computation_type.name]))
    return tuple(found)


def needed(work: Computation, last: int) -> Computation | None:
    """Return the computation of a neighbouring stage whose result one waits for; none: of its own stage's alone.

    Args:
        last: the last stage.
    """
    if work.kind == "forward":
        return Computation(work.stage - 1, work.microbatch, "forward") if work.stage else None
    if work.kind == "weight" or work.stage == last:
        return None
    return Computation(work.stage + 1, work.microbatch, "backward")
