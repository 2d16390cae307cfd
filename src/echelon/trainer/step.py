"""One optimizer step on one rank: forward and backward over micro-batches, then the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.core.shares import share_sizes
from echelon.models.tables import counting_nothing
from echelon.models.trial import evaluating
from echelon.observe.phases import Phase, PhaseClock
from echelon.parallel.base import Placement
from echelon.parallel.split import SplitModel
from echelon.parallel.sync_batchnorm import has_sync_batchnorm
from echelon.sync.base import StepSync
from echelon.tasks import nest
from echelon.tasks.base import SAMPLE, Batch, Task
from echelon.tasks.nest import Nest
from echelon.torch_compat import backward_in_evaluation
from echelon.trainer.loss_guard import LossGuard
from echelon.trainer.precision import autocast_to

if TYPE_CHECKING:
    from echelon.parallel.pipeline import Pipeline


@dataclass(frozen=True)
class StepSettings:
    """What a step needs to know of the description: device, autocast type, micro-batches, clipping.

    `data_group` are the ranks that divide a batch's samples: they add up its units where these are not samples.
    """

    device: torch.device
    autocast: torch.dtype | None
    accumulate: int
    clip_norm: float
    channels_last: bool
    data_group: dist.ProcessGroup | None = None


@dataclass
class StepResult:
    """Sums over this rank's samples, on the device: loss over the units of the global batch, and the task's score.

    `units` and `global_units` are those of the loss: of this rank's replica, and of all ranks. `left_out`: the batch is
    left out of training, for its loss is not finite.
    """

    loss: Tensor
    score: Tensor
    samples: int
    units: int
    global_units: int
    left_out: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """A part of this rank's part of a batch: inputs and targets `(b, ...)`; without targets one input.

    Attributes:
        first: place of its first sample in this rank's part.
        last: whether it is the last one of the step.
    """

    inputs: Nest
    targets: Nest
    first: int
    last: bool


class Step:
    """Forward and backward of a batch. Loss sums are divided by what the strategy says (see `Sync.begin_step`)."""

    def __init__(
        self,
        task: Task,
        settings: StepSettings,
        clock: PhaseClock,
        scaler: torch.amp.GradScaler,
        split: SplitModel | None = None,
        guard: LossGuard | None = None,
    ) -> None:
        self.task, self._settings, self._clock, self._scaler = task, settings, clock, scaler
        self._split, self.guard = split, guard
        self.result: StepResult | None = None  # of the step under way
        self._begun = False
        self._zero: Tensor | None = None  # what sums begin with; nothing is added to it in place

    @property
    def autocast(self) -> torch.dtype | None:
        """The type that autocast gives to matrix products and the like, in training and in evaluation."""
        return self._settings.autocast

    def forward_backward(self, batch: Batch, sync: StepSync) -> StepResult:
        """Accumulate the gradients of a batch; replicas may communicate during the last micro-batch's backward.

        Args:
            batch: this rank's part; at the end of an epoch it may have no targets, and inputs that count nothing.
        """
        if self.guard is not None:
            self.guard.begin(batch)
        inputs, targets = self._to_device(batch)
        if sync.needs_warmup_backward and not self._begun:
            warmup_backward(sync, nest.first_sample(inputs))
        self._begun = True
        count = self._settings.accumulate
        if self._zero is None:
            self._zero = torch.zeros((), device=self._settings.device)
        result = StepResult(self._zero, self._zero, nest.rows(targets), *self.count_units(batch))
        self.result = result
        divisor = sync.begin_step(result.units, result.global_units)
        if self._split is not None and self._split.pipeline is not None:
            self._pipelined(self._split.pipeline, inputs, targets, divisor, result)
            if self.guard is not None:
                self.guard.look(result.loss)
                result.left_out = self.guard.leaves_out(sync.steps_together)
            return result
        share = divisor / result.global_units
        first = 0
        for i, (part, wanted) in enumerate(_parts(inputs, targets, count)):
            last = i == count - 1
            with sync.micro_batch(last):
                total = self._micro_batch(sync, MicroBatch(part, wanted, first, last), divisor, result)
            result.loss = result.loss + (total if share == 1 else total * share)
            first += nest.rows(wanted)
            if last and not result.left_out and (began := sync.communication_began()) is not None:
                self._clock.split(Phase.COMMUNICATE, began)
        return result

    @property
    def asks_units(self) -> bool:
        """Whether ranks tell each other the units of their parts, where the loader does not know all that is needed."""
        return self.task.unit != SAMPLE and self._settings.data_group is not None

    def begin_count(self, batch: Batch) -> None:
        """Begin to add up a coming batch's units over the ranks; all of them call it between the same two steps."""
        if self.asks_units and (batch.global_units is None or self._fsdp_size > 1):
            batch.counted = self._begun_count(batch)

    def count_units(self, batch: Batch) -> tuple[int, int]:
        """Return the loss's units in the part of this rank's replica, and in the global batch.

        Samples are known; other units are counted and added up, unless the loader knows those of the global batch.
        """
        task, placement = self.task, self._split.pieces.placement if self._split is not None else None
        if task.unit == SAMPLE:
            split = placement is not None and placement.layout.splits
            own = replica_samples(placement, batch) if split and placement else nest.rows(batch.targets)
            return own, batch.global_size
        fsdp = self._fsdp_size
        if not self.asks_units or (batch.global_units is not None and fsdp == 1):
            own = self._own_units(batch)
            return own, max(1, own if batch.global_units is None else batch.global_units)
        counts = (batch.counted or self._begun_count(batch))()
        rank = dist.get_rank(self._settings.data_group)
        first = rank - rank % fsdp
        total = sum(counts) if batch.global_units is None else batch.global_units
        return sum(counts[first : first + fsdp]), max(1, total)

    @property
    def _fsdp_size(self) -> int:
        placement = self._split.pieces.placement if self._split is not None else None
        return placement.layout.fsdp if placement is not None else 1

    def _own_units(self, batch: Batch) -> int:
        return self.task.units(batch.targets) if nest.rows(batch.targets) else 0

    def _begun_count(self, batch: Batch) -> Callable[[], Sequence[int]]:
        """Tell the others the units of this rank's part; returns what gives those of all, in the order of ranks."""
        group, clock = self._settings.data_group, self._clock
        counts = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=self._settings.device)
        counts[dist.get_rank(group)] = self._own_units(batch)
        work = dist.all_reduce(counts, group=group, async_op=True)
        assert work is not None

        def counted() -> Sequence[int]:
            """Wait for the others' units, and return them."""
            if not work.is_completed():  # another rank is behind
                clock.enter(Phase.COMMUNICATE)
            work.wait()
            units: list[int] = counts.tolist()
            return units

        return counted

    def _pipelined(self, pipeline: Pipeline, inputs: Nest, targets: Nest, divisor: int, result: StepResult) -> None:
        """Let the pipeline run each part of the batch, in micro-batches of its own."""
        self._clock.enter(Phase.COMMUNICATE)
        count = self._settings.accumulate
        for part, wanted in _parts(inputs, targets, count):
            zeros = nullcontext() if nest.rows(wanted) else counting_nothing(pipeline, self._gathered)
            with pipeline.telling(self._pipeline_computes), zeros:
                done = pipeline.forward_backward(part, wanted, divisor, self._scaler.scale)
            result.loss = result.loss + done.loss * (divisor / result.global_units)
            result.score = result.score + done.score

    def _pipeline_computes(self, kind: str | None) -> None:
        """Count what is between computations as communication: a stage sends, or waits for what others send."""
        phase = Phase.COMMUNICATE if kind is None else Phase.FORWARD if kind == "forward" else Phase.BACKWARD
        self._clock.enter(phase)

    def _micro_batch(self, sync: StepSync, part: MicroBatch, divisor: int, result: StepResult) -> Tensor:
        self._clock.enter(Phase.FORWARD)
        targets = part.targets
        samples = nest.rows(targets)
        with autocast_to(self._settings.autocast, self._settings.device):
            outputs = self._forward(sync.module, part.inputs, samples)
        exact = nest.exact(outputs)
        total = self.task.loss_sum(exact, targets) / divisor if samples else nest.zero_of(exact)
        if self.guard is not None and samples:
            self.guard.look(total, exact, targets, part.first)
        if part.last and self.guard is not None and self.guard.leaves_out(sync.steps_together):
            result.left_out = True
        self._clock.enter(Phase.BACKWARD)
        if samples and not result.left_out:
            self._scaler.scale(total).backward()
        else:
            zeros = nullcontext() if samples else counting_nothing(sync.module, self._gathered)
            with sync.silent() if result.left_out else nullcontext(), zeros:
                self._scaler.scale(total).backward()
        if not samples:
            return torch.zeros_like(total)
        if (score := self.task.training_score(outputs, targets)) is not None:
            result.score = result.score + score
        return total.detach()

    @property
    def _gathered(self) -> list[nn.Parameter]:
        return self._split.pieces.gathered if self._split is not None else []

    def _forward(self, module: nn.Module, inputs: Nest, samples: int) -> Nest:
        """Run the model; a rank without samples takes part with one that counts nothing.

        With SyncBatchNorm it runs an empty batch instead, for the others wait for its statistics.
        """
        if samples:
            return nest.call(module, inputs)
        if has_sync_batchnorm(module):
            return nest.call(module, nest.take(inputs, slice(0)))
        with evaluating(module), backward_in_evaluation([module]):
            return nest.call(module, inputs)

    def _to_device(self, batch: Batch) -> tuple[Nest, Nest]:
        settings, inputs, targets = self._settings, batch.inputs, batch.targets
        if settings.device.type != "cpu":  # else they are there: no loader gives others
            inputs, targets = nest.to_device(inputs, settings.device), nest.to_device(targets, settings.device)
        return nest.map_leaves(_channels_last, inputs) if settings.channels_last else inputs, targets


