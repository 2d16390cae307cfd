"""A task with a loss and metrics of the user's own in place of, or beside, its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.core.figure import ReportSection
from echelon.core.task import Metric, TaskFacts
from echelon.tasks.base import (
    ChosenSample,
    EvaluationResult,
    Examples,
    Generated,
    InputFacts,
    Metrics,
    Prediction,
    Task,
    Writing,
)
from echelon.tasks.nest import Nest, logits_in
from echelon.tasks.own_loss import LossFunction, OwnLoss, takes_whole_outputs, units_of
from echelon.tasks.own_metrics import OwnMetrics, facts_of

if TYPE_CHECKING:
    from torchmetrics import Metric as TorchMetric


class TailoredTask(Task):
    """A task, fitted to its data, with another loss, further metrics, or another primary metric."""

    def __init__(
        self, task: Task, loss: LossFunction | None, metrics: Mapping[str, TorchMetric], primary: Metric
    ) -> None:
        """Take the fitted task and what is the user's own; without a loss, the task's stays.

        Raises:
            UserError: the loss has parameters.
        """
        self._task, self._own = task, dict(metrics)
        self._units = units_of(loss) or task.units
        self.primary = primary
        before = [metric for metric in (task.primary, *task.headlines) if metric.name != primary.name]
        known = [facts for name, metric in metrics.items() if (facts := facts_of(name, metric)) is not None]
        self.name, self.score_label = task.name, task.score_label  # type: ignore[misc]
        self.encoding = task.encoding  # type: ignore[misc]
        self.unit = task.unit if units_of(loss) is None else str(getattr(loss, "unit", "unit"))  # type: ignore[misc]
        self._loss = task.loss_sum if loss is None else OwnLoss(loss, self)
        self.headlines = tuple(m for m in (*known, *before) if m.name != primary.name)  # type: ignore[misc]
        self.curves = task.curves  # type: ignore[misc]
        self.generates = task.generates  # type: ignore[misc]
        self.generation_samples = task.generation_samples  # type: ignore[misc]
        self.takes_shares = task.takes_shares and loss is None  # type: ignore[misc]
        self.takes_records = loss is not None and takes_whole_outputs(loss)  # type: ignore[misc]

    @property
    def is_own(self) -> bool:
        """It is, in part."""
        return True

    def for_evaluation(self) -> Self:
        """Return the same of the task as evaluations have it; a loss of one's own is as in training."""
        tailored = copy.copy(self)
        tailored._task = self._task.for_evaluation()
        if not isinstance(self._loss, OwnLoss):
            tailored._loss = tailored._task.loss_sum
        return tailored

    def facts(self) -> TaskFacts:
        """Return what a record says of the task."""
        known = self._task.facts()
        return replace(
            known,
            primary=self.primary,
            headlines=self.headlines,
            curves=self.curves,
            score_label=self.score_label,
            unit=self.unit,
            units_per_sample=known.units_per_sample if self.unit == known.unit else 0,
        )

    @property
    def outputs(self) -> int:
        """Those of the task."""
        return self._task.outputs

    def loss_sum(self, outputs: Any, targets: Nest) -> Tensor:
        """Return the sum of the losses."""
        return self._loss(outputs, self._task.learnt(targets) if isinstance(self._loss, OwnLoss) else targets)

    def units(self, targets: Nest) -> int:
        """Return the units of B samples."""
        return int(self._units(targets))

    def training_score(self, outputs: Any, targets: Nest) -> Tensor | None:
        """Return what the task counts in training."""
        return self._task.training_score(logits_in(outputs), targets)

    def metrics(self, device: torch.device) -> Metrics:
        """Return an accumulator of the task's metrics and the user's own."""
        return OwnMetrics(self, self._task.metrics(device), self._own, device)

    def examples(self) -> Examples | None:
        """Return the task's choice of samples; none with another loss than it is made by."""
        return None if isinstance(self._loss, OwnLoss) else self._task.examples()

    def generated(
        self, model: Callable[[Nest], Any], samples: Sequence[ChosenSample], group: dist.ProcessGroup | None
    ) -> Generated:
        """Return what the task makes of the model's own writing."""
        return self._task.generated(_with_logits(model), samples, group)

    def predict(self, model: Callable[[Nest], Any], inputs: Nest, writing: Writing) -> list[Prediction]:
        """Return what the task makes of the model; outputs as they are where the loss is one's own and says no task."""
        return self._task.predict(_with_logits(model), inputs, writing)

    def auto_model(self, data: InputFacts) -> str:
        """Return the task's choice."""
        return self._task.auto_model(data)

    def report_sections(self, result: EvaluationResult) -> Sequence[ReportSection]:
        """Return what the task shows."""
        return self._task.report_sections(result)

    def given(self, outputs: Any) -> Any:
        """Return outputs in the units of the data's targets."""
        return self._task.given(outputs)

    def for_metrics(self, outputs: Any, targets: Nest) -> tuple[Any, Nest]:
        """Return outputs and targets as the task says."""
        return self._task.for_metrics(outputs, targets)

    def wrong_loss(self, outputs: Any, targets: Nest) -> str:
        """Say why the loss cannot be computed, where it is one's own."""
        return self._loss.refusal(outputs, self._task.learnt(targets)) if isinstance(self._loss, OwnLoss) else ""

    def odd_outputs(self, outputs: Any) -> str:
        """Say what the task says; a loss of one's own may take any."""
        return "" if isinstance(self._loss, OwnLoss) else self._task.odd_outputs(logits_in(outputs))

    def wrong_outputs(self, outputs: Any, samples: int) -> str:
        """Say what is wrong with a model's outputs; a loss of one's own may take any tensor."""
        outputs = logits_in(outputs)
        wrong = self._task.wrong_outputs(outputs, samples)
        if not isinstance(self._loss, OwnLoss):
            return wrong
        if not wrong or isinstance(outputs, Tensor):
            return ""
        return f"{wrong}: by it the task's metrics go; with task=supervised only the loss and metrics of your own count"


def _with_logits(model: Callable[[Nest], Any]) -> Callable[[Nest], Any]:
    return lambda inputs: logits_in(model(inputs))
