"""Proof that an export is what was trained: both are evaluated on the same data, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echelon.core.errors import UserError
from echelon.core.task import Metric
from echelon.core.units import format_metric
from echelon.data.loader import EvalLoader
from echelon.inference.exports.base import Predictor
from echelon.tasks import nest
from echelon.tasks.base import Metrics, Task
from echelon.tasks.nest import Nest

MOST_OF_SCALE = 1e-4
"""How far outputs may differ, relative to their usual size."""
MOST_OF_LOSS = MOST_OF_METRIC = 1e-3
"""How far the loss may differ, relatively; likewise a metric, one in percent by as much of the whole (0.1 points)."""
_NEVER = 1e4  # logits of this size stand for probabilities of 0: they say nothing of the scale of others


@dataclass(frozen=True)
class Scores:
    """The mean loss per unit, and the primary metric; None: undefined, or only known of what a model writes itself."""

    loss: float
    metric: float | None


@dataclass(frozen=True)
class Agreement:
    """How well an export agrees with the run's model.

    Attributes:
        difference: the largest one of outputs, relative to their usual size.
        worst: inputs of the batch where it is.
        metric: whose values `Scores` have.
    """

    samples: int
    difference: float
    own: Scores
    exported: Scores
    worst: Nest = field(repr=False)
    metric: Metric

    @property
    def objection(self) -> str:
        """Why the export is not what was trained; empty: it is."""
        own, given = self.own, self.exported
        if not _agree(given.loss, own.loss, MOST_OF_LOSS * max(abs(own.loss), 1e-6)):
            return f"its loss is {given.loss:.6g}, the run's {own.loss:.6g}"
        if own.metric is not None and given.metric is not None:
            most = MOST_OF_METRIC if self.metric.percent else MOST_OF_METRIC * max(abs(own.metric), 1e-6)
            if not _agree(given.metric, own.metric, most):
                return f"its {self.metric.label or self.metric.name} is {given.metric:.6g}, the run's {own.metric:.6g}"
        if not self.difference <= MOST_OF_SCALE:
            return f"its outputs differ by {self.difference:.1e} of their size, more than {MOST_OF_SCALE:.0e}"
        return ""

    def __str__(self) -> str:
        name = self.metric.label or self.metric.name
        metric = "" if self.exported.metric is None else f", {name} {format_metric(self.exported.metric)}"
        equal = f"outputs differ by at most {self.difference:.0e}" if self.difference else "outputs are the model's own"
        return f"evaluated again on {self.samples:,} samples: loss {format_metric(self.exported.loss)}{metric}; {equal}"


def _agree(value: float, other: float, most: float) -> bool:
    """Whether two values differ by so much at most; those that are not finite agree where both are the same."""
    if math.isfinite(value) and math.isfinite(other):
        return abs(value - other) <= most
    return value == other or (math.isnan(value) and math.isnan(other))


class _Count:
    """The loss and metrics of one of both."""

    def __init__(self, task: Task) -> None:
        self._task, self._metrics = task.for_evaluation(), task.metrics(torch.device("cpu"))
        self._loss = self._units = 0.0

    def update(self, outputs: Nest, targets: Nest) -> None:
        """Count a batch."""
        _update(self._metrics, outputs, targets)
        self._loss += float(self._task.loss_sum(outputs, targets))
        self._units += self._task.units(targets)

    def scores(self) -> Scores:
        """Return the means over what was counted."""
        loss = self._loss / max(1.0, self._units)
        primary = self._task.primary.name
        return Scores(loss, loss if primary == "loss" else self._metrics.compute(None).metrics.get(primary))


def _update(metrics: Metrics, outputs: Nest, targets: Nest) -> None:
    metrics.update(outputs, targets)


def compare(
    model: Predictor, exported: Predictor, task: Task, loader: EvalLoader, advance: Callable[[], None]
) -> Agreement:
    """Evaluate a run's model and an export of it on the same batches.

    Args:
        advance: is called after each batch.

    Raises:
        UserError: the export cannot take a batch, or there is none.
    """
    counts = _Count(task), _Count(task)
    samples, difference, worst, alone = 0, -1.0, None, None
    with torch.inference_mode():
        for batch in loader:
            if not nest.rows(batch.targets):
                continue
            outputs, given = _outputs(model, exported, batch.inputs)
            alone = nest.take(batch.inputs, slice(0, 1)) if alone is None else alone
            for count, result in zip(counts, (outputs, given), strict=True):
                count.update(result, batch.targets)
            apart = _apart(outputs, given)
            if not apart <= difference:
                difference, worst = apart, batch.inputs
            samples += nest.rows(batch.targets)
            advance()
        if alone is None:
            raise UserError("the run's evaluation data has no sample to evaluate it on")
        apart = _apart(*_outputs(model, exported, alone))  # all batches may have had one size
        if not apart <= difference:
            difference, worst = apart, alone
    return Agreement(samples, difference, counts[0].scores(), counts[1].scores(), worst, task.primary)


def _outputs(model: Predictor, exported: Predictor, inputs: Nest) -> tuple[Nest, Nest]:
    """Return what both give for a batch.

    Raises:
        UserError: the export cannot take it.
    """
    outputs = nest.exact(model(inputs))
    try:
        return outputs, nest.exact(exported(inputs))
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"it cannot take a batch of {nest.rows(inputs)} samples ({reason})") from error


def _apart(outputs: Nest, others: Nest) -> float:
    """Return the largest difference between tensors, relative to the usual size of each; NaN in one alone: infinity."""
    return max((_apart_of(*pair) for pair in zip(nest.leaves(outputs), nest.leaves(others), strict=True)), default=0.0)


def _apart_of(output: Tensor, other: Tensor) -> float:
    if output.shape != other.shape or not torch.equal(output.isfinite(), other.isfinite()):
        return float("inf")
    there = output.isfinite() & (output.abs() < _NEVER)
    if not there.any():  # they are no logits, but large numbers
        there = output.isfinite()
    if not there.any():
        return 0.0
    scale = float(output[there].abs().max())
    return float((output - other)[there].abs().max()) / max(scale, 1e-12)
