"""Tokenisers: text to ids and back. Trained once, then kept in a cache and with the run.

Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) works on bytes, so that no text is unknown to it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.tokeniser import AUTO, BPE, CHARACTERS, FOLDER_FILE, RUN_FILE, TokeniserChoice
from echelon.data.base import DataRequest
from echelon.data.cache import locked

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Ids = NDArray[np.int64]
PAD, UNKNOWN, BEGIN, END = "[PAD]", "[UNK]", "[BOS]", "[EOS]"
SPECIAL = (PAD, UNKNOWN, BEGIN, END)
FEW_CHARACTERS = 256  # an alphabet that is used as it is
_SHORT_TEXT = 10_000_000  # characters; of longer texts pieces are worth their training
_TRAINING_S = 1800.0
_FORMAT = 1  # of what is cached
_MARKED = "with_marks"  # holds, in a file, a tokeniser that adds its own marks


class Tokeniser(Protocol):
    """Cuts text into tokens with the numbers 0 to count - 1."""

    @property
    def count(self) -> int:
        """Size of the vocabulary."""

    def encode(self, texts: Sequence[str], most: int | None = None) -> list[Ids]:
        """Return the ids of each text, at most `most`, with the marks around it where it adds some."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids."""

    def special(self, name: str) -> int | None:
        """Return the id of a special token such as `[EOS]`; None: it has none of this name."""

    def to_json(self) -> str:
        """Return all that it is, for `read_json`."""


@dataclass(frozen=True)
class Characters:
    """Each character of an alphabet is a token; 0 is any other."""

    alphabet: str

    @classmethod
    def of(cls, texts: Sequence[str]) -> Characters:
        """Return the alphabet of some texts."""
        return cls("".join(sorted(set().union(*map(set, texts)))))

    @property
    def count(self) -> int:
        """The characters, and one for others."""
        return len(self.alphabet) + 1

    def encode(self, texts: Sequence[str], most: int | None = None) -> list[Ids]:
        """Return the ids of each text, at most `most`."""
        known = np.array([ord(each) for each in self.alphabet], np.int64)
        return [self._ids(text, known)[:most] for text in texts]

    def _ids(self, text: str, known: Ids) -> Ids:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64)
        if not len(known):
            return np.zeros_like(codes)
        places = np.searchsorted(known, codes).clip(max=len(known) - 1)
        return np.where(known[places] == codes, places + 1, 0)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids."""
        unknown = "\N{REPLACEMENT CHARACTER}"
        return "".join(self.alphabet[i - 1] if 0 < i < self.count else unknown for i in ids)

    def special(self, name: str) -> int | None:
        """Return None: characters are all that it has."""
        return None

    def to_json(self) -> str:
        """Return the alphabet."""
        return json.dumps({CHARACTERS: self.alphabet})


class LibraryTokeniser:
    """A tokeniser of the library `tokenizers`, also one that transformers wrote.

    Args:
        adds_marks: whether it puts its own marks around each text, such as `[CLS]` and `[SEP]`.
    """

    def __init__(self, tokenizer: Tokenizer, adds_marks: bool = False) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.library = tokenizer
        self.adds_marks = adds_marks
        self._marks = int(tokenizer.num_special_tokens_to_add(is_pair=False)) if adds_marks else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LibraryTokeniser) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    @property
    def count(self) -> int:
        """Size of the vocabulary, special tokens among them."""
        return int(self.library.get_vocab_size())

    def with_marks(self, adds_marks: bool) -> LibraryTokeniser:
        """Return the same tokeniser, which puts its own marks around each text, or does not."""
        return LibraryTokeniser(self.library, adds_marks)

    def encode(self, texts: Sequence[str], most: int | None = None) -> list[Ids]:
        """Return the ids of each text, at most `most`: marks around a text that is cut stay."""
        encodings = self.library.encode_batch(list(texts), add_special_tokens=False)
        if most is not None:
            for each in encodings:
                each.truncate(max(0, most - self._marks))
        if self._marks:
            encodings = [self.library.post_process(each, add_special_tokens=True) for each in encodings]
        return [np.array(each.ids[:most], np.int64) for each in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids."""
        return str(self.library.decode(list(ids)))

    def special(self, name: str) -> int | None:
        """Return the id of a special token such as `[EOS]`; None: it has none of this name."""
        found = self.library.token_to_id(name)
        return None if found is None else int(found)

    def to_json(self) -> str:
        """Return it as the library writes it, within a record where it adds marks."""
        written = str(self.library.to_str())
        return json.dumps({_MARKED: json.loads(written)}, ensure_ascii=False) if self.adds_marks else written


