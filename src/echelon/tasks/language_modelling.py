"""The next token of a text, predicted from those before it: cross-entropy in nats, judged by loss and perplexity.

Shapes: B samples, T tokens, V size of the vocabulary.

Helps: Language models of characters or of pieces of words.
Needs: one text (.txt), or token ids with the next ones as targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.core.errors import UserError
from echelon.core.figure import ReportSection, ReportText
from echelon.core.task import Metric, TaskDefaults
from echelon.tasks import nest
from echelon.tasks.base import (
    ChosenSample,
    DataFacts,
    Encoding,
    Generated,
    Prediction,
    TaskSettings,
    TextDecoder,
    Writing,
)
from echelon.tasks.nest import TensorSpec
from echelon.tasks.token_loss import TokenTask, are_tokens, logits_of

_WRITTEN = 240  # tokens of the sample in a report
_TEMPERATURE = 0.8


class LanguageModelling(TokenTask):
    """Logits `(B, T, V)` and the next tokens `(B, T)`; targets of -100 are not counted.

    The loss is the sum over tokens of -log p(token | those before it). With label smoothing s the target is
    (1 - s) on the token and s / V on every one; perplexity is of the plain loss.
    """

    name = "language_modelling"
    primary = Metric("perplexity", "min")
    encoding = Encoding.NEXT_TOKEN
    default_model: ClassVar[str] = "small_gpt"
    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        "adamw", 2e-3, 0.1, epochs=10, batch_size=16, holdout=0.1, warmup_epochs=0.5
    )

    def __init__(self) -> None:
        self._context, self._any_length = 0, False
        self._decoder: TextDecoder | None = None

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: targets are no tokens, or classes are weighed.
        """
        if not are_tokens(data.targets):
            raise UserError(
                f"data {data.name}: targets are {nest.describe(data.targets)}, and --task language-modelling needs the "
                "next token of each: give one text (.txt), or int64 ids of shape (tokens,)"
            )
        task = super().fitted(data, settings)
        (task._context,), task._any_length = nest.leaves(data.targets)[0].shape, nest.leaves(data.targets)[0].ragged
        task.units_per_sample = 0 if task._any_length else task._context
        task._decoder = data.tokeniser if isinstance(data.inputs, TensorSpec) else None
        task.primary = replace(self.primary, chance=float(task._vocabulary) or None)
        return task

    def wrong_outputs(self, outputs: Any, samples: int) -> str:
        """Say what is wrong with a model's outputs."""
        logits = logits_of(outputs)
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        tokens = shape[1] if self._any_length and isinstance(shape, tuple) and len(shape) == 3 else self._context
        wanted, length = (samples, tokens, self._vocabulary), "T" if self._any_length else tokens
        if isinstance(shape, tuple) and shape[:2] == wanted[:2] and (not self._vocabulary or shape == wanted):
            return ""
        return (
            f"must return logits of shape (batch, {length}, {self._vocabulary}), one for each token; for a "
            f"batch of {samples} it returned {shape}"
        )

    def predict(self, model: Callable[[nest.Nest], Any], inputs: nest.Nest, writing: Writing) -> list[Prediction]:
        """Return how the model writes each prompt on; the prompt is left out.

        Args:
            inputs: `input_ids` and `attention_mask` of the prompts, `(B, T)`.

        Raises:
            UserError: the run has no tokeniser that makes text of tokens.
        """
        if self._decoder is None:
            raise UserError("this run knows token ids alone: no tokeniser makes text of what the model writes")
        prompts = [row[there.bool()].tolist() for row, there in zip(*inputs.values(), strict=True)]
        return [Prediction(self._decoder.decode(self._written(model, ids, writing))) for ids in prompts]

    def _written(self, model: Callable[[nest.Nest], Any], prompt: list[int], writing: Writing) -> list[int]:
        """Return the tokens that follow a prompt, each seeing at most a window of those before."""
        generator, ids = torch.Generator().manual_seed(writing.seed), prompt or [0]
        for _ in range(writing.most_tokens):
            recent = ids[-self._context :]
            padded = torch.zeros(1, self._context, dtype=torch.int64)
            padded[0, : len(recent)] = torch.tensor(recent)
            logits = logits_of(model(padded))[0, len(recent) - 1].double().cpu()
            if writing.temperature:
                chances = (logits / writing.temperature).softmax(-1).nan_to_num(1e-9)
                ids = [*ids, int(torch.multinomial(chances, 1, generator=generator))]
            else:
                ids = [*ids, int(logits.argmax())]
        return ids[len(prompt or [0]) :]

    def generated(
        self, model: Callable[[nest.Nest], Any], samples: Sequence[ChosenSample], group: dist.ProcessGroup | None
    ) -> Generated:
        """Return a text that the model writes, token by token, each drawn with temperature 0.8 and one seed."""
        if self._decoder is None:
            return Generated()
        ids = self._written(model, [], Writing(_WRITTEN, _TEMPERATURE))
        note = f"{_WRITTEN} tokens, each drawn from the model's distribution at temperature {_TEMPERATURE}."
        written = ReportText("", self._decoder.decode(ids))
        return Generated(section=ReportSection("Generated text", texts=[written], notes=[note]))


TASK = LanguageModelling
