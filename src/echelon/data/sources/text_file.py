"""One long text: windows of tokens, whose targets are the tokens that follow. Its last part is held out."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from echelon.core.errors import UserError
from echelon.data.base import DataInfo, DataOutline, DataRequest, Source
from echelon.data.images import TensorArray
from echelon.data.sources.base import SourceKind
from echelon.data.tokenisers import Ids, tokeniser_for
from echelon.tasks.base import NO_TARGET, Encoding
from echelon.tasks.nest import TensorSpec

LANGUAGE_MODELLING = "language_modelling"
SUFFIXES = (".txt", ".text")
LEAST_TOKENS = 2  # of a part: one, and one that follows it


class TextFile(SourceKind):
    """The path of a text."""

    form: ClassVar[str] = "a text (.txt)"

    def takes(self, name: str) -> bool:
        """Whether it is a file with a suffix of texts."""
        path = Path(name).expanduser()
        return path.suffix.lower() in SUFFIXES and path.is_file()

    def outline(self, request: DataRequest) -> DataOutline:
        """Return the only task of a text."""
        return DataOutline(LANGUAGE_MODELLING)

    def open(self, request: DataRequest) -> Source:
        """Cut the text into windows of `--context` tokens; the last part of the text is held out, contiguous.

        An epoch has each token but the first of a part once as a target.
        """
        config, path = request.config, Path(request.config.source).expanduser()
        if request.encoding not in (Encoding.AUTO, Encoding.NEXT_TOKEN):
            raise UserError(f"data {path}: one text is for --task language-modelling, not {request.task}")
        text = _read(path)
        cut = round(len(text) * (1 - config.holdout))
        parts = (text[:cut], text[cut:])
        tokeniser = tokeniser_for(request, parts[:1])
        train, held = (tokeniser.encode([part])[0] for part in parts)
        if min(len(train), len(held)) < LEAST_TOKENS:
            raise UserError(f"data {path}: {len(text)} characters are too few to train on, and to hold some out")
        data, evaluation = (windows(ids, config.context) for ids in (train, held))
        info = DataInfo(
            config.source, (), 1, 1, len(data), len(evaluation), (),
            several=TensorSpec((config.context,), "int64", tokeniser.count),
            targets=TensorSpec((config.context,), "int64", tokeniser.count),
            task=LANGUAGE_MODELLING, tokeniser=tokeniser,
        )  # fmt: skip
        note = (
            f"{len(train):,} tokens to train on, of a vocabulary of {tokeniser.count:,}; the last {len(held):,} of the "
            "text are held out"
        )
        return Source(data, evaluation, info, (note,))


SOURCE = TextFile


def windows(ids: Ids, context: int) -> TensorArray:
    """Cut tokens into inputs and targets `(N, context)`: each token but the first is a target once.

    The last window is filled up with the token 0, and with targets that count nothing.
    """
    count = -(-(len(ids) - 1) // context)
    missing = count * context + 1 - len(ids)
    inputs = np.concatenate([ids[:-1], np.zeros(missing, np.int64)]).reshape(count, context)
    targets = np.concatenate([ids[1:], np.full(missing, NO_TARGET, np.int64)]).reshape(count, context)
    return TensorArray(inputs, targets)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"data {path}: it is not UTF-8 (byte {error.start}): convert it") from error
    except OSError as error:
        raise UserError(f"data {path}: cannot be read ({error.strerror})") from error
