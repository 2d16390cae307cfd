"""Building the parts of a run from its description."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from echelon.config import RunConfig
from echelon.config.validate import Nodes
from echelon.core.axes import Axis
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, Source, example_inputs
from echelon.data.base import DataInfo
from echelon.data.loader import EvalLoader, TrainLoader, size_note
from echelon.models import auto_name, parameter_count
from echelon.observe.environment import environment
from echelon.observe.notes import NotedClock
from echelon.observe.phases import PhaseClock, make_clock
from echelon.observe.scalars import Scalars
from echelon.optim.build import build_schedule
from echelon.ps.split_worker import SplitWorker
from echelon.ps.worker_rank import WorkerRank
from echelon.records.file import Recorder
from echelon.records.going import read_launch
from echelon.records.kinds import Start
from echelon.tasks.base import Task
from echelon.trainer.compatibility import interplay_notes
from echelon.trainer.display import Display, RunLength
from echelon.trainer.inputs import model_input, units_of
from echelon.trainer.leases import Commands, Leases
from echelon.trainer.loop import LoopSettings, TrainingRun
from echelon.trainer.parts import Work, build_parts, channels_last, keep_cuts, with_kept_cuts
from echelon.trainer.precision import PRECISIONS
from echelon.trainer.progress import RunProgress
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.saving import RanksState, Saver, tensor_bytes
from echelon.trainer.server_parts import ServerLink, build_worker
from echelon.trainer.servers_checkpoint import ServersState
from echelon.trainer.state import Cursor, Fingerprint, RunParts, layout_of, layout_sizes, seed_everything
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.window import Traffic
from echelon.trainer.world import World, roll_call


@dataclass(frozen=True)
class UserObjects:
    """A model, data and a task of the caller's own, in place of names."""

    model: nn.Module | None = None
    source: Source | None = None
    task: Task | None = None


@dataclass(frozen=True)
class _Groundwork:
    """What every rank builds first, whatever it is part of."""

    resolved: ResolvedRun
    world: World
    source: Source
    task: Task
    clock: PhaseClock
    train_loader: TrainLoader
    eval_loader: EvalLoader

    def work(self, user_objects: UserObjects) -> Work:
        """Return what is trained on what."""
        splits = self.world.placement is not None and self.world.placement.layout.splits
        return Work(self.source.info, self.task, user_objects.model, example_inputs(self.source) if splits else None)

    def run(self, run_parts: RunParts, saver: Saver, progress: RunProgress, start_bytes: int = 0) -> TrainingRun:
        """Put the parts of a run together.

        Args:
            start_bytes: that this rank sent to bring all replicas to the same parameters.
        """
        config, per_epoch = self.resolved.config, self.train_loader.batches_per_epoch
        training = config.training
        return TrainingRun(
            world=self.world,
            parts=run_parts,
            step=Step(self.task, _step_settings(config, self.world), self.clock, run_parts.scaler, run_parts.split),
            task=self.task,
            schedule=build_schedule(run_parts.optimizer, config.optimizer, per_epoch, training.epochs),
            train_loader=self.train_loader,
            eval_loader=self.eval_loader,
            clock=self.clock,
            saver=saver,
            progress=progress,
            settings=LoopSettings(
                training.epochs, training.max_steps, training.eval_every, self.resolved.checkpoint_every
            ),
            traffic=Traffic(at_start=start_bytes),
        )

    def start(self, path: Path) -> Start:
        """Return what the record's line of a start has in every run."""
        config, info, launch = self.resolved.config, self.source.info, read_launch(path)
        return Start(
            device=str(self.world.device),
            threads=torch.get_num_threads(),
            model=auto_name(model_input(info, self.task)) if config.model.name == "auto" else config.model.name,
            data=info.name,
            classes=info.classes,
            task=self.task.facts(),
            train_size=info.train_size,
            eval_size=info.eval_size,
            batch_size=config.data.batch_size,
            steps_per_epoch=self.train_loader.batches_per_epoch,
            epochs=config.training.epochs,
            environment=environment(launch.command),
            launched_t=launch.launched_t,
        )


