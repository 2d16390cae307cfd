"""Metrics of classification over ranks: each sample counted once, whatever the world size and however uneven the parts.

The numbers are torchmetrics'. What is ours: states are added over ranks by one all-reduce of integers (torchmetrics
would gather every state of every metric by itself), a class without samples is left out of the ROC mean (torchmetrics
counts its area as 0), and curves are thinned for drawing. The tests hold every number against scikit-learn.

Shapes: B samples of a batch, n samples of the evaluation set, C classes, T thresholds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.tasks.base import EvaluationResult
from echelon.tasks.gathering import RowMessages, RowStream, gather_rows, meeting_device

if TYPE_CHECKING:
    from torchmetrics import Metric
    from torchmetrics.classification import MulticlassROC

EXACT_ROC_LIMIT = 20_000_000
THRESHOLDS = 200
CURVE_POINTS = 200
CURVE_POINTS_IN_ALL = 20_000
TOP_K = 5


class ClassificationMetrics:
    """Collects logits and targets of this rank's part of the evaluation set, then computes metrics over all ranks.

    Args:
        classes: names of the C classes.
        device: where the logits are.
        exact_roc_limit: with at most this many scores (n * C) in all, ROC curves are exact; beyond, they are
            computed at 200 thresholds from counts, and no scores are kept.
    """

    def __init__(self, classes: Sequence[str], device: torch.device, exact_roc_limit: int = EXACT_ROC_LIMIT) -> None:
        self._names, self._classes, self._device, self._limit = list(classes), len(classes), device, exact_roc_limit
        self._counters = _counters(self._classes, device)
        # Samples, and samples with an output that is not finite.
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._logits: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._kept = 0
        self._binned: MulticlassROC | None = None
        self._stream: RowStream | None = None

    def stream(self, messages: RowMessages, samples: int) -> None:
        """Let logits travel while more of them come, where curves of so many samples of all ranks are exact."""
        if samples * self._classes <= self._limit:
            self._stream = RowStream(self._classes + 1, messages)

    def flush(self) -> None:
        """See `RowStream`."""
        if self._stream is not None:
            self._stream.flush()

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Count a batch: logits (B, C), class numbers (B,). B may be 0.

        Raises:
            ValueError: the shapes do not belong together.
        """
        if logits.ndim != 2 or logits.shape != (len(targets), self._classes):
            raise ValueError(
                f"logits {tuple(logits.shape)} and {len(targets)} targets do not fit {self._classes} classes"
            )
        if not len(targets):
            return  # torchmetrics cannot reshape an empty batch
        logits, targets = logits.detach().float(), targets.detach().long()
        broken = (~logits.isfinite().all(1)).sum()
        self._counts += torch.stack([torch.full_like(broken, len(targets)), broken])
        for counter in self._counters.values():
            counter.update(logits, targets)
        self._keep(logits, targets)

    def _keep(self, logits: Tensor, targets: Tensor) -> None:
        if self._stream is not None:
            self._stream.add(torch.cat([logits, targets[:, None].float()], 1))
            return
        if self._binned is not None:
            self._binned.update(_probabilities(logits).float(), targets)
            return
        self._logits.append(logits)
        self._targets.append(targets)
        self._kept += logits.numel()
        if self._kept > self._limit:
            self._bin()

    def _bin(self) -> MulticlassROC:
        """From here on, keep counts by threshold in place of scores."""
        if self._binned is None:
            self._binned = _binned_roc(self._classes, self._device)
            for logits, targets in zip(self._logits, self._targets, strict=True):
                self._binned.update(_probabilities(logits).float(), targets)
            self._logits, self._targets = [], []
        return self._binned

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        """Return the metrics over all ranks of `group` (None: this process alone), the same on every rank.

        All ranks must call it, also one that had no samples. Only tensors travel.

        Returns:
            metrics: top1, top5, macro_precision, macro_recall, macro_f1, roc_auc, each in 0..1; and the detail (what is
            undefined is None):
            per_class: precision, recall, f1, roc_auc, support, each a list over classes;
            confusion: C lists of C counts, row the true class, column the predicted one;
            roc: "macro" and the number of each class, to {"fpr": [...], "tpr": [...]} of at most 200 points;
            notes: sentences on how numbers were made where that matters;
            classes: their names.

            Macro means follow scikit-learn's defaults: a class that is neither present nor predicted is left out, one
            that is predicted but not present counts as 0. roc_auc is the mean of one-against-rest areas over the
            classes that have samples, and are not all of them.
        """
        own = _states(self._counters)
        tensors = [tensor for each in own.values() for tensor in each.values()]
        counts, *totals = summed_over_ranks([self._counts, *tensors], group)
        summed = iter(totals)
        state = {name: {key: next(summed) for key in each} for name, each in own.items()}
        samples, broken = counts.tolist()
        confusion = state["confusion"]["confmat"]
        notes = self._notes(samples, broken, confusion)
        metrics, per_class = _from_states(self._classes, state) if samples else _undefined(self._classes)
        curves: list[np.ndarray | None] = [None] * self._classes
        if samples and not broken:
            curves = self._curves(samples, group)
        areas = [None if curve is None else float(np.trapezoid(curve[1], curve[0])) for curve in curves]
        detail = {
            "per_class": {**per_class, "roc_auc": areas, "support": confusion.sum(1).tolist()},
            "confusion": confusion.tolist(),
            "roc": _drawn(curves),
            "notes": notes,
            "classes": self._names,
        }
        mean_area = _mean([area for area in areas if area is not None])
        return EvaluationResult({**metrics, "roc_auc": mean_area}, detail)

    def _notes(self, samples: int, broken: int, confusion: Tensor) -> list[str]:
        notes = [f"top5 counts the {self._classes} best of {self._classes} classes"] if self._classes < TOP_K else []
        if samples * self._classes > self._limit:
            notes.append(f"ROC at {THRESHOLDS} thresholds: {samples} samples x {self._classes} classes is many")
        if broken:
            notes.append(f"{broken} samples had an output that is not finite: no ROC")
        absent = int((confusion.sum(1) == 0).sum())
        if absent:
            notes.append(
                f"{absent} of {self._classes} classes have no samples here: macro means leave out those that were not "
                "predicted either, and roc_auc all of them"
            )
        return notes

    def _curves(self, samples: int, group: dist.ProcessGroup | None) -> list[np.ndarray | None]:
        """Return for each class (2, points), false and true positive rates; None without both kinds of samples."""
        if samples * self._classes > self._limit:
            (confmat,) = summed_over_ranks([self._bin().confmat], group)
            roc = _binned_roc(self._classes, torch.device("cpu"))
            fpr, tpr, _ = computed(roc, {"confmat": confmat})
            support = confmat[0, :, 1].sum(-1)
        else:
            logits, targets = self._of_all(group)
            fpr, tpr = _exact_roc(_probabilities(logits), targets)
            support = torch.bincount(targets, minlength=self._classes)
        both = ((support > 0) & (support < samples)).tolist()
        return [
            torch.stack([x, y]).double().numpy() if drawn else None for x, y, drawn in zip(fpr, tpr, both, strict=True)
        ]

    def _of_all(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Return all ranks' logits `(n, C)` and class numbers `(n,)`."""
        if self._stream is not None:
            rows = self._stream.all()
            return rows[:, :-1].contiguous(), rows[:, -1].long()
        logits = torch.cat([torch.zeros(0, self._classes, device=self._device), *self._logits])
        targets = torch.cat([torch.zeros(0, dtype=torch.int64, device=self._device), *self._targets])
        targets = gather_rows(targets.int(), group).long()
        return gather_rows(logits, group), targets


def _probabilities(logits: Tensor) -> Tensor:
    """Return probabilities `(n, C)`: torchmetrics takes logits that all happen to lie in 0..1 for such.

    Wide ones: in float32 all that is close to 1 would tie.
    """
    return logits.double().softmax(1)


def _options(classes: int) -> dict[str, Any]:
    """Inputs are checked in `update`, and ranks add their states themselves."""
    return {"num_classes": classes, "validate_args": False, "sync_on_compute": False}


def _counters(classes: int, device: torch.device) -> dict[str, Metric]:
    """Return the metrics that count; their states are integers that add over batches and ranks."""
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassStatScores

    options = _options(classes)
    counters: dict[str, Metric] = {
        "top1": MulticlassAccuracy(average="micro", **options),
        "top5": MulticlassAccuracy(average="micro", top_k=min(TOP_K, classes), **options),
        "by_class": MulticlassStatScores(average=None, **options),
        "confusion": MulticlassConfusionMatrix(**options),
    }
    return {name: counter.to(device) for name, counter in counters.items()}


def _states(counters: dict[str, Metric]) -> dict[str, dict[str, Tensor]]:
    return {name: cast(dict[str, Tensor], counter.metric_state) for name, counter in counters.items()}


def _from_states(
    classes: int, state: dict[str, dict[str, Tensor]]
) -> tuple[dict[str, float | None], dict[str, list[float | None]]]:
    """Return the metrics, and precision, recall and F1 by class, from states summed over ranks."""
    from torchmetrics.classification import MulticlassF1Score, MulticlassPrecision, MulticlassRecall

    options, counters, by_class = _options(classes), _counters(classes, torch.device("cpu")), state["by_class"]
    metrics: dict[str, float | None] = {name: float(computed(counters[name], state[name])) for name in ("top1", "top5")}
    predicted, present = by_class["tp"] + by_class["fp"], by_class["tp"] + by_class["fn"]
    per_class = {}
    for name, metric, defined_by in (
        ("precision", MulticlassPrecision, predicted),
        ("recall", MulticlassRecall, present),
        ("f1", MulticlassF1Score, predicted + present),
    ):
        values = computed(metric(average=None, **options), by_class).reshape(classes).tolist()
        per_class[name] = [v if defined else None for v, defined in zip(values, defined_by.tolist(), strict=True)]
        metrics[f"macro_{name}"] = float(computed(metric(average="macro", **options), by_class))
    return metrics, per_class


def _undefined(classes: int) -> tuple[dict[str, float | None], dict[str, list[float | None]]]:
    names = ("top1", "top5", "macro_precision", "macro_recall", "macro_f1")
    return dict.fromkeys(names), {name: [None] * classes for name in ("precision", "recall", "f1")}


def computed(metric: Metric, state: dict[str, Tensor]) -> Any:
    """Return what a fresh metric makes of a state of its shapes; in float64, as torchmetrics divides in its type."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was called before the ``update`` method", category=UserWarning)
        metric.merge_state({name: value.double() for name, value in state.items()})
        return metric.compute()


def _binned_roc(classes: int, device: torch.device) -> MulticlassROC:
    """Return the ROC at T thresholds; its state is `confmat` (T, C, 2, 2), counts that add.

    The thresholds are evenly spaced in log-odds, because with many classes nearly all probabilities are close to 0.
    The first is passed by all samples and the last by none, so that curves go from (0, 0) to (1, 1).
    """
    from torchmetrics.classification import MulticlassROC

    inner = torch.linspace(-16, 16, THRESHOLDS - 2).sigmoid()
    thresholds = torch.cat([torch.tensor([0.0]), inner, torch.tensor([2.0])])
    return MulticlassROC(thresholds=thresholds, **_options(classes)).to(device)


def _exact_roc(scores: Tensor, targets: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    from torchmetrics.functional.classification import multiclass_roc

    with warnings.catch_warnings():
        # Such classes are named in the notes and get no curve.
        warnings.filterwarnings("ignore", message="No (positive|negative) samples in targets", category=UserWarning)
        fpr, tpr, _ = multiclass_roc(scores, targets, scores.shape[1], validate_args=False)
    return list(fpr), list(tpr)


def summed_over_ranks(tensors: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the sums over ranks of integer tensors of any shape, on the CPU, by one all-reduce."""
    total = torch.cat([tensor.flatten() for tensor in tensors])
    if group is not None:
        total = total.to(meeting_device(total, group))
        dist.all_reduce(total, group=group)
    parts = total.cpu().split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _drawn(curves: list[np.ndarray | None]) -> dict[str, dict[str, list[float]]]:
    """Return the macro curve and each class's with few enough points to draw and to store."""
    present = {str(c): curve for c, curve in enumerate(curves) if curve is not None}
    if not present:
        return {}
    points = max(20, min(CURVE_POINTS, CURVE_POINTS_IN_ALL // len(present)))
    grid = np.linspace(0, 1, CURVE_POINTS)
    mean = np.mean([np.interp(grid, *curve) for curve in present.values()], axis=0)
    mean[0], mean[-1] = 0.0, 1.0
    drawn = {"macro": np.stack([grid, mean])} | {name: _thin(curve, points) for name, curve in present.items()}
    return {
        name: {"fpr": curve[0].round(6).tolist(), "tpr": curve[1].round(6).tolist()} for name, curve in drawn.items()
    }


def _thin(curve: np.ndarray, points: int) -> np.ndarray:
    """Keep at most `points` of a curve, evenly spaced along its length, and both ends."""
    if curve.shape[1] <= points:
        return curve
    length = np.concatenate([[0.0], np.diff(curve).sum(0).cumsum()])
    kept = np.searchsorted(length, np.linspace(0, length[-1], points)).clip(max=curve.shape[1] - 1)
    return curve[:, np.unique(kept)]


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
