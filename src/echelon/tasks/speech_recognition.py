"""What is said in a sound: connectionist temporal classification, judged by word and character error rates.

CTC (Graves et al. 2006, "Connectionist Temporal Classification") sums over all alignments of labels to frames. The
symbols of a frame are the tokens of the vocabulary and the blank, which is the last.

Shapes: B samples, F frames of the model's output, S symbols, L labels of the longest transcript.

Helps: Sounds with transcripts that do not say when each word is spoken.
Needs: a folder of sounds, each with its text beside it (1.wav, 1.txt), or the transcripts of LibriSpeech.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
    DataFacts,
    Encoding,
    EvaluationResult,
    Examples,
    Metrics,
    PendingSection,
    Prediction,
    Task,
    TaskSettings,
    TextDecoder,
    TightSample,
)
from echelon.tasks.gathering import gather_lines, gather_rows
from echelon.tasks.nest import Nest

_NEVER = -1e4  # a logit whose probability is 0 in every floating-point type
_CERTAIN = 0.999
_MOST_CHARACTERS = 400  # of a transcript in a report


def blank_padding(logits: Tensor, mask: Tensor) -> Tensor:
    """Return logits `(B, F, S)` that give the blank alone, where the mask `(B, F)` is 0.

    Such frames add nothing to the loss, and nothing is read from them: the lengths of samples need not be known beside
    the logits.
    """
    blank = torch.full_like(logits[0, 0], _NEVER)
    blank[-1] = 0
    return torch.where(mask[..., None] != 0, logits, blank)


class SpeechRecognition(Task):
    """Logits `(B, F, S)` and labels `(B, L)`, filled up with -100; the loss is the sum of -log p(labels | sound)."""

    name = "speech_recognition"
    unit = "label"
    primary = Metric("wer", "min", "WER", chance=1.0, noun="word error rate")
    headlines = (Metric("cer", "min", "CER"),)
    curves = (Metric("cer", "min", "CER"),)
    encoding = Encoding.TRANSCRIPTS
    default_model: ClassVar[str] = "small_ctc"
    defaults: ClassVar[TaskDefaults] = TaskDefaults("adamw", lr=2e-3, weight_decay=0.05, epochs=20, batch_size=16)

    def __init__(self) -> None:
        self._symbols = self._worst_samples = 0
        self._decoder: TextDecoder | None = None
        self._tightest: TightSample | None = None
        self._frames = 0

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: the data are no sounds with transcripts, or a setting of classes is asked for.
        """
        task = super().fitted(data, settings)
        specs = nest.leaves(data.targets)
        tokens = specs[0].count if len(specs) == 1 and len(specs[0].shape) == 1 else 0
        if not tokens or data.tokeniser is None:
            raise UserError(
                f"data {data.name}: targets are {nest.describe(data.targets)}, and --task speech-recognition needs "
                "sounds with transcripts: a folder of them with each one's text beside it, such as 1.wav and 1.txt"
            )
        task._symbols, task._decoder = tokens + 1, data.tokeniser
        task._tightest, task._worst_samples = data.tightest, settings.worst_samples
        task._frames = nest.leaves(data.inputs)[0].shape[0]
        return task

    @property
    def outputs(self) -> int:
        """One logit for each symbol."""
        return self._symbols

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of logits `(B, F, S)` and labels `(B, L)`.

        It is infinite where a sample has more labels than frames.
        """
        logits = outputs
        if logits.is_cuda and torch.are_deterministic_algorithms_enabled():
            logits, targets = logits.cpu(), targets.cpu()  # torch's backward on GPUs adds in any order
        lengths = label_counts(targets)
        frames = lengths.new_full((len(logits),), logits.shape[1])
        return F.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1), targets.clamp(min=0), frames, lengths,
            blank=logits.shape[-1] - 1, reduction="sum",
        )  # fmt: skip

    def units(self, targets: Tensor) -> int:
        """Return the number of labels in `(B, L)`."""
        return int(label_counts(targets).sum())

    def metrics(self, device: torch.device) -> Metrics:
        """Return an accumulator of the rates of wrong words and characters."""
        assert self._decoder is not None
        return TranscriptMetrics(self._decoder)

    def predictions(self, outputs: Tensor) -> list[Prediction]:
        """Return what is said in each sound, from logits `(B, F, S)`."""
        assert self._decoder is not None
        return [Prediction(self._decoder.decode(labels)) for labels in greedy_labels(outputs)]

    def examples(self) -> Examples | None:
        """Return a choice of the transcripts with the highest rate of wrong characters."""
        if not self._worst_samples or self._decoder is None:
            return None
        return WorstTranscripts(self._worst_samples, self._decoder)

    def wrong_outputs(self, outputs: Any, samples: int) -> str:
        """Say what is wrong with a model's outputs for inputs that are padding alone, as long as the longest sound."""
        logits = outputs
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if not isinstance(shape, tuple) or len(shape) != 3 or (shape[0], shape[2]) != (samples, self._symbols):
            return (
                f"must return logits of shape (batch, frames, {self._symbols}), one for each token and, last, the "
                f"blank; for a batch of {samples} it returned {shape}"
            )
        # a model that is to be split is tried without its values
        if not logits.is_meta and float(logits.float().softmax(-1)[..., -1].min()) < _CERTAIN:
            return (
                "must give the blank, the last symbol, where the mask is 0: end it with "
                "echelon.tasks.speech_recognition.blank_padding(logits, mask)"
            )
        factor, tight = max(1, -(-self._frames // shape[1])), self._tightest
        if tight is None or -(-tight.frames // factor) >= tight.needed:
            return ""
        return (
            f"makes one frame of {factor}, {-(-tight.frames // factor)} of {tight.name}, whose transcript needs "
            f"{tight.needed}: choose a model that shortens less, or remove this sound"
        )


TASK = SpeechRecognition


def label_counts(targets: Tensor) -> Tensor:
    """Return the number of labels of each sample `(B,)`."""
    return (targets != NO_TARGET).sum(1)


def greedy_labels(logits: Tensor) -> list[list[int]]:
    """Return the labels of logits `(B, F, S)`: each frame's likeliest symbol, repetitions merged, blanks left out."""
    blank = logits.shape[-1] - 1
    rows = logits.argmax(-1).cpu()
    return [[i for i in row.unique_consecutive().tolist() if i != blank] for row in rows]


class TranscriptMetrics:
    """Adds up the edits (insertions, deletions, substitutions) from what is recognised to the references.

    WER is the edits of words over the words of the references, CER that of characters: over all samples, so that each
    word counts the same. Both may exceed 1.
    """

    def __init__(self, decoder: TextDecoder) -> None:
        """Begin with none."""
        from torchmetrics.text import CharErrorRate, WordErrorRate

        self._decoder = decoder
        self._rates = {"wer": WordErrorRate(), "cer": CharErrorRate()}

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch: logits `(B, F, S)` and labels `(B, L)`; B may be 0."""
        pairs = transcripts(self._decoder, outputs, targets)
        for rate in self._rates.values():
            rate.update([pair.recognised for pair in pairs], [pair.reference for pair in pairs])

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        """Return the rates over the samples of all ranks of `group`; all call it."""
        states = [[float(getattr(rate, state)) for state in ("errors", "total")] for rate in self._rates.values()]
        counts = torch.tensor(states, dtype=torch.float64)
        totals = gather_rows(counts[None], group).sum(0).tolist()
        rates = {name: errors / total if total else None for name, (errors, total) in zip(self._rates, totals)}
        return EvaluationResult(rates)


@dataclass(frozen=True)
class TranscriptPair:
    """What was recognised of a sound, and what is said in it."""

    recognised: str
    reference: str

    @property
    def cer(self) -> float:
        """Edits of characters over those of the reference, or over 1 where that is empty."""
        from torchmetrics.functional.text import char_error_rate

        if not self.reference:
            return float(len(self.recognised))
        return float(char_error_rate(self.recognised, self.reference))

    @property
    def wer(self) -> float:
        """Likewise, of words."""
        from torchmetrics.functional.text import word_error_rate

        if not self.reference:
            return float(len(self.recognised.split()))
        return float(word_error_rate(self.recognised, self.reference))


def transcripts(decoder: TextDecoder, outputs: Tensor, targets: Tensor) -> list[TranscriptPair]:
    """Return what greedy decoding recognises in logits `(B, F, S)`, beside the references, of labels `(B, L)`."""
    found = greedy_labels(outputs.detach())
    wanted = [row[row != NO_TARGET].tolist() for row in targets.cpu()]
    return [
        TranscriptPair(decoder.decode(ids).strip(), decoder.decode(labels).strip())
        for ids, labels in zip(found, wanted, strict=True)
    ]


class WorstTranscripts:
    """Chooses the k samples of the highest rate of wrong characters among those of all ranks; of equals, the earlier.

    Args:
        limit: k.
    """

    def __init__(self, limit: int, decoder: TextDecoder) -> None:
        """Begin with none."""
        self._limit, self._decoder = limit, decoder
        self._worst: list[tuple[float, int, str, str]] = []  # -CER, place, title, both texts

    def update(self, inputs: Nest, outputs: Tensor, targets: Tensor, first: int, numbered: bool) -> None:
        """Look at a batch, logits `(B, F, S)` and labels `(B, L)`; B may be 0."""
        for i, pair in enumerate(transcripts(self._decoder, outputs, targets)):
            number = f", sample {first + i} of the evaluation data" if numbered else ""
            title = f"WER {pair.wer:.0%}, CER {pair.cer:.0%}{number}"
            both = f"reference   {pair.reference[:_MOST_CHARACTERS]}\nrecognised  {pair.recognised[:_MOST_CHARACTERS]}"
            self._worst.append((-pair.cer, first + i, title, both))
        self._worst = sorted(self._worst)[: self._limit]

    def section(self, group: dist.ProcessGroup | None = None) -> PendingSection:
        """Bring together all ranks' worst transcripts; all ranks of `group` call it."""
        rows = sorted(gather_lines(self._worst, group))[: self._limit]
        return PendingSection(partial(self._section, rows))

    def _section(self, rows: Sequence[tuple[float, int, str, str]]) -> ReportSection | None:
        if not rows:
            return None
        note = (
            f"The {len(rows)} sounds of the evaluation set with the highest rate of wrong characters, the highest "
            "first. --worst-samples sets how many."
        )
        return ReportSection("Transcripts", notes=[note], texts=[ReportText(row[2], row[3]) for row in rows])
