"""Building the parts of a run from its description."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from echelon.config import RunConfig
from echelon.core.axes import Axis
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, Source, example_inputs, open_data
from echelon.data.base import DataInfo
from echelon.data.loader import EvalLoader, TrainLoader, size_note
from echelon.models import auto_name, parameter_count
from echelon.observe.environment import environment
from echelon.observe.phases import make_clock
from echelon.observe.scalars import Scalars
from echelon.optim.build import build_schedule
from echelon.records.file import Recorder
from echelon.records.going import read_launch
from echelon.records.kinds import Start
from echelon.tasks.base import Task
from echelon.trainer.compatibility import interplay_notes
from echelon.trainer.cuts import keep_cuts, with_kept_cuts
from echelon.trainer.display import Display, RunLength
from echelon.trainer.inputs import model_input, run_task, units_of
from echelon.trainer.loop import LoopSettings, TrainingRun
from echelon.trainer.parts import Work, build_parts, channels_last
from echelon.trainer.precision import PRECISIONS
from echelon.trainer.progress import RunProgress
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.saving import Saver, tensor_bytes
from echelon.trainer.state import Cursor, RunParts, fingerprint, layout_of, seed_everything
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.window import Traffic
from echelon.trainer.world import World, roll_call


@dataclass(frozen=True)
class Given:
    """A model, data and a task of the caller's own, in place of names."""

    model: nn.Module | None = None
    source: Source | None = None
    task: Task | None = None

    def unshared(self) -> Given:
        """Return it with a model in this process's own memory.

        What a launcher sends to several workers lies in memory that they share: each would update the others' model.
        """
        return replace(self, model=copy.deepcopy(self.model))


def assemble(
    resolved: ResolvedRun, path: Path, world: World, record: Recorder, given: Given
) -> tuple[TrainingRun, Cursor]:
    """Build the parts of a run, and restore the newest checkpoint.

    Raises:
        UserError: something in the description cannot be built.
    """
    notes = interplay_notes(resolved, world.size)
    if world.group is None:
        resolved = resolved.for_single_worker()
    config, training = resolved.config, resolved.config.training
    seed_everything(training.seed)
    source = given.source or open_data(config.data, training.seed)
    check_enough(source.info, world.data_size)
    task = run_task(config, source.info, given.task)
    train_loader, eval_loader = _loaders(config, source, world, task)
    clock = make_clock(world.device.type)
    splits = world.placement is not None and world.placement.layout.splits
    work = Work(source.info, task, given.model, example_inputs(source) if splits else None)
    parts = build_parts(with_kept_cuts(resolved, world, path), work, world, clock)
    keep_cuts(parts, world, path)
    saver = Saver(path, config.checkpoint.keep, parts, world, record, fingerprint(config, source.info, task))
    restored = saver.restore()
    if restored is None:
        seed_everything(_rank_seed(training.seed, world.data_rank))
    cursor = restored or Cursor()
    run = TrainingRun(
        world=world,
        parts=parts,
        step=Step(task, _step_settings(config, world), clock, parts.scaler, parts.split),
        task=task,
        schedule=build_schedule(parts.optimizer, config.optimizer, train_loader.batches_per_epoch, training.epochs),
        train_loader=train_loader,
        eval_loader=eval_loader,
        clock=clock,
        saver=saver,
        traffic=Traffic(at_start=_start_bytes(parts.held, world)),
        progress=RunProgress(
            record,
            Scalars(path if world.leads else None),
            _display(config, train_loader.batches_per_epoch, world, cursor, task),
        ),
        settings=LoopSettings(training.epochs, training.max_steps, training.eval_every, resolved.checkpoint_every),
    )
    _record_start(resolved, run, source, cursor, path)
    for name, note in run_notes(config, source.info, parts.split.notes if parts.split else (), notes):
        run.progress.note(name, note)
    if restored is not None:
        run.progress.resumed(cursor.step, path)
    return run, cursor


def run_notes(
    config: RunConfig, info: DataInfo, layout: Sequence[str], settings: Sequence[str]
) -> list[tuple[str, str]]:
    """Return what a user has to know of this run, each with the name of its event."""
    size = [note] if (note := size_note(info, config.data.batch_size)) else []
    named = {"layout": layout, "settings": settings, "batch_size": size}
    return [(name, note) for name, notes in named.items() for note in notes]