def _channels_last(inputs: Tensor) -> Tensor:
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.ndim == 4 else inputs


def _parts(inputs: Nest, targets: Nest, count: int) -> Iterator[tuple[Nest, Nest]]:
    """Yield micro-batches; those without targets have the first input, which counts nothing."""
    if count == 1 and nest.rows(targets):
        yield inputs, targets
        return
    for part, wanted in zip(nest.tensor_split(inputs, count), nest.tensor_split(targets, count), strict=True):
        yield part if nest.rows(wanted) else nest.first_sample(inputs), wanted


def replica_samples(placement: Placement, batch: Batch) -> int:
    """Return how many samples of a global batch this rank's replica has: those of its fsdp ranks together."""
    sizes = batch.sizes or share_sizes(batch.global_size, placement.data_size)
    first = placement.data_rank - placement.data_rank % placement.layout.fsdp
    return sum(sizes[first : first + placement.layout.fsdp])


def warmup_backward(sync: StepSync, inputs: Nest) -> None:
    """Send samples through forward and backward, which changes nothing (see `Sync.needs_warmup_backward`)."""
    with evaluating(sync.module), backward_in_evaluation([sync.module]), sync.micro_batch(last=True):
        nest.zero_of(nest.call(sync.module, inputs)).backward()
    for parameter in sync.module.parameters():
        parameter.grad = None