def _groundwork(resolved: ResolvedRun, world: World, user_objects: UserObjects, data_ranks: int) -> _Groundwork:
    """Open the data, for `data_ranks` that divide it or take turns; the same seed on every rank until it trains."""
    config, seed = resolved.config, resolved.config.training.seed
    seed_everything(seed)
    source = user_objects.source or resolved.source.open()
    check_enough(source.info, data_ranks)
    settings = LoaderConfig.of(config.data, seed, world.device)
    shard = Shard(world.data_rank, world.data_size)
    task = resolved.task.fitted(source.info, user_objects.task)
    return _Groundwork(
        resolved, world, source, task, NotedClock(make_clock(world.device.type), world.notes),
        TrainLoader(source, settings, shard, units_of(task)), EvalLoader(source, settings, shard),
    )  # fmt: skip


def assemble(
    resolved: ResolvedRun, path: Path, world: World, record: Recorder, user_objects: UserObjects
) -> tuple[TrainingRun, Cursor]:
    """Build the parts of a run from its description, and restore the newest checkpoint.

    Raises:
        UserError: something in the description cannot be built.
    """
    notes = interplay_notes(resolved, world.size)
    if world.group is None:
        resolved = resolved.for_single_worker()
    resolved = with_kept_cuts(resolved, world, path)
    ground, config = _groundwork(resolved, world, user_objects, world.data_size), resolved.config
    info = ground.source.info
    run_parts = build_parts(resolved, ground.work(user_objects), world, ground.clock)
    keep_cuts(run_parts, world, path)
    saver = Saver(
        path,
        config.checkpoint.keep,
        RanksState(run_parts, world, record.patience),
        record,
        Fingerprint.of(config, info, ground.task),
    )
    restored = saver.restore()
    if restored is None:
        seed_everything(_rank_seed(config.training.seed, world.data_rank))
    cursor = restored or Cursor()
    display = _display(config, ground.train_loader.batches_per_epoch, world, cursor, ground.task)
    progress = RunProgress(record, Scalars(path if world.leads else None, record.patience), display)
    run = ground.run(run_parts, saver, progress, _start_bytes(run_parts.local_model, world))
    _record_start(ground, run, cursor, path)
    for name, note in run_notes(config, ground.source, run_parts.split.notes if run_parts.split else (), notes):
        progress.note(name, note)
    if world.leads:
        progress.restored(None if restored is None else cursor.step, path, saver.passed_over)
    return run, cursor


def assemble_worker(
    resolved: ResolvedRun, path: Path, world: World, process: WorkerRank, user_objects: UserObjects
) -> tuple[TrainingRun, Leases | Commands]:
    """Build the parts of one process of a parameter server's worker, and where its batches come from.

    Raises:
        UserError: something in the description cannot be built.
    """
    notes, config = interplay_notes(resolved, process.workers), resolved.config
    ground = _groundwork(resolved, world, user_objects, process.workers * world.data_size)
    info = ground.source.info
    run_parts, link = build_worker(resolved, ground.work(user_objects), process, world, ground.clock, path)
    seed_everything(_rank_seed(config.training.seed, process.number * world.data_size + world.data_rank))
    pids = roll_call(world).pids
    record = Recorder(path if link else None, patience_s=resolved.io_patience_s)
    silent = Display(RunLength(0, 0), ground.task.facts(), visible=False)
    progress = RunProgress(record, Scalars(None, record.patience), silent)
    if link is None:
        assert isinstance(run_parts.sync, SplitWorker)
        saver = Saver(
            path, config.checkpoint.keep, RanksState(run_parts, world, record.patience), record, Fingerprint()
        )  # the first rank saves
        run = ground.run(run_parts, saver, progress)
        return run, Commands(run, run_parts.sync)
    idle = run_parts.sync.channel.tell_idle if isinstance(run_parts.sync, SplitWorker) else None
    per_epoch = ground.train_loader.batches_per_epoch
    state = ServersState(link.servers, link.table, per_epoch, record.patience, idle)
    saver = Saver(path, config.checkpoint.keep, state, record, Fingerprint.of(config, info, ground.task))
    run = ground.run(run_parts, saver, progress)
    split_notes = run_parts.split.notes if run_parts.split else ()
    start = replace(_start_of_workers(ground, run_parts, link, path), pids=pids)
    return run, Leases(run, link, state, start, run_notes(config, ground.source, split_notes, notes))


