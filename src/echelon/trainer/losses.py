"""Cross-entropy, summed over samples, with label smoothing and class weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.config.schema import OptimizerConfig
from echelon.core.errors import UserError


def build_loss(config: OptimizerConfig, class_counts: Sequence[int]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss: logits (B, C) and targets (B,) to the scalar sum over the B samples of w_(t_i) * l_i.

    l_i is the sample's cross-entropy with its target smoothed: (1 - s) on the class, s / C on every class. The caller
    divides by the global batch size, so that the gradient is the same however the batch is cut over workers:

        L = sum_i w_(t_i) l_i / (global batch size)

    The weights are thus absolute: all twos double the gradient. `balanced` gives class c the weight
    n / (classes * count_c) (King and Zeng 2001), so that every class counts alike and the mean weight of a training
    sample is 1; a class without training samples has no weight, and does not count as a class.

    Args:
        class_counts: training samples of each class.

    Raises:
        UserError: the weights are of another number than the classes, not numbers, negative, or all zero.
    """
    weights = _class_weights(config.class_weights, class_counts)
    return CrossEntropy(config.label_smoothing, None if weights is None else torch.tensor(weights))


class CrossEntropy:
    """sum_i w_(t_i) l_i, computed in float32 or wider; the weights follow the logits' device."""

    def __init__(self, label_smoothing: float, weights: Tensor | None) -> None:
        self.label_smoothing = label_smoothing
        self.weights = weights

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the scalar sum for logits (B, C) and class numbers (B,); 0 for B = 0."""
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if self.weights is None:
            return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self.label_smoothing)
        if self.weights.device != logits.device or self.weights.dtype != logits.dtype:
            self.weights = self.weights.to(logits)
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)
        return (self.weights[targets] * losses).sum()


def _class_weights(text: str, counts: Sequence[int]) -> list[float] | None:
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
    return weights
