"""A loss that is not finite though the inputs are: the run stops at once, or the batch is left out of training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.records.events import LossNotFinite
from echelon.tasks import nest
from echelon.tasks.base import Batch, Task
from echelon.tasks.nest import Nest
from echelon.trainer.process import record_last
from echelon.trainer.world import World

_MOST_TOLD = 20  # batches that a rank tells of one by one
_MOST_NAMED = 8  # samples in one sentence
_LESS = "start a new run with a lower --lr, or with --warmup-epochs or --clip-norm"


class Diverged(Exception):
    """A loss is not finite, and the run is to stop: it says where, and what may help. A restart would do the same."""


@dataclass(frozen=True)
class GuardSettings:
    """What a rank does about a loss that is not finite.

    Attributes:
        skip: leave the batch out of training; else the run stops.
        folder: of the run, in whose record it is told.
        rank: this process among all that compute.
        say: shows a sentence on the terminal of the run.
    """

    skip: bool
    folder: Path
    rank: int
    say: Callable[[str], None]


@dataclass(frozen=True)
class _Waiting:
    """A loss on its way from a GPU; `done` is recorded behind its copy, before the backward pass."""

    value: Tensor
    done: torch.cuda.Event
    where: str


class LossGuard:
    """Looks at the loss of each step before its gradient is used.

    To stop, the rank that sees it raises, and its launcher ends the others. To leave a batch out, all ranks whose
    gradients make one update agree on it before any of them goes on: a small message in each step, sent only where
    batches are to be left out. On a GPU a loss is looked at when the next step begins, unless batches are to be left
    out: its copy was asked for before the backward pass, which goes on beside.
    """

    def __init__(self, task: Task, parameters: Iterable[Tensor], world: World, settings: GuardSettings) -> None:
        self._task, self._parameters, self._world, self._settings = task, list(parameters), world, settings
        self._batch: Batch | None = None
        self._waiting: list[_Waiting] = []
        self._is_bad = False
        self._told = 0

    def begin(self, batch: Batch) -> None:
        """Hear which batch comes next; looks at what the step before has left.

        Raises:
            Diverged: its loss was not finite.
        """
        self.settle()
        self._batch, self._is_bad = batch, False

    def look(self, loss: Tensor, outputs: Nest = None, targets: Nest = None, first: int = 0) -> None:
        """Look at the loss of a micro-batch.

        Args:
            loss: a scalar.
            outputs: `(b, ...)` that it is made of, as the task is given them; None: they are on another rank.
            targets: `(b, ...)`.
            first: place of the micro-batch's first sample in this rank's part of the batch.

        Raises:
            Diverged: it is not finite, and the run is to stop.
        """
        if loss.is_cuda and not self._settings.skip:
            self._waiting.append(_copied(loss.detach(), self._where()))
        elif not math.isfinite(value := loss.item()):
            positions = [] if outputs is None else culprits(self._task, outputs, targets)
            self._found(value, self._where(), self._named([first + each for each in positions]), outputs)

    def settle(self) -> None:
        """Look at losses that were still being computed.

        Raises:
            Diverged: one is not finite.
        """
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for loss in waiting:
            loss.done.synchronize()  # of the forward pass: reading the loss itself would wait for the whole step
            if not math.isfinite(value := float(loss.value)):
                self._found(value, loss.where, "", None)

    def leaves_out(self, together: bool) -> bool:
        """Whether this step's batch is left out of training, the same on all ranks that make one update of it.

        Args:
            together: these are all ranks; else those of this rank's replica.
        """
        if not self._settings.skip:
            return False
        placement = self._world.placement
        group = self._world.group if together or placement is None else placement.model_group
        if group is None:
            return self._is_bad
        worst = torch.tensor([self._is_bad * (self._settings.rank + 1)], device=self._world.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        if worst and self._world.leads and not self._is_bad:
            self._say(f"{self._where(int(worst) - 1)}: the loss is not finite; this batch is left out of training")
        return bool(worst)

    def close(self) -> None:
        """Record how many more batches were left out than were told of one by one."""
        if self._told > _MOST_TOLD:
            more = self._told - _MOST_TOLD
            told = f"rank {self._settings.rank}: {more} more batches whose loss is not finite were left out of training"
            record_last(self._settings.folder, LossNotFinite(told, rank=self._settings.rank, count=more))

    def _found(self, loss: float, where: str, samples: str, outputs: Nest) -> None:
        """Say what was seen; raises where the run is to stop, or no batch can help."""
        value = "NaN" if math.isnan(loss) else "infinite"
        of = f" of {samples}" if samples else ""
        said = f"{where}: the loss{of} is {value}, though the inputs are finite"
        if not all(_is_finite(parameter) for parameter in self._parameters):
            raise Diverged(f"{said}: parameters are not finite since an earlier update, for it was too large: {_LESS}")
        if outputs is not None and not all(map(_is_finite, _tensors(outputs))):
            said += "; the model's outputs are not"
        if not self._settings.skip:
            raise Diverged(f"{said}: {_LESS}; or resume with --on-nan skip, which leaves such batches out")
        self._is_bad = True
        self._told += 1
        if self._told <= _MOST_TOLD:
            message = f"{said}: this batch is left out of training"
            record_last(self._settings.folder, LossNotFinite(message, rank=self._settings.rank))
            self._say(message)

    def _say(self, message: str) -> None:
        logging.warning(message)
        if self._world.leads:
            self._settings.say(message)

    def _where(self, rank: int | None = None) -> str:
        batch, step = self._batch, self._world.notes.step
        assert batch is not None
        rank = self._settings.rank if rank is None else rank
        return f"rank {rank}, step {step} (batch {batch.index + 1} of epoch {batch.epoch + 1})"

    def _named(self, positions: Sequence[int]) -> str:
        """Name samples of this rank's part of the batch by their numbers in the data; without positions, all of them.

        Empty where the numbers are not known.
        """
        numbers = self._batch.samples if self._batch is not None else None
        if numbers is None or (positions and max(positions) >= len(numbers)):
            return ""
        chosen = [int(numbers[i]) for i in positions] if positions else [int(number) for number in numbers]
        if len(chosen) == 1:
            return f"sample {chosen[0]} of the data"
        more = f" and {len(chosen) - _MOST_NAMED} more" if len(chosen) > _MOST_NAMED else ""
        return f"samples {', '.join(map(str, chosen[:_MOST_NAMED]))}{more} of the data"


def _copied(loss: Tensor, where: str) -> _Waiting:
    """Ask for a copy of a scalar on a GPU."""
    value, done = torch.empty((), dtype=loss.dtype, pin_memory=True), torch.cuda.Event()
    value.copy_(loss, non_blocking=True)
    done.record()
    return _Waiting(value, done, where)


def culprits(task: Task, outputs: Nest, targets: Nest) -> list[int]:
    """Return the places of the samples whose loss is not finite by itself; none where it is no sum over samples."""
    count = nest.rows(targets)
    leaves = nest.leaves(outputs)
    if any(not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != count for leaf in leaves):
        return []
    with torch.no_grad():
        return [
            i
            for i in range(count)
            if not math.isfinite(
                float(task.loss_sum(nest.take(outputs, slice(i, i + 1)), nest.take(targets, slice(i, i + 1))))
            )
        ]


def _tensors(outputs: Nest) -> list[Tensor]:
    return [leaf for leaf in nest.leaves(outputs) if isinstance(leaf, Tensor)]


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())