def workers_at_start(process: WorkerRank, nodes: Nodes) -> int:
    """Return the processes of all workers that a run with servers begins with; machines may join later."""
    return process.workers * process.size * nodes.least // nodes.most


def _start_of_workers(ground: _Groundwork, run_parts: RunParts, link: ServerLink, path: Path) -> Start:
    """Return the record's line of a run's start; how far the run is, its scheduler knows."""
    placement = ground.world.placement
    layout: dict[str, int] | None = None
    if run_parts.split is not None and placement is not None:
        sizes = {**placement.layout.sizes, Axis.DP: link.process.workers}
        layout = layout_sizes(replace(placement.layout, sizes=sizes))
    return replace(
        ground.start(path),
        world_size=workers_at_start(link.process, ground.resolved.nodes),
        backend="zmq",
        parameters=parameter_count(link.servers.held),
        layout=layout or None,
        served=True,
    )


def run_notes(
    config: RunConfig, source: Source, layout: Sequence[str], settings: Sequence[str]
) -> list[tuple[str, str]]:
    """Return what a user has to know of this run, each with the name of its event."""
    size = [note] if (note := size_note(source.info, config.data.batch_size)) else []
    named = {"data": source.notes, "layout": layout, "settings": settings, "batch_size": size}
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


def _start_bytes(local_model: nn.Module, world: World) -> int:
    """The first replica sends parameters and buffers to all others when DDP wraps what a rank holds."""
    if world.placement is None or world.placement.coordinates[Axis.DP]:
        return 0
    return (world.placement.layout.dp - 1) * tensor_bytes(local_model.state_dict())


def _rank_seed(seed: int, rank: int) -> int:
    """Dropout and the like differ between ranks, the parameters do not."""
    return (seed * 1_000_003 + rank + 1) % 2**63


def _record_start(ground: _Groundwork, run: TrainingRun, cursor: Cursor, path: Path) -> None:
    world = run.world
    ranks = roll_call(world)
    parameters = _parameter_count(run.parts, world)
    if not world.leads:
        return
    start = replace(
        ground.start(path),
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        world_size=world.size,
        hosts=ranks.hosts,
        pids=ranks.pids,
        affinity=ranks.affinity,
        backend="none" if world.group is None else ("nccl" if world.device.type == "cuda" else "gloo"),
        parameters=parameters,
        layout=layout_of(world),
        start_step=cursor.step,
        start_epoch=cursor.epoch,
        idle=_idle_settings(ground.resolved, world),
    )
    run.progress.record.write(start)


def _idle_settings(resolved: ResolvedRun, world: World) -> list[str]:
    """Return the settings, as flags, that do nothing with a single worker."""
    if world.size > 1:
        return []
    strategy = resolved.described.strategy
    idle = [] if resolved.sync.acts_alone else [f"--sync {strategy.sync}"]
    return idle + [f"--compression {strategy.compression}"] * (strategy.compression != "none")


def _parameter_count(run_parts: RunParts, world: World) -> int:
    """Return the trainable numbers of the whole model; all ranks call it together."""
    if run_parts.split is None:
        return parameter_count(run_parts.model)
    regions = run_parts.split.pieces.regions
    trainable = [name for name, p in run_parts.local_model.named_parameters() if p.requires_grad]
    group = world.placement.group(Axis.PP) if world.placement else None
    count = torch.tensor([sum(math.prod(regions[name].shape) for name in trainable)], device=world.device)
    if group is not None:
        dist.all_reduce(count, group=group)
    return int(count)
