"""One optimizer step on one rank: forward and backward over micro-batches, then the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.data.base import Batch
from echelon.observe.phases import Phase, PhaseClock
from echelon.parallel.local_shards import LocalShards, clip_by_norm
from echelon.parallel.pipeline import Pipeline
from echelon.parallel.split import SplitModel
from echelon.parallel.sync_batchnorm import has_sync_batchnorm
from echelon.sync.base import StepSync


@dataclass(frozen=True)
class StepSettings:
    """What a step needs to know of the description: device, autocast type, micro-batches, clipping."""

    device: torch.device
    autocast: torch.dtype | None
    accumulate: int
    clip_norm: float
    channels_last: bool


@dataclass
class StepResult:
    """Sums over this rank's samples, on the device: loss over the global batch size, and correct predictions."""

    loss: Tensor
    correct: Tensor
    samples: int


class Step:
    """Forward and backward of a batch. Loss sums are divided by what the strategy says (see `Sync.begin_step`)."""

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        settings: StepSettings,
        clock: PhaseClock,
        scaler: torch.amp.GradScaler,
        split: SplitModel | None = None,
    ) -> None:
        self._loss, self._settings, self._clock, self._scaler = loss, settings, clock, scaler
        self._split = split
        self._begun = False

    def forward_backward(self, batch: Batch, sync: StepSync) -> StepResult:
        """Accumulate the gradients of a batch; replicas may communicate during the last micro-batch's backward.

        Args:
            batch: this rank's part, inputs `(B, ...)`, targets `(B,)`; B may be 0 at the end of an epoch.
        """
        inputs, targets = self._to_device(batch)
        if sync.needs_warmup_backward and not self._begun:
            warmup_backward(sync.module, inputs.new_zeros((1, *inputs.shape[1:])))
        self._begun = True
        count = self._settings.accumulate
        zero = torch.zeros((), device=self._settings.device)
        result = StepResult(zero, zero.clone(), len(targets))
        divisor = sync.begin_step(len(targets), batch.global_size)
        if self._split is not None and self._split.pipeline is not None:
            return self._pipelined(self._split.pipeline, inputs, targets, (divisor, batch.global_size))
        share = divisor / batch.global_size
        parts = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        for i, (part, wanted) in enumerate(parts):
            last = i == count - 1
            with sync.micro_batch(last):
                total = self._micro_batch(sync, part, wanted, divisor, result)
            result.loss = result.loss + total * share
            if last and (began := sync.communication_began()) is not None:
                self._clock.split(Phase.COMMUNICATE, began)
        return result

    def _pipelined(self, pipeline: Pipeline, inputs: Tensor, targets: Tensor, sizes: tuple[int, int]) -> StepResult:
        """Let the pipeline run each part of the batch, in micro-batches of its own; `sizes`: divisor, global batch."""
        self._clock.enter(Phase.COMMUNICATE)
        count = self._settings.accumulate
        zero = torch.zeros((), device=self._settings.device)
        result = StepResult(zero, zero.clone(), len(targets))
        for part, wanted in zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True):
            with pipeline.telling(self._pipeline_computes):
                done = pipeline.forward_backward(part, wanted, sizes[0], self._scaler.scale)
            result.loss = result.loss + done.loss * (sizes[0] / sizes[1])
            result.correct = result.correct + done.correct
        return result

    def _pipeline_computes(self, kind: str | None) -> None:
        """Count what is between computations as communication: a stage sends, or waits for what others send."""
        phase = Phase.COMMUNICATE if kind is None else Phase.FORWARD if kind == "forward" else Phase.BACKWARD
        self._clock.enter(phase)

    def _micro_batch(self, sync: StepSync, inputs: Tensor, targets: Tensor, divisor: int, result: StepResult) -> Tensor:
        self._clock.enter(Phase.FORWARD)
        with self._autocast():
            logits = self._forward(sync.module, inputs)
            exact = logits if logits.dtype == torch.float64 else logits.float()
            total = self._loss(exact, targets) / divisor if len(targets) else logits.sum() * 0.0
        self._clock.enter(Phase.BACKWARD)
        self._scaler.scale(total).backward()
        if len(targets):
            result.correct = result.correct + (logits.detach().argmax(-1) == targets).sum()
        return total.detach()

    def _forward(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Run the model; a rank without samples takes part with one blank sample of weight zero.

        With SyncBatchNorm it runs its empty batch instead, for the others wait for its statistics.
        """
        if len(inputs) or has_sync_batchnorm(module):
            return module(inputs)
        with evaluating(module):
            return module(inputs.new_zeros((1, *inputs.shape[1:])))

    def _autocast(self) -> torch.autocast:
        dtype = self._settings.autocast
        return torch.autocast(self._settings.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)

    def _to_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        settings = self._settings
        inputs = batch.inputs.to(settings.device, non_blocking=True)
        if settings.channels_last and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, batch.targets.to(settings.device, non_blocking=True)


def warmup_backward(module: nn.Module, inputs: Tensor) -> None:
    """Send blank samples through forward and backward, which changes nothing (see `Sync.needs_warmup_backward`)."""
    with evaluating(module):
        (module(inputs).sum() * 0.0).backward()
    for parameter in module.parameters():
        parameter.grad = None


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, then each of its parts back into the mode that it had."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def make_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, clip_norm: float
) -> Callable[[], None]:
    """Return the function that applies gradients: unscale, clip by global norm, step, clear."""

    divided = model.divided if isinstance(model, LocalShards) else None

    def update() -> None:
        if clip_norm:
            scaler.unscale_(optimizer)
            if divided is not None and scaler.is_enabled():  # the norm is that of all gradients
                divided.scale_others(1 / scaler.get_scale())
            if isinstance(model, LocalShards):
                clip_by_norm(model, clip_norm)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if divided is not None:
            model.zero_grad(set_to_none=True)
            divided.share()

    return update
