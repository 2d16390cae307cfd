"""The ways that could train a model on some machines, with the memory that each takes of a rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from echelon.config import RunConfig
from echelon.config.machines import Machines
from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.core.layout import DEFAULT_SCHEDULE
from echelon.data.base import DataInfo
from echelon.forecast.memory import Rehearsed, forecast, rehearse_layout
from echelon.models import build_model, build_untried, hints_for
from echelon.models.base import ModelInput
from echelon.optim.traits import least_state
from echelon.parallel.blocks import find_blocks
from echelon.parallel.deferred_init import without_memory
from echelon.parallel.pipeline.chain import Unit
from echelon.parallel.pipeline.cuts import measure_units
from echelon.parallel.pipeline.plan import StagePlan
from echelon.planning.calibration import Calibration, MeasuredMemory
from echelon.planning.steps import (
    FEWER_DOUBLINGS,
    Division,
    Estimate,
    Pipelined,
    Replicated,
    Sharded,
    Way,
    interval,
    pipeline_layout,
    shares_of,
)
from echelon.records.kinds import Alternative
from echelon.run.resolve import resolve
from echelon.tasks import nest
from echelon.trainer.inputs import any_inputs, model_input

if TYPE_CHECKING:
    from echelon.trainer.resolved import ResolvedRun

_DEEPEST = 8  # ranks of a pipeline that are tried
_PLANNED_SCHEDULES = (DEFAULT_SCHEDULE, "interleaved")  # gpipe takes as long as 1f1b, and more memory
MEMORY_RESIDUAL = 0.1
"""Relative error of the memory of whole replicas' processes, with what runs were measured to have beside a forecast:
on a quiet machine 3% (benchmarks/RESULTS.md), but the same process is 7% smaller where others want memory."""
UNMEASURED_MEMORY, OTHER_LAYOUTS_MEMORY, AVERAGES_MEMORY = 0.15, 0.1, 0.15
"""By how much its interval widens, relatively: of forecasts alone, of other layouts, and of replicas that average."""
_MOST_REHEARSED = 64  # ranks of the layouts whose memory is rehearsed: of more, a rank's is that of so many


@dataclass(frozen=True)
class PlannedWay:
    """One way to train on some machines.

    Attributes:
        settings: by dotted name, beside the run's.
        exact: whether the loss curve is that of one process, BatchNorm and rounding aside.
        memory_bytes: of the fullest rank; where `unknown` says why that is not forecast, the least that it can be, of
            parameters, gradients and the optimizer's state; None: nothing is known.
        memory_off: how far that may be off, relatively.
        by_group: at most the bytes of a rank of each group of machines, where parts of a batch go by speed; empty: as
            above.
    """

    way: Way
    settings: dict[str, str]
    exact: bool
    memory_bytes: int | None = None
    unknown: str = ""
    memory_off: float = 0.0
    by_group: tuple[int, ...] = ()

    def memory(self, division: Division = Division.ALIKE) -> Estimate | None:
        """Return the bytes of the fullest rank; the upper bound is infinite where only the least is known."""
        if self.memory_bytes is None:
            return None
        if self.unknown:
            return Estimate(self.memory_bytes, self.memory_bytes, math.inf)
        most = max(self.by_group) if division is Division.BY_SPEED and self.by_group else self.memory_bytes
        return interval(most, self.memory_off)

    def by_part(self, machines: Machines, division: Division) -> tuple[int, ...]:
        """Return the bytes of a rank of each group of machines; empty: nothing is known."""
        if division is Division.BY_SPEED and self.by_group:
            return self.by_group
        return () if self.memory_bytes is None else (self.memory_bytes,) * len(machines.parts)

    @property
    def is_default(self) -> bool:
        """Whether whole replicas send their gradients as they are, in each step."""
        return self.exact and isinstance(self.way, Replicated)


def of_workers(candidate: PlannedWay, workers: int) -> PlannedWay:
    """Return a way for any number of workers as it is of so many: where all share the parameters, they are so many."""
    way = candidate.way
    return (
        replace(candidate, way=replace(way, size=workers))
        if isinstance(way, Sharded) and way.for_any_workers
        else candidate
    )


def _built(config: ModelConfig, data: ModelInput) -> nn.Module:
    """Build a model without memory; with it, where its constructor needs values, or its first batch tells its shapes.

    Raises:
        UserError: it cannot be built for such data.
    """
    with without_memory():
        try:
            model = build_untried(config, data)
        except (RuntimeError, TypeError, ValueError):  # of tensors without values; what is wrong with it comes again
            model = None
    if model is None or any(is_lazy(parameter) for parameter in model.parameters()):
        return build_model(config, data)
    return model


@dataclass
class DescribedModel:
    """A model and its data, as a run describes them, with what was found of each layout so far.

    Attributes:
        beyond: by the samples of a rank, the bytes that its process had beside what was forecast.
        residual: relative error of the memory of what was measured.
    """

    config: RunConfig
    info: DataInfo
    model: nn.Module
    found: dict[tuple[str, int], Rehearsed] = field(default_factory=dict)
    beyond: dict[float, float] = field(default_factory=dict)
    residual: float = MEMORY_RESIDUAL

    @staticmethod
    def of(config: RunConfig) -> DescribedModel:
        """Open the data and build the model, without memory where it can be."""
        run = resolve(replace(config, strategy=replace(config.strategy, parallel="fsdp=2", compression="none")))
        info = run.source.open().info
        return DescribedModel(config, info, _built(config.model, model_input(info, run.task.fitted(info))))

    def learn(self, measured: Sequence[MeasuredMemory]) -> None:
        """Compare what runs took with what is forecast of them: no forecast has processes and libraries' caches."""
        with suppress(UserError):  # values matter to the model: nothing is forecast of it
            forecasts = [self._forecast(dict(each.settings), each.workers, each.batch) for each in measured]
            self.beyond = {each.samples: each.n_bytes - told for each, told in zip(measured, forecasts, strict=True)}

    def memory(self, settings: dict[str, str], ranks: int, batch: int) -> int:
        """Return the bytes of the fullest rank, a checkpoint's copy not counted; with what was learnt, of its process.

        Raises:
            UserError: the model cannot be laid out so.
        """
        forecast_bytes = self._forecast(settings, ranks, batch)
        return max(forecast_bytes // 2, forecast_bytes + round(self._beyond(batch / ranks)))

    def memory_off(self, way: Way, samples: float) -> float:
        """Return how far the memory of a rank with so many samples may be off, relatively."""
        measured = self.beyond or {samples: 0.0}
        far = max(0.0, math.log2(min(measured) / samples), math.log2(samples / max(measured)))
        terms = (
            self.residual,
            0.0 if self.beyond else UNMEASURED_MEMORY,
            0.0 if isinstance(way, Replicated) else OTHER_LAYOUTS_MEMORY,
            AVERAGES_MEMORY if isinstance(way, Replicated) and way.cost.period > 1 else 0.0,
            FEWER_DOUBLINGS * far,
        )
        return math.hypot(*terms)

    def _beyond(self, samples: float) -> float:
        """Return what a rank takes beside the forecast: on a line through what was measured, up to twice as far."""
        if not self.beyond:
            return 0.0
        (least, first), (most, last) = min(self.beyond.items()), max(self.beyond.items())
        slope = (last - first) / (most - least) if most > least else 0.0
        return first + slope * (min(samples, 2 * most) - least)

    def _forecast(self, settings: dict[str, str], ranks: int, batch: int) -> int:
        run = self._resolved(settings, batch)
        key = run.config.strategy.parallel, batch // ranks
        if key not in self.found:
            self.found[key] = rehearse_layout(run, self.info, ranks, self.model)
        told = forecast(run, self.info, ranks, self.model, self.found[key])
        if told.unknown or not told.memory:
            raise UserError(f"its memory cannot be forecast ({told.unknown})")
        return max(memory.peak for memory in told.memory)

    def least_memory(self, ranks: int) -> int:
        """Return the bytes of parameters, gradients and the optimizer's state, cut over so many ranks."""
        optimizer = self.config.optimizer
        state = least_state(optimizer.name, optimizer.momentum)
        return sum(p.nbytes for p in self.model.parameters()) * (2 + state) // ranks

    def rehearsed(self, settings: dict[str, str], ranks: int, batch: int) -> Rehearsed:
        """Return what was found of a layout."""
        self.memory(settings, ranks, batch)
        return self.found[settings["strategy.parallel"], batch // ranks]

    def _resolved(self, settings: dict[str, str], batch: int) -> ResolvedRun:
        named = {name.removeprefix("strategy."): text for name, text in settings.items()}
        base = {"sync": "allreduce", "compression": "none", "parallel": "dp=-1"}
        strategy = replace(self.config.strategy, **{**base, **named})
        data = replace(self.config.data, batch_size=batch)
        return resolve(replace(self.config, strategy=strategy, data=data))

    def passed_bytes(self, steps: list[str], samples: int = 2) -> tuple[float, ...]:
        """Return the bytes of a sample that go into each of some steps, in forward; of one that is no module, as many
        as into the fullest.
        """
        sizes: dict[str, int] = {}

        def note(name: str, inputs: object) -> None:
            sizes[name] = sum(t.nbytes for t in nest.leaves(inputs))

        modules = dict(self.model.named_modules())
        hooks = [
            modules[name].register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs))
            for name in set(steps) & set(modules)
        ]
        example = any_inputs(self.info, samples, next(self.model.parameters()).dtype)
        device = next(self.model.parameters()).device
        try:
            with torch.no_grad():
                nest.call(self.model, nest.to_device(example, device))
        finally:
            for hook in hooks:
                hook.remove()
        return tuple(sizes.get(name, max(sizes.values(), default=0)) / samples for name in steps)


