"""Tar shards (WebDataset layout) of images with their classes: below `train/` with `val/` or `test/`, or in one folder.

A sample is the members of one name: `000017.jpg` with `000017.cls` (a number), `.txt` (a name) or `.json` (a field
`label`, or the one that `--target` names). Shards are read through once to learn where each member lies; then their
samples are shuffled, divided and resumed as those of a folder are. Compressed shards are refused.

Needs: plain `.tar` files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.errors import UserError
from echelon.data.base import DataOutline, DataRequest, Source
from echelon.data.class_folders import FolderLinks
from echelon.data.file_names import COMPRESSED, TABLES, is_tar
from echelon.data.images import ImageRanges
from echelon.data.labelled_files import FileNames, FileRanges, OpenFiles
from echelon.data.parts import TEST, TRAIN, VALIDATION, by_part, part_of, subfolders, train_folder
from echelon.data.sample_index import NamedSampleIndex
from echelon.data.sources.base import SourceKind, grown_images, held_out_of_begun
from echelon.data.sources.sounds import classified_sounds
from echelon.data.sources.texts import TEXT_CLASSIFICATION, WrittenTexts, classified_texts
from echelon.data.sources.transcripts import Recordings, plain_text, transcribed
from echelon.data.tar_index import (
    IMAGES,
    SOUNDS,
    TEXTS,
    MemberChoice,
    ShardIndex,
    compressed_shard,
    index_shards,
    kind_of_shard,
)
from echelon.tasks.base import Encoding

_WORDS = re.compile(r"[a-z]+")


class Shards(SourceKind):
    """The path of a folder of tar shards, or of one shard."""

    form: ClassVar[str] = "a folder of tar shards"
    reads: ClassVar[tuple[str, ...]] = ("input", "target", "follow_links")
    is_read_by_url: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("torchvision",)

    def takes(self, name: str) -> bool:
        """Whether it is a tar archive, or a folder with some, in itself or in its `train/`, and no other folders."""
        path = Path(name).expanduser()
        return is_tar(path.name) if not path.is_dir() else bool(_shards_in(path) or _shards_in(train_folder(path)))

    def check(self, name: str) -> None:
        """Refuse shards that are not there, and those that are compressed.

        Raises:
            UserError: names it.
        """
        path = Path(name).expanduser()
        if not path.exists():
            raise UserError(f"data {path}: no such file")
        for files in _parts_of(path).values():
            for file in files:
                if how := COMPRESSED.get(file.suffix.lower()):
                    raise UserError(compressed_shard(file, how))

    def outline(self, request: DataRequest) -> DataOutline | None:
        """Return the task that sounds or texts are for, as the first sample tells; None: they are images."""
        files = _parts_of(request.path).get(TRAIN, []) if request.path.exists() else []
        kind = kind_of_shard(files[0], request.config.input) if files else ""
        if kind == SOUNDS:
            said = request.encoding is Encoding.TRANSCRIPTS
            if request.encoding is Encoding.AUTO:  # by all texts: the index that is made is kept
                members = MemberChoice(request.config.input, request.config.target)
                said = _is_said(index_shards(files, members, _cache_of(request)))
            return DataOutline("speech_recognition" if said else "speech_classification")
        return DataOutline(TEXT_CLASSIFICATION) if kind == TEXTS else None

    def open(self, request: DataRequest) -> Source:
        """Open the shards; where they have no part for evaluation, samples are held out by the seed."""
        source = request.config.source
        self.check(str(request.path))
        parts = _parts_of(request.path)
        if TRAIN not in parts:
            raise UserError(f"data {source}: there is {next(iter(parts))} but no train beside it")
        links = FolderLinks(request.path, request.config.follow_links)
        links.count(file for files in parts.values() for file in files)
        links.check()
        members = MemberChoice(request.config.input, request.config.target)
        try:
            indexes = {part: index_shards(files, members, _cache_of(request)) for part, files in parts.items()}
        except OSError as error:
            raise UserError(f"data {error.filename}: {error.strerror}") from None
        opened = _of_kind(_Shards(request, indexes))
        return replace(opened, notes=(*links.notes, *opened.notes))


SOURCE = Shards


def _cache_of(request: DataRequest) -> Path:
    return Path(request.config.root).expanduser() / "shards"


def _of_kind(shards: _Shards) -> Source:
    """Return what the shards hold, as the task wants it.

    Raises:
        UserError: the task is for other data.
    """
    wanted, index = shards.request.encoding, shards.indexes[TRAIN]
    if index.kind == SOUNDS and (wanted is Encoding.TRANSCRIPTS or (wanted is Encoding.AUTO and _is_said(index))):
        if index.spoken:
            return shards.recordings()
        raise UserError(f"data {shards.path}: a transcript of each sound is to be in a .txt beside it")
    known = {
        IMAGES: (Encoding.CLASSES, shards.images),
        SOUNDS: (Encoding.SPEECH, shards.sounds),
        TEXTS: (Encoding.TEXT, shards.texts),
    }
    encoding, opened = known[index.kind]
    if wanted not in (Encoding.AUTO, encoding):
        raise UserError(
            f"data {shards.path} is shards of {index.kind} with classes, which --task {shards.request.task} does not "
            "take"
        )
    return opened()


def _shards_in(path: Path) -> list[Path]:
    """Return the shards of a folder, sorted by name; none where other data lies beside them."""
    if not path.is_dir():
        return []
    seen = [each for each in path.iterdir() if not each.name.startswith(".")]
    others = any(each.suffix.lower() in TABLES or (not part_of(each.name) and each.is_dir()) for each in seen)
    return [] if others else sorted(each for each in seen if is_tar(each.name) and each.is_file())


def _parts_of(path: Path) -> dict[str, list[Path]]:
    """Return the shards of each part: `train`, and `val` and `test` where they are there.

    Parts are folders, or words in the shards' names, such as `set-train-000.tar`; else all are `train`.

    Raises:
        UserError: some names tell their part, and others do not.
    """
    if not path.is_dir():
        return {TRAIN: [path]}
    with_shards = [name for name in subfolders(path) if part_of(name) and _shards_in(path / name)]
    if with_shards:
        return {part: _shards_in(path / name) for part, name in by_part(path, with_shards).items()}
    files = _shards_in(path)
    named: dict[str, list[Path]] = {}
    for file in files:
        words = _WORDS.findall(file.name.lower())
        named.setdefault(next(filter(None, map(part_of, words)), ""), []).append(file)
    if set(named) <= {""}:
        return {TRAIN: files}
    if "" in named:
        raise UserError(f"data {path}: is {named[''][0].name} of train, val or test? Other shards there say it by name")
    return {part: named[part] for part in (TRAIN, VALIDATION, TEST) if part in named}


@dataclass(frozen=True)
class _Shards:
    """The files in the shards of each part, with what stands beside each of them."""

    request: DataRequest
    indexes: Mapping[str, ShardIndex]

    @property
    def path(self) -> str:
        """What the data is called."""
        return self.request.config.source

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names by label."""
        return tuple(_classes(self.path, self.indexes[TRAIN]))

    @cached_property
    def members(self) -> list[str]:
        """Names of the training samples, each with its shard, by which a run knows them."""
        files = _files(self.indexes[TRAIN])
        return [f"{Path(files.files.paths[files.file[i]]).name}: {files.names[i]}" for i in range(len(files))]

    def sample_index(self, classes: tuple[str, ...]) -> NamedSampleIndex:
        """Return how samples are numbered in the run."""
        return NamedSampleIndex.of(self.request.folder, self.path, classes, self.members)

    def of_classes(self) -> tuple[dict[str, FileRanges], NamedSampleIndex]:
        """Return the files of each part with their classes, and how those of training are numbered."""
        parts = {part: _labelled(self.path, index, self.classes) for part, index in self.indexes.items()}
        sample_index = self.sample_index(self.classes)
        if sample_index.is_kept:
            parts[TRAIN] = parts[TRAIN].subset(sample_index.order(self.members))
        return parts, sample_index

    def images(self) -> Source:
        """Return images with classes."""
        files, sample_index = self.of_classes()
        parts = {part: ImageRanges(**vars(each)) for part, each in files.items()}
        train, validation, test = parts[TRAIN], parts.get(VALIDATION), parts.get(TEST)
        notes: tuple[str, ...] = ()
        if validation is None:
            divided = held_out_of_begun(self.request, sample_index, test is not None)
            train, validation, notes = train.subset(divided.train), train.subset(divided.evaluation), divided.notes
        grown = grown_images(self.request, train, validation, self.classes, sample_index)
        return replace(grown, test=test, notes=notes, sample_index=sample_index)

    def sounds(self) -> Source:
        """Return sounds with classes."""
        parts, sample_index = self.of_classes()
        return classified_sounds(self.request, parts, self.classes, sample_index)

    def texts(self) -> Source:
        """Return texts with classes."""
        parts, sample_index = self.of_classes()
        written = {part: WrittenTexts(_texts_in(files), files.labels) for part, files in parts.items()}
        return classified_texts(self.request, written, self.classes, sample_index)

    def recordings(self) -> Source:
        """Return sounds with what is said in them."""
        parts = {
            part: Recordings(
                _files(index), index.table["key"].to_pylist(), list(map(plain_text, index.table["label"].to_pylist()))
            )
            for part, index in self.indexes.items()
        }
        sample_index = self.sample_index(())
        train = parts[TRAIN].some(sample_index.order(self.members))
        return transcribed(self.request, train, parts.get(VALIDATION), parts.get(TEST), sample_index)


