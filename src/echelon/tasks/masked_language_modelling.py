"""Masked tokens of a text, predicted from all others: cross-entropy in nats, judged by loss and perplexity of those.

Shapes: B samples, T tokens, V size of the vocabulary.

Helps: Text encoders, to be fine-tuned later with few labels.
Needs: one text (.txt).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.core.errors import UserError
from echelon.core.figure import ReportSection, ReportText
from echelon.core.task import TaskDefaults
from echelon.tasks import nest
from echelon.tasks.base import (
    NO_TARGET,
    ChosenSample,
    DataFacts,
    Encoding,
    Generated,
    Prediction,
    TaskSettings,
    Writing,
)
from echelon.tasks.gathering import gather_lines
from echelon.tasks.language_modelling import LanguageModelling
from echelon.tasks.nest import Nest
from echelon.tasks.token_loss import logits_of

_SHOWN_TOKENS = 64  # of a window, around its first predicted tokens
_BEFORE = 16  # of these, before the first predicted one


class MaskedLanguageModelling(LanguageModelling):
    """Logits `(B, T, V)` and the tokens `(B, T)`, -100 where nothing is to be predicted.

    The loss is the sum, over the tokens to be predicted, of -log p(token | the visible tokens of its window).
    """

    name = "masked_language_modelling"
    unit = "masked token"
    speed_unit: ClassVar[str] = "token"  # all of a window are read, and as many in each: a few of them are drawn
    encoding = Encoding.MASKED_TOKENS
    default_model: ClassVar[str] = "small_bert"
    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        "adamw", 2e-3, 0.1, epochs=20, batch_size=16, holdout=0.1, warmup_epochs=0.5
    )
    generation_samples = 8

    def __init__(self) -> None:
        super().__init__()
        self._inputs: Nest = None
        self._is_shown = False

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: targets are no tokens, or classes are weighed.
        """
        task = super().fitted(data, settings)
        task._inputs, task._is_shown = data.inputs, settings.worst_samples > 0
        return task

    def predict(self, model: Callable[[Nest], Any], inputs: Nest, writing: Writing) -> list[Prediction]:
        """Return each text with its masks filled, each by its likeliest token.

        Args:
            inputs: `input_ids` and `attention_mask` of the texts, `(B, T)`; the number of the mask is the vocabulary's
                size. Of a longer text only the first window is filled.

        Raises:
            UserError: the run has no tokeniser that makes text of tokens.
        """
        if self._decoder is None:
            raise UserError("this run knows token ids alone: no tokeniser makes text of what the model writes")
        texts = []
        for row, there in zip(*inputs.values(), strict=True):
            ids = row[there.bool()][: self._context].cpu()
            padded = torch.full((1, self._context), self._vocabulary)
            padded[0, : len(ids)] = ids
            filled = logits_of(model(padded))[0, : len(ids)].argmax(-1).cpu()
            texts.append(self._decoder.decode(torch.where(ids == self._vocabulary, filled, ids).tolist()))
        return [Prediction(text) for text in texts]

    def generated(
        self, model: Callable[[Nest], Any], samples: Sequence[ChosenSample], group: dist.ProcessGroup | None
    ) -> Generated:
        """Return some windows of the evaluation set with what the model predicts beside the truth."""
        decoder = self._decoder
        if decoder is None or not self._is_shown:
            return Generated()
        inputs = torch.cat([s.inputs for s in samples]) if samples else nest.blank(self._inputs, 1)
        logits = logits_of(model(inputs))  # once on each rank, for it may be collective
        rows = [
            (sample.place, *_described(sample, scores.softmax(-1).cpu(), decoder.decode, self._vocabulary))
            for sample, scores in zip(samples, logits, strict=False)
        ]
        texts = [ReportText(seen, answers) for _, seen, answers in sorted(gather_lines(rows, group))]
        note = (
            f"{len(texts)} windows that lie evenly over the evaluation set: each [n] stands for a token that is to be "
            "predicted, below what was there, and the likeliest token with its probability."
        )
        return Generated(section=ReportSection("Predicted tokens beside the truth", texts=texts, notes=[note]))


TASK = MaskedLanguageModelling


def _described(
    sample: ChosenSample, shares: Tensor, decode: Callable[[Sequence[int]], str], mask: int
) -> tuple[str, str]:
    """Return a part of a window, numbers in place of tokens to be predicted, and a line for each of these.

    Args:
        shares: of the tokens `(T, V)`, as predicted.
        mask: the number that stands for a token to be predicted, and after the end of a text.
    """
    targets, ids = sample.targets[0].cpu(), sample.inputs[0].cpu()
    places = (targets != NO_TARGET).nonzero().flatten().tolist()
    start = max(0, (places[0] if places else 0) - _BEFORE)
    there = ((ids != mask) | (targets != NO_TARGET)).nonzero().flatten().tolist()
    end = min(there[-1] + 1 if there else 0, start + _SHOWN_TOKENS)
    seen, began = "", start
    answers: list[str] = []
    for place in [place for place in places if place < end]:
        best = int(shares[place].argmax())
        true, said = decode([int(targets[place])]), decode([best])
        seen += f"{decode(ids[began:place].tolist())} [{len(answers) + 1}] "
        verdict = "right" if best == int(targets[place]) else f"predicted {said!r}"
        answers.append(f"[{len(answers) + 1}] {true!r}: {verdict} ({float(shares[place, best]):.2f})")
        began = place + 1
    return seen + decode(ids[began:end].tolist()), "\n".join(answers)
