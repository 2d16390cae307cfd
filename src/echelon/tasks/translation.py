"""A sentence from another one: cross-entropy of the target's tokens in nats, judged by chrF of what the model writes.

Shapes: B samples, T target tokens, V size of the vocabulary.

Helps: Translation, and other tasks that turn a text into another: summaries, questions, corrections.
Needs: a folder of parallel text (train.en, train.de), with the languages as `--input` and `--target`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.core.errors import UserError
from echelon.core.figure import ReportSection, ReportText, pick
from echelon.core.task import Metric, TaskDefaults
from echelon.tasks import nest
from echelon.tasks.base import (
    NO_TARGET,
    ChosenSample,
    DataFacts,
    Encoding,
    Generated,
    Prediction,
    SentenceMarks,
    TaskSettings,
    TextDecoder,
    Writing,
)
from echelon.tasks.gathering import gather_lines
from echelon.tasks.nest import Nest
from echelon.tasks.token_loss import TokenTask, are_tokens, logits_of

IDS, MASK, DECODER_IDS = "input_ids", "attention_mask", "decoder_input_ids"
_AT_ONCE = 64  # sentences that are written together
_LONGER, _MORE = 1.5, 5  # a translation has at most so many times the source's tokens, and so many more
_PERPLEXITY = Metric("perplexity", "min")


class Translation(TokenTask):
    """Logits `(B, T, V)` and the next target tokens `(B, T)`; targets of -100 are padding and not counted.

    The loss is the sum over target tokens, the end mark included, of -log p(token | source, tokens before). With label
    smoothing s the target is (1 - s) on the token and s / V on every one; the metrics `loss` and `perplexity` leave
    smoothing out. chrF (Popovic 2015) and BLEU are sacrebleu's, over at most 256 sentences that the model writes by
    greedy decoding.
    """

    name = "translation"
    primary = Metric("chrf", "max", "chrF")
    headlines: ClassVar[tuple[Metric, ...]] = (_PERPLEXITY, Metric("loss", "min"), Metric("bleu", "max", "BLEU"))
    generates: ClassVar[tuple[Metric, ...]] = (primary, headlines[-1])
    curves: ClassVar[tuple[Metric, ...]] = (_PERPLEXITY,)
    generation_samples = 256
    encoding = Encoding.TEXT_PAIRS
    default_model: ClassVar[str] = "small_seq2seq"
    defaults: ClassVar[TaskDefaults] = TaskDefaults("adamw", 2e-3, 0.01, epochs=8, batch_size=128, warmup_epochs=0.5)

    def __init__(self) -> None:
        self._shown = 0
        self._writer: SentenceWriter | None = None

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data; perplexity is its primary metric where nothing makes text of ids.

        Raises:
            UserError: inputs or targets are no tokens, or classes are weighed.
        """
        inputs = data.inputs if isinstance(data.inputs, dict) else {}
        if not are_tokens(data.targets) or DECODER_IDS not in inputs:
            raise UserError(
                f"data {data.name}: inputs are {nest.describe(data.inputs)}, and --task translation needs pairs of "
                f"texts: give a folder with train.en and train.de, or {IDS}, {MASK} and {DECODER_IDS} with the next "
                "tokens as targets"
            )
        task = super().fitted(data, settings)
        task._shown = settings.worst_samples
        if data.tokeniser is not None and data.marks is not None:
            task._writer = SentenceWriter(data.tokeniser, data.marks)
        else:
            task.primary, task.generates = _PERPLEXITY, ()  # type: ignore[misc]
            task.headlines = self.headlines[1:2]  # type: ignore[misc]
        return task

    def wrong_outputs(self, outputs: Any, samples: int) -> str:
        """Say what is wrong with a model's outputs."""
        logits = logits_of(outputs)
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        fits = isinstance(shape, tuple) and len(shape) == 3 and shape[0] == samples
        if fits and (not self._vocabulary or shape[2] == self._vocabulary):
            return ""
        return (
            f"must return logits of shape (batch, target tokens, {self._vocabulary or 'V'}), one for each token; for a "
            f"batch of {samples} it returned {shape}"
        )

    def predict(self, model: Callable[[Nest], Any], inputs: Nest, writing: Writing) -> list[Prediction]:
        """Return the translation of each sentence, its tokens the most probable ones.

        Raises:
            UserError: the run has no tokeniser that makes text of tokens.
        """
        if self._writer is None:
            raise UserError("this run knows token ids alone: no tokeniser makes sentences of what the model writes")
        return [Prediction(text) for text in self._writer.texts(model, inputs)]

    def generated(
        self, model: Callable[[Nest], Any], samples: Sequence[ChosenSample], group: dist.ProcessGroup | None
    ) -> Generated:
        """Return chrF and BLEU of the sentences that the model writes, and some of them beside their references."""
        if self._writer is None:
            return Generated()
        pairs = [Written(*row) for row in sorted(gather_lines(self._writer.write(model, samples, group), group))]
        section = _section(pairs, self._shown) if self._shown and pairs else None
        return Generated(scores(pairs), section)


TASK = Translation


@dataclass(frozen=True)
class Written:
    """A sentence of the evaluation set and its place there, its translation, and what the model wrote."""

    place: int
    source: str
    reference: str
    hypothesis: str


