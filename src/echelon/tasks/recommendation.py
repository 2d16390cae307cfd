"""Pairs, such as of a user and an item, with a rating or a click: which number, or whether, belongs to a pair.

Ratings: squared error, judged by RMSE. Clicks (a target of 0 and 1): cross-entropy, judged by the area below the ROC.

Helps: Ratings and clicks of users and items.
Needs: `--input USER,ITEM`, columns of ids, and `--target`, a rating or 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from echelon.core.errors import UserError
from echelon.core.figure import Chart, ReportSection, axis, dots, line
from echelon.core.task import Metric, TaskDefaults
from echelon.tasks import nest
from echelon.tasks.base import DataFacts, Encoding, EvaluationResult, InputFacts, Metrics, TaskSettings
from echelon.tasks.gathering import Gathered, bins_by_prediction
from echelon.tasks.regression import Regression, Units, regression_scores

CLICKS = 2
"""The `count` of a target that is 0 or 1."""
_GROUPS = 10


class PairPrediction(Regression):
    """Outputs `(B, 1)` or `(B,)`, and targets `(B,)`: ratings, or 0 and 1 where outputs are logits."""

    name = "recommendation"
    encoding = Encoding.IDS
    defaults: ClassVar[TaskDefaults] = TaskDefaults("sgd", 4.0, 1e-4, epochs=20, batch_size=1024, holdout=0.1)

    def __init__(self) -> None:
        super().__init__()
        self._clicks = False

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: inputs are no ids, or targets are no single numbers.
        """
        task = super().fitted(data, settings)
        if task.outputs != 1 or not all(spec.count for spec in nest.leaves(data.inputs)):
            raise UserError(
                f"data {data.name}: --task recommendation needs inputs of ids and one target; these are "
                f"{nest.describe(data.inputs)}, and {nest.describe(data.targets)}"
            )
        task._clicks = nest.leaves(data.targets)[0].count == CLICKS
        if task._clicks:
            task.primary = Metric("roc_auc", "max", "ROC AUC")
            task.headlines = (Metric("log_loss", "min", "log loss"),)  # type: ignore[misc, assignment]
        return task

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over pairs of the squared error, or the cross-entropy."""
        if self._clicks:
            return F.binary_cross_entropy_with_logits(outputs.reshape(-1), targets.to(outputs), reduction="sum")
        return super().loss_sum(outputs, targets)

    def metrics(self, device: torch.device) -> Metrics:
        """Return an accumulator of RMSE and MAE, or of ROC AUC and log loss."""
        return _PairMetrics(self._units, self._clicks, device)

    def report_sections(self, result: EvaluationResult) -> Sequence[ReportSection]:
        """Return the calibration."""
        predicted, true = result.detail["predicted"], result.detail["true"]
        if not predicted:
            return ()
        low, high = min(predicted + true), max(predicted + true)
        exact = line("exact", [low, high], [low, high], "rule", dash="dot", width=1, hoverinfo="skip")
        layout = {"xaxis": axis("mean prediction"), "yaxis": axis("mean truth"), "showlegend": False}
        caption = f"Pairs in {len(predicted)} groups of equal size, by what is predicted of them."
        groups = dots("pairs", predicted, true, "eval")
        chart = Chart("calibration", "Calibration", caption, "Calibration.", [exact, groups], layout, 360)
        return (ReportSection("Predictions", [chart]),)

    def auto_model(self, data: InputFacts) -> str:
        """Return the factors of users and items, where inputs are the ids of both."""
        return "matrix_factorisation" if len(nest.leaves(data.inputs)) == 2 else "two_tower"


TASK = PairPrediction


class _PairMetrics:
    def __init__(self, units: Units, clicks: bool, device: torch.device) -> None:
        self._units, self._clicks, self._rows = units, clicks, Gathered(1, device)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch: outputs (B, 1) or (B,), targets (B,); B may be 0."""
        wide = outputs.reshape(-1, 1).float()
        self._rows.update(wide.sigmoid() if self._clicks else self._units.given(wide), targets)

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        """Return the metrics, and the calibration as means of groups of pairs."""
        outputs, targets = self._rows.all(group)
        predicted, true = bins_by_prediction(outputs[:, 0], targets[:, 0], _GROUPS)
        metrics = _click_scores(outputs[:, 0], targets[:, 0]) if self._clicks else _rating_scores(outputs, targets)
        return EvaluationResult(metrics, {"predicted": predicted, "true": true})


def _rating_scores(outputs: Tensor, targets: Tensor) -> dict[str, float | None]:
    return regression_scores(outputs, targets)[0]


def _click_scores(probabilities: Tensor, targets: Tensor) -> dict[str, float | None]:
    """Return ROC AUC, undefined without both kinds of pairs, and the mean cross-entropy in nats."""
    from torchmetrics.functional.classification import binary_auroc

    both = 0 < int(targets.sum()) < len(targets)
    finite = bool(probabilities.isfinite().all())
    return {
        "roc_auc": float(binary_auroc(probabilities, targets.long())) if both and finite else None,
        "log_loss": float(F.binary_cross_entropy(probabilities, targets)) if len(targets) and finite else None,
    }
