"""Samples of one class each: cross-entropy with label smoothing and class weights, judged by top-1.

Shapes: B samples, C classes.

Helps: Rows of a table, or anything else with one class each.
Needs: class numbers from 0; for a table, a `--target` of strings or whole numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.core.errors import UserError
from echelon.core.figure import ReportSection
from echelon.core.task import BEFORE_TASKS, TaskDefaults
from echelon.tasks import nest
from echelon.tasks.base import (
    DataFacts,
    Encoding,
    EvaluationResult,
    InputFacts,
    Metrics,
    Prediction,
    TargetValues,
    Task,
    TaskSettings,
)
from echelon.tasks.classification_metrics import ClassificationMetrics
from echelon.tasks.classification_report import class_sections
from echelon.tasks.nest import TensorSpec

_SUMS_TO_ONE = 1e-3  # also in bfloat16
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


class Classification(Task):
    """Logits `(B, C)` and class numbers `(B,)`.

    The loss is the sum over samples of w_(t_i) * l_i, where l_i is the sample's cross-entropy with its target smoothed:
    (1 - s) on the class, s / C on every class. The engine divides by the global batch size:

        L = sum_i w_(t_i) l_i / (global batch size)

    Weights are scaled so that the mean weight of a training sample is 1: all twos are as no weights. torch divides by
    the weights of each batch's samples instead, which no worker knows of the others. `balanced` gives class c the
    weight n / (classes * count_c) (King and Zeng 2001), so that every class counts alike; a class without training
    samples has no weight, and does not count as a class.
    """

    name = "classification"
    primary = BEFORE_TASKS.primary
    headlines, curves = tuple(BEFORE_TASKS.headlines), tuple(BEFORE_TASKS.curves)
    score_label = "top-1"
    takes_shares = True
    encoding = Encoding.CLASSES
    table_model: ClassVar[str] = "table_mlp"
    defaults: ClassVar[TaskDefaults] = TaskDefaults("adamw", 2e-3, 1e-2, epochs=20)

    def __init__(self) -> None:
        self.classes: tuple[str, ...] = ()
        self._loss = CrossEntropy(0.0, None)

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: targets are no classes; the weights are of another number than the classes, not numbers,
                negative, or all zero.
        """
        kind = nest.leaves(data.targets)
        if len(kind) != 1 or kind[0].shape or kind[0].dtype not in _INTEGERS:
            one_hot = data.target_values is not None and data.target_values.one_hot
            which = "they are one-hot: give targets.argmax(1)" if one_hot else "give int64 class numbers from 0"
            if len(kind) == 1 and kind[0].shape == (1,) and kind[0].dtype in _INTEGERS:
                which = "give targets.squeeze(1)"
            elif len(kind) == 1 and not one_hot and (other := likely_task(kind[0], data.target_values)):
                which = f"--task {other} learns these" + (" (a class for each position)" if kind[0].ragged else "")
            raise UserError(
                f"data {data.name}: targets are {nest.describe(data.targets)}, and --task {_flag(self.name)} needs "
                f"one whole number, the class, for each sample: {which}, or name another --task"
            )
        if not data.classes:
            span = data.label_span
            reach = f", and these reach from {span[0]:,} to {span[1]:,}" if span else ""
            raise UserError(
                f"data {data.name}: labels must be 0 to C - 1, for C classes{reach}; or name another --task"
            )
        if data.label_span is not None and data.label_span[0] == 1:
            raise UserError(
                f"data {data.name}: labels are 1 to {data.label_span[1]}, and classes are numbered from 0: give "
                "targets - 1, or name another --task; if class 0 is missing here alone, name all classes with "
                "data=echelon.data.from_datasets(train, evaluation, classes=[...])"
            )
        task = copy.copy(self)
        task.classes = data.classes
        task.primary = replace(self.primary, chance=1 / len(data.classes))
        weights = class_weights(settings.class_weights, data.class_counts)
        task._loss = CrossEntropy(settings.label_smoothing, None if weights is None else torch.tensor(weights))
        return task

    def for_evaluation(self) -> Self:
        """Return the task with plain cross-entropy."""
        task = copy.copy(self)
        task._loss = CrossEntropy(0.0, None)
        return task

    @property
    def outputs(self) -> int:
        """One logit a class."""
        return len(self.classes)

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of logits `(B, C)` and class numbers `(B,)`, or shares of classes `(B, C)`."""
        return self._loss(outputs, targets)

    def training_score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number of correct predictions of logits `(B, C)`.

        Of targets that are shares `(B, C)` in place of class numbers `(B,)`, the largest share is the class.
        """
        wanted = targets.argmax(-1) if targets.is_floating_point() else targets
        return (outputs.detach().argmax(-1) == wanted).sum()

    def metrics(self, device: torch.device) -> Metrics:
        """Return an accumulator of top-1, top-5, precision, recall, F1, ROC and the confusion matrix."""
        return ClassificationMetrics(self.classes, device)

    def predictions(self, outputs: Tensor) -> list[Prediction]:
        """Return the likeliest class of each of logits `(B, C)`, and the probability of every one."""
        rows = outputs.softmax(-1).cpu()
        return [
            Prediction(
                self.classes[int(row.argmax())],
                float(row.max()),
                dict(zip(self.classes, row.tolist(), strict=True)),
            )
            for row in rows
        ]

    def report_sections(self, result: EvaluationResult) -> Sequence[ReportSection]:
        """Return the confusion matrix, the ROC curves and the table of the classes."""
        return class_sections({**result.detail, "metrics": result.metrics})

    def auto_model(self, data: InputFacts) -> str:
        """Return the task's own, else the one for columns of a table; others as by the size of images."""
        return self.default_model or (self.table_model if data.task == self.name else "")

    def odd_outputs(self, outputs: Any) -> str:
        """Say that outputs are probabilities, as of a model that ends in a softmax."""
        return probabilities_for_logits(outputs, -1)

    def wrong_outputs(self, outputs: Any, samples: int) -> str:
        """Say what is wrong with a model's outputs."""
        if isinstance(outputs, Tensor) and outputs.shape == (samples, self.outputs):
            return ""
        got = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        wanted = f"must return logits of shape (batch, {self.outputs}), one per class"
        return f"{wanted}; for a batch of {samples} it returned {got}"


