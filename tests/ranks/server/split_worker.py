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
from echelon.coordinator.messages import EvaluateTask, EvaluationDone, JoinWorker, SetupDone, SetupTask
from echelon.core.axes import Axis
from echelon.data.base import Batch, Shard
from echelon.data.order import local_part
from echelon.observe.phases import HostClock
from echelon.observe.resources import Sampler
from echelon.ps.client import Client, ClientConfig
from echelon.ps.spans import model_table
from echelon.ps.strategy import ParameterServer, WorkerOptions
from echelon.ps.table import Cut
from echelon.ps.worker_rank import WorkerRank
from echelon.records.file import Recorder
from echelon.run.resolve import resolve
from echelon.sync.ps import ServerSettings
from echelon.trainer.leased import train_task
from echelon.trainer.leased_assemble import LeasedWorker
from echelon.trainer.leased_bench import WorkerModel
from echelon.trainer.leased_split import follow
from echelon.trainer.parts import Work, build_split
from echelon.trainer.replica import Replica
from echelon.trainer.state import seed_everything
from echelon.trainer.step import Step, StepSettings
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
    lr: float
    compression: str = "none"


class _Loader:
    """Gives any part of a trial's batches; a run is one epoch of them."""

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
    leads = world.rank == 0
    split = build_split(resolve(config), Work(INFO, TASK, whole_model(work.trial), example), world, 1)
    model = whole_model(work.trial) if leads else None
    replica = Replica(split, model, TIMEOUT_S)
    step = Step(
        TASK,
        StepSettings(world.device, None, config.training.accumulate, 0.0, False),
        clock,
        torch.amp.GradScaler("cpu", enabled=False),
        split,
    )
    loader = cast(Any, _Loader(work.trial))
    nothing = cast(Any, None)
    bench = WorkerModel(resolve(config), world, nothing, model, replica, TASK, step, clock, loader, nothing)
    if not leads:
        follow(bench, replica)
        return []
    return _lead(work, bench, rank.index * 2 // rank.world_size, rank.folder)


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


def _lead(work: Work4, bench: WorkerModel, number: int, folder: Path) -> list[Tensor]:
    model, replica = bench.model, bench.replica
    assert model is not None and replica is not None
    table = model_table(model, Cut(work.settings.servers, work.settings.chunk_bytes))
    client = Client(
        ClientConfig(f"worker{number}", KEYS, work.address, read(work.compression), 0, number, TIMEOUT_S,
                     keeps=work.settings.replicas == 0, aggregates=work.settings.aggregates)
    )  # fmt: skip
    client.set_table(table)
    client.while_waiting(replica.words.tell_idle, 0.02)  # more often than a run does
    strategy = ParameterServer(model, table, client, WorkerOptions(work.settings, 0.0, bench.clock))
    schedule = SimpleNamespace(set_step=lambda step: None, lr=work.lr)
    worker = LeasedWorker(
        bench, work.settings, strategy, table, client, cast(Any, schedule), cast(Any, None), folder, Sampler(""),
        Recorder(None), WorkerRank(number, 0),
    )  # fmt: skip
    client.join(JoinWorker(table.fingerprint))
    seen = _tasks(worker)
    replica.words.tell("over")
    client.close()
    return seen


def _tasks(worker: LeasedWorker) -> list[Tensor]:
    client, table, seen = worker.client, worker.table, list[Tensor]()
    while (task := client.next_task()) is not None:
        if isinstance(task, SetupTask):
            client.wait_for_servers(worker.settings.servers)
            states = {k: {"value": v, "version": 0} for k, v in worker.strategy.key_values().items()}
            client.put(table, states, 10.0)
            client.report(SetupDone(task.task, table.fingerprint, 10**6, 0, []))
        elif isinstance(task, EvaluateTask):
            values = client.fetch(table, [k.index for k in table.keys], task.tag, full=False)
            seen.append(torch.cat([values[k.index]["value"] for k in table.keys]))
            client.report(EvaluationDone(task.task))
        else:
            train_task(worker, task)
    return seen
