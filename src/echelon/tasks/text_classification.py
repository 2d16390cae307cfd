"""Texts, each of one class: cross-entropy with label smoothing and class weights, judged by top-1.

Shapes: B samples, T tokens, C classes.

Helps: Questions, reviews or messages with one class each.
Needs: a table with a column of texts (`--input`) and one of classes (`--target`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.core.figure import ReportSection, ReportText
from echelon.core.task import TaskDefaults
from echelon.tasks import nest
from echelon.tasks.base import DataFacts, Encoding, Examples, PendingSection, TaskSettings, TextDecoder
from echelon.tasks.classification import Classification
from echelon.tasks.gathering import gather_lines
from echelon.tasks.nest import Nest

_MOST_CHARACTERS = 400  # of a text in a report


class TextClassification(Classification):
    """Logits `(B, C)` and class numbers `(B,)` of texts; the loss is that of `classification`."""

    name = "text_classification"
    encoding = Encoding.TEXT
    default_model: ClassVar[str] = "text_classifier"
    takes_shares = False
    defaults: ClassVar[TaskDefaults] = TaskDefaults("adamw", 5e-3, 0.05, epochs=6, batch_size=64)

    def __init__(self) -> None:
        super().__init__()
        self._decoder: TextDecoder | None = None
        self._worst_samples = 0

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: as of `Classification`.
        """
        task = super().fitted(data, settings)
        task._decoder, task._worst_samples = data.tokeniser, settings.worst_samples
        return task

    def examples(self) -> Examples | None:
        """Return a choice of the texts with the highest loss; None where nothing makes text of ids."""
        if not self._worst_samples or self._decoder is None:
            return None
        return WorstTexts(self._worst_samples, self.classes, self._decoder, self._loss.each)


TASK = TextClassification


class WorstTexts:
    """Chooses the k texts of the highest loss among those of all ranks.

    Args:
        limit: k.
        classes: names of the C classes.
        decoder: makes text of `input_ids`, those of padding left out.
        losses: of logits `(B, C)` and class numbers `(B,)`, the loss of each sample `(B,)`.
    """

    def __init__(
        self, limit: int, classes: Sequence[str], decoder: TextDecoder, losses: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Begin with none."""
        self._limit, self._classes, self._decoder, self._losses = limit, classes, decoder, losses
        self._worst: list[tuple[float, int, str, str]] = []  # loss, place, what was predicted, text

    def update(self, inputs: Nest, outputs: Tensor, targets: Tensor, first: int, numbered: bool) -> None:
        """Look at a batch, logits `(B, C)` and class numbers `(B,)`; B may be 0."""
        if not len(targets):
            return
        logits = outputs.detach().double()
        losses = self._losses(logits, targets).nan_to_num(nan=torch.inf, posinf=torch.inf)
        for i in losses.sort(descending=True, stable=True).indices[: self._limit].tolist():
            row = nest.take(inputs, i)
            ids = row["input_ids"][row["attention_mask"].bool()].tolist()
            text = self._decoder.decode(ids).strip()[:_MOST_CHARACTERS]
            true, predicted = self._classes[int(targets[i])], self._classes[int(logits[i].argmax())]
            title = f"true {true}, predicted {predicted}, loss {float(losses[i]):.3g}"
            self._worst.append((-float(losses[i]), first + i, title, text))
        self._worst = sorted(self._worst)[: self._limit]

    def section(self, group: dist.ProcessGroup | None = None) -> PendingSection:
        """Bring together all ranks' worst texts; all ranks of `group` call it."""
        rows = sorted(self._worst if group is None else gather_lines(self._worst, group))[: self._limit]
        return PendingSection(partial(self._section, rows))

    def _section(self, rows: Sequence[tuple[float, int, str, str]]) -> ReportSection | None:
        if not rows:
            return None
        note = f"The {len(rows)} texts of the evaluation set with the highest loss, the highest first."
        return ReportSection("Worst-predicted texts", notes=[note], texts=[ReportText(row[2], row[3]) for row in rows])