def check_enough(info: DataInfo, workers: int) -> None:
    """Refuse more workers than training samples.

    Raises:
        UserError: names both numbers.
    """
    if info.train_size < workers:
        raise UserError(f"{info.name} has {info.train_size} samples for {workers} workers: use fewer workers")


def _step_settings(config: RunConfig, world: World) -> StepSettings:
    return StepSettings(
        device=world.device,
        autocast=PRECISIONS[config.training.precision].autocast,
        accumulate=config.training.accumulate,
        clip_norm=config.optimizer.clip_norm,
        channels_last=channels_last(config, world.device),
        data_group=world.data_group,
    )


def _display(config: RunConfig, steps_per_epoch: int, world: World, cursor: Cursor, task: Task) -> Display:
    steps = config.training.epochs * steps_per_epoch
    total = min(steps, config.training.max_steps or steps)
    return Display(RunLength(total, config.training.epochs), task.facts(), world.leads, cursor.step)


def _start_bytes(held: nn.Module, world: World) -> int:
    """The first replica sends parameters and buffers to all others when DDP wraps what a rank holds."""
    if world.placement is None or world.placement.coordinates[Axis.DP]:
        return 0
    return (world.placement.layout.dp - 1) * tensor_bytes(held.state_dict())


def _rank_seed(seed: int, rank: int) -> int:
    """Dropout and the like differ between ranks, the parameters do not."""
    return (seed * 1_000_003 + rank + 1) % 2**63


def _record_start(resolved: ResolvedRun, run: TrainingRun, source: Source, cursor: Cursor, path: Path) -> None:
    config, world, info = resolved.config, run.world, source.info
    ranks = roll_call(world)
    parameters = _parameter_count(run.parts, world)
    if not world.leads:
        return
    launch = read_launch(path)
    start = Start(
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        world_size=world.size,
        hosts=ranks.hosts,
        pids=ranks.pids,
        affinity=ranks.affinity,
        backend="none" if world.group is None else ("nccl" if world.device.type == "cuda" else "gloo"),
        device=str(world.device),
        threads=torch.get_num_threads(),
        parameters=parameters,
        layout=layout_of(world),
        model=_model_name(config, source, run.task),
        data=info.name,
        classes=info.classes,
        task=run.task.facts(),
        train_size=info.train_size,
        eval_size=info.eval_size,
        batch_size=config.data.batch_size,
        steps_per_epoch=run.train_loader.batches_per_epoch,
        epochs=config.training.epochs,
        start_step=cursor.step,
        start_epoch=cursor.epoch,
        idle=_idle_settings(resolved, world),
        environment=environment(launch.command),
        launched_t=launch.launched_t,
    )
    run.progress.record.write(start)


def _idle_settings(resolved: ResolvedRun, world: World) -> list[str]:
    """Return the settings, as flags, that do nothing with a single worker."""
    if world.size > 1:
        return []
    strategy = resolved.described.strategy
    idle = [] if resolved.sync.acts_alone else [f"--sync {strategy.sync}"]
    return idle + [f"--compression {strategy.compression}"] * (strategy.compression != "none")


def _parameter_count(parts: RunParts, world: World) -> int:
    """Return the trainable numbers of the whole model; all ranks call it together."""
    if parts.split is None:
        return parameter_count(parts.model)
    regions = parts.split.pieces.regions
    own = {name: regions[name].shape for name, p in parts.held.named_parameters() if p.requires_grad}
    group = world.placement.group(Axis.PP) if world.placement else None
    count = torch.tensor([sum(math.prod(shape) for shape in own.values())], device=world.device)
    if group is not None:
        dist.all_reduce(count, group=group)
    return int(count)


def _loaders(config: RunConfig, source: Source, world: World, task: Task) -> tuple[TrainLoader, EvalLoader]:
    settings = LoaderConfig.of(config.data, config.training.seed, world.device)
    shard = Shard(world.data_rank, world.data_size)
    return TrainLoader(source, settings, shard, units_of(task)), EvalLoader(source, settings, shard)


def _model_name(config: RunConfig, source: Source, task: Task) -> str:
    chosen = auto_name(model_input(source.info, task))
    return chosen if config.model.name == "auto" else config.model.name
