"""Model and strategy of a parameter server's worker, and what it talks to coordinator and servers with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from echelon.config import RunConfig
from echelon.coordinator.addresses import ROLES_FOLDER, wait_for_address
from echelon.messages.identity import derive_keys, read_secret
from echelon.models.tables import sparse_tables
from echelon.observe.phases import PhaseClock
from echelon.optim.build import build_optimizer
from echelon.optim.traits import is_nesterov, is_sgd
from echelon.parallel.base import alone
from echelon.ps.client import Client, ClientConfig
from echelon.ps.momentum import SgdTerms
from echelon.ps.spans import model_table
from echelon.ps.split_worker import SplitWorker
from echelon.ps.strategy import ParameterServer, WorkerOptions
from echelon.ps.table import Cut, KeyTable, RowStart
from echelon.ps.worker_rank import WorkerRank, worker_name
from echelon.sync.ps import ServerSettings, server_settings
from echelon.tasks.base import SAMPLE
from echelon.trainer.parts import build_computing, build_split, build_whole, check_complex, compiled
from echelon.trainer.precision import PRECISIONS, build_scaler
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.state import RunParts, seed_everything
from echelon.trainer.tables import check_sparse_model, table_notes, whole_table_notes
from echelon.trainer.work import Work
from echelon.trainer.world import World


@dataclass(frozen=True)
class ServerLink:
    """What a worker's leading rank has beside the parts of a run.

    Attributes:
        servers: the strategy, on the whole model; on a worker that is one rank it is that of the parts.
        folder: what the run's roles share.
        notes: what a user has to know of how its tables begin.
    """

    client: Client
    settings: ServerSettings
    table: KeyTable
    servers: ParameterServer
    process: WorkerRank
    timeout_s: float
    folder: Path
    notes: Sequence[str] = ()


def build_worker(
    run: ResolvedRun, work: Work, process: WorkerRank, world: World, clock: PhaseClock, path: Path
) -> tuple[RunParts, ServerLink | None]:
    """Build what a process of a worker computes with, and where it leads the link to coordinator and servers.

    All ranks of a worker call it together. The optimizer never steps, the servers update: it carries the schedule.

    Raises:
        UserError: the model cannot be built, or not be split like this.
    """
    config, starts = run.config, dict[str, RowStart]()
    work = replace(work, row_starts=starts if process.size == 1 else None)
    full_model = _whole_model(config, work, process, world) if process.leads else None
    if full_model is not None:
        check_complex(full_model, run, process.size)
        check_sparse_model(full_model, run, process.size)
    worker = None
    if process.size > 1:
        seed_everything(config.training.seed)
        split = build_split(run, work, world, run.sync.batch_parts(process.workers) * world.data_size)
        worker = SplitWorker(split, full_model, clock, run.timeout_s, work.task.unit == SAMPLE)
    scaler = build_scaler("fp32", world.device, None)  # fp16 is refused
    if full_model is None:
        assert worker is not None
        idle = torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.0)
        return RunParts(worker.module, idle, scaler, None, worker, worker.split), None
    link = _connect(run, path, process, full_model, clock, worker, work)
    optimizer = build_optimizer(
        full_model, config.optimizer, config.data.batch_size, run.optimizer.factory, work.tuned.rates,
        sparse_tables(full_model),
    )  # fmt: skip
    if worker is None:
        return RunParts(full_model, optimizer, scaler, None, link.servers, frozen=work.tuned.frozen), link
    return RunParts(worker.module, optimizer, scaler, None, worker, worker.split), link


def worker_momentum(run: ResolvedRun, workers: int) -> SgdTerms | None:
    """Return what each of so many workers does to its gradients in the servers' place; None: nothing."""
    optimizer = run.config.optimizer
    if run.optimizer.factory is not None or not is_sgd(optimizer.name) or not optimizer.momentum:
        return None
    if not server_settings(run.sync).workers_keep_momentum(workers):
        return None
    return SgdTerms(optimizer.momentum, is_nesterov(optimizer.name), optimizer.weight_decay, workers - 1)


def _connect(
    run: ResolvedRun,
    path: Path,
    process: WorkerRank,
    model: nn.Module,
    clock: PhaseClock,
    worker: SplitWorker | None,
    work: Work,
) -> ServerLink:
    """Make a worker's client, cut the model into the servers' keys, and build the strategy between them."""
    config, settings, timeout_s = run.config, server_settings(run.sync), run.timeout_s
    roles = path / ROLES_FOLDER
    client = Client(
        ClientConfig(
            worker_name(process.number), derive_keys(read_secret(roles)), wait_for_address(roles, timeout_s),
            run.compression, config.training.seed, process.number, timeout_s,
            keeps=settings.replicas == 0, aggregates=settings.aggregates, by_priority=settings.by_priority,
        )
    )  # fmt: skip
    by_element = run.optimizer.is_split_on_servers and not client.sends_shapes
    cut = Cut(settings.servers, settings.chunk_bytes, whole_tensors=not by_element)
    table = model_table(model, cut, work.tuned.rates, work.row_starts or {})
    client.set_table(table)
    reads_ahead = worker is None and (
        config.model.compile or PRECISIONS[config.training.precision].parameters is not None
    )
    momentum = worker_momentum(run, process.workers)
    options = WorkerOptions(settings, config.optimizer.clip_norm, clock, reads_ahead, momentum)
    called = compiled(model, run, work) if worker is None else model
    servers = ParameterServer(model, table, client, options, called)
    if worker is not None:
        worker.servers = servers
        client.while_waiting(worker.channel.tell_idle, worker.channel.idle_s)
    notes = [*table_notes(run, model, process.workers), *whole_table_notes(run, model, work.row_starts or {})]
    return ServerLink(client, settings, table, servers, process, timeout_s, roles, notes)


def _whole_model(config: RunConfig, work: Work, process: WorkerRank, world: World) -> nn.Module:
    """Build the whole model; beside pieces, a plain one in the processor's memory, which nothing computes with."""
    if process.size == 1:
        return build_computing(config, work, world)
    plain = replace(
        config,
        model=replace(config.model, channels_last="off"),
        training=replace(config.training, precision="fp32"),
    )
    work = replace(work, user_model=copy.deepcopy(work.user_model))
    return build_whole(plain, work, World(0, 1, 0, torch.device("cpu"), None, alone()))
