"""Samples with any number of labels each: cross-entropy of each label, judged by mean average precision.

Shapes: B samples, L labels.

Helps: Tags: a sample can have several labels, or none.
Needs: targets `(B, L)` of 0 and 1; for a table, a `--target` of lists, of labels joined by `|` or `;`, or several of 0
and 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.core.figure import ReportSection
from echelon.core.spec import Value
from echelon.core.task import Metric, TaskDefaults
from echelon.tasks import nest
from echelon.tasks.base import (
    OF_TEXTS,
    DataFacts,
    Encoding,
    EvaluationResult,
    InputFacts,
    Metrics,
    Prediction,
    Task,
    TaskSettings,
    are_tokens,
)
from echelon.tasks.classification_report import class_sections
from echelon.tasks.gathering import RowMetrics

_THRESHOLD = 0.5
_CURVE_POINTS = 200


class MultiLabel(Task):
    """Logits `(B, L)` and targets `(B, L)` of 0 and 1; a sample's loss is the mean over the labels."""

    name = "multi_label"
    primary = Metric("map", "max", "mAP")
    headlines = (Metric("macro_f1", "max", "macro F1"), Metric("roc_auc", "max", "ROC AUC"))
    encoding = Encoding.LABELS
    table_model: ClassVar[str] = "table_mlp"
    text_model: ClassVar[str] = "text_classifier"
    defaults: ClassVar[TaskDefaults] = TaskDefaults("adamw", 2e-3, 1e-2, epochs=20)

    def __init__(self) -> None:
        self.labels: tuple[str, ...] = ()

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: targets are not one number for each label, or class weights or label smoothing are asked for.
        """
        task = super().fitted(data, settings)
        specs = nest.leaves(data.targets)
        if len(specs) != 1 or len(specs[0].shape) != 1 or specs[0].shape[0] < 2 or specs[0].ragged:
            raise UserError(
                f"data {data.name}: targets are {nest.describe(data.targets)}, and --task multi-label needs a 0 or 1 "
                "for each of at least 2 labels: float32 of shape (L,)"
            )
        if data.target_values is not None and not data.target_values.marks:
            least, most = data.target_values.span
            raise UserError(
                f"data {data.name}: targets reach from {least:g} to {most:g}, and --task multi-label needs 0 or 1 for "
                "each label: give (targets > 0.5).float(), or name another --task"
            )
        task.labels = data.classes or tuple(str(i) for i in range(specs[0].shape[0]))
        return task

    @property
    def outputs(self) -> int:
        """One logit a label."""
        return len(self.labels)

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over samples of the cross-entropy of logits and targets `(B, L)`, its mean over the labels."""
        losses = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs), reduction="none")
        return losses.mean(-1).sum()

    def metrics(self, device: torch.device) -> Metrics:
        """Return an accumulator of average precision, precision, recall, F1 and ROC of each label."""
        return _LabelMetrics(self.labels, device)

    def metric_arguments(self, classes: int) -> Mapping[str, Value]:
        """Return the number of labels, and that there are several."""
        return {"task": "multilabel", "num_labels": len(self.labels)}

    def predictions(self, outputs: Tensor) -> list[Prediction]:
        """Return the labels whose probability, from logits `(B, L)`, is at least a half, and that of every one."""
        rows = outputs.sigmoid().tolist()
        return [
            Prediction(
                [label for label, share in zip(self.labels, row, strict=True) if share > _THRESHOLD],
                probabilities=dict(zip(self.labels, row, strict=True)),
            )
            for row in rows
        ]

    def report_sections(self, result: EvaluationResult) -> Sequence[ReportSection]:
        """Return the ROC curves and the table of the labels."""
        return class_sections({**result.detail, "metrics": result.metrics})

    def auto_model(self, data: InputFacts) -> str:
        """Return the one for texts, or for other columns of a table; others as by the size of images."""
        if data.task != self.name:
            return ""
        return self.text_model if are_tokens(data.inputs) else self.table_model

    def defaults_for(self, data: DataConfig, inputs: InputFacts | None = None) -> TaskDefaults:
        """Return those of texts where the inputs are, else those of other columns."""
        return OF_TEXTS if inputs is not None and are_tokens(inputs.inputs) else self.defaults


TASK = MultiLabel


class _LabelMetrics(RowMetrics):
    def __init__(self, labels: Sequence[str], device: torch.device) -> None:
        super().__init__(len(labels), device)
        self._labels = list(labels)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch of logits and targets (B, L); B may be 0."""
        self.add(outputs, targets)

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        """Return the means over labels, and the detail by label; None is undefined, and left out of means."""
        logits, targets = self.all(group)
        return _label_scores(self._labels, logits.sigmoid(), targets.long())


def _label_scores(labels: list[str], scores: Tensor, targets: Tensor) -> EvaluationResult:
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision, binary_roc

    columns: dict[str, list[float | None]] = {
        name: [] for name in ("precision", "recall", "f1", "roc_auc", "average_precision")
    }
    support, curves = targets.sum(0).tolist(), {}
    finite = bool(scores.isfinite().all())
    for i in range(len(labels)):
        score, true = scores[:, i].contiguous(), targets[:, i].contiguous()
        some, both = finite and support[i] > 0, finite and 0 < support[i] < len(true)
        for name, value in _counts_of(score > _THRESHOLD, true).items():
            columns[name].append(value)
        columns["average_precision"].append(float(binary_average_precision(score, true)) if some else None)
        columns["roc_auc"].append(float(binary_auroc(score, true)) if both else None)
        if both:
            fpr, tpr, _ = binary_roc(score, true)
            chosen = torch.linspace(0, len(fpr) - 1, min(_CURVE_POINTS, len(fpr))).long()
            curves[str(i)] = {"fpr": fpr[chosen].tolist(), "tpr": tpr[chosen].tolist()}
    absent = sum(not count for count in support)
    notes = (
        [f"{absent} of {len(labels)} labels are on no sample here: they have no average precision"] if absent else []
    )
    metrics = {
        "map": _mean(columns["average_precision"]),
        "macro_f1": _mean(columns["f1"]),
        "roc_auc": _mean(columns["roc_auc"]),
    }
    return EvaluationResult(
        metrics, {"per_class": {**columns, "support": support}, "roc": curves, "notes": notes, "classes": labels}
    )


def _counts_of(predicted: Tensor, true: Tensor) -> dict[str, float | None]:
    """Return precision, recall and F1 of one label; what nothing defines is None."""
    hits, given, there = int((predicted & (true == 1)).sum()), int(predicted.sum()), int(true.sum())
    return {
        "precision": hits / given if given else None,
        "recall": hits / there if there else None,
        "f1": 2 * hits / (given + there) if given + there else None,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
