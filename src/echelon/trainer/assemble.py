"""Building the parts of a run from its description."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import takewhile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from echelon.checkpoint import CheckpointStore
from echelon.collectives import base as collectives
from echelon.collectives.chooser import PathBySize
from echelon.config import RunConfig
from echelon.config.validate import Nodes
from echelon.coordinator.addresses import ROLES_FOLDER
from echelon.core.axes import Axis
from echelon.core.errors import UserError
from echelon.core.own import is_nameless, of_object
from echelon.core.terms import TERMINAL_VARIABLE
from echelon.data import (
    LoaderConfig,
    Shard,
    Source,
    evaluation_digest,
    example_samples,
    samples_digest,
    stream_digests,
)
from echelon.data.base import DataInfo
from echelon.data.kept_info import keep_info
from echelon.data.loader import EvalLoader, TrainLoader, size_note
from echelon.data.order import layer_seed
from echelon.data.transforms import NO_TRANSFORMS, Transforms
from echelon.models import auto_name, parameter_count
from echelon.models.trial import own_copy
from echelon.models.tuning.plan import TuningPlan
from echelon.observe.callbacks import Listeners, as_callback, named_callbacks
from echelon.observe.environment import environment
from echelon.observe.loggers import LOGGERS
from echelon.observe.loggers.base import BackgroundLogger, LoggerSettings, own_loggers
from echelon.observe.notes import NotedClock
from echelon.observe.phases import PhaseClock, make_clock
from echelon.observe.profile import StepProfiler, TracedClock, rank_trace
from echelon.observe.resources import resident_bytes
from echelon.observe.tensorboard import TensorBoard
from echelon.optim.build import Schedule, build_schedule
from echelon.optim.own import OptimizerFactory, described
from echelon.parallel.sync_batchnorm import regroup_sync_batchnorm
from echelon.ps.split_worker import SplitWorker
from echelon.ps.worker_rank import WorkerRank
from echelon.records.events import Event, PeriodChanged, StartedOver, WeightsLoaded
from echelon.records.file import Recorder, newest
from echelon.records.going import Launch, read_launch
from echelon.records.kinds import Start, Steps
from echelon.sync.base import Replayable, Sync
from echelon.tasks import nest
from echelon.tasks.base import Task
from echelon.tasks.classification import likely_task
from echelon.tasks.own_loss import LossFunction
from echelon.tasks.registry import TaskObjects
from echelon.trainer.balance import Balancer, BatchParts, Deal, dealt_anew, make_balancer, why_not
from echelon.trainer.compatibility import (
    batchnorm_notes,
    interplay_notes,
    length_notes,
    pushing_order,
    sent_whole_notes,
    still_notes,
    summing_order,
    worker_notes,
)
from echelon.trainer.display import Display, RunLength
from echelon.trainer.folder import CHECKPOINTS_FOLDER, has_checkpoint
from echelon.trainer.inputs import model_input, units_of
from echelon.trainer.leases import Commands, Leases
from echelon.trainer.loop import LoopSettings, TrainingRun, regroupable
from echelon.trainer.loss_guard import GuardSettings, LossGuard
from echelon.trainer.membership import Membership
from echelon.trainer.parts import build_parts, channels_last, keep_cuts, with_kept_cuts
from echelon.trainer.path_choice import PathsFile, with_chosen_paths
from echelon.trainer.precision import PRECISIONS
from echelon.trainer.progress import RunProgress
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.retuning import RebuiltParts, Retuning, as_it_goes_on, kept_epoch
from echelon.trainer.saving import RanksState, Saver
from echelon.trainer.second_copy import make_copy
from echelon.trainer.server_parts import ServerLink, build_worker
from echelon.trainer.servers_checkpoint import ServersState
from echelon.trainer.state import Cursor, Fingerprint, OwnMarks, RunParts, layout_of, layout_sizes, seed_everything
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.tables import table_notes
from echelon.trainer.unused import unread_notes
from echelon.trainer.update import UpdateGate
from echelon.trainer.window import Traffic
from echelon.trainer.work import Work
from echelon.trainer.world import World, first_that_differs, roll_call, short_connects, text_from_rank_0


@dataclass(frozen=True)
class UserObjects:
    """Objects of the caller's own, in place of names, and callbacks (see `echelon.observe.callbacks`).

    Attributes:
        loss_mark: `core.own.code_mark` of `loss`, made where its source can be read.
    """

    model: nn.Module | None = None
    source: Source | None = None
    task: Task | None = None
    callbacks: tuple[object, ...] = ()
    transforms: Transforms = NO_TRANSFORMS
    loss: LossFunction | None = None
    metrics: object = None
    optimizer: OptimizerFactory | None = None
    loggers: tuple[LoggerSettings, ...] = ()
    loss_mark: str = ""

    @property
    def of_task(self) -> TaskObjects:
        """Those that say what is learnt, and how it is judged."""
        return TaskObjects(self.task, self.loss, self.metrics)

    @property
    def needed(self) -> tuple[str, ...]:
        """Keywords of `echelon.resume` by which a run needs these again: no name leads to them."""
        given = {
            "model": self.model is not None,
            "data": self.source is not None,
            "task": self.task is not None,
            "loss": self.loss is not None and is_nameless(of_object(self.loss)),
            "metrics": self.metrics is not None and is_nameless(of_object(self.metrics)),
            "optimizer": self.optimizer is not None and is_nameless(described(self.optimizer)),
            "callbacks": bool(self.callbacks),
            "transform": self.transforms.training is not None,
            "eval_transform": self.transforms.evaluation is not None,
            "loggers": bool(self.loggers),
        }
        return tuple(keyword for keyword, is_given in given.items() if is_given)


@dataclass(frozen=True)
class _Groundwork:
    """What every rank builds first, whatever it is part of.

    Attributes:
        rank: of all of the run.
        resident_bytes: of this process, which has no model yet.
        needs_several: the model cannot train on one sample alone.
    """

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
    balances: bool = False
    resident_bytes: int = 0
    needs_several: bool = False

    @property
    def work(self) -> Work:
        """What is trained on what."""
        splits = self.world.placement is not None and self.world.placement.layout.splits
        model = self.user_objects.model
        tried = splits or model is not None or self.task.is_own
        example, targets = example_samples(self.source) if tried else (None, None)
        tuning = self.resolved.tuning
        return Work(
            self.source.info,
            self.task,
            model,
            example,
            tuning,
            steps=self._steps_since(tuning),
            example_targets=targets,
            least_samples=self._at_once(self._last_batch),
            usual_samples=self._at_once(self.full_batch),
            balances=self.balances,
            start_tuning=self.resolved.start_tuning,
        )

    @property
    def marks(self) -> OwnMarks:
        """What tells the data and the loss of the caller's own from others."""
        loss = self.user_objects.loss_mark
        if self.user_objects.source is None:
            return OwnMarks(loss=loss)
        return OwnMarks(samples_digest(self.source), evaluation_digest(self.source), loss)

    @property
    def full_batch(self) -> int:
        """Samples of a full batch."""
        return min(self.resolved.config.data.batch_size, self.source.info.train_size)

    @property
    def _last_batch(self) -> int:
        """Return the samples of the smallest batch, which is the last of an epoch."""
        if self.steps < self.train_loader.batches_per_epoch:  # it is never reached
            return self.full_batch
        return self.source.info.train_size % self.full_batch or self.full_batch

    def _at_once(self, samples: int) -> int:
        """Return the samples of a batch that the rank with the fewest computes with at once."""
        return max(1, samples // max(1, self.world.data_size) // self.resolved.config.training.accumulate)

    @property
    def least_part(self) -> int:
        """Samples of a full batch that each rank gets where parts follow speed: smaller batches are cut alike."""
        at_once = 2 * self.resolved.config.training.accumulate
        return -(-at_once * self.full_batch // self._last_batch) if self.needs_several else 1

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        training = self.resolved.config.training
        steps = training.epochs * self.train_loader.batches_per_epoch
        return min(steps, training.max_steps) if training.max_steps else steps

    def _steps_since(self, tuning: TuningPlan) -> int:
        """Return the steps of the run in which parts are as a plan has them, or more is trained: they count anew."""
        return max(1, self.steps - tuning.epoch * self.train_loader.batches_per_epoch)

    def run(self, run_parts: RunParts, saver: Saver, progress: RunProgress) -> TrainingRun:
        """Put the parts of a run together."""
        config = self.resolved.config
        training, told = config.training, bool(config.tracking.callbacks or self.user_objects.callbacks)
        every = self.resolved.checkpoint_every
        return TrainingRun(
            world=self.world,
            parts=run_parts,
            step=self.step(run_parts, saver.folder, progress),
            task=self.task,
            schedule=self.schedule(run_parts),
            train_loader=self.train_loader,
            eval_loader=self.eval_loader,
            clock=self.clock,
            saver=saver,
            progress=progress,
            settings=LoopSettings(
                training.epochs, training.max_steps, training.eval_every, every, told,
                training.early_stop, training.early_stop_delta,
                time.monotonic() - self.launch.seconds_since() + self.resolved.max_time_s,
                training.seed,
            ),
            traffic=Traffic(at_start=run_parts.start_bytes),
            profiler=self.profiler,
            test_loader=self.test_loader,
        )  # fmt: skip

    def step(self, run_parts: RunParts, folder: Path, progress: RunProgress) -> Step:
        """Build what computes a step."""
        settings = _step_settings(self.resolved.config, self.world)
        guard = self._loss_guard(run_parts, folder, progress)
        return Step(self.task, settings, self.clock, run_parts.scaler, run_parts.split, guard)

    def schedule(self, run_parts: RunParts) -> Schedule:
        """Build the schedule of the learning rate."""
        config, per_epoch = self.resolved.config, self.train_loader.batches_per_epoch
        return build_schedule(run_parts.optimizer, config.optimizer, per_epoch, config.training.epochs)

    def retuning(self, saver: Saver, progress: RunProgress, path: Path, pristine: nn.Module | None) -> Retuning:
        """Return what builds the run's parts anew where tuning begins to train more.

        Args:
            pristine: the caller's own module, as it was before tuning changed it.
        """

        def build(plan: TuningPlan) -> RebuiltParts:
            """Build the parts for a plan, and restore them; weights to start from are in the checkpoint."""
            seed_everything(self.resolved.config.training.seed)
            resolved = replace(self.resolved.going_on(0), tuning=plan)
            copy = None if pristine is None else own_copy(pristine)
            work = replace(self.work, tuning=plan, user_model=copy, steps=self._steps_since(plan))
            run_parts = build_parts(with_kept_cuts(resolved, self.world, path), work, self.world, self.clock)
            saver.restore_into(RanksState(run_parts, self.world, progress.record.patience))
            step = self.step(run_parts, path, progress)
            return RebuiltParts(run_parts, step, self.schedule(run_parts), work.tuned.words)

        return Retuning(self.resolved.tuning, build)

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
            objects=self.user_objects.needed,
        )


def _groundwork(
    resolved: ResolvedRun,
    path: Path,
    world: World,
    user_objects: UserObjects,
    data_ranks: int,
    rank: int,
    balances: bool = False,
) -> _Groundwork:
    """Open the data, for `data_ranks` that divide it or take turns; the same seed on every rank until it trains.

    Args:
        rank: of all ranks of the run, also where these are workers of a parameter server.
        balances: parts of batches follow the ranks' speed.
    """
    config, seed = resolved.config, resolved.config.training.seed
    seed_everything(seed)
    source = user_objects.source or resolved.source.open()
    if source.sample_index is not None:
        source.sample_index.check(path)
    check_enough(source.info, data_ranks)
    check_whole_streams(source, world)
    if rank == 0:
        keep_info(path, source.info)
    task = resolved.task.fitted(source.info, user_objects.of_task)
    check_mixing(config, task)
    clock: PhaseClock = NotedClock(make_clock(world.device.type), world.notes)
    profiler = None
    if config.training.profile:
        clock = TracedClock(clock)
        profiler = StepProfiler(config.training.profile, rank_trace(path, rank), clock)
    train, evaluation, test = _loaders_of(resolved, world, source, task, user_objects, balances)
    return _Groundwork(
        resolved, world, rank, source, task, clock, train, evaluation, user_objects, read_launch(path), profiler, test,
        balances, resident_bytes(),
    )  # fmt: skip


def _loaders_of(
    resolved: ResolvedRun, world: World, source: Source, task: Task, user_objects: UserObjects, balances: bool = False
) -> tuple[TrainLoader, EvalLoader, EvalLoader | None]:
    """Return the loaders of a rank's part of the training, evaluation and test sets."""
    config = resolved.config
    settings = LoaderConfig.of(config.data, config.training.seed, world.device, user_objects.transforms)
    shard = Shard(world.data_rank, world.data_size)
    largest = min(config.data.batch_size, source.info.train_size) if balances else 0
    return (
        TrainLoader(source, settings, shard, units_of(task), largest),
        EvalLoader(source, settings, shard),
        None if source.test is None else EvalLoader(source, settings, shard, source.test),
    )


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


class Rebuilder:
    """Builds anew, of a run that goes on, what depends on its ranks.

    Attributes:
        resolved: the run.
    """

    def __init__(self, ground: _Groundwork, path: Path, membership: Membership | None = None) -> None:
        self.resolved, self._ground, self._path = ground.resolved, ground, path
        self._membership = membership
        self._builds: Callable[[dist.ProcessGroup | None, collectives.Path], Sync] | None = None
        self._leads, self._opened = ground.world.leads, ExitStack()

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.resolved.config.training.seed

    def leave(self, run: TrainingRun) -> None:
        """Let go of the groups that the strategy and the layers work in."""
        regroup_sync_batchnorm(run.parts.model, None)
        self._builds = regroupable(run).leave()

    @property
    def paths(self) -> str:
        """The path of each size, where they were tried before the first step: the text of `PathsFile`; else nothing."""
        path = self.resolved.path
        return PathsFile(self._ground.world.size, path.choices).as_text() if isinstance(path, PathBySize) else ""

    def take_paths(self, text: str) -> None:
        """Take over what the others chose before this rank came."""
        if text:
            self.resolved = replace(
                self.resolved, path=PathBySize(PathsFile.from_text(text).choices, order=self.resolved.path.order)
            )

    def recorded(self) -> int:
        """Return the last step that the run's record tells of."""
        return next((window.step for window in newest(self._path, Steps)), 0)

    def shares(self, before: Sequence[int]) -> tuple[int, ...]:
        """Return the parts of a full batch of ranks that had such parts, 0 for new ones; empty: parts are equal."""
        ground = self._ground
        return dealt_anew(ground.full_batch, before, ground.least_part) if ground.balances else ()

    def enter(self, run: TrainingRun, world: World, cursor: Cursor, sent: int) -> None:
        """Build what depends on the ranks for those of a world, which all call it together.

        Args:
            sent: bytes that this rank sent to bring others where it is.
        """
        builds, self._builds = self._builds, None  # it keeps what the strategy had before
        assert builds is not None
        ground, same = self._ground, (run.world.data_rank, run.world.data_size) == (world.data_rank, world.data_size)
        with _connecting(self._membership), short_connects(timedelta(seconds=self.resolved.timeout_s)):
            regroup_sync_batchnorm(run.parts.model, world.data_group)
            run.world, run.parts = world, replace(run.parts, sync=builds(world.group, self.resolved.path))
        if ground.balances:
            division = BatchParts(ground.full_batch, world.size, least=ground.least_part)
            run.balance = Balancer(division, cursor.shares)
        if world.leads and not self._leads:
            self._lead(run, world, cursor)
        ground = self._ground = replace(self._ground, world=world)
        if not same:
            for loader in (run.train_loader, run.eval_loader, run.test_loader):
                if loader is not None:
                    loader.close()
            objects = ground.user_objects
            loaders = _loaders_of(self.resolved, world, ground.source, ground.task, objects, ground.balances)
            run.train_loader, run.eval_loader, run.test_loader = loaders
        if cursor.shares:
            run.train_loader.deal(replace(run.train_loader.shard, weights=cursor.shares))
        run.step = ground.step(run.parts, self._path, run.progress)
        run.saver.go_on(RanksState(run.parts, world, run.progress.record.patience), run.progress.record, sent)

    def _lead(self, run: TrainingRun, world: World, cursor: Cursor) -> None:
        """Show and record from now on: the rank that did is gone."""
        self._leads = True
        # where the record is another machine's, so is the command that began it
        ground = self._ground = replace(self._ground, launch=read_launch(self._path))
        config = self.resolved.config
        if terminal := os.environ.get(TERMINAL_VARIABLE):
            for fd in (1, 2):
                os.dup2(int(terminal), fd)
        record = Recorder(self._path, patience_s=self.resolved.io_patience_s)
        display = _display(config, ground.train_loader.batches_per_epoch, world, cursor, ground.task)
        self._opened.enter_context(display)
        run.progress = RunProgress(record, build_listeners(config, self._path, record, ground.user_objects), display)
        run.saver.on_saved = run.progress.saved
        if not has_checkpoint(self._path):  # on the disk of a machine that has not led before
            keep_info(self._path, ground.source.info)
            keep_sample_index(ground.source, self._path)
            run.saver.postpone()

    def tell(self, run: TrainingRun, cursor: Cursor, seconds: float, dead: int, sent: int) -> None:
        """Record who the ranks are from now on, and what is lost with `dead` of before; all of them call it.

        Args:
            sent: bytes that this rank sent to bring others where it is.
        """
        start = _start_of(self._ground, run, cursor, sent)
        if start is not None:
            run.progress.record.write(start)
            run.progress.record.flush()
            workers = f"{start.world_size} workers go on" if start.world_size > 1 else "1 worker goes on"
            lost = f"; what the codec of {dead} had not sent yet is lost" if dead and self._remembers else ""
            run.progress.note("members", f"{workers} from step {cursor.step}; agreed in {seconds:.2f} s{lost}")
            if cursor.shares:
                run.progress.happened(Deal(cursor.shares, anew=True).event(cursor.step))

    @property
    def _remembers(self) -> bool:
        return self.resolved.compression.encodes and self.resolved.compression.codec.biased

    def close(self) -> None:
        """End what was opened."""
        self._opened.close()


def assemble(
    resolved: ResolvedRun,
    path: Path,
    world: World,
    record: Recorder,
    user_objects: UserObjects,
    membership: Membership | None = None,
) -> tuple[TrainingRun, Cursor, Rebuilder]:
    """Build the parts of a run from its description, and restore the newest checkpoint.

    Args:
        membership: of a run whose survivors go on; a newcomer to it restores nothing.

    Raises:
        UserError: something in the description cannot be built.
    """
    notes = interplay_notes(resolved, world.size, world.device.type == "cuda")
    is_newcomer = membership is not None and membership.is_newcomer
    if world.group is None and not is_newcomer:
        resolved = resolved.for_single_worker()
    resolved, goes_on = (resolved, False) if is_newcomer else as_it_goes_on(resolved, path, world)
    resolved, chosen = with_chosen_paths(with_kept_cuts(resolved, world, path), world, path)
    balances, unbalanced = _balances(resolved, world, membership is not None and not _divides(world))
    ground = _groundwork(resolved, path, world, user_objects, world.data_size, world.rank, balances)
    info, config, work = ground.source.info, resolved.config, ground.work
    pristine = own_copy(user_objects.model) if resolved.tuning.until and user_objects.model is not None else None
    if membership is not None:
        gc.freeze()  # a new term collects what wrapped the model: to look at all that is imported takes half a second
    with _connecting(None if is_newcomer else membership):
        run_parts = build_parts(resolved, work, world, ground.clock)
    ground = replace(ground, needs_several=any(work.needs_several))
    state = RanksState(run_parts, world, record.patience)
    fingerprint = Fingerprint.of(resolved, info, ground.task, ground.train_loader.sampling, ground.marks)
    saver = Saver(path, config.checkpoint.keep, state, record, fingerprint)
    restored = _restored(saver, goes_on, config.training.seed, state, world) if not is_newcomer else None
    keep_cuts(run_parts, world, path)
    if world.leads:
        keep_sample_index(ground.source, path)
    if restored is None:
        seed_everything(rank_seed(config.training.seed, world.data_rank))
    _replay(run_parts.sync, restored, world, path)
    cursor = restored or Cursor(draws_by_part=membership is not None and not _divides(world))
    cursor.draws_by_part |= balances
    display = _display(config, ground.train_loader.batches_per_epoch, world, cursor, ground.task)
    listeners = build_listeners(config, path, record, user_objects) if world.leads else Listeners()
    progress = RunProgress(record, listeners, display)
    saver.on_saved = progress.saved
    run = ground.run(run_parts, saver, progress)
    run.balance = None if is_newcomer else _balancer(ground, cursor, path)
    if resolved.tuning.changes_later:
        run.retuning = ground.retuning(saver, progress, path, pristine)
    whole = sent_whole_notes(resolved, run_parts.model, world.size)
    notes += [*length_notes(resolved, ground.steps, world.size, encodes=not whole), *unbalanced, *whole]
    notes += _model_notes(resolved, run_parts, world)
    _record_start(ground, run, cursor, path)
    _tell_beginning(ground, work, run, [*notes, *chosen], restored is not None)
    if world.leads:
        progress.restored(None if restored is None else cursor.step, path, saver.passed_over)
    _let_survive(resolved, run, membership)
    return run, cursor, Rebuilder(ground, path, membership)


def _let_survive(resolved: ResolvedRun, run: TrainingRun, membership: Membership | None) -> None:
    """Let survivors go on, or those of a split run save what a dead rank had; all ranks call it."""
    run.survives = membership is not None
    if membership is None or run.parts.split is None or run.world.group is None:
        return
    assert run.parts.update is not None
    run.parts.update.gate = UpdateGate(run.world.group, run.world.device)
    with membership.connecting():
        run.copy = run.parts.update.copy = make_copy(resolved, run.parts, run.world, run.progress.note)


def _restored(saver: Saver, goes_on: bool, seed: int, state: RanksState, world: World) -> Cursor | None:
    """Return where the newest checkpoint is; a run that goes on has one, and was built without the weights it had.

    A rank that nobody was before draws on its own, from a seed of the step.
    """
    restored = saver.restore()
    if restored is not None and not state.draws_go_on:
        seed_everything(layer_seed(seed, restored.step, world.data_rank))
    if goes_on and restored is None:
        raise RuntimeError("the run's checkpoints were there a moment ago, and are not: nothing to go on from")
    return restored


def _model_notes(resolved: ResolvedRun, run_parts: RunParts, world: World) -> list[str]:
    """Say what the model's layers mean for a run of several workers."""
    synced = resolved.config.model.sync_batchnorm
    tables = table_notes(resolved, run_parts.model, world.size)
    normed = batchnorm_notes(resolved, run_parts.model, world.size)
    normed += still_notes(resolved, run_parts.model)
    return [*tables, *normed, *worker_notes(run_parts.model, world.data_size, synced)]


def _connecting(membership: Membership | None) -> AbstractContextManager[None]:
    """Surround what makes connections to other ranks, which break when these leave."""
    return membership.connecting() if membership is not None else nullcontext()


def _tell_beginning(ground: _Groundwork, work: Work, run: TrainingRun, notes: Sequence[str], restored: bool) -> None:
    """Record and say what has to be known of a run that begins, or goes on from a checkpoint."""
    progress = run.progress
    if run.world.leads:
        _record_weights(work, progress, restored)
    split = run.parts.split
    own = run_notes(ground.resolved.config, ground.source, split.notes if split else (), notes)
    for name, note in (*work.notes, *own):
        progress.note(name, note)


def _balances(resolved: ResolvedRun, world: World, changes: bool) -> tuple[bool, list[str]]:
    """Return whether parts of a batch follow the ranks' speed, and what to say where they cannot.

    Args:
        changes: ranks may come and go.
    """
    if resolved.config.launch.balance == "off":
        return False, []
    reason = why_not(resolved, world, changes)
    return not reason, [f"--balance auto does nothing: {reason}"] if reason else []


def _divides(world: World) -> bool:
    """Whether ranks have parts of a model, or of an optimizer's state: they begin and end together."""
    layout = world.placement.layout if world.placement is not None else None
    return layout is not None and (layout.splits or layout.zero1)


def _balancer(ground: _Groundwork, cursor: Cursor, path: Path) -> Balancer | None:
    """Return what decides on shares, and deal those of the checkpoint; None: parts are equal."""
    world, loader = ground.world, ground.train_loader
    if not ground.balances:
        cursor.shares = ()
        return None
    replicas = world.placement.layout.dp if world.placement is not None else world.size
    division = BatchParts(ground.full_batch, replicas, world.data_size // replicas, ground.least_part)
    balancer = make_balancer(division, world, cursor, path)
    loader.deal(replace(loader.shard, weights=cursor.shares))
    return balancer


def _replay(sync: Sync, restored: Cursor | None, world: World, path: Path) -> None:
    """Let a strategy decide again what the record has of the steps after a checkpoint's; all ranks call it."""
    if restored is None or not isinstance(sync, Replayable) or not sync.decides:
        return
    lines = newest(path, PeriodChanged, StartedOver) if world.leads else iter(())
    since = takewhile(lambda line: not isinstance(line, StartedOver), lines)
    decided = {str(line.step): line.new for line in reversed(list(since)) if isinstance(line, PeriodChanged)}
    told: Mapping[str, int] = json.loads(text_from_rank_0(json.dumps(decided), world))
    sync.replay({int(at): period for at, period in told.items() if int(at) > restored.step})


def assemble_worker(
    resolved: ResolvedRun, path: Path, world: World, process: WorkerRank, user_objects: UserObjects
) -> tuple[TrainingRun, Leases | Commands]:
    """Build the parts of one process of a parameter server's worker, and where its batches come from.

    Raises:
        UserError: something in the description cannot be built.
    """
    notes, config = interplay_notes(resolved, process.workers, world.device.type == "cuda"), resolved.config
    tuning = resolved.tuning
    if tuning.changes_later:
        tuning = tuning.at(kept_epoch(path / ROLES_FOLDER))
        resolved = replace(resolved, tuning=tuning)
    goes_on = process.size == 1 and has_checkpoint(path)
    if goes_on:
        resolved = replace(resolved.going_on(0), tuning=tuning)
    rank = process.number * world.size + world.rank
    ground = _groundwork(resolved, path, world, user_objects, process.workers * world.data_size, rank)
    info = ground.source.info
    work = ground.work
    run_parts, link = build_worker(resolved, work, process, world, ground.clock, path)
    if goes_on and work.tuned.frozen:
        _take_base(run_parts, work.tuned.frozen, path)
    seed_everything(rank_seed(config.training.seed, process.number * world.data_size + world.data_rank))
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
    parts = 1 if link.settings.aggregates else min(link.settings.batch_parts(process.workers), config.data.batch_size)
    state = ServersState(
        link.servers, link.table, per_epoch, record.patience, idle, work.tuned.frozen, tuning.epoch, parts
    )
    fingerprint = Fingerprint.of(resolved, info, ground.task, ground.train_loader.sampling, ground.marks)
    saver = Saver(path, config.checkpoint.keep, state, record, fingerprint)
    run = ground.run(run_parts, saver, progress)
    if process.number == 0:
        _record_weights(work, progress, resumes=False)
    split_notes = run_parts.split.notes if run_parts.split else ()
    start = replace(_start_of_workers(ground, run_parts, link), pids=pids)
    return run, Leases(
        run, link, state, start, [*work.notes, *run_notes(config, ground.source, split_notes, [*notes, *link.notes])]
    )


def _take_base(run_parts: RunParts, frozen: Set[str], path: Path) -> None:
    """Give a worker that goes on what no server holds, as the newest checkpoint has it."""
    base = CheckpointStore(path / CHECKPOINTS_FOLDER, keep=1).newest_base()
    if base is not None:
        stays = {name: tensor for name, tensor in base["model"].items() if name in frozen}
        run_parts.model.load_state_dict({**run_parts.model.state_dict(), **stays})


def _record_weights(work: Work, progress: RunProgress, resumes: bool) -> None:
    """Record what became of the weights that a run starts from, each name that differs; silent where it goes on."""
    for loaded in work.loaded[:1]:
        if not resumes:
            progress.display.say(str(loaded))
            details = (loaded.loaded, loaded.new, loaded.unexpected, loaded.reshaped)
            progress.record.write(WeightsLoaded(str(loaded), *details))


def keep_sample_index(source: Source, path: Path) -> None:
    """Write which samples a run begins with to its folder, where the source can tell and nothing is there."""
    if source.sample_index is not None and not source.sample_index.is_kept:
        source.sample_index.keep(path)


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
        parameters=link.table.numel,
        layout=layout or None,
        served=True,
        order=pushing_order(ground.resolved, link.process.size),
    )


def run_notes(
    config: RunConfig, source: Source, layout: Sequence[str], settings: Sequence[str]
) -> list[tuple[str, str]]:
    """Return what a user has to know of this run, each with the name of its event."""
    size = [note] if (note := size_note(source.info, config.data.batch_size)) else []
    unread = unread_notes(config.data, source)
    named = {
        "data": [*source.notes, *_labels_note(config, source.info)],
        "layout": layout,
        "settings": [*unread, *settings],
        "batch_size": size,
    }
    return [(name, note) for name, notes in named.items() for note in notes]


def _labels_note(config: RunConfig, info: DataInfo) -> list[str]:
    """Say which task targets of zeros and ones look like, where they are learnt as numbers because none was named."""
    target = info.targets
    if config.task != "auto" or config.optimizer.loss or info.task != "regression" or nest.is_container(target):
        return []
    likely = likely_task(target, info.target_values)
    said = f"data {info.name}: targets are all 0 and 1, and are learnt as numbers (regression)"
    return [f"{said}: --task {likely} learns them as labels"] if likely == "multi-label" else []


def check_mixing(config: RunConfig, task: Task) -> None:
    """Refuse mixup and CutMix for a task whose targets cannot be shares of classes.

    Raises:
        UserError: names the task.
    """
    if (config.data.mixup or config.data.cutmix) and not task.takes_shares:
        raise UserError(f"--mixup and --cutmix blend classes: the task {task.name} has none to blend")


def check_whole_streams(source: Source, world: World) -> None:
    """Check that data which can only be iterated gives every rank the same; all ranks call it.

    Raises:
        UserError: it gives a rank a share, or another order: of what the rank then keeps, a part would be all.
    """
    for part, digest in stream_digests(source).items():
        if (other := first_that_differs(digest, world)) is not None:
            raise UserError(
                f"data {source.info.name}: the {part} data gives worker {other} other items than worker 0: each "
                "keeps its part of all items, so let the data give all workers the same, and leave out what divides it "
                "by rank (split_dataset_by_node, RANK) or shuffles it without a seed"
            )


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
    return Display(RunLength.of(config, total, steps_per_epoch), task.facts(), world.leads, cursor.step)


def rank_seed(seed: int, rank: int) -> int:
    """Return the seed of a rank's generators: dropout and the like differ between ranks, the parameters do not."""
    return (seed * 1_000_003 + rank + 1) % 2**63


def _record_start(ground: _Groundwork, run: TrainingRun, cursor: Cursor, path: Path) -> None:
    start = _start_of(ground, run, cursor)
    if start is not None:
        run.progress.begins(start, ground.resolved.described, path, ground.resolved.compression.codec)


def _start_of(ground: _Groundwork, run: TrainingRun, cursor: Cursor, sent: int = 0) -> Start | None:
    """Return the record's line of a start, on the rank that leads; all ranks call it together."""
    world = run.world
    ranks = roll_call(world, ground.resident_bytes)
    parameters = _parameter_count(run.parts, world)
    recovery = torch.tensor([sent], device=world.device)
    if world.group is not None:
        dist.all_reduce(recovery, group=world.group)
    if not world.leads:
        return None
    return replace(
        ground.start(),
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        world_size=world.size,
        hosts=ranks.hosts,
        pids=ranks.pids,
        affinity=ranks.affinity,
        resident_bytes=ranks.resident_bytes if world.device.type == "cpu" else (),
        backend="none" if world.group is None else ("nccl" if world.device.type == "cuda" else "gloo"),
        parameters=parameters,
        layout=layout_of(world),
        start_step=cursor.step,
        start_epoch=cursor.epoch,
        idle=_idle_settings(ground.resolved, world),
        order=summing_order(ground.resolved, world.size),
        shares=cursor.shares,
        recovery_bytes=int(recovery),
    )


def _idle_settings(resolved: ResolvedRun, world: World) -> list[str]:
    """Return the settings, as flags, that do nothing with a single worker."""
    if world.size > 1:
        return []
    strategy = resolved.described.strategy
    idle = [] if resolved.sync.acts_alone else [f"--sync {strategy.sync}"]
    return idle + [f"--compression {strategy.compression}"] * resolved.compression.encodes


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
