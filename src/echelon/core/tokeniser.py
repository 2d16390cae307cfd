"""Which tokeniser text is cut with, as `--tokeniser` says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.core.errors import UserError, naming
from echelon.core.spec import bind, parse_spec

AUTO, BPE, CHARACTERS = "auto", "bpe", "characters"
FOLDER_FILE = "tokenizer.json"  # as transformers writes it
RUN_FILE = "tokeniser.json"  # as it is kept with a run


@dataclass(frozen=True)
class BytePairs:
    """Settings of byte-pair encoding.

    Attributes:
        size: tokens of the vocabulary at most.
    """

    size: int = 8000


@dataclass(frozen=True)
class TokeniserChoice:
    """What text is cut with.

    Attributes:
        name: auto, bpe, characters; empty: what `file` holds.
        size: tokens of a vocabulary that is trained, at most.
        file: of a tokeniser that is there already.
    """

    name: str
    size: int = BytePairs.size
    file: Path | None = None


def read_tokeniser(text: str) -> TokeniserChoice:
    """Read `auto`, `bpe(8000)`, `characters`, or a folder with a `tokenizer.json`: also a run's.

    Raises:
        UserError: it is none of these.
    """
    if text in (AUTO, CHARACTERS):
        return TokeniserChoice(text)
    with naming("--tokeniser"):
        if text.partition("(")[0] == BPE:
            size = bind(parse_spec(text), BytePairs).size
            if size < 300:
                raise UserError(f"{text}: a vocabulary holds the 256 bytes and more: at least 300")
            return TokeniserChoice(BPE, size)
        folder = Path(text).expanduser()
        if "/" not in text and not folder.is_dir():  # a run that goes on has its own, whether or not a path is there
            raise UserError(
                f"unknown tokeniser {text!r}: write auto, bpe(8000), characters, or a folder with {FOLDER_FILE}"
            )
        of_run = folder / RUN_FILE
        return TokeniserChoice("", file=of_run if of_run.is_file() else folder / FOLDER_FILE)
