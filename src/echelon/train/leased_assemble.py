"""The parts of a worker of a parameter server, built from the run's description."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from echelon.config import RunConfig, load_run_config
from echelon.config.validate import check_world
from echelon.core.units import parse_seconds
from echelon.data import LoaderConfig, Shard, Source, open_data
from echelon.data.loader import EvalLoader, TrainLoader
from echelon.observe.live.resources import Sampler
from echelon.observe.phases import PhaseClock, make_clock
from echelon.observe.record import Recorder
from echelon.sync.ps import ParameterServer, WorkerOptions
from echelon.sync.server.client import Client, ClientConfig
from echelon.sync.server.identity import derive_keys, read_secret
from echelon.sync.server.settings import Settings
from echelon.sync.server.spans import model_table
from echelon.sync.server.table import Cut, Table
from echelon.train.assemble import Given, _rank_seed, _step_settings, check_enough
from echelon.train.combine import settle_momentum
from echelon.train.leased_check import settings_of
from echelon.train.leased_saving import LeasedSaver
from echelon.train.losses import build_loss
from echelon.train.optim import Schedule, build_optimizer, build_schedule
from echelon.train.parts import build_whole
from echelon.train.served_start import ROLES_FOLDER, Seat, wait_for_address
from echelon.train.state import fingerprint, seed_everything
from echelon.train.step import Step
from echelon.train.window import gpu_uuid
from echelon.train.world import World, _device

BY_ELEMENT = ("sgd", "nesterov", "momentum", "adam", "adamw", "nadam", "nadamw", "lion", "rmsprop", "adagrad")
"""Optimizers that treat every element by itself, so that a large tensor may be split over servers."""


@dataclass
class LeasedWorker:
    """The parts of one worker."""

    config: RunConfig
    settings: Settings
    world: World
    source: Source
    strategy: ParameterServer
    table: Table
    client: Client
    step: Step
    schedule: Schedule
    clock: PhaseClock
    train_loader: TrainLoader
    eval_loader: EvalLoader
    saver: LeasedSaver
    path: Path
    sampler: Sampler


def assemble_worker(path: Path, seat: Seat, record: Recorder, given: Given) -> LeasedWorker:
    """Build the parts of a worker from the run's description.

    Raises:
        UserError: something in the description cannot be built.
    """
    config = settle_momentum(load_run_config(path / "config.yaml"))
    settings = settings_of(config)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    number = seat.number
    world = World(number, 1, seat.local, _device(config.training.device, seat.local), None)
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_world(config, workers)
    seed_everything(config.training.seed)
    source = given.source or open_data(config.data, config.training.seed)
    check_enough(source.info, workers)
    model = build_whole(config, source.info, world, given.model)
    loader_config = LoaderConfig.of(config.data, config.training.seed, world.device)
    train_loader = TrainLoader(source, loader_config, Shard(0, 1))
    client = Client(_client_config(config, settings, path, number))
    table = model_table(model, _cut(config, settings, client))
    client.set_table(table)
    clock = make_clock(world.device.type)
    options = WorkerOptions(settings, config.optimizer.clip_norm, clock, config.model.compile)
    strategy = ParameterServer(model, table, client, options)
    optimizer = build_optimizer(model, config.optimizer, config.data.batch_size)  # never steps: it carries the schedule
    loss = build_loss(config.optimizer, source.info.class_counts)
    scaler = torch.amp.GradScaler(world.device.type, enabled=False)
    worker = LeasedWorker(
        config, settings, world, source, strategy, table, client,
        Step(loss, _step_settings(config, world.device), clock, scaler),
        build_schedule(optimizer, config.optimizer, train_loader.batches_per_epoch, config.training.epochs), clock,
        train_loader, EvalLoader(source, loader_config, Shard(0, 1)),
        LeasedSaver(path, config.checkpoint.keep, record, fingerprint(config, source.info)), path,
        Sampler(gpu_uuid(world.device)),
    )  # fmt: skip
    seed_everything(_rank_seed(config.training.seed, number))
    return worker


def _client_config(config: RunConfig, settings: Settings, path: Path, number: int) -> ClientConfig:
    roles = path / ROLES_FOLDER
    timeout_s = parse_seconds(config.launch.timeout)
    return ClientConfig(
        f"worker{number}", derive_keys(read_secret(roles)), wait_for_address(roles, timeout_s),
        config.strategy.compression, config.training.seed, number, timeout_s, keeps=settings.replicas == 0,
        aggregates=settings.aggregates,
    )  # fmt: skip


def _cut(config: RunConfig, settings: Settings, client: Client) -> Cut:
    by_element = config.optimizer.name.lower() in BY_ELEMENT and not client.sends_shapes
    return Cut(settings.servers, settings.chunk_bytes, whole_tensors=not by_element)
