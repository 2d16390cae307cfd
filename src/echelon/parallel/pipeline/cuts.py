"""Where a chain is cut into stages: by hand, or so that measured times balance."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from statistics import median

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError, nearest
from echelon.parallel.pipeline.chain import ChainStep, Unit
from echelon.parallel.pipeline.stage import make_stage
from echelon.tasks import nest
from echelon.tasks.nest import Nest

ROUNDS = 3  # measured forwards and backwards of each unit, after one that is not


def cuts_by_hand(names: Sequence[str], units: Sequence[Unit]) -> tuple[int, ...]:
    """Return the numbers of the units that stages begin with, from names.

    Raises:
        UserError: a name is no unit's, the first one's, or out of order.
    """
    known = [unit.name for unit in units]
    for name in names:
        if name not in known:
            raise UserError(
                f"--cuts: a stage cannot begin with {name!r}: {nearest(name, known)}one can with {', '.join(known[1:])}"
            )
    found = [known.index(name) for name in names]
    if found != sorted(set(found)) or (found and found[0] == 0):
        raise UserError(
            f"--cuts {','.join(names)}: name the blocks that the second and later stages begin with, in forward order"
        )
    return tuple(found)


def balanced(times: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the numbers with which all but the first of `stages` contiguous runs begin, their longest sum least.

    Of several best ways, that with the earliest cuts.

    >>> balanced([1, 1, 1, 3], 2), balanced([2, 1, 1, 1, 1], 3)
    ((3,), (1, 3))
    """
    sums = [0.0, *accumulate(times)]

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return the least longest sum of `left` runs over times[start:], and the cuts that give it."""
        if left == 1:
            return sums[-1] - sums[start], ()
        found = []
        for cut in range(start + 1, len(times) - left + 2):
            rest, cuts = best(cut, left - 1)
            found.append((max(sums[cut] - sums[start], rest), (cut, *cuts)))
        return min(found)

    return best(0, stages)[1]


def stages_of(units: Sequence[Unit], cuts: Sequence[int]) -> tuple[tuple[ChainStep, ...], ...]:
    """Return the steps of each stage."""
    edges = [0, *cuts, len(units)]
    return tuple(tuple(step for unit in units[start:stop] for step in unit.steps) for start, stop in pairwise(edges))


def measure_units(model: nn.Module, units: Sequence[Unit], example: Nest) -> list[float]:
    """Return the seconds of each unit's forward and backward for one micro-batch.

    One unit at a time is copied, so that a model on the meta device can be measured, and the model keeps its state.
    Units of the same structure are measured once: their times are equal by nature, and only noise would differ.

    Args:
        example: inputs of a micro-batch, of any values, on the device to measure.
    """
    x: Nest = example
    device: torch.device = nest.leaves(example)[0].device
    known: dict[object, float] = {}
    times = []
    for i, unit in enumerate(units):
        copied = _materialised(make_stage(model, unit.steps, i == 0, i == len(units) - 1, example), device)
        signature = _signature(copied, unit, x)
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type):
            out = copied(*nest.leaves(x))
            if signature not in known:
                known[signature] = median(_seconds(copied, x) for _ in range(ROUNDS))
        times.append(known[signature])
        x = out.detach()
    return times


def _seconds(unit: nn.Module, x: Nest) -> float:
    given = [each.clone().requires_grad_() if each.is_floating_point() else each for each in nest.leaves(x)]
    _wait(given[0].device)
    began = time.perf_counter()
    out = unit(*given)
    if out.requires_grad:
        out.sum().backward()
    _wait(given[0].device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _materialised(unit: nn.Module, device: torch.device) -> nn.Module:
    def blank(tensor: Tensor) -> Tensor:
        """Return a small constant of the same shape and dtype on the device."""
        return torch.full_like(tensor, 0.01 if tensor.is_floating_point() else 0, device=device)

    memo: dict[int, object] = {}
    for parameter in unit.parameters():
        memo[id(parameter)] = nn.Parameter(blank(parameter.detach()), requires_grad=parameter.requires_grad)
    memo.update({id(buffer): blank(buffer) for buffer in unit.buffers() if id(buffer) not in memo})
    return copy.deepcopy(unit, memo)


def _signature(unit: nn.Module, steps: Unit, x: Nest) -> object:
    shapes = tuple(tuple(tensor.shape) for tensor in (*unit.parameters(), *unit.buffers()))
    settings = tuple(str(unit.get_submodule(s.name)) if s.name[0] not in ":=" else s.name for s in steps.steps)
    return shapes, settings, tuple((each.shape, each.dtype) for each in nest.leaves(x))
