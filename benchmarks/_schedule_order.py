"""What a pipeline's step would have been had messages taken no time: each rank's computations, in order, as long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from echelon.records.kinds import PipelineAction

Key = tuple[str, int, int]


def _key(action: PipelineAction) -> Key:
    kind = "backward" if action.kind == "input" else action.kind
    return kind, action.stage, action.microbatch


def _needs(action: PipelineAction, last: int) -> Key | None:
    """Return the computation that an action waits for; the first stage computes all of its backward as `weight`."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "forward":
        return ("forward", stage - 1, microbatch) if stage else None
    if action.kind == "weight" and stage:
        return "backward", stage, microbatch
    return ("forward", stage, microbatch) if stage == last else ("backward", stage + 1, microbatch)


def _by_rank(actions: Sequence[PipelineAction]) -> dict[int, list[PipelineAction]]:
    ordered = sorted(actions, key=lambda action: action.begin_s)
    return {rank: [a for a in ordered if a.rank == rank] for rank in sorted({a.rank for a in actions})}


def without_messages(actions: Sequence[PipelineAction]) -> list[PipelineAction]:
    """Return the actions as early as their order and what they need allow; nothing else takes time.

    Raises:
        ValueError: an action needs one that is not there.
    """
    last, waiting = max(action.stage for action in actions), _by_rank(actions)
    free, ends = dict.fromkeys(waiting, 0.0), dict[Key, float]()
    found: list[PipelineAction] = []
    while any(waiting.values()):
        before = len(found)
        for rank, mine in waiting.items():
            while mine and ((needed := _needs(mine[0], last)) is None or needed in ends):
                action = mine.pop(0)
                begin = max(free[rank], ends[needed] if needed else 0.0)
                free[rank] = ends[_key(action)] = begin + action.end_s - action.begin_s
                found.append(replace(action, begin_s=begin, end_s=free[rank]))
        if len(found) == before:
            raise ValueError("an action waits for one that no rank has")
    return found


def seconds_between(actions: Sequence[PipelineAction]) -> float:
    """Return the median time between two computations of a rank of which the second had to wait for no other rank's."""
    last = max(action.stage for action in actions)
    ends, ranks = {_key(a): a.end_s for a in actions}, {_key(a): a.rank for a in actions}
    gaps = []
    for rank, mine in _by_rank(actions).items():
        for before, after in pairwise(mine):
            needed = _needs(after, last)
            if needed is None or ranks[needed] == rank or ends[needed] <= before.end_s:
                gaps.append(after.begin_s - before.end_s)
    return median(gaps) if gaps else 0.0
