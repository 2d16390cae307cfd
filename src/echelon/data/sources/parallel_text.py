"""Parallel text: a folder of files with one sentence a line, such as train.en and train.de, val.en and val.de.

Line i of one language is the translation of line i of the other. Lengths are those of the token ids in memory, so that
batches are grouped by them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from echelon.core.errors import UserError, nearest
from echelon.core.units import many
from echelon.data.base import DataInfo, DataOutline, DataRequest, Source
from echelon.data.class_folders import FolderLinks
from echelon.data.columns import IDS, MASK
from echelon.data.images import TensorArray
from echelon.data.order import Indices
from echelon.data.ragged import RaggedArray
from echelon.data.sample_index import RowSampleIndex, SampleIndex
from echelon.data.sources.base import SourceKind, held_out_of_begun
from echelon.data.sources.text_file import read_lines
from echelon.data.tokenisers import Tokeniser, tokeniser_for
from echelon.tasks.base import NO_TARGET, Encoding, SentenceMarks
from echelon.tasks.nest import TensorSpec

TRANSLATION = "translation"
DECODER_IDS = "decoder_input_ids"  # as models of transformers call it
_MOST_TOKENS = 512  # of a sentence with its mark; what is longer is cut
_TRAIN = "train"
_VALIDATION = ("val", "valid", "validation", "dev")
_TEST = re.compile(r"test\b|test_")  # test.en, test_2016_flickr.en, test-1.en
_LANGUAGE = re.compile(r"[A-Za-z]{2,8}([-_][A-Za-z0-9]+)*")
_OTHER_FILES = {"csv", "tsv", "jsonl", "json", "parquet", "txt", "text", "md", "gz", "zip", "tar", "npy", "pt", "yaml"}
_BEGINS, _ENDS = ("[BOS]", "<s>", "<bos>", "<pad>"), ("[EOS]", "</s>", "<eos>")


@dataclass(frozen=True)
class Pairs:
    """Sentences of two languages, one by one each other's translation."""

    source: Sequence[str]
    target: Sequence[str]

    def __len__(self) -> int:
        return len(self.source)

    def take(self, chosen: Indices) -> Pairs:
        """Return some of the pairs."""
        return Pairs([self.source[i] for i in chosen], [self.target[i] for i in chosen])

    def digest(self, count: int) -> str:
        """Return a hash of the first `count` pairs."""
        return hashlib.sha256(repr((self.source[:count], self.target[:count])).encode()).hexdigest()


class ParallelText(SourceKind):
    """The path of a folder with `train.X` and `train.Y`, one for each language."""

    form: ClassVar[str] = "a folder of parallel text (train.en, train.de)"
    reads: ClassVar[tuple[str, ...]] = ("input", "target", "follow_links")

    def takes(self, name: str) -> bool:
        """Whether it is a folder with training files of two languages, and no table."""
        folder = Path(name).expanduser()
        return len(_languages(folder)) > 1 and not (folder / "train.csv").exists()

    def outline(self, request: DataRequest) -> DataOutline:
        """Return the only task of pairs of sentences.

        Raises:
            UserError: the run is of another task, or names no two of the languages.
        """
        _chosen_languages(request)
        return DataOutline(TRANSLATION)

    def open(self, request: DataRequest) -> Source:
        """Read the files of both languages; where there are none to validate by, pairs are held out by the seed."""
        folder = Path(request.config.source).expanduser()
        languages = _chosen_languages(request)
        stems = _stems(folder, languages)
        links = FolderLinks(folder, request.config.follow_links)
        links.count(folder / f"{stem}.{language}" for stem in stems.values() for language in languages)
        links.check()
        parts, notes = {}, [*links.notes]
        for part, stem in stems.items():
            parts[part], empty = _read_pairs(folder, stem, languages)
            if empty:
                notes.append(f"{stem}: {empty} pairs are left out, for a side of them is empty")
        train = parts["train"]
        sample_index = RowSampleIndex.of(request.folder, request.config.source, len(train), train.digest)
        parts["train"] = train.take(np.arange(sample_index.count))
        if "val" not in parts:
            held = _hold_out(parts, request, sample_index)
            notes += [held] if request.tell_whole is None else []
        tests = _test_stems(folder, languages)
        if len(tests) > 1:
            notes.append(f"the test set is {stems['test']}, the first by name of {', '.join(tests)}")
        return _source(request, parts, notes, sample_index)