def candidates(
    known: Calibration, machines: Machines, described: DescribedModel | None, batch: int
) -> list[PlannedWay]:
    """Return what could train on these machines; without a description nothing is known of memory or other layouts."""
    found = [_replicated(way, machines) for way in known.ways]
    if described is not None:
        found += list(_sharded(machines, described))
    found = [with_memory(each, known, machines, described, batch) for each in found]
    if described is not None and known.precise:  # stages are timed on this machine, which has to hold the model for it
        found += list(_pipelined(known, machines, described, batch))
    return found


def with_memory(
    candidate: PlannedWay, known: Calibration, machines: Machines, described: DescribedModel | None, batch: int
) -> PlannedWay:
    """Return a way with the memory that it takes of a rank, for a global batch."""
    if described is None:
        return replace(candidate, unknown="of a run from Python objects the memory is not forecast")
    way, workers = candidate.way, machines.workers
    if isinstance(way, Pipelined):
        memory_off = described.memory_off(way, batch / way.replicas)
        return replace(candidate, memory_bytes=_memory_of_pipeline(way, described, batch), memory_off=memory_off)
    ranks = min(way.size if isinstance(way, Sharded) else workers, _MOST_REHEARSED)
    layout = f"fsdp={ranks}" if isinstance(way, Sharded) else f"dp={ranks}"
    laid_out = {**candidate.settings, "strategy.parallel": layout}
    by_speed = not machines.are_alike and way.parts_by_speed(machines)
    shares = shares_of(known, machines, batch) if by_speed else ()
    try:
        memory = described.memory(laid_out, ranks, max(1, batch // workers) * ranks)
        by_group = tuple(
            memory  # at most, and that fits
            if samples <= batch / workers and memory <= group.usable_bytes
            else described.memory(laid_out, ranks, math.ceil(samples) * ranks)
            for samples, group in zip(shares, machines.parts, strict=False)
        )
    except UserError as error:
        least = described.least_memory(way.size if isinstance(way, Sharded) else 1)
        return replace(candidate, unknown=str(error), memory_bytes=least)
    memory_off = described.memory_off(way, max(batch / workers, *shares, 0.0))
    return replace(candidate, memory_bytes=memory, by_group=by_group, memory_off=memory_off)


def _memory_of_pipeline(way: Pipelined, described: DescribedModel, batch: int) -> int:
    layout = pipeline_layout(way.depth, way.microbatches, way.schedule)
    return described.memory({"strategy.parallel": layout}, way.depth, batch // way.replicas)


def _replicated(cost: Alternative, machines: Machines) -> PlannedWay:
    way = Replicated(cost)
    settings = {"strategy.parallel": f"dp={machines.workers}", **way.cost.settings}
    exact = way.cost.settings == {"strategy.compression": "none"}
    return PlannedWay(way, settings, exact)


def _sharded(machines: Machines, described: DescribedModel) -> Iterator[PlannedWay]:
    blocks = max(1, len(find_blocks(described.model, hints_for(described.model))))
    sizes = {machines.workers, machines.per_machine} - {1}
    for size in sorted(sizes):
        if machines.workers % size:
            continue
        way = Sharded(size, machines.workers // size, blocks)
        yield PlannedWay(way, {"strategy.parallel": way.label}, exact=True)


def _pipelined(known: Calibration, machines: Machines, described: DescribedModel, batch: int) -> Iterator[PlannedWay]:
    for ranks in (2, 4, _DEEPEST):
        if machines.workers % ranks:
            continue
        replicas = machines.workers // ranks
        count = next((m for m in (4 * ranks, 2 * ranks, ranks) if not batch % (replicas * m)), 0)
        for schedule in _PLANNED_SCHEDULES if count else ():
            with suppress(UserError):  # the model is no chain, or too short: no candidate
                way = pipeline_way(described, Pipelining(ranks, replicas, count, schedule), batch)
                planned = PlannedWay(way, {"strategy.parallel": way.label}, exact=True)
                yield with_memory(planned, known, machines, described, batch)


def tried_pipelines(machines: Sequence[Machines], described: DescribedModel, batch: int) -> tuple[str, ...]:
    """Return the layouts of short runs that tell what pipelines cost: two ranks, few micro-batches and many; none where
    no pipeline is planned, or the model cannot be cut in two.
    """
    counts = [count for count in (2, 4, 8) if not batch % count]
    if not counts or all(each.workers % 2 for each in machines):
        return ()
    found = [Pipelining(2, 1, count) for count in dict.fromkeys((counts[0], counts[-1]))]
    try:
        for each in found:
            pipeline_way(described, each, batch)
    except UserError:  # as where candidates are sought
        return ()
    return tuple(each.layout for each in found)


@dataclass(frozen=True)
class Pipelining:
    """A pipeline of so many ranks, replicas of it, and its micro-batches."""

    ranks: int
    replicas: int
    microbatches: int
    schedule: str = DEFAULT_SCHEDULE

    @property
    def layout(self) -> str:
        """That of one replica."""
        return pipeline_layout(self.ranks, self.microbatches, self.schedule)


def pipeline_way(described: DescribedModel, asked: Pipelining, batch: int) -> Pipelined:
    """Return a pipeline of a model, cut and timed as a run cuts it.

    Raises:
        UserError: the model cannot be laid out so.
    """
    found = described.rehearsed({"strategy.parallel": asked.layout}, asked.ranks, batch // asked.replicas)
    seconds = _alone_s(described, found.stages, batch // asked.replicas // asked.microbatches)
    numel = [0] * asked.ranks
    for stage in found.stages:
        numel[stage.rank] += stage.numel
    cuts = [stage.steps[0].name for stage in found.stages[1:]]
    return Pipelined(
        tuple(s / sum(seconds) for s in seconds), asked.replicas, asked.microbatches,
        described.passed_bytes(cuts), max(numel) / max(1, sum(numel)), asked.schedule, asked.ranks,
    )  # fmt: skip


def _alone_s(described: DescribedModel, stages: Sequence[StagePlan], samples: int) -> list[float]:
    """Return the seconds of each stage for a micro-batch; those whose cuts asked for no measurement are timed now.

    Raises:
        UserError: a stage cannot run by itself.
    """
    known = [stage.seconds for stage in stages if stage.seconds]
    if len(known) == len(stages):
        return known
    example = any_inputs(described.info, max(1, samples), next(described.model.parameters()).dtype)
    try:
        return measure_units(described.model, [Unit(s.steps[0].name, s.steps) for s in stages], example)
    except Exception as error:
        raise UserError(f"a stage of the pipeline cannot run by itself: {error}") from error
