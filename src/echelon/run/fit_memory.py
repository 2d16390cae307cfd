"""`--accumulate auto`: the fewest micro-batches with which a run is forecast to fit the memory that is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil

from echelon.config import RunConfig
from echelon.core.errors import UserError, naming
from echelon.core.units import format_bytes
from echelon.observe.oom import memory_group
from echelon.run.machine import say
from echelon.run.micro_batches import samples_of, twice, with_micro_batches
from echelon.run.out_of_memory import PROCESS_BYTES

if TYPE_CHECKING:
    import torch
    from torch import nn

    from echelon.data.base import DataInfo
    from echelon.trainer.assemble import UserObjects
    from echelon.trainer.resolved import ResolvedRun

USED_SHARE = 0.9  # of what is free: a forecast is no measurement
_FLAG = "--accumulate auto"


def chosen(run: ResolvedRun, ranks: int, user_objects: UserObjects | None) -> RunConfig:
    """Return the description of a run with its number of micro-batches chosen.

    Args:
        ranks: all of them, which are of this machine.

    Raises:
        UserError: nothing can be forecast, or nothing fits.
    """
    from echelon.trainer.world import choose_device

    objects = user_objects
    if objects is not None and (objects.task is not None or objects.loss is not None):
        raise UserError(f"{_FLAG}: what a task or a loss of your own needs cannot be forecast: give a number")
    source = objects.source if objects is not None and objects.source is not None else run.source.open()
    model = objects.model if objects is not None else None
    device = choose_device(run.config.training.device, 0, ranks)

    def need(count: int) -> int:
        """Forecast what the largest rank needs."""
        cut = replace(run, config=with_micro_batches(run.config, count))
        with naming(_FLAG):
            return needed_bytes(cut, source.info, ranks, device, model)

    with naming(_FLAG):
        free = free_bytes(device, ranks)
    count = fewest(need, samples_of(run, ranks), free)
    say(f"{_FLAG}: {count} micro-batch{'es' * (count > 1)}, to fit {format_bytes(free)} for each worker")
    return with_micro_batches(run.described, count)


def needed_bytes(
    run: ResolvedRun, info: DataInfo, ranks: int, device: torch.device, model: nn.Module | None = None
) -> int:
    """Forecast the bytes that the fullest rank needs, beyond what its process and its libraries take.

    Args:
        model: the caller's own, in place of the described one.

    Raises:
        UserError: the model cannot be laid out so, or values matter to it.
    """
    from echelon.forecast.memory import forecast

    predicted = forecast(run, info, ranks, model)
    if predicted.unknown or not predicted.memory:
        raise UserError(f"memory cannot be forecast ({predicted.unknown}): choose by hand")
    copies = device.type == "cpu"  # checkpoints are copied into the processor's memory
    return max(m.peak + m.checkpoint * copies for m in predicted.memory) + predicted.leader * copies


def fewest(need: Callable[[int], int], samples: int, free: int) -> int:
    """Return the first of 1, 2, 4, ... micro-batches, at most one for each sample, whose need of bytes fits.

    Raises:
        UserError: none does.
    """
    for count in _counts(samples):
        needed = need(count)
        if needed <= free:
            return count
    raise UserError(
        f"{_FLAG}: a rank is forecast to need {format_bytes(needed)} with one sample at a time, and may use "
        f"{format_bytes(free)}: use fewer workers, --recompute blocks, or divide the model with --parallel"
    )


def _counts(samples: int) -> Iterator[int]:
    count: int | None = 1
    while count is not None:
        yield count
        count = twice(count, samples)


def free_bytes(device: torch.device, ranks: int) -> int:
    """Return what a rank may use of the memory that is free now: of its GPU, or of the machine's that all share.

    Raises:
        UserError: the GPU does not tell.
    """
    if device.type == "cuda":
        from echelon.observe.resources import Gpu
        from echelon.trainer.window import gpu_uuid

        try:
            _, used, total = Gpu(gpu_uuid(device)).read()
        except RuntimeError as error:
            raise UserError(f"the memory of the GPU is not known ({error}): choose by hand") from error
        return max(0, int(USED_SHARE * (total - used)) - PROCESS_BYTES)
    group = memory_group(os.getpid())
    limited = group.free_bytes() if group is not None else None
    free = psutil.virtual_memory().available
    return max(0, int(USED_SHARE * min(free, free if limited is None else limited) / ranks) - PROCESS_BYTES)
