"""Where the samples of tar shards lie: found once for each shard, and kept below the data's root.

The layout is WebDataset's (Aizman, Maltby, Breuel, "High performance I/O for large scale deep learning", 2019,
arXiv:2001.01858): members of the same name up to its first dot are one sample, such as `000017.jpg` and `000017.cls`.
With the places known, samples are read in any order, and a rank reads the bytes of its own alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import feather

from echelon.core.errors import UserError
from echelon.data.cache import locked
from echelon.data.class_folders import IMAGE_FILES, SOUND_FILES
from echelon.data.images import TARGET_KEYS

_FORMAT = 2  # of what is cached
_INDEXING_S = 3600.0
_BLOCK = tarfile.BLOCKSIZE
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_CLASS, _JSON, _TEXT = "cls", "json", "txt"
IMAGES, SOUNDS, TEXTS = "images", "sounds", "texts"
_EXTENSIONS = {
    kind: tuple(extension[1:] for extension in files.extensions)
    for kind, files in ((IMAGES, IMAGE_FILES), (SOUNDS, SOUND_FILES))
} | {TEXTS: (_TEXT,)}
_FIELDS = (*TARGET_KEYS, "cls", "class")
_MOST_LABEL_BYTES = 1 << 20


@dataclass(frozen=True)
class MemberChoice:
    """Which members of a sample are used.

    Attributes:
        content: extension of the image, sound or text, without its dot; empty: the one that is of such.
        field: of the JSON member, that holds the class; empty: the class is wherever it is found.
    """

    content: str = ""
    field: str = ""


@dataclass(frozen=True)
class ShardIndex:
    """The samples of some shards, in the order of the shards and of their members.

    Attributes:
        shards: paths.
        sizes: of the shards in bytes, when they were read.
        table: `key` and `label` (string) of each sample, `shard`, `offset` and `size` (int64) of what it holds.
        kind: of what they hold, `IMAGES`, `SOUNDS` or `TEXTS`.
        spoken: whether labels are texts beside sounds, which may be what is said in them.
    """

    shards: tuple[str, ...]
    sizes: tuple[int, ...]
    table: pa.Table
    kind: str = IMAGES
    spoken: bool = False


class _Place(NamedTuple):
    offset: int
    size: int


_Sample = Mapping[str, _Place]  # by extension


def index_shards(files: Sequence[Path], members: MemberChoice, cache: Path) -> ShardIndex:
    """Return the samples of shards; each shard is read through once, by one process of a machine.

    A shard that has changed since (size or time of its last change) is read again.

    Args:
        files: shards, in the order of their samples.
        cache: folder of what is found.

    Raises:
        UserError: a shard cannot be read, is compressed or cut off; a sample lacks a member or has one too many.
    """
    sizes = tuple(file.stat().st_size for file in files)
    kept = [cache / f"{_digest(file, members)}.arrow" for file in files]
    if not all(each.is_file() for each in kept):
        with locked(cache / ".lock", _INDEXING_S, f"{cache}: another process has been reading shards for an hour"):
            for file, index in zip(files, kept, strict=True):
                if not index.is_file():
                    _write(index, _read_shard(file, members))
    tables = [feather.read_table(index, memory_map=False) for index in kept]
    _refuse_mixed(files, tables)
    numbered = [
        table.append_column("shard", pa.array(np.full(len(table), number, np.int64)))
        for number, table in enumerate(tables)
    ]
    facts = {name: value.decode() for name, value in tables[0].schema.metadata.items()}
    kind = facts[b"kind"]
    return ShardIndex(
        tuple(str(file) for file in files), sizes, pa.concat_tables(numbered).replace_schema_metadata(), kind,
        kind == SOUNDS and facts[b"labels"] == _TEXT,
    )  # fmt: skip


def kind_of_shard(file: Path, content: str = "") -> str:
    """Return what the first sample of a shard holds, `IMAGES`, `SOUNDS` or `TEXTS`; empty: that is not known.

    Args:
        content: as in `MemberChoice`.
    """
    first, extensions = "", []
    try:
        with tarfile.open(file, mode="r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, dot, extension = name.partition(".")
                if not member.isreg() or not stem or not dot:
                    continue
                first = first or f"{folder}/{stem}"
                if f"{folder}/{stem}" != first:
                    break
                extensions.append(extension.lower())
    except (tarfile.TarError, OSError):
        return ""  # opening says why
    return _kind_of(extensions, MemberChoice(content))


def _digest(file: Path, members: MemberChoice) -> str:
    found = file.stat()
    facts = (_FORMAT, os.path.realpath(file), found.st_size, found.st_mtime_ns, members.content, members.field)
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _write(index: Path, table: pa.Table) -> None:
    """Write a shard's index, whole or not at all."""
    unfinished = index.with_suffix(".unfinished")
    feather.write_feather(table, unfinished, compression="uncompressed")
    unfinished.replace(index)


