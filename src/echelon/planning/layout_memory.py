"""What layouts of a run need of the memory of a worker on this machine, and which of them fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.config import RunConfig
from echelon.core.errors import UserError, naming
from echelon.core.units import format_bytes
from echelon.run.fit_memory import free_bytes, needed_bytes
from echelon.run.out_of_memory import smaller_settings
from echelon.run.resolve import launch_request, resolve
from echelon.run.start import plan_of
from echelon.trainer.compatibility import check_strategies
from echelon.trainer.world import choose_device

WHOLE = "dp=-1"
"""Each worker has the whole model."""
_TOLD = 4


@dataclass(frozen=True)
class LayoutNeed:
    """What a layout needs of the fullest worker.

    Attributes:
        needed_bytes: beyond what the process and its libraries take; None: `reason` says why the layout is none here.
    """

    layout: str
    needed_bytes: int | None
    reason: str = ""


class LayoutMemory:
    """The memory of this machine's workers, and what a run's layouts need of it."""

    def __init__(self, config: RunConfig, flag: str) -> None:
        """Take a description with a layout that is none of `auto`, and the flag by which users know this.

        Raises:
            UserError: the data cannot be opened, or the memory that is free is not known.
        """
        self._config, self._flag = config, flag
        run = resolve(config)
        self.workers = plan_of(launch_request(config), Path(config.run)).workers
        self._device = choose_device(config.training.device, 0, self.workers)
        self._info = run.source.open().info
        with naming(flag):
            self.free_bytes = free_bytes(self._device, self.workers)

    def need_of(self, layout: str) -> LayoutNeed:
        """Forecast what a layout needs; where it, or its forecast, cannot be, the result says why."""
        config = replace(self._config, strategy=replace(self._config.strategy, parallel=layout))
        try:
            run = resolve(config)
            check_strategies(run, self.workers)
            needed = needed_bytes(run, self._info, self.workers, self._device)
        except UserError as error:
            return LayoutNeed(layout, None, str(error))
        return LayoutNeed(layout, needed)

    def fits(self, need: LayoutNeed) -> bool:
        """Whether a layout is known to fit."""
        return need.needed_bytes is not None and need.needed_bytes <= self.free_bytes

    def nothing_fits(self, needs: Sequence[LayoutNeed]) -> UserError:
        """Return what to say where no layout fits: the least need, and with which settings that would."""
        known = [need for need in needs if need.needed_bytes is not None]
        if not known:
            return UserError(f"{self._flag}: no layout's memory can be forecast ({needs[0].reason}): choose by hand")
        least = min(known, key=lambda need: need.needed_bytes or 0)
        config = replace(self._config, strategy=replace(self._config.strategy, parallel=least.layout))
        would = list(self._would_fit(config))[:_TOLD]
        helps = f"it would fit with {', or '.join(would)}" if would else "use a smaller --batch-size or a smaller model"
        return UserError(
            f"{self._flag}: nothing fits the {format_bytes(self.free_bytes)} of each worker: the least is "
            f"{format_bytes(least.needed_bytes or 0)}, with --parallel {least.layout}; {helps}"
        )

    def _would_fit(self, config: RunConfig) -> Iterator[str]:
        for flags, smaller in smaller_settings(config, ranks=1):
            try:
                needed = needed_bytes(resolve(smaller), self._info, self.workers, self._device)
            except UserError:  # this combination is refused: it is no help
                continue
            if needed <= self.free_bytes:
                yield f"{flags} ({format_bytes(needed)})"


@dataclass(frozen=True)
class FittingLayouts:
    """Layouts that fit, whole replicas first and then those that send least; and what was rejected, in sentences."""

    layouts: tuple[str, ...]
    words: tuple[str, ...]


def fitting_layouts(config: RunConfig, flag: str) -> FittingLayouts:
    """Return which layouts of a run fit the memory of this machine's workers.

    Where the memory of whole replicas cannot be forecast, they are taken to fit, in words, and nothing else is.

    Args:
        config: with a layout that is none of `auto`.
        flag: by which users know this.

    Raises:
        UserError: nothing fits.
    """
    memory = LayoutMemory(config, flag)
    whole = memory.need_of(WHOLE)
    if whole.needed_bytes is None:
        return FittingLayouts((WHOLE,), (f"{flag}: whole replicas, though {whole.reason}.",))
    needs = [whole, *(memory.need_of(each) for each in divided_layouts(memory.workers, config.data.batch_size))]
    fitting = [need for need in needs if memory.fits(need)]
    if not fitting:
        raise memory.nothing_fits(needs)
    free = format_bytes(memory.free_bytes)
    words = [f"{flag}: each worker may use {free}; needed are {_listed(fitting)}."]
    if larger := [need for need in needs if need.needed_bytes is not None and not memory.fits(need)]:
        words.append(f"{flag}: too large: {_listed(larger)}.")
    words += [f"{flag}: not {need.layout}: {need.reason}." for need in needs if need.needed_bytes is None]
    return FittingLayouts(tuple(need.layout for need in fitting), tuple(words))


def _listed(needs: Sequence[LayoutNeed]) -> str:
    return ", ".join(f"{format_bytes(need.needed_bytes or 0)} by {need.layout}" for need in needs)


def divided_layouts(workers: int, batch: int) -> Iterator[str]:
    """Yield layouts that divide a model over this machine's workers, those that send least first.

    >>> list(divided_layouts(2, 64))
    ['dp=2,zero1', 'fsdp=2', 'tp=2', 'pp=2,microbatches=8']
    """
    if workers > 1:
        yield f"dp={workers},zero1"
    sizes = [size for size in range(2, workers + 1) if workers % size == 0]
    for size in sizes:
        yield _with_replicas(f"fsdp={size}", workers // size)
    for size in sizes:
        yield _with_replicas(f"tp={size}", workers // size)
    for size in sizes:
        samples = batch // (workers // size)
        count = next((m for m in (4 * size, 2 * size, size) if samples >= m and samples % m == 0), 0)
        if count:
            yield _with_replicas(f"pp={size},microbatches={count}", workers // size)


def _with_replicas(layout: str, replicas: int) -> str:
    return layout if replicas == 1 else f"dp={replicas},{layout}"
