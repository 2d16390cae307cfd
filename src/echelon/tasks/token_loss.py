"""What tasks share whose model gives a token's probability: the cross-entropy of tokens in nats, and perplexity.

Shapes: B samples, T tokens, V size of the vocabulary.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from echelon.core.errors import UserError
from echelon.tasks import nest
from echelon.tasks.base import NO_TARGET, DataFacts, EvaluationResult, Metrics, Task, TaskSettings

_MOST_NATS = 700.0  # whose exponential is a number


class TokenTask(Task):
    """Logits `(B, T, V)` and tokens `(B, T)`; targets of -100 count nothing.

    The loss is the sum over tokens of -log p(token). With label smoothing s the target is (1 - s) on the token and
    s / V on every one; perplexity is of the plain loss.
    """

    unit = "token"
    _vocabulary = 0
    _smoothing = 0.0

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for data whose targets are token ids `(T,)`.

        Raises:
            UserError: classes are weighed.
        """
        if settings.class_weights not in ("none", ""):
            raise UserError(f"--class-weights are for classes; the task is {self.name.replace('_', '-')}")
        task = copy.copy(self)
        task._vocabulary, task._smoothing = nest.leaves(data.targets)[0].count, settings.label_smoothing
        return task

    def for_evaluation(self) -> Self:
        """Return the task without label smoothing."""
        task = copy.copy(self)
        task._smoothing = 0.0
        return task

    @property
    def outputs(self) -> int:
        """One logit for each token of the vocabulary; 0: any."""
        return self._vocabulary

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the sum of the losses of logits `(B, T, V)` and the tokens `(B, T)`."""
        return F.cross_entropy(
            logits_of(outputs).flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=NO_TARGET,
            label_smoothing=self._smoothing,
        )  # fmt: skip

    def units(self, targets: Tensor) -> int:
        """Return the number of tokens in `(B, T)`, padding left out."""
        return int((targets != NO_TARGET).sum())

    def metrics(self, device: torch.device) -> Metrics:
        """Return an accumulator of perplexity."""
        return TokenMetrics(device)


def are_tokens(targets: nest.Nest) -> bool:
    """Whether the specs of targets are of token ids `(T,)`."""
    specs = nest.leaves(targets)
    return len(specs) == 1 and len(specs[0].shape) == 1 and bool(specs[0].dtype == "int64")


class TokenMetrics:
    """Adds up the negative log-likelihood of tokens, in float64."""

    def __init__(self, device: torch.device) -> None:
        """Begin with no tokens."""
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Count a batch: logits `(B, T, V)` and the tokens `(B, T)`."""
        logits = logits_of(outputs).detach().flatten(0, -2)
        total = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=NO_TARGET)
        self._totals += torch.stack([total.double(), (targets != NO_TARGET).sum().double()])

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        """Return the perplexity and the nats per token, over the tokens of all ranks of `group`; all call it."""
        totals = self._totals.clone()
        if group is not None:
            dist.all_reduce(totals, group=group)
        total, tokens = totals.tolist()
        if not tokens or not math.isfinite(total):
            return EvaluationResult({"perplexity": None, "loss": None})
        nats = total / tokens
        return EvaluationResult({"perplexity": math.exp(min(nats, _MOST_NATS)), "loss": nats})


def logits_of(outputs: Any) -> Any:
    """Return the logits of a model that gives more beside them, as those of transformers do."""
    return getattr(outputs, "logits", outputs)