def _refuse_mixed(files: Sequence[Path], tables: Sequence[pa.Table]) -> None:
    for file, table in zip(files, tables, strict=True):
        held, first = (each.schema.metadata[b"kind"].decode() for each in (table, tables[0]))
        if held != first:
            raise UserError(f"data {file}: it holds {held}, and {files[0]} {first}: use shards of one kind")
    kinds = [table.schema.metadata[b"labels"].decode() for table in tables]
    for file, kind in zip(files, kinds, strict=True):
        if kind != kinds[0]:
            raise UserError(
                f"data {file}: its classes are in .{kind}, those of {files[0]} in .{kinds[0]}: use one kind"
            )


def _read_shard(file: Path, members: MemberChoice) -> pa.Table:
    with file.open("rb") as stream:
        head = stream.read(8)
        for magic, name in _MAGIC.items():
            if head.startswith(magic):
                raise UserError(compressed_shard(file, name))
        samples = _samples_of(file)
        if not samples:
            raise UserError(f"data {file}: it holds no samples, which are members such as 000017.jpg and 000017.cls")
        kind = _kind_of(list(next(iter(samples.values()))), members) or IMAGES
        places = [_content_member(file, key, sample, members, kind) for key, sample in samples.items()]
        labels, label_of = _label_member(file, stream.fileno(), samples, members, kind)
        columns = {
            "key": pa.array([key.encode(errors="replace").decode() for key in samples], pa.string()),
            "offset": pa.array([place.offset for place in places], pa.int64()),
            "size": pa.array([place.size for place in places], pa.int64()),
            "label": pa.array([label_of(key, sample) for key, sample in samples.items()], pa.string()),
        }
    return pa.table(columns).replace_schema_metadata({"labels": labels, "kind": kind})


def compressed_shard(file: Path, how: str) -> str:
    """Return why a compressed shard is refused, and what works."""
    unpack = {"gzip": "gunzip", "bzip2": "bunzip2", "xz": "unxz", "zstd": "unzstd"}[how]
    return (
        f"data {file}: it is compressed ({how}), and no sample can be read out of its middle: "
        f"unpack it to a plain .tar ({unpack} {file.name}), images are compressed in themselves"
    )


def _samples_of(file: Path) -> dict[str, dict[str, _Place]]:
    """Return the members of each sample by extension, and samples by key, in the order of the shard.

    Raises:
        UserError: it is no tar archive, is cut off, or has a member twice or one that is no plain file.
    """
    samples: dict[str, dict[str, _Place]] = {}
    try:
        with tarfile.open(file, mode="r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, dot, extension = name.partition(".")
                if member.isdir() or not stem or not dot:
                    continue  # folders, hidden files, and files without an extension are of no sample
                if not member.isreg() or member.issparse():
                    raise UserError(
                        f"data {file}: member {member.name} is a link or no plain file: pack the file itself"
                    )
                key, extension = f"{folder}/{stem}" if folder else stem, extension.lower()
                if extension in samples.setdefault(key, {}):
                    raise UserError(
                        f"data {file}: member {key}.{extension} is there twice: each sample needs its own name"
                    )
                samples[key][extension] = _Place(member.offset_data, member.size)
            end = archive.offset
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"data {file}: {_why_unreadable(file, error)}") from error
    _refuse_cut(file, end)
    return samples