SOURCE = ParallelText


def _languages(folder: Path) -> list[str]:
    """Return the suffixes of the training files, sorted."""
    if not folder.is_dir():
        return []
    suffixes = [path.suffix[1:] for path in folder.glob(f"{_TRAIN}.*") if path.stem == _TRAIN and path.is_file()]
    return sorted(each for each in suffixes if _LANGUAGE.fullmatch(each) and each.lower() not in _OTHER_FILES)


def _chosen_languages(request: DataRequest) -> tuple[str, str]:
    config = request.config
    if request.encoding not in (Encoding.AUTO, Encoding.TEXT_PAIRS):
        raise UserError(f"data {config.source} is parallel text, for --task translation, not {request.task}")
    known = _languages(Path(config.source).expanduser())
    for flag, name in (("--input", config.input), ("--target", config.target)):
        if not name:
            raise UserError(
                f"data {config.source} is in {', '.join(known)}: say from which language to which, such as "
                f"--input {known[0]} --target {known[1]}"
            )
        if name not in known:
            raise UserError(
                f"{flag} {name}: {config.source} has no {_TRAIN}.{name}: {nearest(name, known)}it is in "
                f"{', '.join(known)}"
            )
    if config.input == config.target:
        raise UserError(f"--input and --target are both {config.input}: name two of {', '.join(known)}")
    return config.input, config.target


def _stems(folder: Path, languages: tuple[str, str]) -> dict[str, str]:
    """Return the file names without suffix, by part: train; val and test where both languages have them."""
    stems = {"train": _TRAIN}
    held = next((each for each in _VALIDATION if _has(folder, each, languages)), None)
    if held is not None:
        stems["val"] = held
    if tests := _test_stems(folder, languages):
        stems["test"] = tests[0]
    return stems


def _test_stems(folder: Path, languages: tuple[str, str]) -> list[str]:
    suffix = f".{languages[0]}"
    stems = sorted(path.name.removesuffix(suffix) for path in folder.glob(f"test*{suffix}"))
    return [each for each in stems if _TEST.match(each) and _has(folder, each, languages)]


def _has(folder: Path, stem: str, languages: tuple[str, str]) -> bool:
    return all((folder / f"{stem}.{language}").is_file() for language in languages)


def _read_pairs(folder: Path, stem: str, languages: tuple[str, str]) -> tuple[Pairs, int]:
    """Return the pairs of one part, and how many were left out because a side is empty."""
    first, second = [folder / f"{stem}.{language}" for language in languages]
    left, right = ([line.strip() for line in read_lines(file)] for file in (first, second))
    if len(left) != len(right):
        raise UserError(
            f"data {folder}: {first.name} has {len(left)} lines and {second.name} {len(right)}: line i of one must be "
            f"the translation of line i of the other{_empty_end(first, left, second, right)}"
        )
    kept = [(a, b) for a, b in zip(left, right, strict=True) if a and b]
    if not kept:
        raise UserError(f"data {folder}: {first.name} and {second.name} hold no pair of sentences")
    return Pairs([a for a, _ in kept], [b for _, b in kept]), len(left) - len(kept)


def _empty_end(first: Path, left: list[str], second: Path, right: list[str]) -> str:
    """Say that all which one file has more than the other are empty lines at its end."""
    file, longer, length = (first, left, len(right)) if len(left) > len(right) else (second, right, len(left))
    more = longer[length:]
    if any(more):
        return ""
    return f"; the last {many(len(more), 'line')} of {file.name} {'is' if len(more) == 1 else 'are'} empty"


