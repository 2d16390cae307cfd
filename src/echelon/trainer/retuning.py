"""From an epoch on more of a model is trained: the parts of a run are built anew, from a checkpoint of that moment.

A run that is resumed there does the same, so that it has the same bits as one that goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.checkpoint import CheckpointStore
from echelon.models.tuning.plan import TuningPlan
from echelon.optim.build import Schedule
from echelon.trainer.saving import CHECKPOINTS_FOLDER
from echelon.trainer.state import RunParts
from echelon.trainer.step import Step


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
        words = f"epoch {epoch + 1}: {made.words}; optimizer, buckets and codecs begin anew, with memories of zero"
        return replace(made, words=words)


def begun_epoch(folder: Path) -> int:
    """Return the epoch, counted from 0, in which a run's newest checkpoint lies; 0 where there is none."""
    found = CheckpointStore(folder / CHECKPOINTS_FOLDER, keep=1).newest(rank=0)
    return 0 if found is None else int(found[1]["cursor"]["epoch"])
