"""Model, optimizer and strategy of a rank, whole or split as the layout says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from echelon.config import RunConfig
from echelon.data.base import DataInfo
from echelon.models import ModelInput, build_model, hints_for
from echelon.observe.phases import PhaseClock
from echelon.parallel.pieces import Pieces
from echelon.parallel.split import SplitModel, SplitOptions, split_model
from echelon.parallel.sync_batchnorm import convert_sync_batchnorm
from echelon.parallel.zero import DividedUpdate
from echelon.sync import Sync, SyncContext, build_sync
from echelon.train.layouts import read_cuts, read_tensor_plan
from echelon.train.optim import EMA, build_optimizer
from echelon.train.split_sync import SplitSync
from echelon.train.state import RunParts
from echelon.train.step import AUTOCAST, make_update
from echelon.train.world import World

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Work:
    """What is trained on what.

    Attributes:
        info: of the data.
        loss: sums over samples.
        own: the caller's own module, in place of the described one.
        example: two samples' inputs of any values; None: images as `info` says.
    """

    info: DataInfo
    loss: Loss
    own: nn.Module | None = None
    example: Tensor | None = None

    def inputs(self, like: Tensor) -> Tensor:
        """Return the example, the same on every rank; drawn without touching the run's generators."""
        if self.example is not None:
            return self.example.to(like.device)
        generator = torch.Generator().manual_seed(0)
        shape = (2, self.info.channels, self.info.image_size, self.info.image_size)
        return torch.randn(shape, generator=generator).to(like.device, like.dtype)


@dataclass(frozen=True)
class _Built:
    """What the strategy acts on: `held` are the tensors of this rank, which `optimizer` updates."""

    config: RunConfig
    world: World
    clock: PhaseClock
    held: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


def build_parts(config: RunConfig, work: Work, world: World, clock: PhaseClock) -> RunParts:
    """Build what a run's state is made of; all ranks call it together.

    Raises:
        UserError: the model cannot be built, or not be split like this.
    """
    split = None
    model = build_whole(config, work.info, world, work.own)
    if _is_divided(world):
        split = _divided(model, world)
    elif _is_split(config, world):
        split = _split(config, model, world, work)
        model = split.module
    held = split.pieces if split else model
    optimizer = build_optimizer(held, config.optimizer, config.data.batch_size)
    if split and split.pieces.divided:
        split.pieces.divided.keep_own(optimizer)
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.training.precision == "fp16")
    built = _Built(config, world, clock, held, optimizer, scaler)
    ema = EMA(held, config.training.ema) if config.training.ema else None
    if split and not split.pieces.divided:
        sync: Sync = SplitSync(model, split.pieces, lambda: _sync(built, held), clock)
    else:
        compiled = cast(nn.Module, torch.compile(model)) if config.model.compile else model
        sync = _sync(built, compiled)
    return RunParts(model, optimizer, scaler, ema, sync, split)


def channels_last(config: RunConfig, device: torch.device) -> bool:
    """Whether images lie in memory channel by channel."""
    wanted = config.model.channels_last
    return wanted == "on" or (wanted == "auto" and device.type == "cuda")


def build_whole(config: RunConfig, info: DataInfo, world: World, own: nn.Module | None) -> nn.Module:
    """Build the whole model on this rank's device, the same values on every rank."""
    model = own or build_model(config.model, ModelInput(len(info.classes), info.channels, info.image_size))
    if config.model.sync_batchnorm and world.data_group is not None:
        model = convert_sync_batchnorm(model, world.data_group)
    model = model.to(world.device)
    sharded = world.placed is not None and world.placed.layout.fsdp > 1  # rows of parameters must be contiguous
    if channels_last(config, world.device) and not sharded:
        model = model.to(memory_format=torch.channels_last)
    return model


def _is_split(config: RunConfig, world: World) -> bool:
    return world.placed is not None and (world.placed.layout.splits or config.training.recompute != "none")


def _is_divided(world: World) -> bool:
    return world.placed is not None and world.placed.layout.zero1 and world.placed.replica_group is not None


def _divided(model: nn.Module, world: World) -> SplitModel:
    assert world.placed is not None and world.placed.replica_group is not None
    pieces = Pieces([model], world.placed)
    pieces.divided = DividedUpdate(pieces.trainable(), world.placed.replica_group)
    return SplitModel(model, pieces)


def _split(config: RunConfig, model: nn.Module, world: World, work: Work) -> SplitModel:
    assert world.placed is not None
    options = SplitOptions(
        tensor_plan=read_tensor_plan(config.strategy.tensor_plan),
        cuts=read_cuts(config.strategy.cuts),
        recompute=config.training.recompute,
        example=work.inputs(next(model.parameters())),
        samples=config.data.batch_size // world.data_size // config.training.accumulate,
        autocast=AUTOCAST[config.training.precision],
        loss=work.loss,
    )
    return split_model(model, world.placed, hints_for(model), options)


def _sync(built: _Built, model: nn.Module) -> Sync:
    config, world = built.config, built.world
    context = SyncContext(
        model=model,
        update=make_update(built.held, built.optimizer, built.scaler, config.optimizer.clip_norm),
        optimizer=built.optimizer,
        group=world.placed.replica_group if world.placed else world.group,
        device=world.device,
        compression=config.strategy.compression,
        collective=config.strategy.collective,
        seed=config.training.seed,
        clock=built.clock,
    )
    return build_sync(config.strategy.sync, context)
