"""The next token of a text from those before it: cross-entropy in nats, judged by loss and perplexity.

Shapes: B samples, T tokens, V size of the vocabulary.

Helps: Language models, of characters or of pieces of words.
Needs: one text (.txt), or token ids with the next ones as targets.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from echelon.core.errors import UserError
from echelon.core.figure import ReportSection, ReportText
from echelon.core.task import Metric, TaskDefaults
from echelon.tasks import nest
from echelon.tasks.base import (
    NO_TARGET,
    ChosenSample,
    DataFacts,
    Encoding,
    EvaluationResult,
    Generated,
    InputFacts,
    Metrics,
    Task,
    TaskSettings,
    TextDecoder,
)
from echelon.tasks.nest import TensorSpec

_WRITTEN = 240  # tokens of the sample in a report
_TEMPERATURE = 0.8
_MOST_NATS = 700.0  # whose exponential is a number


class LanguageModelling(Task):
    """Logits `(B, T, V)` and the next tokens `(B, T)`; targets of -100 count nothing.

    The loss is the sum over tokens of -log p(token | those before it). With label smoothing s the target is
    (1 - s) on the token and s / V on every one; perplexity is of the plain loss.
    """

    name = "language_modelling"
    unit = "token"
    primary = Metric("perplexity", "min")
    encoding = Encoding.NEXT_TOKEN
    defaults: ClassVar[TaskDefaults] = TaskDefaults("adamw", 2e-3, 0.1, epochs=10, batch_size=16, holdout=0.1)

    def __init__(self) -> None:
        self._vocabulary = self._context = 0
        self._smoothing = 0.0
        self._decoder: TextDecoder | None = None

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: targets are no tokens, or classes are weighed.
        """
        specs = nest.leaves(data.targets)
        if len(specs) != 1 or len(specs[0].shape) != 1 or specs[0].dtype != "int64":
            raise UserError(
                f"data {data.name}: targets are {nest.describe(data.targets)}, and --task language-modelling needs the "
                "next token of each: give one text (.txt), or int64 ids of shape (tokens,)"
            )
        if settings.class_weights not in ("none", ""):
            raise UserError("--class-weights are for classes; the task is language-modelling")
        task = copy.copy(self)
        task._vocabulary, (task._context, *_) = specs[0].count, specs[0].shape
        task.units_per_sample = task._context
        task._smoothing, task._decoder = (
            settings.label_smoothing,
            data.tokeniser if isinstance(data.inputs, TensorSpec) else None,
        )
        task.primary = replace(self.primary, chance=float(task._vocabulary) or None)
        return task

    @property
    def outputs(self) -> int:
        """One logit for each token of the vocabulary; 0: any."""
        return self._vocabulary

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the sum of the losses of logits `(B, T, V)` and the next tokens `(B, T)`."""
        logits = logits_of(outputs)
        return F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=NO_TARGET,
            label_smoothing=self._smoothing,
        )  # fmt: skip

    def units(self, targets: Tensor) -> int:
        """Return the number of tokens."""
        return int((targets != NO_TARGET).sum())

    def metrics(self, device: torch.device) -> Metrics:
        """Return an accumulator of perplexity."""
        return TokenMetrics(device)

    def auto_model(self, data: InputFacts) -> str:
        """Return the small GPT."""
        return "small_gpt"

    def wrong_outputs(self, outputs: Any, samples: int) -> str:
        """Say what is wrong with a model's outputs."""
        logits = logits_of(outputs)
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        wanted = (samples, self._context, self._vocabulary)
        if isinstance(shape, tuple) and shape[:2] == wanted[:2] and (not self._vocabulary or shape == wanted):
            return ""
        return (
            f"must return logits of shape (batch, {self._context}, {self._vocabulary}), one for each token; for a "
            + (f"batch of {samples} it returned {shape}")
        )

    def generated(
        self, model: Callable[[nest.Nest], Any], samples: Sequence[ChosenSample], group: dist.ProcessGroup | None
    ) -> Generated:
        """Return a text that the model writes, token by token, each drawn with temperature 0.8 and one seed."""
        if self._decoder is None:
            return Generated()
        generator, ids = torch.Generator().manual_seed(0), [0]
        for _ in range(_WRITTEN):
            recent = ids[-self._context :]
            padded = torch.zeros(1, self._context, dtype=torch.int64)
            padded[0, : len(recent)] = torch.tensor(recent)
            logits = logits_of(model(padded))[0, len(recent) - 1].double().cpu()
            chances = (logits / _TEMPERATURE).softmax(-1).nan_to_num(1e-9)
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
        note = f"{_WRITTEN} tokens, each drawn from the model's distribution at temperature {_TEMPERATURE}."
        written = ReportText("", self._decoder.decode(ids[1:]))
        return Generated(section=ReportSection("Generated text", texts=[written], notes=[note]))


TASK = LanguageModelling


class TokenMetrics:
    """Adds up the negative log-likelihood of tokens, in float64."""

    def __init__(self, device: torch.device) -> None:
        """Begin with no tokens."""
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Count a batch: logits `(B, T, V)` and the next tokens `(B, T)`."""
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
