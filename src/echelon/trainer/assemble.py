"""Building the parts of a run from its description."""

from __future__ import annotations

import math
import os
import sys
import time
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
from echelon.data.kept_info import keep_info
from echelon.data.loader import EvalLoader, TrainLoader, size_note
from echelon.data.transforms import NO_TRANSFORMS, Transforms
from echelon.models import auto_name, parameter_count
from echelon.observe.callbacks import Listeners, as_callback, named_callbacks
from echelon.observe.environment import environment
from echelon.observe.loggers import LOGGERS
from echelon.observe.loggers.base import BackgroundLogger, LoggerSettings, own_loggers
from echelon.observe.notes import NotedClock
from echelon.observe.phases import PhaseClock, make_clock
from echelon.observe.profile import StepProfiler, TracedClock, rank_trace
from echelon.observe.tensorboard import TensorBoard
from echelon.optim.build import build_schedule
from echelon.optim.own import OptimizerFactory
from echelon.ps.split_worker import SplitWorker
from echelon.ps.worker_rank import WorkerRank
from echelon.records.events import Event, WeightsLoaded
from echelon.records.file import Recorder
from echelon.records.going import Launch, read_launch
from echelon.records.kinds import Start
from echelon.tasks.base import Task
from echelon.tasks.own_loss import LossFunction
from echelon.tasks.registry import TaskObjects
from echelon.trainer.compatibility import interplay_notes, length_notes
from echelon.trainer.display import Display, RunLength
from echelon.trainer.inputs import model_input, units_of
from echelon.trainer.leases import Commands, Leases
from echelon.trainer.loop import LoopSettings, TrainingRun
from echelon.trainer.loss_guard import GuardSettings, LossGuard
from echelon.trainer.parts import Work, build_parts, channels_last, keep_cuts, with_kept_cuts
from echelon.trainer.path_choice import with_chosen_paths
from echelon.trainer.precision import PRECISIONS
from echelon.trainer.progress import RunProgress
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.saving import RanksState, Saver
from echelon.trainer.server_parts import ServerLink, build_worker
from echelon.trainer.servers_checkpoint import ServersState
from echelon.trainer.state import Cursor, Fingerprint, RunParts, layout_of, layout_sizes, seed_everything
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.window import Traffic
from echelon.trainer.world import World, roll_call


@dataclass(frozen=True)
class UserObjects:
    """Objects of the caller's own, in place of names, and callbacks (see `echelon.observe.callbacks`)."""

    model: nn.Module | None = None
    source: Source | None = None
    task: Task | None = None
    callbacks: tuple[object, ...] = ()
    transforms: Transforms = NO_TRANSFORMS
    loss: LossFunction | None = None
    metrics: object = None
    optimizer: OptimizerFactory | None = None
    loggers: tuple[LoggerSettings, ...] = ()

    @property
    def of_task(self) -> TaskObjects:
        """Those that say what is learnt, and how it is judged."""
        return TaskObjects(self.task, self.loss, self.metrics)


