"""`--accumulate auto` and `--batch-size auto`: what a run is forecast to fit the memory with that is there.

The first takes the fewest micro-batches, the second the largest batch.
"""

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
from echelon.run.resolve import LaunchRequest, resolve

if TYPE_CHECKING:
    import torch
    from torch import nn

    from echelon.data.base import DataInfo
    from echelon.trainer.assemble import UserObjects
    from echelon.trainer.resolved import ResolvedRun

USED_SHARE = 0.9  # of what is free: a forecast is no measurement
_MICRO_BATCHES = "--accumulate auto"
_BATCH = "--batch-size auto"
LEAST_STEPS = 50
"""Steps that are left of an epoch: fewer hardly train, whatever memory would hold."""


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
        raise UserError(f"{_MICRO_BATCHES}: what a task or a loss of your own needs cannot be forecast: give a number")
    source = objects.source if objects is not None and objects.source is not None else run.source.open()
    model = objects.model if objects is not None else None
    device = choose_device(run.config.training.device, 0, ranks)

    def need(count: int) -> int:
        """Forecast what the largest rank needs."""
        cut = replace(run, config=with_micro_batches(run.config, count))
        with naming(_MICRO_BATCHES):
            return needed_bytes(cut, source.info, ranks, device, model)

    with naming(_MICRO_BATCHES):
        free = free_bytes(device, ranks)
    count = fewest(need, samples_of(run, ranks), free)
    say(f"{_MICRO_BATCHES}: {count} micro-batch{'es' * (count > 1)}, to fit {format_bytes(free)} for each worker")
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
        f"{_MICRO_BATCHES}: a rank is forecast to need {format_bytes(needed)} with one sample at a time, and may use "
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


def with_batch(request: LaunchRequest, workers: int, user_objects: UserObjects | None = None) -> RunConfig:
    """Return a description with its batch chosen for this machine, which it leaves open; says what was chosen.

    Batches are the smallest that the layout divides evenly, times a power of two.

    Raises:
        UserError: machines might not choose alike, nothing can be forecast, or nothing fits.
    """
    config = request.config
    _check(request)
    from echelon.trainer.world import choose_device

    objects = user_objects
    if objects is not None and (objects.task is not None or objects.loss is not None):
        raise UserError(f"{_BATCH}: what a task or a loss of your own needs cannot be forecast: give a number")
    factory = objects.optimizer if objects is not None else None
    described = resolve(_with(config, workers), factory)
    source = objects.source if objects is not None and objects.source is not None else described.source.open()
    model = objects.model if objects is not None else None
    layout = request.layout.resolve(workers)
    parts = described.batch_parts(layout)
    device = choose_device(config.training.device, 0, workers)

    def need(batch: int) -> int:
        """Forecast what the fullest rank needs."""
        with naming(_BATCH):
            return needed_bytes(resolve(_with(config, batch), factory), source.info, workers, device, model)

    unit = parts * config.training.accumulate * (layout.microbatches or layout.pp)
    with naming(_BATCH):
        free = free_bytes(device, workers)
    batch, fits_more = largest(need, unit, max(unit, source.info.train_size // LEAST_STEPS), free)
    why = f"an epoch keeps {LEAST_STEPS} steps" if fits_more else f"{format_bytes(free)} are there for each worker"
    say(f"{_BATCH}: {batch} samples a step, {batch // parts} in each of {parts} parts: {why}; {_rate(config, batch)}")
    return _with(config, batch)


def largest(need: Callable[[int], int], unit: int, most: int, free: int) -> tuple[int, bool]:
    """Return the largest of unit, 2 unit, 4 unit, ... up to `most` whose need of bytes fits, and whether that is all.

    >>> largest(lambda batch: 10 * batch, 2, 100, 320), largest(lambda batch: batch, 2, 100, 320)
    ((32, False), (64, True))

    Raises:
        UserError: none fits.
    """
    batch = top = unit * 2 ** ((most // unit).bit_length() - 1)
    while (needed := need(batch)) > free:
        if batch == unit:
            raise UserError(
                f"{_BATCH}: a rank is forecast to need {format_bytes(needed)} with the smallest batch, {unit}, and may "
                f"use {format_bytes(free)}: use fewer workers, --recompute blocks, or divide the model with --parallel"
            )
        batch //= 2
    return batch, batch == top


def _check(request: LaunchRequest) -> None:
    if request.nodes.most > 1 or request.place.cluster() is not None:
        raise UserError(f"{_BATCH} looks at the memory of this machine: for others use --batch-size N")
    if request.config.training.accumulate == 0:
        raise UserError(f"{_BATCH} and --accumulate auto would each fit any memory: give one of them a number")


def _with(config: RunConfig, batch: int) -> RunConfig:
    return replace(config, data=replace(config.data, batch_size=batch))


def _rate(config: RunConfig, batch: int) -> str:
    """Say what becomes of the learning rate, which nobody changes but by --scale-lr."""
    rate, scale = config.optimizer.lr, config.optimizer.scale_lr
    if scale:
        return f"--scale-lr {scale} makes the learning rate {rate * batch / scale:.4g}"
    return f"the learning rate stays {rate:g} (--scale-lr N lets it follow the batch)"
