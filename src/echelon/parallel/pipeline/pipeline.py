"""A model over the ranks of a pipeline: forward and backward of a batch in micro-batches, and evaluation.

A batch is cut into micro-batches of one size; where it does not divide, the last sample is repeated with weight zero.
That would enter BatchNorm's statistics, so with BatchNorm such a batch goes in fewer micro-batches, which divide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from echelon.core.hints import Hints
from echelon.parallel.pipeline.batches import MicroBatches, cut_batch, dividing_count, evaluating, has_batchnorm
from echelon.parallel.pipeline.plan import StagePlan, plan_stages
from echelon.parallel.pipeline.settings import PipelineResult, PipelineSettings, microbatch_count, schedule_class
from echelon.parallel.pipeline.stage import Boundary, Skeleton, make_stage, set_types
from echelon.parallel.pipeline.timeline import ActionRecorder, Kind
from echelon.parallel.pipeline.torch_stage import EarlyStage, receive_early
from echelon.records.kinds import PipelineAction
from echelon.tasks import nest
from echelon.tasks.nest import Nest
from echelon.torch_compat import detect_fake_mode, step_microbatches

Loss = Callable[[Tensor, Any], Tensor]
Score = Callable[[Tensor, Any], Tensor | None]
Scale = Callable[[Tensor], Tensor]
Schedule = PipelineScheduleSingle | PipelineScheduleMulti
FIRST_RECORDED = 2  # the steps before it also start things up
MOST_SHAPES = 16  # of micro-batches whose schedules are kept


def batchnorm_notes(has_batchnorm: bool, microbatches: int) -> tuple[str, ...]:
    """Say, of a model with BatchNorm, that micro-batches have statistics of their own."""
    if not has_batchnorm or microbatches == 1:
        return ()
    return (
        f"BatchNorm takes its statistics over each of the {microbatches} micro-batches by itself, as in "
        "GPipe: losses differ a little from those of one process; pp with microbatches=1 has the same",
    )


@dataclass(frozen=True)
class Judge:
    """What the last stage makes of outputs and targets of samples: the sum of their losses, and their score.

    Attributes:
        loss: sums over units; gets outputs in float32 (float64 of a float64 model).
        score: a number summed over samples, such as correct predictions.
    """

    loss: Loss
    score: Score | None = None


class Pipeline(nn.Module):
    """This rank's stages of a model, and what runs them together with the other ranks'.

    Attributes:
        plan: all stages.
        stage_modules: this rank's, in forward order; parameters have the names that they have in the whole model.
        microbatches: parts of a batch.
        schedule: its name.
        timelines: of the recorded steps, every rank's actions; the owner may empty it.
    """

    def __init__(
        self,
        model: nn.Module,
        hints: Hints | None,
        mesh: DeviceMesh,
        settings: PipelineSettings,
        judge: Judge,
        example: Nest,
    ) -> None:
        """Cut a model; all ranks of the world call it together. The model's other parts are the caller's to let go.

        Args:
            model: the whole, the same on every rank, on its device or on meta, not yet split in another way.
            mesh: of the pipeline, 1-D.
            judge: what the last stage computes.
            example: inputs of at least one sample, of any values, on the device.

        Raises:
            UserError: the model cannot be cut so, or the schedule does not take what is asked of it.
        """
        super().__init__()
        self._group, self._device, self._settings = mesh.get_group(), nest.leaves(example)[0].device, settings
        self._judge = judge
        self.plan: tuple[StagePlan, ...] = plan_stages(model, hints, settings, mesh.size(), example)
        self.schedule = settings.schedule
        self.microbatches = microbatch_count(settings, mesh.size(), len(self.plan))
        steps = tuple(stage.steps for stage in self.plan)
        self._skeleton = Skeleton(model, steps, example)
        self._boundaries(example, training=True)
        rank, last = mesh.get_local_rank(), len(steps) - 1
        self._mine = [number for number, stage in enumerate(self.plan) if stage.rank == rank]
        self._modules_of_stages = nn.ModuleList(
            make_stage(model, steps[i], i == 0, i == last, example) for i in self._mine
        )
        self._mixes_samples = has_batchnorm([model])
        self._schedules: dict[tuple[object, ...], Schedule] = {}
        self._recorder = ActionRecorder(self._device)
        self._done = 0
        self._job = _Job(self._judge, 1, _identity, self._device)
        self.timelines: list[list[PipelineAction]] = []

    @property
    def stage_modules(self) -> list[nn.Module]:
        """This rank's stages, in forward order."""
        return list(self._modules_of_stages)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user has to know of this pipeline, in sentences."""
        return batchnorm_notes(self._mixes_samples, self.microbatches)

    def forward_backward(
        self, inputs: Nest, targets: Nest, divisor: float, scale: Scale | None = None
    ) -> PipelineResult:
        """Add the gradients of sum(losses) / divisor to those of the parameters; every rank gets the result.

        Args:
            inputs: nest of (N, ...), targets: nest of (N, ...), the same on all ranks of the pipeline. Without targets
                one input that counts nothing.
            scale: applied to each micro-batch's loss before its backward.
        """
        count = self.microbatches
        if self._mixes_samples:
            count = dividing_count(nest.rows(targets), count, self._settings.data_group, self._device)
        parts = cut_batch(inputs, targets, count)
        self._job = _Job(self._judge, divisor, scale or _identity, self._device)
        recorded = FIRST_RECORDED <= self._done < FIRST_RECORDED + self._settings.recorded
        recorded = recorded and detect_fake_mode(nest.leaves(inputs)) is None  # a rehearsal takes no time
        schedule = self._schedule(parts, training=True)
        if recorded:
            self._recorder.start()
        with evaluating(self.stage_modules, blank=not nest.rows(targets)):
            self._run(schedule, parts, training=True)
        if recorded:
            self.timelines.append(self._recorder.finish(self._group))
        self._done += 1
        sums = self._job.sums
        self._broadcast(sums)
        (logits,) = self._boundaries(parts.inputs[0], training=True)[-1]
        loss = sums[0].to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        return PipelineResult(loss, sums[1], nest.rows(targets))

    def forward(self, *by_position: Nest, **by_name: Nest) -> Tensor:
        """Return logits (N, ...) on every rank, for inputs of N samples as the model takes them; no gradients."""
        inputs: Nest = by_name or (by_position if len(by_position) > 1 else by_position[0])
        samples, first = nest.rows(inputs), nest.leaves(inputs)[0]
        parts = cut_batch(inputs, first.new_zeros(0), min(self.microbatches, max(1, samples)))
        with torch.no_grad():
            outputs = self._run(self._schedule(parts, training=False), parts, training=False)
            (last,) = self._boundaries(parts.inputs[0], training=False)[-1]
            shape = (len(parts.inputs) * last.shape[0], *last.shape[1:])
            logits = outputs.contiguous() if outputs is not None else first.new_empty(shape, dtype=last.dtype)
            self._broadcast(logits)
        return logits[:samples]

    def evaluate(self, inputs: Nest) -> Tensor:
        """Return logits as `forward` does."""
        found: Tensor = nest.call(self.forward, inputs)
        return found

    @contextmanager
    def telling(self, on_change: Callable[[Kind | None], None]) -> Iterator[None]:
        """Say inside the block what begins: a computation, or with None what is between computations."""
        before, self._recorder.on_change = self._recorder.on_change, on_change
        try:
            yield
        finally:
            self._recorder.on_change = before

    def _boundaries(self, inputs: Nest, training: bool) -> tuple[tuple[Boundary, ...], ...]:
        return self._skeleton.boundaries(inputs, self._settings.types(training))

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, group_src=self.plan[-1].rank, group=self._group)

    def _run(self, schedule: Schedule, batches: MicroBatches, training: bool) -> Tensor | None:
        inputs = [tuple(nest.leaves(batch)) for batch in batches.inputs] if 0 in self._mine else None
        targets = list(batches.targets) if training and len(self.plan) - 1 in self._mine else None
        autocast, parameters = self._settings.types(training)
        for stage in self._modules_of_stages:
            set_types(stage, autocast, None if self._settings.sharded else parameters)
        return step_microbatches(schedule, inputs, targets, return_outputs=not training)

    def _schedule(self, batches: MicroBatches, training: bool) -> Schedule:
        first = batches.inputs[0]
        key = (len(batches.inputs), training, *((leaf.shape, leaf.dtype) for leaf in nest.leaves(first)))
        if key not in self._schedules:
            if len(self._schedules) == MOST_SHAPES:
                self._schedules.clear()
            self._schedules[key] = self._new_schedule(first, len(batches.inputs), training)
        return self._schedules[key]

    def _new_schedule(self, first: Nest, count: int, training: bool) -> Schedule:
        between = self._boundaries(first, training)
        stages = [
            EarlyStage(
                module,
                number,
                len(self.plan),
                self._device,
                input_args=tuple(each.blank() for each in between[number]),
                output_args=tuple(each.blank() for each in between[number + 1]),
                group=self._group,
            )
            for number, module in zip(self._mine, self._modules_of_stages, strict=True)
        ]
        kind, single = schedule_class(self.schedule, count, dist.get_world_size(self._group), len(self.plan))
        for stage in stages:
            stage.recorder = self._recorder
            stage.inputs_move = any(each.requires_grad for each in between[stage.stage_index])
            stage.early_of = count if single and self._device.type == "cpu" else 0
        loss = self._micro_loss if training else None
        schedule = kind(stages[0] if single else stages, n_microbatches=count, loss_fn=loss, scale_grads=False)
        if not single and self._device.type == "cpu":
            receive_early(schedule)
        assert isinstance(schedule, Schedule)
        return schedule

    def _micro_loss(self, logits: Tensor, targets: Nest) -> Tensor:
        with self._recorder.telling("forward"):
            return self._job.loss_of(logits, targets)


class _Job:
    """The losses of one batch, in the order in which micro-batches reach the last stage."""

    def __init__(self, judge: Judge, divisor: float, scale: Scale, device: torch.device) -> None:
        self._judge, self._divisor, self._scale = judge, divisor, scale
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    def loss_of(self, logits: Tensor, targets: Nest) -> Tensor:
        """Return the scaled loss of a micro-batch, whose samples beyond its targets have weight zero."""
        exact = logits if logits.dtype == torch.float64 else logits.float()
        samples = nest.rows(targets)
        if not samples:
            return exact.sum() * 0.0
        known = exact[:samples]
        total = self._judge.loss(known, targets) / self._divisor
        score = self._judge.score(known, targets) if self._judge.score else None
        self.sums[0] += total.detach().double()
        if score is not None:
            self.sums[1] += score.double()
        return self._scale(total)


def _identity(loss: Tensor) -> Tensor:
    return loss