@dataclass(frozen=True)
class _Groundwork:
    """What every rank builds first, whatever it is part of; `rank`: of all of the run."""

    resolved: ResolvedRun
    world: World
    rank: int
    source: Source
    task: Task
    clock: PhaseClock
    train_loader: TrainLoader
    eval_loader: EvalLoader
    user_objects: UserObjects
    launch: Launch
    profiler: StepProfiler | None
    test_loader: EvalLoader | None

    @property
    def work(self) -> Work:
        """What is trained on what."""
        splits = self.world.placement is not None and self.world.placement.layout.splits
        example = example_inputs(self.source) if splits else None
        return Work(
            self.source.info, self.task, self.user_objects.model, example, self.resolved.tuning, steps=self.steps
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        training = self.resolved.config.training
        steps = training.epochs * self.train_loader.batches_per_epoch
        return min(steps, training.max_steps) if training.max_steps else steps

    def run(self, run_parts: RunParts, saver: Saver, progress: RunProgress) -> TrainingRun:
        """Put the parts of a run together."""
        config, per_epoch = self.resolved.config, self.train_loader.batches_per_epoch
        training, told = config.training, bool(config.tracking.callbacks or self.user_objects.callbacks)
        every = self.resolved.checkpoint_every
        return TrainingRun(
            world=self.world,
            parts=run_parts,
            step=Step(
                self.task, _step_settings(config, self.world), self.clock, run_parts.scaler, run_parts.split,
                self._loss_guard(run_parts, saver.folder, progress),
            ),
            task=self.task,
            schedule=build_schedule(run_parts.optimizer, config.optimizer, per_epoch, training.epochs),
            train_loader=self.train_loader,
            eval_loader=self.eval_loader,
            clock=self.clock,
            saver=saver,
            progress=progress,
            settings=LoopSettings(
                training.epochs, training.max_steps, training.eval_every, every, told,
                training.early_stop, training.early_stop_delta,
                time.monotonic() - self.launch.seconds_since() + self.resolved.max_time_s,
            ),
            traffic=Traffic(at_start=run_parts.start_bytes),
            profiler=self.profiler,
            test_loader=self.test_loader,
        )  # fmt: skip

    def _loss_guard(self, run_parts: RunParts, folder: Path, progress: RunProgress) -> LossGuard | None:
        """Return what looks at losses; None in a search of the learning rate, which ends where they are not finite."""
        config = self.resolved.config
        if config.optimizer.lr_find:
            return None
        settings = GuardSettings(config.data.on_nan == "skip", folder, self.rank, progress.display.say)
        return LossGuard(self.task, run_parts.local_model.parameters(), self.world, settings)

    def start(self) -> Start:
        """Return what the record's line of a start has in every run."""
        config, info, launch = self.resolved.config, self.source.info, self.launch
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


def _groundwork(
    resolved: ResolvedRun, path: Path, world: World, user_objects: UserObjects, data_ranks: int, rank: int
) -> _Groundwork:
    """Open the data, for `data_ranks` that divide it or take turns; the same seed on every rank until it trains.

    Args:
        rank: of all ranks of the run, also where these are workers of a parameter server.
    """
    config, seed = resolved.config, resolved.config.training.seed
    seed_everything(seed)
    source = user_objects.source or resolved.source.open()
    if source.roster is not None:
        source.roster.check(path)
    check_enough(source.info, data_ranks)
    if rank == 0:
        keep_info(path, source.info)
    settings = LoaderConfig.of(config.data, seed, world.device, user_objects.transforms)
    shard = Shard(world.data_rank, world.data_size)
    task = resolved.task.fitted(source.info, user_objects.of_task)
    check_mixing(config, task)
    clock: PhaseClock = NotedClock(make_clock(world.device.type), world.notes)
    profiler = None
    if config.training.profile:
        clock = TracedClock(clock)
        profiler = StepProfiler(config.training.profile, rank_trace(path, rank), clock)
    return _Groundwork(
        resolved, world, rank, source, task, clock,
        TrainLoader(source, settings, shard, units_of(task)), EvalLoader(source, settings, shard), user_objects,
        read_launch(path), profiler,
        None if source.test is None else EvalLoader(source, settings, shard, source.test),
    )  # fmt: skip


def build_listeners(config: RunConfig, path: Path, record: Recorder, user_objects: UserObjects) -> Listeners:
    """Build who is told what happens in a run, for the process that leads it.

    Raises:
        UserError: a callback cannot be built.
    """

    def say(text: str) -> None:
        """Tell the user of a logger's trouble."""
        record.write(Event(text, name="logger"))
        print(f"echelon: {text}", file=sys.stderr, flush=True)

    callbacks = (*map(as_callback, user_objects.callbacks), *named_callbacks(config.tracking.callbacks))
    specs = LOGGERS.chain(config.tracking.loggers) if config.tracking.loggers else []
    services = [BackgroundLogger(spec.name, LOGGERS.bind(spec), say) for spec in specs]
    services += [BackgroundLogger(name, own, say) for name, own in own_loggers(user_objects.loggers).items()]
    return Listeners((TensorBoard(path, record.patience), *services), callbacks)


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
    resolved, chosen = with_chosen_paths(with_kept_cuts(resolved, world, path), world, path)
    ground, config = _groundwork(resolved, path, world, user_objects, world.data_size, world.rank), resolved.config
    info = ground.source.info
    work = ground.work
    run_parts = build_parts(resolved, work, world, ground.clock)
    keep_cuts(run_parts, world, path)
    saver = Saver(
        path,
        config.checkpoint.keep,
        RanksState(run_parts, world, record.patience),
        record,
        Fingerprint.of(config, info, ground.task, ground.train_loader.sampling),
    )
    restored = saver.restore()
    if world.leads:
        keep_roster(ground.source, path)
    if restored is None:
        seed_everything(_rank_seed(config.training.seed, world.data_rank))
    cursor = restored or Cursor()
    display = _display(config, ground.train_loader.batches_per_epoch, world, cursor, ground.task)
    listeners = build_listeners(config, path, record, user_objects) if world.leads else Listeners()
    progress = RunProgress(record, listeners, display)
    saver.on_saved = progress.saved
    run = ground.run(run_parts, saver, progress)
    notes += length_notes(resolved, ground.steps, world.size)
    _record_start(ground, run, cursor, path)
    if world.leads:
        _record_weights(work, progress, restored is not None)
    for note in work.notes[:1]:
        progress.note("tuning", note)
    for name, note in run_notes(
        config, ground.source, run_parts.split.notes if run_parts.split else (), [*notes, *chosen]
    ):
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
    rank = process.number * world.size + world.rank
    ground = _groundwork(resolved, path, world, user_objects, process.workers * world.data_size, rank)
    info = ground.source.info
    work = ground.work
    run_parts, link = build_worker(resolved, work, process, world, ground.clock, path)
    seed_everything(_rank_seed(config.training.seed, process.number * world.data_size + world.data_rank))
    pids = roll_call(world).pids
    record = Recorder(path if link else None, patience_s=resolved.io_patience_s)
    silent = Display(RunLength(0, 0), ground.task.facts(), visible=False)
    progress = RunProgress(record, Listeners(), silent)
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
    fingerprint = Fingerprint.of(config, info, ground.task, ground.train_loader.sampling)
    saver = Saver(path, config.checkpoint.keep, state, record, fingerprint)
    run = ground.run(run_parts, saver, progress)
    if process.number == 0:
        _record_weights(work, progress, resumes=False)
    split_notes = run_parts.split.notes if run_parts.split else ()
    start = replace(_start_of_workers(ground, run_parts, link), pids=pids)
    of_tuning = [("tuning", note) for note in work.notes[:1]]
    return run, Leases(run, link, state, start, [*of_tuning, *run_notes(config, ground.source, split_notes, notes)])


def _record_weights(work: Work, progress: RunProgress, resumes: bool) -> None:
    """Record what became of the weights that a run starts from, each name that differs; silent where it goes on."""
    for loaded in work.loaded[:1]:
        if not resumes:
            progress.display.say(str(loaded))
            details = (loaded.loaded, loaded.new, loaded.unexpected, loaded.reshaped)
            progress.record.write(WeightsLoaded(str(loaded), *details))


def keep_roster(source: Source, path: Path) -> None:
    """Write which samples a run begins with to its folder, where the source can tell and nothing is there."""
    if source.roster is not None and not source.roster.is_kept:
        source.roster.keep(path)


def workers_at_start(process: WorkerRank, nodes: Nodes) -> int:
    """Return the processes of all workers that a run with servers begins with; machines may join later."""
    return process.workers * process.size * nodes.least // nodes.most


def _start_of_workers(ground: _Groundwork, run_parts: RunParts, link: ServerLink) -> Start:
    """Return the record's line of a run's start; how far the run is, its scheduler knows."""
    placement = ground.world.placement
    layout: dict[str, int] | None = None
    if run_parts.split is not None and placement is not None:
        sizes = {**placement.layout.sizes, Axis.DP: link.process.workers}
        layout = layout_sizes(replace(placement.layout, sizes=sizes))
    return replace(
        ground.start(),
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


def check_mixing(config: RunConfig, task: Task) -> None:
    """Refuse mixup and CutMix for a task whose targets cannot be shares of classes.

    Raises:
        UserError: names the task.
    """
    if (config.data.mixup or config.data.cutmix) and not task.takes_shares:
        raise UserError(f"--mixup and --cutmix make shares of classes of targets; the task {task.name} takes none")


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
    return Display(RunLength.of(config, total), task.facts(), world.leads, cursor.step)


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
        ground.start(),
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
    run.progress.begins(start, ground.resolved.described, path)


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
