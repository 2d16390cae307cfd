"""Pairs, such as of a user and an item, with a rating or a click; or which item a user takes next.

With ratings: squared error, judged by RMSE. With clicks (a target of 0 and 1): cross-entropy, judged by the area under
the ROC. Without a target: the next item among all, judged by NDCG and hit rate at 10 on the last item of each user.

Helps: Ratings, clicks, or lists of what users took.
Needs: `--input USER,ITEM`, columns of ids, and a `--target` of ratings or of 0 and 1, or none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.core.figure import Chart, ReportSection, axis, dots, line
from echelon.core.spec import Value
from echelon.core.task import Metric, TaskDefaults, TaskFacts
from echelon.tasks import nest
from echelon.tasks.base import (
    NO_TARGET,
    DataFacts,
    Encoding,
    EvaluationResult,
    InputFacts,
    Metrics,
    Prediction,
    Task,
    TaskSettings,
)
from echelon.tasks.gathering import RowMetrics, bins_by_prediction
from echelon.tasks.nest import TensorSpec
from echelon.tasks.regression import Regression, Units, regression_scores

CLICKS = 2
"""The `count` of a target that is 0 or 1."""
_GROUPS = 10
_OF_NETWORKS = TaskDefaults("adamw", 2e-3, 1e-2, epochs=10, batch_size=1024, holdout=0.1)
TOP = 10
"""Items at the head of a ranking that metrics look at."""
_FIRST = (1, 2, 3, 5, TOP, 20, 50, 100, 200, 500, 1000)


class PairPrediction(Regression):
    """Outputs `(B, 1)` or `(B,)`, and targets `(B,)`: ratings, or 0 and 1 where outputs are logits."""

    name = "recommendation"
    encoding = Encoding.IDS
    table_model: ClassVar[str] = ""  # by the columns
    defaults: ClassVar[TaskDefaults] = TaskDefaults("sgd", 4.0, 1e-4, epochs=20, batch_size=1024, holdout=0.1)

    def __init__(self) -> None:
        super().__init__()
        self._clicks = False

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: inputs are no ids, or targets are no single numbers.
        """
        if isinstance(data.inputs, tuple) and all(spec.count and spec.shape for spec in data.inputs):
            return ItemRanking()._fitted_to(data, settings)  # type: ignore[return-value]
        task = super().fitted(data, settings)
        (spec,) = nest.leaves(data.targets)
        if task.outputs != 1 or not any(spec.count for spec in nest.leaves(data.inputs)):
            raise UserError(
                f"data {data.name}: --task recommendation needs inputs of ids and one target; these are "
                f"{nest.describe(data.inputs)}, and {nest.describe(data.targets)}: give a table with --input and "
                "--target, or TensorDataset(users, items, ratings) of int64, int64 and float32"
            )
        task._clicks = spec.count == CLICKS or _is_marks(data, spec)
        if task._clicks:
            task.primary = Metric("roc_auc", "max", "ROC AUC")
            task.headlines = (Metric("log_loss", "min", "log loss"),)  # type: ignore[misc, assignment]
        return task

    def _takes_targets(self, data: DataFacts, spec: TensorSpec) -> bool:
        return super()._takes_targets(data, spec) or _is_marks(data, spec)

    def defaults_for(self, data: DataConfig, inputs: InputFacts | None = None) -> TaskDefaults:
        """Return those of factors, of networks where there are numbers among the inputs, or of a ranking."""
        if not data.target:
            return ItemRanking.defaults
        return _OF_NETWORKS if inputs is not None and _has_numbers(inputs) else self.defaults

    def facts(self) -> TaskFacts:
        """Return what a record says of the task: its samples are pairs."""
        return replace(super().facts(), unit="pair", units_per_sample=1)

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over pairs `(B,)` of the squared error, or the cross-entropy."""
        if self._clicks:
            return F.binary_cross_entropy_with_logits(outputs.reshape(-1), targets.to(outputs), reduction="sum")
        return super().loss_sum(outputs, targets)

    def metrics(self, device: torch.device) -> Metrics:
        """Return an accumulator of RMSE and MAE, or of ROC AUC and log loss."""
        return _PairMetrics(self._units, self._clicks, device)

    def metric_arguments(self, classes: int) -> Mapping[str, Value]:
        """Return that clicks are one of two; ratings have no classes."""
        return {"task": "binary"} if self._clicks else {}

    def predictions(self, outputs: Tensor) -> list[Prediction]:
        """Return the rating of each pair, from outputs `(B, 1)` or `(B,)`, or the probability of a click."""
        if self._clicks:
            return [Prediction(share) for share in outputs.reshape(-1).sigmoid().tolist()]
        return super().predictions(outputs)

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
        """Return the factors of users and items, where inputs are the ids of both; of numbers too, a network."""
        if _has_numbers(data):
            return "dlrm"
        return "matrix_factorisation" if len(nest.leaves(data.inputs)) == 2 else "two_tower"


TASK = PairPrediction


def _is_marks(data: DataFacts, spec: TensorSpec) -> bool:
    """Whether targets from Python are whole numbers 0 and 1."""
    return not spec.shape and not spec.dtype.startswith("float") and data.classes == ("0", "1")


def _has_numbers(data: InputFacts) -> bool:
    return any(spec.dtype.startswith("float") for spec in nest.leaves(data.inputs))


class ItemRanking(PairPrediction):
    """Which of some items a user took: outputs `(B, I, 1)` or `(B, I)`, the higher the likelier.

    Targets `(B, I)` are 1 for the item that was taken, 0 for others, `NO_TARGET` for those that do not count. The loss
    is the cross-entropy of the item among those that count: in training one and some that were drawn by chance
    (sampled softmax), in an evaluation all.
    """

    primary = Metric("ndcg10", "max", f"NDCG@{TOP}")
    headlines = (Metric("hit_rate10", "max", f"hit rate@{TOP}", percent=True),)  # type: ignore[assignment]
    defaults: ClassVar[TaskDefaults] = TaskDefaults("adamw", 1e-2, 0.1, epochs=10, batch_size=1024)

    def __init__(self) -> None:
        super().__init__()
        self._candidates = 0

    def _fitted_to(self, data: DataFacts, settings: TaskSettings) -> Self:
        task = Task.fitted(self, data, settings)
        (users, items), (targets,) = data.inputs, nest.leaves(data.targets)
        if not users.shape == items.shape == targets.shape:
            raise UserError(f"data {data.name}: users, items and targets must be of one shape, of each item its user")
        task._candidates = targets.shape[0]
        by_chance = sum(1 / math.log2(1 + rank) for rank in range(1, TOP + 1)) / max(1, items.count - 1)
        task.primary = replace(self.primary, chance=by_chance)
        return task

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over samples `(B, I)` of -log of the taken item's share; 0 where none is known."""
        taken = targets == 1
        unknown = ~taken.any(1, keepdim=True)  # of one score each, so that its gradient is 0 and not undefined
        scores = outputs.reshape(targets.shape).masked_fill(targets == NO_TARGET, -torch.inf).masked_fill(unknown, 0)
        losses = scores.logsumexp(1) - scores.masked_fill(~taken, 0).sum(1)
        return losses.masked_fill(unknown[:, 0], 0).sum()

    def units(self, targets: Tensor) -> int:
        """Return the number of samples `(B, I)` whose taken item is known; in training it always is."""
        return int((targets == 1).any(1).sum())

    def learnt(self, targets: Tensor) -> Tensor:
        """Return targets `(B, I)`, which have no units."""
        return targets

    def given(self, outputs: Tensor) -> Tensor:
        """Return scores `(B, I, 1)` or `(B, I)`, which have no units."""
        return outputs

    def metrics(self, device: torch.device) -> Metrics:
        """Return an accumulator of NDCG and hit rate."""
        return _RankMetrics(device)

    def predictions(self, outputs: Tensor) -> list[Prediction]:
        """Return the score of each pair's item, the first of outputs `(B, I, 1)` or `(B, I)`: it ranks items."""
        return [Prediction(score) for score in outputs.reshape(len(outputs), -1)[:, 0].tolist()]

    def report_sections(self, result: EvaluationResult) -> Sequence[ReportSection]:
        """Return how many users find the item among the first n."""
        first, share = result.detail["first"], result.detail["share"]
        layout = {
            "xaxis": axis("first n items", type="log"), "yaxis": axis("share of users", rangemode="tozero"),
            "showlegend": False,
        }  # fmt: skip
        caption = "Users whose held-out item is among the n that the model ranks first, of all that they did not take."
        trace = line("users", first, share, "eval")
        return (ReportSection("Ranking", [Chart("ranks", "Hit rate", caption, "Hit rate.", [trace], layout, 360)]),)

    def auto_model(self, data: InputFacts) -> str:
        """Return the factors of users and items."""
        return "matrix_factorisation"

    def wrong_outputs(self, outputs: Any, samples: int) -> str:
        """Say what is wrong with a model's outputs."""
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        wanted = (samples, self._candidates)
        if shape in (wanted, (*wanted, 1)):
            return ""
        return f"must return a score for each id, {(*wanted, 1)} of ids {wanted}; it returned {shape}"