def _why_unreadable(file: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"it cannot be read ({error.strerror})"
    if "unexpected end of data" in str(error):
        return "it ends within a member, as if it were cut off: copy it again"
    return f"this is no tar archive that can be read ({str(error).splitlines()[0]})"


def _refuse_cut(file: Path, end: int) -> None:
    """Refuse a shard without the block of zeros that ends an archive: where it is cut, `tarfile` stops without a word.

    Args:
        end: where reading stopped.

    Raises:
        UserError: something else is there, or nothing.
    """
    with file.open("rb") as stream:
        stream.seek(end)
        block = stream.read(_BLOCK)
    if len(block) < _BLOCK:
        raise UserError(f"data {file}: it has no end-of-archive block, as if it were cut off: copy or pack it again")
    if block.strip(b"\0"):
        raise UserError(f"data {file}: at byte {end} is no member's header: the archive is damaged, pack it again")


def _kind_of(extensions: Sequence[str], members: MemberChoice) -> str:
    """Return what a sample with these members holds; empty: nothing that is known.

    A text beside an image or a sound is its label, and alone with a class it is what is learnt from.
    """
    if members.content:
        wanted = members.content.lower().rpartition(".")[2]
        return next((kind for kind, known in _EXTENSIONS.items() if wanted in known), IMAGES)
    found = [kind for kind in (IMAGES, SOUNDS) if any(each in _EXTENSIONS[kind] for each in extensions)]
    if not found and _TEXT in extensions and {_CLASS, _JSON} & {*extensions}:
        return TEXTS
    return found[0] if found else ""


_NOUNS = {IMAGES: "image (.jpg, .png, ...)", SOUNDS: "sound (.wav, .flac, ...)", TEXTS: "text (.txt)"}


def _content_member(file: Path, key: str, sample: _Sample, members: MemberChoice, kind: str) -> _Place:
    wanted = (members.content.lower().lstrip("."),) if members.content else _EXTENSIONS[kind]
    found = [extension for extension in sample if extension in wanted]
    if len(found) == 1:
        return sample[found[0]]
    has = ", ".join(f".{extension}" for extension in sample)
    if found:
        raise UserError(f"data {file}: sample {key} has several {kind} ({has}): name one with --input {found[0]}")
    what = f".{wanted[0]}" if members.content else _NOUNS[kind]
    raise UserError(f"data {file}: sample {key} has no {what}, only {has}{_two_dots(sample)}")


def _two_dots(sample: _Sample) -> str:
    """Say how a name with two dots is read, where one of a sample ends as an image or a sound does."""
    known = [e for e in sample if "." in e and e.rpartition(".")[2] in (*_EXTENSIONS[IMAGES], *_EXTENSIONS[SOUNDS])]
    return f": what follows a name's first dot is its kind, so name one with --input {known[0]}" if known else ""


def _label_member(
    file: Path, descriptor: int, samples: Mapping[str, _Sample], members: MemberChoice, kind: str
) -> tuple[str, Any]:
    """Return the extension that classes are in, and a function of (key, sample) that reads one.

    The first sample tells which it is; all others must have it.
    """
    key, first = next(iter(samples.items()))
    reader = _LabelReader(file, descriptor, members.field)
    if members.field and _JSON not in first:
        has = ", ".join(f".{each}" for each in first)
        raise UserError(
            f"data {file}: --target {members.field} is a field of a sample's .json, and sample {key} has only {has}"
        )
    if members.field or (_CLASS not in first and _JSON in first and reader.field_of(key, first)):
        if not members.field:
            reader = _LabelReader(file, descriptor, reader.field_of(key, first))
        return _JSON, reader.from_json
    extension = next((each for each in (_CLASS, _TEXT) if each in first and (each != _TEXT or kind != TEXTS)), "")
    if not extension:
        has = ", ".join(f".{each}" for each in first)
        hint = "; --target names the field of its .json" if _JSON in first else ""
        raise UserError(f"data {file}: sample {key} has no class (.cls, .txt, or .json with a label), only {has}{hint}")
    return extension, lambda key, sample: reader.text(key, sample, extension)


class _LabelReader:
    """Reads the classes of a shard's samples."""

    def __init__(self, file: Path, descriptor: int, field: str) -> None:
        self._file, self._descriptor, self._field = file, descriptor, field

    def text(self, key: str, sample: _Sample, extension: str) -> str:
        """Return what a member of text says, without white space around it."""
        if extension not in sample:
            has = ", ".join(f".{each}" for each in sample)
            raise UserError(f"data {self._file}: sample {key} has no .{extension} as the first sample has, only {has}")
        offset, size = sample[extension]
        try:
            text = os.pread(self._descriptor, min(size, _MOST_LABEL_BYTES), offset).decode().strip()
        except UnicodeDecodeError:
            text = ""
        if not text:
            raise UserError(f"data {self._file}: {key}.{extension} is empty, or no text")
        return text

    def from_json(self, key: str, sample: _Sample) -> str:
        """Return the class in a JSON member."""
        value = self._values(key, sample).get(self._field)
        if not isinstance(value, (str, int)) or value == "":
            kind = "no field" if value is None else f"{type(value).__name__}, and no class, in"
            raise UserError(f"data {self._file}: {key}.{_JSON} has {kind} {self._field!r}: --target names another")
        return str(value)

    def field_of(self, key: str, sample: _Sample) -> str:
        """Return the name of the field that a class usually has; empty: there is none."""
        values = self._values(key, sample)
        return next((field for field in _FIELDS if isinstance(values.get(field), (str, int))), "")

    def _values(self, key: str, sample: _Sample) -> Mapping[str, Any]:
        try:
            values = json.loads(self.text(key, sample, _JSON))
        except ValueError as error:
            raise UserError(f"data {self._file}: {key}.{_JSON} is no JSON ({error})") from error
        if not isinstance(values, dict):
            raise UserError(f"data {self._file}: {key}.{_JSON} holds a {type(values).__name__}, and no fields")
        return values