def _texts_in(files: FileRanges) -> list[str]:
    """Return the texts of files.

    Raises:
        UserError: one is not UTF-8.
    """
    texts = []
    for i in range(len(files)):
        try:
            texts.append(files.contents(i).decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UserError(f"data {files.path(i)}: it is not UTF-8 (byte {error.start}): convert it") from error
    return texts


def _is_said(index: ShardIndex) -> bool:
    """Whether texts beside sounds are what is said in them, and no names of classes: nearly each is another one."""
    return index.spoken and 2 * len(pc.unique(index.table["label"])) > len(index.table) + 2


def _classes(path: str, index: ShardIndex) -> Sequence[str]:
    """Return the classes of the training shards; whole numbers are in the order of numbers, names of the alphabet.

    Raises:
        UserError: there is one alone, or another one in nearly each sample.
    """
    found: list[str] = pc.unique(index.table["label"]).to_pylist()
    count = len(index.table)
    if len(found) < 2:
        raise UserError(f"data {path}: all {count} samples have the class {found[0]!r}: are these all shards?")
    if 2 * len(found) > count + 2:
        raise UserError(f"data {path}: {count} samples have {len(found)} different labels: are these classes?")
    return sorted(found, key=int) if all(re.fullmatch(r"-?\d+", each) for each in found) else sorted(found)


def _labelled(path: str, index: ShardIndex, classes: Sequence[str]) -> FileRanges:
    places = pc.index_in(index.table["label"], value_set=pa.array(classes, pa.string()))
    if places.null_count:
        row = pc.index(pc.is_null(places), True).as_py()
        shard, key, label = (index.table[name][row].as_py() for name in ("shard", "key", "label"))
        raise UserError(
            f"data {index.shards[shard]}: sample {key} has the class {label!r}, which the train part has not"
        )
    return replace(_files(index), labels=places.to_numpy().astype("int64"))


def _files(index: ShardIndex) -> FileRanges:
    shard, offset, size = (index.table[name].to_numpy() for name in ("shard", "offset", "size"))
    names = FileNames(index.table["key"].to_pylist())
    return FileRanges(OpenFiles(index.shards, index.sizes), names, shard, offset, size, np.zeros(len(shard), np.int64))