def scores(pairs: Sequence[Written]) -> dict[str, float | None]:
    """Return chrF and BLEU over all pairs, 0 to 100, as sacrebleu computes them by default."""
    from sacrebleu.metrics import BLEU, CHRF

    if not pairs:
        return {"chrf": None, "bleu": None}
    hypotheses, references = [pair.hypothesis for pair in pairs], [[pair.reference for pair in pairs]]
    return {
        "chrf": CHRF().corpus_score(hypotheses, references).score,
        "bleu": BLEU().corpus_score(hypotheses, references).score,
    }


def _section(pairs: Sequence[Written], shown: int) -> ReportSection:
    texts = [
        ReportText(pair.source, f"reference:  {pair.reference}\ntranslated: {pair.hypothesis}")
        for pair in pick(pairs, shown)
    ]
    note = (
        f"Of {len(pairs)} sentences that lie evenly over the evaluation set, by which chrF and BLEU are computed: the "
        "model writes the most probable token, one after the other."
    )
    return ReportSection("Translations beside their references", texts=texts, notes=[note])


def longest_written(tokens: int) -> int:
    """Return how many tokens the translation of a source of so many may have."""
    return math.ceil(_LONGER * tokens) + _MORE


class SentenceWriter:
    """Lets a model write the target of some samples, each token the most probable one.

    Args:
        decoder: makes text of ids.
        marks: that begin and end a sentence.
    """

    def __init__(self, decoder: TextDecoder, marks: SentenceMarks) -> None:
        """Take what texts are made of."""
        self._decoder, self._marks = decoder, marks

    def write(
        self, model: Callable[[Nest], Any], samples: Sequence[ChosenSample], group: dist.ProcessGroup | None
    ) -> list[tuple[int, str, str, str]]:
        """Return place, source, reference and what the model wrote, of this rank's samples.

        All ranks of `group` call the model equally often: a rank that has nothing left gives it a blank sample.
        """
        ordered = sorted(samples, key=lambda sample: int(sample.inputs[MASK].sum()))  # neighbours end together
        rounds = _most(-(-len(ordered) // _AT_ONCE), group)
        rows: list[tuple[int, str, str, str]] = []
        for i in range(rounds):
            chosen = ordered[i * _AT_ONCE : (i + 1) * _AT_ONCE]
            sources = [sample.inputs[IDS][sample.inputs[MASK].bool()].cpu() for sample in chosen]
            for sample, source, ids in zip(chosen, sources, self._greedy(model, sources, group), strict=True):
                wanted = sample.targets[sample.targets != NO_TARGET].tolist()
                rows.append((sample.place, self._text(source.tolist()), self._text(wanted), self._text(ids)))
        return rows

    def texts(self, model: Callable[[Nest], Any], inputs: Nest) -> list[str]:
        """Return what the model writes for each source, ids with a mask `(B, T)`."""
        sources = [row[mask.bool()].cpu() for row, mask in zip(inputs[IDS], inputs[MASK], strict=True)]
        return [self._text(ids) for ids in self._greedy(model, sources, None)]

    def _greedy(
        self, model: Callable[[Nest], Any], sources: Sequence[Tensor], group: dist.ProcessGroup | None
    ) -> list[list[int]]:
        """Return the ids that the model writes for each source, the mark of the end left out."""
        inputs = _padded(sources)
        limits = torch.tensor([longest_written(len(source)) for source in sources], dtype=torch.int64)
        written = torch.full((len(sources), 1), self._marks.begin)
        going = torch.arange(len(sources))
        while _most(len(going), group):
            asked = nest.take(inputs, going) if len(going) else _padded([torch.zeros(1, dtype=torch.int64)])
            given = written[going] if len(going) else torch.full((1, written.shape[1]), self._marks.begin)
            best = logits_of(model({**asked, DECODER_IDS: given}))[:, -1].argmax(-1).cpu()
            if not len(going):
                continue
            column = torch.full((len(sources),), self._marks.end)
            column[going] = best
            written = torch.cat([written, column[:, None]], 1)
            going = going[(best != self._marks.end) & (written.shape[1] <= limits[going])]
        return [self._before_end(row) for row in written[:, 1:].tolist()]

    def _before_end(self, ids: list[int]) -> list[int]:
        return ids[: ids.index(self._marks.end)] if self._marks.end in ids else ids

    def _text(self, ids: Sequence[int]) -> str:
        return self._decoder.decode([i for i in ids if i not in (self._marks.begin, self._marks.end)]).strip()


def _padded(sources: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return ids and mask `(n, longest)` of some sources `(length,)`."""
    blank = torch.zeros(0, 1, dtype=torch.int64)
    if not sources:
        return {IDS: blank, MASK: blank}
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        IDS: pad(list(sources), batch_first=True),
        MASK: pad([torch.ones_like(source) for source in sources], batch_first=True),
    }


def _most(count: int, group: dist.ProcessGroup | None) -> int:
    """Return the largest of the ranks' counts; all ranks of `group` call it."""
    if group is None:
        return count
    most = torch.tensor([count], device="cpu" if dist.get_backend(group) == "gloo" else "cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return int(most)
