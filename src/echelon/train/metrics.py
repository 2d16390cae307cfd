"""Classification metrics over ranks: each sample counted once, whatever the world size and however uneven the parts.

Written on torch alone: importing torchmetrics costs several seconds, in every worker of every run. The tests hold every
number against scikit-learn.

Shapes: B samples of a batch, n samples of the evaluation set, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

EXACT_ROC_LIMIT = 20_000_000
THRESHOLDS = 200
CURVE_POINTS = 200
CURVE_POINTS_IN_ALL = 20_000
TOP_K = 5

Reduce = Callable[[Tensor], Tensor]


class Evaluation:
    """Collects logits and targets of this rank's part of the evaluation set, then computes metrics over all ranks.

    Args:
        classes: number of classes C.
        device: where the logits are.
        exact_roc_limit: with at most this many scores (n * C) in all, ROC curves are exact; beyond, they are
            computed at 200 thresholds from counts, and no scores are kept.
    """

    def __init__(self, classes: int, device: torch.device, exact_roc_limit: int = EXACT_ROC_LIMIT) -> None:
        self._classes, self._device, self._limit = classes, device, exact_roc_limit
        self._confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
        # Top-k hits, samples, samples with an output that is not finite.
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._logits: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._kept = 0
        # Scores of a class by threshold interval: of its own samples, and of all samples.
        self._histogram: Tensor | None = None

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Count a batch: logits (B, C), class numbers (B,). B may be 0.

        Raises:
            ValueError: the shapes do not belong together.
        """
        if logits.ndim != 2 or logits.shape != (len(targets), self._classes):
            raise ValueError(
                f"logits {tuple(logits.shape)} and {len(targets)} targets do not fit {self._classes} classes"
            )
        logits, targets = logits.detach().float(), targets.detach().long()
        flat = targets * self._classes + logits.argmax(1)
        self._confusion += torch.bincount(flat, minlength=self._classes**2).view_as(self._confusion)
        hits = (logits.topk(min(TOP_K, self._classes), dim=1).indices == targets[:, None]).sum()
        broken = (~logits.isfinite().all(1)).sum()
        self._counts += torch.stack([hits, torch.full_like(hits, len(targets)), broken])
        self._keep(logits, targets)

    def _keep(self, logits: Tensor, targets: Tensor) -> None:
        if self._histogram is not None:
            self._histogram += _histogram(logits, targets)
            return
        self._logits.append(logits)
        self._targets.append(targets)
        self._kept += logits.numel()
        if self._kept > self._limit:
            self._bin()

    def _bin(self) -> None:
        """From here on, keep counts by threshold in place of scores."""
        if self._histogram is None:
            self._histogram = torch.zeros(2, self._classes, THRESHOLDS + 1, dtype=torch.int64, device=self._device)
            for logits, targets in zip(self._logits, self._targets, strict=True):
                self._histogram += _histogram(logits, targets)
            self._logits, self._targets = [], []

    def compute(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """Return the metrics over all ranks of `group` (None: this process alone), the same on every rank.

        All ranks must call it, also one that had no samples. Only tensors travel.

        Returns:
            Plain values for JSON (what is undefined is None):
            metrics: top1, top5, macro_precision, macro_recall, macro_f1, roc_auc, each in 0..1;
            per_class: precision, recall, f1, roc_auc, support, each a list over classes;
            confusion: C lists of C counts, row the true class, column the predicted one;
            roc: "macro" and the number of each class, to {"fpr": [...], "tpr": [...]} of at most 200 points;
            notes: sentences on how numbers were made where that matters.

            Macro means follow scikit-learn's defaults: a class that is neither present nor predicted is left out, one
            that is predicted but not present counts as 0. roc_auc is the mean of one-against-rest areas over the
            classes that have samples, and are not all of them.
        """
        confusion = _all_reduce(self._confusion, group).cpu()
        hits, samples, broken = _all_reduce(self._counts, group).tolist()
        notes = [f"top5 counts the {self._classes} best of {self._classes} classes"] if self._classes < TOP_K else []
        exact = samples * self._classes <= self._limit
        if not exact:
            notes.append(f"ROC at {THRESHOLDS} thresholds: {samples} samples x {self._classes} classes is many")
        curves: list[Tensor | None] = [None] * self._classes
        if broken:
            notes.append(f"{broken} samples had an output that is not finite: no ROC")
        elif exact:
            curves = _exact_curves(*self._gather(group))
        else:
            self._bin()
            assert self._histogram is not None
            curves = _binned_curves(_all_reduce(self._histogram, group).cpu())
        per_class, macro = _from_confusion(confusion, notes)
        areas = [None if curve is None else _area(curve) for curve in curves]
        metrics = {
            "top1": _ratio(int(confusion.diagonal().sum()), samples),
            "top5": _ratio(hits, samples),
            **macro,
            "roc_auc": _mean(areas),
        }
        return {
            "metrics": metrics,
            "per_class": {**per_class, "roc_auc": areas, "support": confusion.sum(1).tolist()},
            "confusion": confusion.tolist(),
            "roc": _drawn(curves),
            "notes": notes,
        }

    def _gather(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Return all ranks' logits (n, C) and targets (n,), on the CPU."""
        logits = torch.cat(self._logits) if self._logits else torch.zeros(0, self._classes, device=self._device)
        targets = torch.cat(self._targets) if self._targets else torch.zeros(0, dtype=torch.int64, device=self._device)
        return _all_gather(logits, group).cpu(), _all_gather(targets, group).cpu()


def _meeting_device(tensor: Tensor, group: dist.ProcessGroup) -> torch.device:
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else tensor.device


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over ranks, as a new tensor."""
    total = tensor.clone()
    if group is not None:
        total = total.to(_meeting_device(tensor, group))
        dist.all_reduce(total, group=group)
    return total


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the ranks' tensors one after another along dim 0, where they may differ in length."""
    if group is None:
        return tensor
    device, ranks = _meeting_device(tensor, group), dist.get_world_size(group)
    length = torch.tensor([len(tensor)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(ranks)]
    dist.all_gather(lengths, length, group=group)
    longest = max(int(each) for each in lengths)
    padded = torch.zeros((longest, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(count)] for part, count in zip(parts, lengths, strict=True)])


def _thresholds(device: torch.device) -> Tensor:
    """Probabilities evenly spaced in log-odds: with many classes nearly all probabilities are close to 0."""
    return torch.linspace(-16, 16, THRESHOLDS, device=device).sigmoid()


def _histogram(logits: Tensor, targets: Tensor) -> Tensor:
    """Count probabilities by class and interval: (2, C, T + 1), [0] of the class's own samples, [1] of all samples."""
    n, classes = logits.shape
    interval = torch.bucketize(logits.softmax(1), _thresholds(logits.device), right=True)
    cell = interval + torch.arange(classes, device=logits.device) * (THRESHOLDS + 1)
    size = classes * (THRESHOLDS + 1)
    own = torch.bincount(cell[torch.arange(n, device=logits.device), targets], minlength=size)
    return torch.stack([own, torch.bincount(cell.flatten(), minlength=size)]).view(2, classes, THRESHOLDS + 1)


def _binned_curves(histogram: Tensor) -> list[Tensor | None]:
    own, everyone = histogram.flip(-1).cumsum(-1).unbind(0)
    return [_curve(true, count - true) for true, count in zip(own, everyone, strict=True)]


def _exact_curves(logits: Tensor, targets: Tensor) -> list[Tensor | None]:
    wide = logits.double()
    normaliser = wide.logsumexp(1)
    curves = []
    for c in range(logits.shape[1]):
        score, order = (wide[:, c] - normaliser).sort(descending=True)
        true = (targets[order] == c).cumsum(0)
        # Samples of one score pass a threshold together.
        last = torch.ones(len(score), dtype=torch.bool)
        last[:-1] = score[1:] != score[:-1]
        below = torch.arange(1, len(score) + 1)
        curves.append(_curve(true[last], (below - true)[last]))
    return curves


def _curve(true: Tensor, false: Tensor) -> Tensor | None:
    """Return (2, points), false and true positive rates from (0, 0) to (1, 1); None without both kinds of samples."""
    if not len(true) or not true[-1] or not false[-1]:
        return None
    rates = torch.stack([false.double() / false[-1], true.double() / true[-1]])
    return torch.cat([torch.zeros(2, 1, dtype=torch.float64), rates], dim=1)


def _area(curve: Tensor) -> float:
    return float(torch.trapezoid(curve[1], curve[0]))


def _from_confusion(
    confusion: Tensor, notes: list[str]
) -> tuple[dict[str, list[float | None]], dict[str, float | None]]:
    """Return precision, recall and F1 by class, and their macro means."""
    right, support, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    counted = (support + predicted > 0).tolist()
    absent = int((support == 0).sum())
    if absent:
        notes.append(
            f"{absent} of {len(support)} classes have no samples here: macro means leave out those that were not "
            "predicted either, and roc_auc all of them"
        )
    columns = {
        "precision": [_ratio(r, p) for r, p in zip(right.tolist(), predicted.tolist(), strict=True)],
        "recall": [_ratio(r, s) for r, s in zip(right.tolist(), support.tolist(), strict=True)],
        "f1": [_ratio(2 * r, t) for r, t in zip(right.tolist(), (support + predicted).tolist(), strict=True)],
    }
    macro = {
        f"macro_{name}": _mean([value or 0.0 for value, used in zip(values, counted, strict=True) if used])
        for name, values in columns.items()
    }
    return columns, macro


def _drawn(curves: list[Tensor | None]) -> dict[str, dict[str, list[float]]]:
    """Return the macro curve and each class's with few enough points to draw and to store."""
    present = {str(c): curve for c, curve in enumerate(curves) if curve is not None}
    if not present:
        return {}
    points = max(20, min(CURVE_POINTS, CURVE_POINTS_IN_ALL // len(present)))
    grid = torch.linspace(0, 1, CURVE_POINTS, dtype=torch.float64)
    mean = torch.stack([_interpolate(grid, curve) for curve in present.values()]).mean(0)
    mean[0], mean[-1] = 0.0, 1.0
    drawn = {"macro": torch.stack([grid, mean])} | {name: _thin(curve, points) for name, curve in present.items()}
    return {name: {"fpr": _rounded(curve[0]), "tpr": _rounded(curve[1])} for name, curve in drawn.items()}


def _interpolate(grid: Tensor, curve: Tensor) -> Tensor:
    """Return the curve's true positive rate at the grid's false positive rates; the upper one where it is vertical."""
    fpr, tpr = curve.contiguous()
    right = torch.searchsorted(fpr, grid, right=True).clamp(1, len(fpr) - 1)
    left = right - 1
    share = ((grid - fpr[left]) / (fpr[right] - fpr[left]).clamp(min=1e-300)).clamp(0, 1)
    return tpr[left] + share * (tpr[right] - tpr[left])


def _thin(curve: Tensor, points: int) -> Tensor:
    """Keep at most `points` of a curve, evenly spaced along its length, and both ends."""
    if curve.shape[1] <= points:
        return curve
    length = torch.cat([torch.zeros(1, dtype=torch.float64), curve.diff(dim=1).sum(0).cumsum(0)])
    wanted = torch.linspace(0, float(length[-1]), points, dtype=torch.float64)
    kept = torch.searchsorted(length, wanted).clamp(max=curve.shape[1] - 1).unique()
    return curve[:, kept]


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: list[float | None] | list[float]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
