"""Everything that a run is, as one tree of tensors and plain values, and back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from echelon.config import RunConfig
from echelon.core.errors import UserError
from echelon.data.base import DataInfo
from echelon.sync.base import Sync
from echelon.train.optim import EMA
from echelon.train.world import World


@dataclass
class Cursor:
    """How far the run is: the next global batch is `batch` of `epoch`; `step` optimizer steps are done."""

    epoch: int = 0
    batch: int = 0
    step: int = 0


@dataclass(frozen=True)
class RunParts:
    """The objects whose state makes up a run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: EMA | None
    sync: Sync


def fingerprint(config: RunConfig, info: DataInfo) -> dict[str, Any]:
    """Return what must be the same for a checkpoint to continue this run: model, data, order of samples, optimizer."""
    return {
        "model": config.model.name,
        "optimizer": config.optimizer.name,
        "data": info.name,
        "train_size": info.train_size,
        "classes": len(info.classes),
        "batch_size": config.data.batch_size,
        "seed": config.training.seed,
    }


def check_fingerprint(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        UserError: names the first thing that differs.
    """
    for key, value in present.items():
        if saved.get(key) != value:
            raise UserError(
                f"the checkpoint is of another run: its {key} is {saved.get(key)!r}, here it is {value!r}; "
                "resume with the same description, or start a new run with --weights"
            )


def shared_state(parts: RunParts, cursor: Cursor) -> dict[str, Any]:
    """Return the state that is the same on every replica."""
    return {
        "model": parts.model.state_dict(),
        "optimizer": get_optimizer_state_dict(parts.model, parts.optimizer),
        "scaler": parts.scaler.state_dict(),
        "ema": parts.ema.state_dict() if parts.ema else {},
        "cursor": {"epoch": cursor.epoch, "batch": cursor.batch, "step": cursor.step},
    }


def rank_state(parts: RunParts, world: World) -> dict[str, Any]:
    """Return the state of this rank alone: random generators, buffers (BatchNorm) and what `sync` keeps."""
    _, keys, position, *_ = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": list(random.getstate()[1]),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_position": int(position),
        "sync": parts.sync.state_dict(),
        "buffers": dict(parts.model.named_buffers()),
    }
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def load_shared_state(parts: RunParts, state: Mapping[str, Any]) -> Cursor:
    """Restore what every replica has; returns the cursor.

    Raises:
        UserError: the checkpoint is of another model.
    """
    try:
        parts.model.load_state_dict(state["model"])
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip() if len(str(error).splitlines()) > 1 else str(error)
        raise UserError(f"the checkpoint is of another model: {reason}") from None
    set_optimizer_state_dict(parts.model, parts.optimizer, state["optimizer"])
    if state["scaler"]:
        parts.scaler.load_state_dict(dict(state["scaler"]))
    if parts.ema and state["ema"]:
        parts.ema.load_state_dict(state["ema"])
    return Cursor(**state["cursor"])


def load_rank_state(parts: RunParts, world: World, saved_size: int, ranks: Mapping[int, Any]) -> None:
    """Restore this rank's own state; on another number of ranks, only what can be kept.

    Random generators start anew from the shared state then, and the strategy merges what all ranks had.
    """
    if saved_size != world.size:
        parts.sync.load_former_ranks([ranks[rank]["sync"] for rank in sorted(ranks)])
        return
    own = ranks[world.rank]
    torch.set_rng_state(own["torch"])
    random.setstate((3, tuple(own["python"]), None))
    np.random.set_state(("MT19937", own["numpy"].numpy().astype(np.uint32), own["numpy_position"], 0, 0.0))
    if world.device.type == "cuda" and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"], world.device)
    with torch.no_grad():
        for name, buffer in parts.model.named_buffers():
            buffer.copy_(own["buffers"][name])
    parts.sync.load_state_dict(own["sync"])


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and Python alike on every rank: replicas start from the same parameters."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