def tokeniser_for(request: DataRequest, texts: Sequence[str], adds_marks: bool = False) -> Tokeniser:
    """Return the tokeniser of a run: the one kept with it; else as its settings say, trained on texts.

    What is trained is kept below the data's root, by a hash of texts and settings: one process of a machine trains it,
    others wait.

    Args:
        texts: of the training part.
        adds_marks: one of a folder puts its own marks around each text; one that a run kept does as it did there.

    Raises:
        UserError: a file holds none.
    """
    kept = request.folder / RUN_FILE if request.folder is not None else None
    if kept is not None and kept.is_file():
        return read_json(kept)
    choice = resolved(request.preparation.tokeniser, texts)
    if choice.file is not None:
        tokeniser = read_json(choice.file)
        if isinstance(tokeniser, LibraryTokeniser):
            of_folder = choice.file.name == FOLDER_FILE  # another run's texts had marks, or had none
            tokeniser = tokeniser.with_marks(adds_marks and (of_folder or tokeniser.adds_marks))
    elif choice.name == CHARACTERS:
        tokeniser = Characters.of(texts)
    else:
        tokeniser = _cached(choice, texts, Path(request.config.root).expanduser() / "tokenisers")
    if kept is not None and kept.parent.is_dir():
        write_atomic(kept, tokeniser.to_json())
    return tokeniser


def resolved(choice: TokeniserChoice, texts: Sequence[str]) -> TokeniserChoice:
    """Return what `auto` becomes: characters of one text that is not long and has few of them; else byte pairs."""
    if choice.name != AUTO:
        return choice
    few = len(texts) == 1 and len(texts[0]) <= _SHORT_TEXT and len(set(texts[0])) <= FEW_CHARACTERS
    return TokeniserChoice(CHARACTERS if few else BPE)


def read_json(file: Path) -> Tokeniser:
    """Return the tokeniser of a file.

    Raises:
        UserError: it holds none.
    """
    from tokenizers import Tokenizer

    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text)
        if isinstance(alphabet := values.get(CHARACTERS), str):
            return Characters(alphabet)
        marked = values.get(_MARKED)
        return LibraryTokeniser(Tokenizer.from_str(json.dumps(marked) if marked else text), adds_marks=bool(marked))
    except OSError as error:
        raise UserError(f"tokeniser {file}: cannot be read ({error.strerror})") from error
    except Exception as error:
        raise UserError(f"tokeniser {file}: it holds no tokeniser ({str(error).splitlines()[0]})") from error


def train_byte_pairs(texts: Sequence[str], size: int) -> LibraryTokeniser:
    """Return byte-pair encoding with at most `size` tokens, trained on texts; the same for the same texts."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    return LibraryTokeniser(tokenizer)


def _cached(choice: TokeniserChoice, texts: Sequence[str], cache: Path) -> Tokeniser:
    digest = hashlib.sha256(f"{_FORMAT} {choice.name} {choice.size}".encode())
    for text in texts:
        digest.update(b"\0" + text.encode("utf-8", "surrogatepass"))
    file = cache / f"{digest.hexdigest()[:32]}.json"
    if not file.is_file():
        busy = f"{cache}: another process has been training a tokeniser for half an hour"
        with locked(cache / ".lock", _TRAINING_S, busy):
            if not file.is_file():
                write_atomic(file, train_byte_pairs(texts, choice.size).to_json())
    return read_json(file)