def _hold_out(by_part: dict[str, Pairs], request: DataRequest, sample_index: SampleIndex) -> str:
    """Move some training pairs to a part `val`, in place; returns what a user is told."""
    train = by_part["train"]
    divided = held_out_of_begun(request, sample_index, "test" in by_part, "pair")
    by_part["train"], by_part["val"] = train.take(divided.train), train.take(divided.evaluation)
    return (
        f"{len(divided.evaluation)} of {sample_index.begun} training pairs are held out to choose the best checkpoint "
        f"by: there is no val.{request.config.input}"
    )


def _source(request: DataRequest, by_part: dict[str, Pairs], notes: list[str], sample_index: SampleIndex) -> Source:
    train, later = by_part["train"], sample_index.count - sample_index.begun
    tokeniser = tokeniser_for(request, [*train.source, *train.target])
    marks, vocabulary = marks_of(tokeniser)
    encoded, cut = {}, 0
    begun = {**by_part, "train": train.take(np.arange(len(train) - later))}
    for name, pairs in begun.items():
        encoded[name], long = _encoded(pairs, tokeniser, marks)
        cut += long
    if cut:
        notes.append(f"{cut} sentences of more than {_MOST_TOKENS} tokens are cut")
    arrays = [*encoded.values()]
    source_length = max(each.values[IDS].shape[1] for each in arrays)
    target_length = max(each.targets.shape[1] for each in arrays)
    if later:  # cut to the longest of the others, for which the model was built
        encoded["train"], _ = _encoded(train, tokeniser, marks, (source_length, target_length))
    info = DataInfo(
        request.config.source, (), 1, 1, len(train), len(by_part["val"]), (),
        several={
            IDS: TensorSpec((source_length,), "int64", vocabulary, ragged=True),
            MASK: TensorSpec((source_length,), "int64", ragged=True),
            DECODER_IDS: TensorSpec((target_length,), "int64", vocabulary, ragged=True),
        },
        targets=TensorSpec((target_length,), "int64", vocabulary, ragged=True),
        task=TRANSLATION, tokeniser=tokeniser, marks=marks, stages=sample_index.trained_stages(len(train)),
    )  # fmt: skip
    notes.insert(0, f"{len(train):,} pairs to train on, of a common vocabulary of {vocabulary:,} tokens")
    return Source(encoded["train"], encoded["val"], info, tuple(notes), encoded.get("test"), sample_index)


def marks_of(tokeniser: Tokeniser) -> tuple[SentenceMarks, int]:
    """Return the ids that begin and end a sentence, and the size of the vocabulary with them.

    They are the tokeniser's own where it has some; else two ids behind its vocabulary.
    """
    count, ids = tokeniser.count, []
    for names in (_BEGINS, _ENDS):
        known = [each for name in names if (each := tokeniser.special(name)) is not None]
        ids.append(known[0] if known else count)
        count += not known
    return SentenceMarks(*ids), count


def _encoded(
    pairs: Pairs, tokeniser: Tokeniser, marks: SentenceMarks, most: tuple[int, int] = (_MOST_TOKENS, _MOST_TOKENS)
) -> tuple[TensorArray, int]:
    """Return pairs as ids, and how many sentences were cut.

    The source ends with the mark of the end, so that the model sees where it does; the decoder is given the target
    behind the mark of the beginning, and has to predict the target with the mark of the end.

    Args:
        most: tokens of a source and of a target, with their marks; what is longer is cut.
    """
    begin, end = np.array([marks.begin]), np.array([marks.end])

    both = tokeniser.encode(pairs.source), tokeniser.encode(pairs.target)
    long = sum(len(row) >= most_of for rows, most_of in zip(both, most, strict=True) for row in rows)
    sources, targets = ([row[: most_of - 1] for row in rows] for rows, most_of in zip(both, most, strict=True))
    ids = RaggedArray.of([np.concatenate([row, end]) for row in sources])
    mask = RaggedArray(np.ones_like(ids.values), np.cumsum(ids.lengths))
    given = RaggedArray.of([np.concatenate([begin, row]) for row in targets])
    wanted = RaggedArray.of([np.concatenate([row, end]) for row in targets], pad=NO_TARGET)
    return TensorArray({IDS: ids, MASK: mask, DECODER_IDS: given}, wanted), long
