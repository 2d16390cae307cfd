"""What a worker of a parameter server talks to scheduler and servers with, built from the run's description."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.config import RunConfig
from echelon.coordinator.addresses import ROLES_FOLDER, wait_for_address
from echelon.messages.identity import derive_keys, read_secret
from echelon.observe.resources import Sampler
from echelon.optim.build import Schedule, build_optimizer, build_schedule
from echelon.optim.traits import is_elementwise
from echelon.ps.client import Client, ClientConfig
from echelon.ps.spans import model_table
from echelon.ps.strategy import ParameterServer, WorkerOptions
from echelon.ps.table import Cut, KeyTable
from echelon.ps.worker_rank import WorkerRank, worker_name
from echelon.records.file import Recorder
from echelon.sync.ps import ServerSettings, server_settings
from echelon.trainer.leased_bench import WorkerModel
from echelon.trainer.leased_saving import LeasedSaver
from echelon.trainer.precision import PRECISIONS
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.state import fingerprint
from echelon.trainer.window import gpu_uuid


@dataclass
class LeasedWorker:
    """What a worker's first process has; of one that is no team, its only one."""

    bench: WorkerModel
    settings: ServerSettings
    strategy: ParameterServer
    table: KeyTable
    client: Client
    schedule: Schedule
    saver: LeasedSaver
    path: Path
    sampler: Sampler
    record: Recorder
    seat: WorkerRank
    shared_buffers: bool = False

    @property
    def config(self) -> RunConfig:
        """The run's description."""
        return self.bench.run.config


def assemble_worker(path: Path, seat: WorkerRank, record: Recorder, bench: WorkerModel) -> LeasedWorker:
    """Build what talks to scheduler and servers, around what computes.

    Raises:
        UserError: something in the description cannot be built.
    """
    config, model = bench.run.config, bench.model
    assert model is not None
    settings = server_settings(bench.run.sync)
    client = Client(_client_config(bench.run, path, seat.number))
    table = model_table(model, _cut(config, settings, client))
    client.set_table(table)
    if bench.replica is not None:
        client.while_waiting(bench.replica.words.tell_idle, bench.replica.words.idle_s)
    options = WorkerOptions(
        settings, config.optimizer.clip_norm, bench.clock, config.model.compile, _reads_ahead(config)
    )
    strategy = ParameterServer(model, table, client, options)
    optimizer = build_optimizer(model, config.optimizer, config.data.batch_size)  # never steps: it carries the schedule
    per_epoch = bench.train_loader.batches_per_epoch
    return LeasedWorker(
        bench, settings, strategy, table, client,
        build_schedule(optimizer, config.optimizer, per_epoch, config.training.epochs),
        LeasedSaver(path, config.checkpoint.keep, record, fingerprint(config, bench.source.info, bench.task)), path,
        Sampler(gpu_uuid(bench.world.device)), record, seat,
    )  # fmt: skip


def _reads_ahead(config: RunConfig) -> bool:
    """Whether the model reads its parameters before its layers are called: to copy them in a narrower type."""
    return PRECISIONS[config.training.precision].parameters is not None


def _client_config(run: ResolvedRun, path: Path, number: int) -> ClientConfig:
    roles, timeout_s, settings = path / ROLES_FOLDER, run.timeout_s, server_settings(run.sync)
    return ClientConfig(
        worker_name(number), derive_keys(read_secret(roles)), wait_for_address(roles, timeout_s),
        run.compression, run.config.training.seed, number, timeout_s, keeps=settings.replicas == 0,
        aggregates=settings.aggregates,
    )  # fmt: skip


def _cut(config: RunConfig, settings: ServerSettings, client: Client) -> Cut:
    by_element = is_elementwise(config.optimizer.name) and not client.sends_shapes
    return Cut(settings.servers, settings.chunk_bytes, whole_tensors=not by_element)
