"""One long text: windows of tokens, whose targets are the tokens that follow, or those that were masked.

Its last part is held out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from echelon.core.errors import UserError
from echelon.data.base import DataInfo, DataOutline, DataRequest, Source
from echelon.data.drawn import DrawnSamples
from echelon.data.images import TensorArray
from echelon.data.order import Indices, uniforms
from echelon.data.sample_index import FixedSampleIndex
from echelon.data.sources.base import HELD_OF_TRAIN, SourceKind
from echelon.data.tokenisers import Ids, tokeniser_for
from echelon.tasks.base import NO_TARGET, Encoding
from echelon.tasks.nest import Nest, TensorSpec

LANGUAGE_MODELLING, MASKED = "language_modelling", "masked_language_modelling"
LEAST_TOKENS = 2  # of a part: one, and one that follows it
PREDICTED = 0.15  # share of a window's tokens that are to be predicted
_MASKED, _RANDOM = 0.8, 0.1  # of these; the rest stays as it is, so that what is seen may be right or wrong


class TextFile(SourceKind):
    """The path of a text."""

    form: ClassVar[str] = "a text (.txt)"
    reads: ClassVar[tuple[str, ...]] = ("context",)
    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".text")
    tasks: ClassVar[tuple[str, ...]] = ("language_modelling",)

    def takes(self, name: str) -> bool:
        """Whether it is a file with a suffix of texts."""
        path = Path(name).expanduser()
        return path.suffix.lower() in self.suffixes and path.is_file()

    def outline(self, request: DataRequest) -> DataOutline:
        """Return the task of a text, where none is chosen that of the next token."""
        return outline_of_text(request)

    def open(self, request: DataRequest) -> Source:
        """Cut the text into windows of `--context` tokens; the last part of the text is held out, contiguous."""
        path = Path(request.config.source).expanduser()
        if request.encoding is not Encoding.AUTO and not is_for_one_text(request.encoding):
            raise UserError(
                f"data {path}: one text is for --task language-modelling or masked-language-modelling, "
                f"not {request.task}"
            )
        return text_source(request, TextParts.of(request, read_text(path)))


SOURCE = TextFile
SUFFIXES = TextFile.suffixes


def is_for_one_text(encoding: Encoding) -> bool:
    """Whether a task learns the tokens of a text."""
    return encoding in (Encoding.NEXT_TOKEN, Encoding.MASKED_TOKENS)


def outline_of_text(request: DataRequest) -> DataOutline:
    """Return the task of a text, where none is chosen that of the next token."""
    return DataOutline(MASKED if request.encoding is Encoding.MASKED_TOKENS else LANGUAGE_MODELLING)


@dataclass(frozen=True)
class TextParts:
    """The parts of a text.

    Attributes:
        held: by which checkpoints are compared.
        test: that no choice is made by; empty: there is none.
        is_end: whether `held` is the end of what there was to train on.
    """

    train: str
    held: str
    test: str = ""
    is_end: bool = False

    @classmethod
    def of(cls, request: DataRequest, text: str, held: str = "", test: str = "") -> TextParts:
        """Return the parts of a text; without one to validate by, its last part is held out, contiguous.

        Of data that is evaluated and is not the run's, all of the text is in both parts.
        """
        if held:
            return cls(text, held, test)
        if request.tell_whole is not None:
            if not test:
                request.tell_whole()
            return cls(text, text, test)
        share = min(HELD_OF_TRAIN, request.config.holdout) if test else request.config.holdout
        cut = round(len(text) * (1 - share))
        return cls(text[:cut], text[cut:], test, is_end=True)


def text_source(request: DataRequest, text: TextParts) -> Source:
    """Return windows of tokens; an epoch has each token but the first of a part once as a target.

    Raises:
        UserError: a part is too short.
    """
    config, is_masked = request.config, request.encoding is Encoding.MASKED_TOKENS
    tokeniser = tokeniser_for(request, (text.train,))
    parts = [tokeniser.encode([part])[0] for part in (text.train, text.held, text.test) if part]
    if len(parts) < 2 or min(map(len, parts)) < LEAST_TOKENS:
        count = len(text.train) + len(text.held) + len(text.test)
        raise UserError(f"data {config.source}: {count} characters are too few to train on, and to hold some out")
    data, evaluation, *tests = (
        MaskedWindows(ids, config.context, tokeniser.count, request.seed) if is_masked else windows(ids, config.context)
        for ids in parts
    )
    info = DataInfo(
        config.source, (), 1, 1, len(data), len(evaluation), (),
        several=TensorSpec((config.context,), "int64", tokeniser.count + is_masked),  # one more for the mask
        targets=TensorSpec((config.context,), "int64", tokeniser.count),
        task=outline_of_text(request).task, tokeniser=tokeniser,
    )  # fmt: skip
    note = f"{len(parts[0]):,} tokens to train on, of a vocabulary of {tokeniser.count:,}"
    if text.is_end:
        note += f"; the last {len(parts[1]):,} of the text are held out"
    digest = hashlib.sha256("\0".join((text.train, text.held, text.test)).encode()).hexdigest()
    sample_index = FixedSampleIndex.of(request.folder, config.source, len(data), digest)
    return Source(data, evaluation, info, (note,), tests[0] if tests else None, sample_index)


def windows(ids: Ids, context: int) -> TensorArray:
    """Cut tokens into inputs and targets `(N, context)`: each token but the first is a target once.

    The last window is filled up with the token 0, and with targets that count nothing.
    """
    count = -(-(len(ids) - 1) // context)
    missing = count * context + 1 - len(ids)
    inputs = np.concatenate([ids[:-1], np.zeros(missing, np.int64)]).reshape(count, context)
    targets = np.concatenate([ids[1:], np.full(missing, NO_TARGET, np.int64)]).reshape(count, context)
    return TensorArray(inputs, targets)


class MaskedWindows(DrawnSamples):
    """Windows of tokens, 15% of which are to be predicted (Devlin et al. 2019, BERT, arXiv:1810.04805).

    Of these, 80% are replaced by the mask, 10% by any token, and 10% stay. Which ones, is drawn anew in each epoch. The
    last window is filled up with masks that count nothing. Targets of other tokens are `NO_TARGET`.

    Args:
        ids: of the text, in its order.
        context: T, tokens of a window.
        count: of the vocabulary; the number of the mask is `count`.
    """

    def __init__(self, ids: Ids, context: int, count: int, seed: int) -> None:
        missing = -len(ids) % context
        self._tokens = np.concatenate([ids, np.full(missing, count, np.int64)]).reshape(-1, context)
        self._count, self._seed = count, seed
        there = (self._tokens != count).sum(1)
        self._predicted = self.unit_counts = np.maximum(1, np.round(PREDICTED * there)).astype(
            np.int64
        )  # exactly 15%, at least one
        self.specs = TensorSpec((context,), "int64", count + 1), TensorSpec((context,), "int64", count)

    def __len__(self) -> int:
        return len(self._tokens)

    def fill(self, epoch: int, draws: Indices, inputs: Nest, targets: Nest) -> None:
        """Write the windows of `draws`, masked, and the tokens that were there."""
        rows = draws % len(self)
        tokens = self._tokens[rows]
        place, outcome, other = np.split(uniforms(self._seed, epoch, draws, 3 * tokens.shape[1]), 3, axis=1)
        there = tokens != self._count
        rank = np.argsort(np.argsort(np.where(there, place, 1), axis=1), axis=1)
        chosen = rank < self._predicted[rows, None]  # those with the lowest numbers
        anything = (other * self._count).astype(np.int64)
        changed = np.where(outcome < _MASKED, self._count, np.where(outcome < _MASKED + _RANDOM, anything, tokens))
        inputs[:] = np.where(chosen, changed, tokens)
        targets[:] = np.where(chosen, tokens, NO_TARGET)


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"data {path}: it is not UTF-8 (byte {error.start}): convert it") from error
    except OSError as error:
        raise UserError(f"data {path}: cannot be read ({error.strerror})") from error


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file: cut at line feeds alone, for other separators may stand within a sentence.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    return lines_of(read_text(path))


def lines_of(text: str) -> list[str]:
    """Return the lines of a text as those of a file."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
