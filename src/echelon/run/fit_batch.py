"""`--batch-size auto`: the largest batch with which a run is forecast to fit the memory that is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.config import RunConfig
from echelon.core.errors import UserError, naming
from echelon.core.units import format_bytes
from echelon.run.fit_memory import free_bytes, needed_bytes
from echelon.run.machine import say
from echelon.run.resolve import LaunchRequest, resolve

if TYPE_CHECKING:
    from echelon.trainer.assemble import UserObjects

LEAST_STEPS = 50
"""Steps that are left of an epoch: fewer hardly train, whatever memory would hold."""
_FLAG = "--batch-size auto"


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
        raise UserError(f"{_FLAG}: what a task or a loss of your own needs cannot be forecast: give a number")
    factory = objects.optimizer if objects is not None else None
    described = resolve(_with(config, workers), factory)
    source = objects.source if objects is not None and objects.source is not None else described.source.open()
    model = objects.model if objects is not None else None
    layout = request.layout.resolve(workers)
    parts = described.batch_parts(layout)
    device = choose_device(config.training.device, 0, workers)

    def need(batch: int) -> int:
        """Forecast what the fullest rank needs."""
        with naming(_FLAG):
            return needed_bytes(resolve(_with(config, batch), factory), source.info, workers, device, model)

    unit = parts * config.training.accumulate * (layout.microbatches or layout.pp)
    with naming(_FLAG):
        free = free_bytes(device, workers)
    batch, fits_more = largest(need, unit, max(unit, source.info.train_size // LEAST_STEPS), free)
    why = f"an epoch keeps {LEAST_STEPS} steps" if fits_more else f"{format_bytes(free)} are there for each worker"
    say(f"{_FLAG}: {batch} samples a step, {batch // parts} in each of {parts} parts: {why}; {_rate(config, batch)}")
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
                f"{_FLAG}: a rank is forecast to need {format_bytes(needed)} with the smallest batch, {unit}, and may "
                f"use {format_bytes(free)}: use fewer workers, --recompute blocks, or divide the model with --parallel"
            )
        batch //= 2
    return batch, batch == top


def _check(request: LaunchRequest) -> None:
    if request.nodes.most > 1 or request.place.cluster() is not None:
        raise UserError(f"{_FLAG} looks at the memory of this machine: for others use --batch-size N")
    if request.config.training.accumulate == 0:
        raise UserError(f"{_FLAG} and --accumulate auto would each fit any memory: give one of them a number")


def _with(config: RunConfig, batch: int) -> RunConfig:
    return replace(config, data=replace(config.data, batch_size=batch))


def _rate(config: RunConfig, batch: int) -> str:
    """Say what becomes of the learning rate, which nobody changes but by --scale-lr."""
    rate, scale = config.optimizer.lr, config.optimizer.scale_lr
    if scale:
        return f"--scale-lr {scale} makes the learning rate {rate * batch / scale:.4g}"
    return f"the learning rate stays {rate:g} (--scale-lr N lets it follow the batch)"
