"""From an epoch on more of a model is trained: the parts of a run are built anew, from a checkpoint of that moment.

A run that is resumed there does the same, so that it has the same bits as one that goes through. Where servers hold
the parameters, their keys change with it: the launch ends with the checkpoint, and another one goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from echelon.checkpoint import CheckpointStore
from echelon.core.files import write_atomic
from echelon.models.tuning.plan import TuningPlan
from echelon.optim.build import Schedule
from echelon.trainer.folder import CHECKPOINTS_FOLDER
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.state import RunParts
from echelon.trainer.step import Step
from echelon.trainer.world import World

EPOCH_FILE = "epoch.json"
_NEW = -1  # in place of an epoch: no checkpoint is there


@dataclass(frozen=True)
class RebuiltParts:
    """What a run goes on with, once it is restored into it.

    Attributes:
        words: how much is trained now.
    """

    parts: RunParts
    step: Step
    schedule: Schedule
    words: str


@dataclass
class Retuning:
    """When a run's parts are built anew, and how.

    Attributes:
        plan: as of now.
        build: makes the parts for a plan, and restores them from the newest checkpoint.
    """

    plan: TuningPlan
    build: Callable[[TuningPlan], RebuiltParts]

    def is_due(self, epoch: int) -> bool:
        """Whether more is trained from an epoch on, counted from 0, than is now."""
        return self.plan.at(epoch) != self.plan

    def rebuilt(self, epoch: int) -> RebuiltParts:
        """Return the parts from an epoch on; all ranks call it, once the checkpoint before it is on the disk."""
        self.plan = self.plan.at(epoch)
        made = self.build(self.plan)
        return replace(made, words=begin_anew(epoch, made.words))


def begin_anew(epoch: int, words: str) -> str:
    """Return what is said where more is trained from an epoch on, counted from 0.

    Args:
        words: how much is trained now.
    """
    return f"epoch {epoch + 1}: {words}; optimizer, buckets and codecs begin anew, with memories of zero"


def begun_epoch(folder: Path) -> int:
    """Return the epoch, counted from 0, in which a run's newest checkpoint lies; 0 where there is none."""
    found = _store(folder).newest(rank=0)
    return 0 if found is None else int(found[1]["cursor"]["epoch"])


def as_it_goes_on(resolved: ResolvedRun, folder: Path, world: World) -> tuple[ResolvedRun, bool]:
    """Return a run as its newest checkpoint has it, and whether there is one: it then starts from no other weights.

    What is trained since that checkpoint's epoch, rank 0 says, whose disk has it: others' may have none.
    """
    later = resolved.tuning.changes_later
    if not (later or resolved.config.model.weights):
        return resolved, False
    epoch = torch.full((1,), _NEW, dtype=torch.int64, device=world.device)
    if world.leads and _store(folder).newest_step() is not None:
        epoch.fill_(begun_epoch(folder) if later else 0)
    if world.group is not None:
        dist.broadcast(epoch, 0, group=world.group)
    begun = int(epoch)
    return (resolved, False) if begun == _NEW else (resolved.going_on(begun), True)


def _store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / CHECKPOINTS_FOLDER, keep=1)


def keep_epoch(roles: Path, epoch: int) -> None:
    """Write for a launch's roles in which epoch it begins: what is trained stays so until the launch ends."""
    write_atomic(roles / EPOCH_FILE, json.dumps({"epoch": epoch}))


def kept_epoch(roles: Path) -> int:
    """Return the epoch, counted from 0, in which the launch of these roles began."""
    return int(json.loads((roles / EPOCH_FILE).read_text())["epoch"])
