"""What one process of a parameter server's worker computes with; the worker is that process, or a team of them."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace

import torch
from torch import nn

from echelon.config import RunConfig
from echelon.coordinator.messages import TrainTask
from echelon.data import LoaderConfig, Shard, Source, example_inputs, open_data
from echelon.data.base import Batch
from echelon.data.loader import EvalLoader, TrainLoader
from echelon.observe.phases import Phase, PhaseClock, make_clock
from echelon.ps.worker_rank import WorkerRank
from echelon.tasks.base import SAMPLE, Task
from echelon.trainer.assemble import Given, _rank_seed, _step_settings, check_enough
from echelon.trainer.evaluate import EvaluationReport, evaluate
from echelon.trainer.inputs import run_task, units_of
from echelon.trainer.parts import Work, build_computing, build_split, build_whole
from echelon.trainer.precision import set_numerics
from echelon.trainer.replica import Replica, Sums
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.state import seed_everything
from echelon.trainer.step import Step
from echelon.trainer.world import World


@dataclass(frozen=True)
class WorkerModel:
    """The parts of one process. `model` is whole, and there where the process leads; `replica` where it is split."""

    run: ResolvedRun
    world: World
    source: Source
    model: nn.Module | None
    replica: Replica | None
    task: Task
    step: Step
    clock: PhaseClock
    train_loader: TrainLoader
    eval_loader: EvalLoader

    @property
    def _fsdp(self) -> int:
        return self.world.placement.layout.fsdp if self.world.placement else 1

    def part(self, task: TrainTask) -> Batch:
        """Return this process's part of a lease: with fsdp the ranks of a worker divide it."""
        self.clock.enter(Phase.DATA)
        own = self.world.data_rank if self._fsdp > 1 else 0
        shard = Shard(task.share * self._fsdp + own, task.shares * self._fsdp)
        batch = self.train_loader.part(task.epoch, task.batch, shard)
        if self.task.unit != SAMPLE and task.shares > 1 and batch.global_units is None:
            whole = self.train_loader.part(task.epoch, task.batch, Shard(0, 1))  # nobody else can tell its units
            batch.global_units = self.task.units(whole.targets)
        return batch

    def compute(self, batch: Batch) -> Sums:
        """Forward and backward of a worker that is split, as all of its ranks."""
        assert self.replica is not None
        return self.replica.compute(self.step, batch, self.clock)

    def evaluate(self, module: nn.Module) -> EvaluationReport:
        """Evaluate a module that holds what is to be evaluated; all ranks of a worker call it together."""
        return evaluate(module, self.eval_loader, self.task, self.world)

    def close(self) -> list[tuple[str, str]]:
        """End the loaders; returns the images that could not be decoded, and why."""
        self.train_loader.close()
        self.eval_loader.close()
        return self.train_loader.bad_images + self.eval_loader.bad_images


def build_bench(run: ResolvedRun, seat: WorkerRank, world: World, given: Given) -> WorkerModel:
    """Build what a process computes with; all ranks of a worker call it together.

    Raises:
        UserError: something in the description cannot be built.
    """
    config = run.config
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    set_numerics(config.training)
    seed = config.training.seed
    seed_everything(seed)
    source = given.source or open_data(config.data, seed)
    fsdp = world.placement.layout.fsdp if world.placement else 1
    check_enough(source.info, seat.workers * fsdp)
    clock = make_clock(world.device.type)
    work = Work(source.info, run_task(config, source.info, given.task), given.model)
    model = _build_model(config, work, seat, world) if seat.leads else None
    replica = None
    if seat.size > 1:
        seed_everything(seed)
        work = replace(work, example=example_inputs(source))
        split = build_split(run, work, world, run.sync.batch_parts(seat.workers) * fsdp)
        replica = Replica(split, model, run.timeout_s)
    settings = LoaderConfig.of(config.data, seed, world.device)
    scaler = torch.amp.GradScaler(world.device.type, enabled=False)
    bench = WorkerModel(
        run, world, source, model, replica, work.task,
        Step(work.task, _step_settings(config, world), clock, scaler, replica.split if replica else None), clock,
        TrainLoader(source, settings, Shard(0, 1), units_of(work.task)),
        EvalLoader(source, settings, Shard(world.data_rank, world.data_size) if replica else Shard(0, 1)),
    )  # fmt: skip
    seed_everything(_rank_seed(seed, seat.number * fsdp + (world.data_rank if replica else 0)))
    return bench


def _build_model(config: RunConfig, work: Work, seat: WorkerRank, world: World) -> nn.Module:
    """Build the whole model; beside pieces, a plain one in the processor's memory, which nothing computes with."""
    if seat.size == 1:
        return build_computing(config, work, world)
    plain = replace(
        config,
        model=replace(config.model, channels_last="off"),
        training=replace(config.training, precision="fp32"),
    )
    work = replace(work, own=copy.deepcopy(work.own))
    return build_whole(plain, work, World(0, 1, 0, torch.device("cpu"), None))