class _RankMetrics:
    """Counts at which rank the item stands that was taken; an item with the same score stands before it."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(len(_FIRST), dtype=torch.float64, device=device)
        self._gain, self._users = torch.zeros((), dtype=torch.float64, device=device), 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch: outputs (B, I, 1) or (B, I), targets (B, I); B may be 0."""
        ranks = ranks_of(outputs.reshape(targets.shape), targets)
        self._counts += torch.stack([(ranks <= first).sum() for first in _FIRST])
        self._gain += torch.where(ranks <= TOP, 1 / torch.log2(1 + ranks), 0).sum()
        self._users += len(ranks)

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        """Return the means over users of all ranks of `group`."""
        totals = torch.cat([self._counts, self._gain[None], self._gain.new_tensor([self._users])])
        if group is not None:
            dist.all_reduce(totals, group=group)
        *counts, gain, users = totals.tolist()
        shares = [count / users if users else None for count in counts]
        metrics = {"ndcg10": gain / users if users else None, "hit_rate10": shares[_FIRST.index(TOP)]}
        return EvaluationResult(metrics, {"first": list(_FIRST), "share": shares})


def ranks_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the rank of the item with target 1 among those whose target is not `NO_TARGET`, `(B,)` in float64.

    Scores and targets are of B users and the N items that each is asked of, `(B, N)`.

    Rank 1 has the highest score. Others with the same score, or one that is no number, stand before the item; where no
    target is 1, or the item's score is no number, the rank is infinite.
    """
    taken = targets == 1
    own = scores.masked_fill(~taken, 0).sum(1, keepdim=True)
    before = (~(scores < own) & ~taken & (targets != NO_TARGET)).sum(1)
    there = taken.any(1) & own[:, 0].isfinite()
    return torch.where(there, 1 + before.double(), torch.inf)


class _PairMetrics(RowMetrics):
    def __init__(self, units: Units, clicks: bool, device: torch.device) -> None:
        super().__init__(1, device)
        self._units, self._clicks = units, clicks

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch: outputs (B, 1) or (B,), targets (B,); B may be 0."""
        wide = outputs.reshape(-1, 1).float()
        self.add(wide if self._clicks else self._units.given(wide), targets.to(wide))

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        """Return the metrics, and the calibration as means of groups of pairs."""
        outputs, targets = self.all(group)
        given = outputs[:, 0].sigmoid() if self._clicks else outputs[:, 0]
        predicted, true = bins_by_prediction(given, targets[:, 0], _GROUPS)
        metrics = _click_scores(outputs[:, 0], targets[:, 0]) if self._clicks else _rating_scores(outputs, targets)
        return EvaluationResult(metrics, {"predicted": predicted, "true": true})


def _rating_scores(outputs: Tensor, targets: Tensor) -> dict[str, float | None]:
    return regression_scores(outputs, targets)[0]


def _click_scores(logits: Tensor, targets: Tensor) -> dict[str, float | None]:
    """Return ROC AUC, undefined without both kinds of pairs, and the mean cross-entropy in nats.

    Of logits `(n,)`, not of probabilities: these are exactly 1 above 17 in float32, where pairs would tie, and the
    logarithm of what is left would be that of nothing.
    """
    from torchmetrics.functional.classification import binary_auroc

    both = 0 < int(targets.sum()) < len(targets)
    finite = bool(logits.isfinite().all())
    order = logits.unique(return_inverse=True)[1].double() / max(1, len(logits))  # in 0 to 1, as binary_auroc wants
    return {
        "roc_auc": float(binary_auroc(order, targets.long())) if both and finite else None,
        "log_loss": float(F.binary_cross_entropy_with_logits(logits, targets)) if len(targets) and finite else None,
    }
