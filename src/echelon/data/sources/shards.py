"""Tar shards (WebDataset layout) of images with their classes: below `train/` with `val/` or `test/`, or in one folder.

A sample is the members of one name: `000017.jpg` with `000017.cls` (a number), `.txt` (a name) or `.json` (a field
`label`, or the one that `--target` names). Shards are read through once to learn where each member lies; then their
samples are shuffled, divided and resumed as those of a folder are. Compressed shards are refused.

Needs: plain `.tar` files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.errors import UserError
from echelon.data.base import DataRequest, Source
from echelon.data.class_folders import FolderLinks
from echelon.data.file_names import COMPRESSED, TABLES, is_tar
from echelon.data.images import FileNames, ImageRanges, OpenFiles
from echelon.data.parts import by_part, part_of, subfolders, train_folder
from echelon.data.sample_index import NamedSampleIndex
from echelon.data.sources.base import SourceKind, grown_images, held_out_of_begun
from echelon.data.tar_index import (
    MemberChoice,
    ShardIndex,
    compressed_shard,
    index_shards,
)
from echelon.tasks.base import Encoding

_WORDS = re.compile(r"[a-z]+")


class Shards(SourceKind):
    """The path of a folder of tar shards, or of one shard."""

    form: ClassVar[str] = "a folder of tar shards"
    is_read_by_url: ClassVar[bool] = True

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

    def open(self, request: DataRequest) -> Source:
        """Open the shards; where they have no part for evaluation, samples are held out by the seed."""
        source = request.config.source
        if request.encoding not in (Encoding.AUTO, Encoding.CLASSES):
            raise UserError(
                f"data {source} is shards of images with classes, which --task {request.task} does not take"
            )
        self.check(str(request.path))
        parts = _parts_of(request.path)
        if "train" not in parts:
            raise UserError(f"data {source}: there is {next(iter(parts))} but no train beside it")
        links = FolderLinks(request.path, request.config.follow_links)
        links.count(file for files in parts.values() for file in files)
        links.check()
        members = MemberChoice(request.config.input, request.config.target)
        cache = Path(request.config.root).expanduser() / "shards"
        try:
            indexes = {part: index_shards(files, members, cache) for part, files in parts.items()}
        except OSError as error:
            raise UserError(f"data {error.filename}: {error.strerror}") from None
        opened = _source(request, indexes)
        return replace(opened, notes=(*links.notes, *opened.notes))


SOURCE = Shards


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
        return {"train": [path]}
    with_shards = [name for name in subfolders(path) if part_of(name) and _shards_in(path / name)]
    if with_shards:
        return {part: _shards_in(path / name) for part, name in by_part(path, with_shards).items()}
    files = _shards_in(path)
    named: dict[str, list[Path]] = {}
    for file in files:
        words = _WORDS.findall(file.name.lower())
        named.setdefault(next(filter(None, map(part_of, words)), ""), []).append(file)
    if set(named) <= {""}:
        return {"train": files}
    if "" in named:
        raise UserError(f"data {path}: is {named[''][0].name} of train, val or test? Other shards there say it by name")
    return {part: named[part] for part in ("train", "val", "test") if part in named}


def _source(request: DataRequest, indexes: Mapping[str, ShardIndex]) -> Source:
    """Return the parts as images, with what is held out where some are not there."""
    path = request.config.source
    classes = _classes(path, indexes["train"])
    parts = {part: _images(path, index, classes) for part, index in indexes.items()}
    train, validation, test = parts["train"], parts.get("val"), parts.get("test")
    names = tuple(str(name) for name in classes)
    members = [f"{Path(train.files.paths[train.file[i]]).name}: {train.names[i]}" for i in range(len(train))]
    sample_index = NamedSampleIndex.of(request.folder, path, names, members)
    if sample_index.is_kept:
        train = train.subset(sample_index.order(members))
    notes: tuple[str, ...] = ()
    if validation is None:
        divided = held_out_of_begun(request, sample_index, test is not None)
        train, validation, notes = train.subset(divided.train), train.subset(divided.evaluation), divided.notes
    return replace(
        grown_images(request, train, validation, names, sample_index), test=test, notes=notes, sample_index=sample_index
    )


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


def _images(path: str, index: ShardIndex, classes: Sequence[str]) -> ImageRanges:
    places = pc.index_in(index.table["label"], value_set=pa.array(classes, pa.string()))
    if places.null_count:
        row = pc.index(pc.is_null(places), True).as_py()
        shard, key, label = (index.table[name][row].as_py() for name in ("shard", "key", "label"))
        raise UserError(
            f"data {index.shards[shard]}: sample {key} has the class {label!r}, which the train part has not"
        )
    shard, offset, size = (index.table[name].to_numpy() for name in ("shard", "offset", "size"))
    names = FileNames(index.table["key"].to_pylist())
    labels = places.to_numpy().astype("int64")
    return ImageRanges(OpenFiles(index.shards, index.sizes), names, shard, offset, size, labels)
