"""The training loop: reads like the papers, on one page."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist

from echelon.config.validate import CheckpointInterval
from echelon.data.base import Batch
from echelon.data.loader import EvalLoader, TrainLoader
from echelon.observe.phases import Phase, PhaseClock
from echelon.observe.profile import StepProfiler
from echelon.optim.build import Schedule
from echelon.sync.base import Regroupable, StepAbandoned
from echelon.tasks.base import Task
from echelon.trainer.balance import Balancer
from echelon.trainer.evaluate import EvaluationReport, evaluate
from echelon.trainer.progress import RunProgress
from echelon.trainer.retuning import Retuning
from echelon.trainer.saving import Saver
from echelon.trainer.second_copy import SecondCopy
from echelon.trainer.state import RunParts
from echelon.trainer.step import Step, StepResult
from echelon.trainer.window import Traffic
from echelon.trainer.world import World


@dataclass(frozen=True)
class LoopSettings:
    """How long to train, and when to evaluate and save.

    Attributes:
        callbacks: whether the leading rank has some that all wait for.
        early_stop: after so many evaluations in a row without improvement; 0: never.
        early_stop_delta: a change up to this is none.
        ends_s: when the command is to have ended, by `time.monotonic`.
        draws_seed: of what layers draw where that depends on the part of a batch (see `Cursor.draws_by_part`).
    """

    epochs: int
    max_steps: int
    eval_every: int
    checkpoint: CheckpointInterval
    callbacks: bool = False
    early_stop: int = 0
    early_stop_delta: float = 0.0
    ends_s: float = math.inf
    draws_seed: int = 0


@dataclass
class TrainingRun:
    """The parts of a run, put together by `assemble.py` or by a loop of one's own.

    `survives`: it goes on when some of its ranks die (see `elastic.py`).
    `copy`: what this rank keeps of a neighbour's state; None: nothing.
    `balance`: decides on the ranks' shares of a batch; None: they stay as they are.
    """

    world: World
    parts: RunParts
    step: Step
    task: Task
    schedule: Schedule
    train_loader: TrainLoader
    eval_loader: EvalLoader
    clock: PhaseClock
    saver: Saver
    progress: RunProgress
    settings: LoopSettings
    traffic: Traffic = field(default_factory=Traffic)
    profiler: StepProfiler | None = None
    test_loader: EvalLoader | None = None
    balance: Balancer | None = None
    survives: bool = False
    retuning: Retuning | None = None
    copy: SecondCopy | None = None

    @property
    def other_bytes_sent(self) -> int:
        """Bytes that this rank has sent so that states are saved, or kept twice."""
        return self.saver.bytes_sent + (self.copy.bytes_sent if self.copy else 0)

    def retune(self, epoch: int) -> None:
        """Go on with parts that are built for an epoch, from the newest checkpoint; all ranks call it together."""
        if self.retuning is None:
            return
        if self.step.guard is not None:
            self.step.guard.close()
        self.parts.sync.close()
        totals, others = self.parts.sync.bytes_sent(), self.other_bytes_sent
        made = self.retuning.rebuilt(epoch)
        self.parts, self.step, self.schedule = made.parts, made.step, made.schedule
        self.traffic.begin_anew(totals, others, made.parts.start_bytes)
        self.progress.note("tuning", made.words)


def regroupable(run: TrainingRun) -> Regroupable:
    """Return the strategy of a run whose survivors go on."""
    sync = run.parts.sync
    assert isinstance(sync, Regroupable), "runs whose strategy is not are refused"
    return sync


class Batches(Protocol):
    """Where batches come from, and what is done between two steps.

    Attributes:
        status: how it ended, once there are no more: `completed`, `stopped`, or what a coordinator says.
    """

    status: str

    def __iter__(self) -> Iterator[Batch]:
        """Give this rank's parts of batches, in phase `data`; the learning rate is that of the coming step."""

    def step_done(self, result: StepResult) -> None:
        """Take what a step gave, once its update is done."""


def fit(run: TrainingRun, batches: Batches) -> str:
    """Train until there are no more batches; returns how it ended."""
    for batch in batches:
        sync = run.parts.sync
        try:
            result = run.step.forward_backward(batch, sync)
            run.clock.enter(Phase.UPDATE)
            if result.left_out:
                sync.leave_out()
            else:
                sync.step()
        except StepAbandoned:
            continue
        if run.parts.ema and not result.left_out:
            run.parts.ema.update(run.parts.local_model)
        run.clock.enter(Phase.OTHER)
        batches.step_done(result)
        run.world.notes.finish_step()
    return batches.status


def evaluate_agreed(run: TrainingRun) -> EvaluationReport:
    """Evaluate what the replicas agree on, its moving average where there is one; all ranks call it together.

    Where it is better than all before, the test set is evaluated too, if there is one: no choice is made by it.
    """
    ema = run.parts.ema
    averaged: AbstractContextManager[object] = ema.swapped(run.parts.local_model) if ema else nullcontext()
    shown = run.progress.display.bar("evaluation, batch", len(run.eval_loader))
    with shown as bar, averaged, run.parts.sync.agreed(averages=ema is not None):
        judge = functools.partial(
            evaluate, run.parts.model, task=run.task, world=run.world, advance=bar.advance, autocast=run.step.autocast
        )
        report = judge(run.eval_loader)
        if run.test_loader is not None:
            better = _is_best(run, report)
            if better:
                bar.begin("evaluation of the test set, batch", len(run.test_loader))
            test = judge(run.test_loader) if better else None
            report = replace(report, test=test)
        if run.parts.split:
            run.parts.split.settle()
    return report


def _is_best(run: TrainingRun, report: EvaluationReport) -> bool:
    """Whether a report is better than all before, as the first rank of the group knows them."""
    better = torch.tensor([run.saver.is_best(report, run.task)], device=run.world.device)
    if run.world.group is not None:
        dist.broadcast(better, src=0, group=run.world.group)
    return bool(better)