TASK = Classification


class CrossEntropy:
    """sum_i w_(t_i) l_i, computed in float32 or wider; the weights follow the logits' device."""

    def __init__(self, label_smoothing: float, weights: Tensor | None) -> None:
        self.label_smoothing = label_smoothing
        self.weights = weights

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the scalar sum for logits (B, C) and class numbers (B,), or shares (B, C); 0 for B = 0.

        Shares weigh the losses of their classes: sum_i sum_c t_ic w_c l_ic.
        """
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if self.weights is None:
            return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self.label_smoothing)
        if targets.is_floating_point():
            surprise = -logits.log_softmax(-1)
            per_class = (1 - self.label_smoothing) * surprise + self.label_smoothing * surprise.mean(-1, keepdim=True)
            return (targets * self.weights.to(logits) * per_class).sum()
        return self.each(logits, targets).sum()

    def each(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the losses of the samples (B,)."""
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)
        if self.weights is None:
            return losses
        if self.weights.device != logits.device or self.weights.dtype != logits.dtype:
            self.weights = self.weights.to(logits)
        return self.weights[targets] * losses


def likely_task(targets: TensorSpec, values: TargetValues | None) -> str:
    """Return the task that targets look like which are no class each; empty: they look like no other one's."""
    is_marks = targets.dtype == "bool" or (values is not None and values.marks)
    if len(targets.shape) == 1 and targets.shape[0] > 1 and is_marks and not targets.ragged:
        return "multi-label"
    if targets.ragged and len(targets.shape) == 1 and targets.dtype == "int64":
        return "language-modelling"
    return "segmentation" if len(targets.shape) == 2 and targets.dtype in _INTEGERS else ""


def probabilities_for_logits(outputs: Any, classes: int) -> str:
    """Say that outputs are probabilities and the loss takes logits; empty: they are none.

    Args:
        classes: the dim of the classes.
    """
    if (
        not isinstance(outputs, Tensor)
        or not outputs.numel()
        or outputs.shape[classes] < 2
        or bool((outputs < 0).any())
    ):
        return ""
    sums = outputs.float().sum(classes)
    if not torch.allclose(sums, torch.ones_like(sums), atol=_SUMS_TO_ONE):
        return ""
    return (
        "its outputs are not negative and sum to 1 over the classes, as those of a softmax, and the loss takes logits: "
        "leave out the softmax, with which it learns slowly; or give a loss of probabilities with --loss"
    )


def _flag(task: str) -> str:
    return task.replace("_", "-")


def class_weights(text: str, counts: Sequence[int]) -> list[float] | None:
    """Return the weight of each class, by which a training sample's mean weight is 1; None for none.

    Args:
        text: none, balanced, or one number per class separated by commas.
        counts: training samples of each class.

    Raises:
        UserError: the weights are of another number than the classes, not numbers, negative, or zero for all classes
            that have samples.
    """
    if text in ("none", ""):
        return None
    if text == "balanced":
        present = sum(count > 0 for count in counts)
        return [sum(counts) / (present * count) if count else 0.0 for count in counts]
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"--class-weights {text!r}: write none, balanced, or one number per class separated by commas"
        ) from None
    if len(weights) != len(counts):
        raise UserError(
            f"--class-weights gives {len(weights)} weights, the data has {len(counts)} classes: one for each"
        )
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise UserError(f"--class-weights {text!r}: weights are finite, not negative and not all zero")
    total = sum(weight * count for weight, count in zip(weights, counts, strict=True))
    if not total:
        raise UserError(f"--class-weights {text!r}: no class that has training samples has a weight")
    return [weight * sum(counts) / total for weight in weights]
