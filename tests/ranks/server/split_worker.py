"""Workers of a parameter server that are several ranks, as real processes that train on leases as a run's do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from echelon.compression import read
from echelon.coordinator.messages import EvaluateTask, EvaluationDone
from echelon.core.axes import Axis
from echelon.core.patience import Patience
from echelon.core.task import Stagnation
from echelon.data.base import Batch, Shard
from echelon.data.order import local_part
from echelon.observe.phases import HostClock
from echelon.ps.client import Client, ClientConfig
from echelon.ps.spans import model_table
from echelon.ps.split_worker import SplitWorker
from echelon.ps.strategy import ParameterServer, WorkerOptions
from echelon.ps.table import Cut
from echelon.ps.worker_rank import WorkerRank
from echelon.records.file import Recorder
from echelon.records.kinds import Start
from echelon.run.resolve import resolve
from echelon.sync.ps import ServerSettings
from echelon.trainer.leases import Commands, Leases
from echelon.trainer.loop import TrainingRun, fit
from echelon.trainer.parts import build_split
from echelon.trainer.progress import RunProgress
from echelon.trainer.server_parts import ServerLink
from echelon.trainer.servers_checkpoint import ServersState
from echelon.trainer.state import RunParts, seed_everything
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.work import Work
from echelon.trainer.world import World
from tests.ranks.layouts import INFO, MODELS, TASK, Trial, make_world
from tests.ranks.server.roles import KEYS
from tests.ranks.spawn import Rank

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Work4:
    """What four ranks do as two workers of a server: `trial.parallel` has dp=2."""

    trial: Trial
    settings: ServerSettings
    address: str
    folder: Path
    lr: float
    compression: str = "none"


class _Loader:
    """Gives any part of a trial's batches; a run is one epoch of them."""

    batches_per_epoch = 10**6

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def part(self, epoch: int, batch: int, shard: Shard) -> Batch:
        inputs, targets = self._trial.global_batch(batch)
        own = torch.from_numpy(local_part(np.arange(len(inputs)), shard))
        return Batch(inputs[own], targets[own], len(inputs), batch)


def whole_model(trial: Trial) -> nn.Module:
    """Build a trial's model, the same in every process."""
    seed_everything(0)
    return MODELS[trial.model]().double()


def work_split(rank: Rank, work: Work4) -> list[Tensor]:
    """Be a rank of a worker to the end of the run; leaders return the copies that they were given to look at."""
    world = _own_world(make_world(work.trial.config(), rank))
    clock, placement = HostClock(), world.placement
    assert placement is not None
    config = work.trial.config()
    example = work.trial.global_batch(0)[0][:2]
    split = build_split(resolve(config), Work(INFO, TASK, whole_model(work.trial), example), world, 1)
    model = whole_model(work.trial) if world.rank == 0 else None
    worker = SplitWorker(split, model, clock, TIMEOUT_S, counts_samples=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    settings = StepSettings(world.device, None, config.training.accumulate, 0.0, False)
    run = TrainingRun(
        world=world,
        parts=RunParts(worker.module, cast(Any, None), scaler, None, worker, split),
        step=Step(TASK, settings, clock, scaler, split),
        task=TASK,
        schedule=cast(Any, SimpleNamespace(set_step=lambda step: None, lr=work.lr)),
        train_loader=cast(Any, _Loader(work.trial)),
        eval_loader=cast(Any, None),
        clock=clock,
        saver=cast(Any, SimpleNamespace(passed_over=[], restore=lambda: None, best=None, stagnation=Stagnation())),
        progress=RunProgress(Recorder(None), cast(Any, None), cast(Any, None)),
        settings=cast(Any, None),
    )
    if model is None:
        fit(run, Commands(run, worker))
        return []
    return _lead(work, run, model, rank.index * 2 // rank.world_size)


def _own_world(world: World) -> World:
    """Return the world of one replica: ranks of other replicas are not in it, as in a run."""
    placement = world.placement
    assert placement is not None and placement.model_group is not None
    alone = replace(placement.layout, sizes={**placement.layout.sizes, Axis.DP: 1})
    own = replace(
        placement, layout=alone, coordinates={**placement.coordinates, Axis.DP: 0}, replica_group=None,
        data_group=placement.group(Axis.FSDP),
    )  # fmt: skip
    return World(world.rank % alone.model_size, alone.model_size, 0, world.device, placement.model_group, own)


class _Looking(Leases):
    """Leases of a worker that keeps what it is given to look at, and evaluates nothing."""

    def __init__(self, run: TrainingRun, link: ServerLink) -> None:
        super().__init__(run, link, ServersState(link.servers, link.table, 1, Patience(Path())), Start(), ())
        self._of = link
        self.seen = list[Tensor]()

    def _evaluate_copy(self, task: EvaluateTask) -> EvaluationDone:
        keys = self._of.table.keys
        values = self._of.client.fetch(self._of.table, [k.index for k in keys], task.tag, full=False)
        self.seen.append(torch.cat([values[k.index]["value"] for k in keys]))
        return EvaluationDone(task.task)


def _lead(work: Work4, run: TrainingRun, model: nn.Module, number: int) -> list[Tensor]:
    worker = cast(SplitWorker, run.parts.sync)
    table = model_table(model, Cut(work.settings.servers, work.settings.chunk_bytes))
    client = Client(
        ClientConfig(f"worker{number}", KEYS, work.address, read(work.compression), 0, number, TIMEOUT_S,
                     keeps=work.settings.replicas == 0, aggregates=work.settings.aggregates)
    )  # fmt: skip
    client.set_table(table)
    client.while_waiting(worker.channel.tell_idle, 0.02)  # more often than a run does
    worker.servers = ParameterServer(model, table, client, WorkerOptions(work.settings, 0.0, run.clock))
    link = ServerLink(client, work.settings, table, worker.servers, WorkerRank(number, 0), 10.0, work.folder)
    leases = _Looking(run, link)
    fit(run, leases)
    client.close()
    return leases.seen
