"""Folders of text files: one folder per class, below `train/` with `val/` or `test/`, or in one folder that is split.

For `--task language-modelling` the files of a part are one long text, in the order of their names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from echelon.core.errors import UserError
from echelon.data.base import CLASS_NUMBER, DataInfo, DataOutline, DataRequest, Source
from echelon.data.class_folders import (
    IMAGE_FILES,
    SOUND_FILES,
    FileKind,
    FolderLinks,
    files_below,
    scan_classes,
    scan_like,
)
from echelon.data.columns import encode_texts
from echelon.data.images import TensorArray
from echelon.data.labelled_files import Labels
from echelon.data.order import Indices
from echelon.data.parts import TEST, TRAIN, VALIDATION, PartFolders, train_folder
from echelon.data.sample_index import NamedSampleIndex, SampleIndex
from echelon.data.sources.base import SourceKind, held_out_of_begun
from echelon.data.sources.text_file import SUFFIXES, TextParts, is_for_one_text, outline_of_text, read_text, text_source
from echelon.tasks.base import Encoding

TEXT_FILES = FileKind(SUFFIXES, "text files")
_OTHER = (*IMAGE_FILES.extensions, *SOUND_FILES.extensions)
TEXT_CLASSIFICATION = "text_classification"
_LOOKED_AT = 1000  # files and folders, until the first folder with files tells what all hold
_BETWEEN = "\n\n"  # documents of one long text


class Texts(SourceKind):
    """The path of a folder of text files."""

    form: ClassVar[str] = "a folder of texts"
    reads: ClassVar[tuple[str, ...]] = ("follow_links",)

    def takes(self, name: str) -> bool:
        """Whether the first folder with files that lies in a folder has texts in it, and no images or sounds."""
        path = Path(name).expanduser()
        return path.is_dir() and _begins_with_texts(path)

    def outline(self, request: DataRequest) -> DataOutline:
        """Return the task that texts with a class each are for, unless they are to be one text."""
        if is_for_one_text(request.encoding):
            return outline_of_text(request)
        return DataOutline(TEXT_CLASSIFICATION)

    def open(self, request: DataRequest) -> Source:
        """Read all files; where there is no part for evaluation, one is held out: by the seed, of one text its end."""
        path = Path(request.config.source).expanduser()
        if request.encoding not in (Encoding.AUTO, Encoding.TEXT) and not is_for_one_text(request.encoding):
            raise UserError(
                f"data {path} is a folder of text files, for --task text-classification or language-modelling, "
                f"not {request.task}"
            )
        links = FolderLinks(path, request.config.follow_links, TEXT_FILES)
        try:
            source = (_one_text if is_for_one_text(request.encoding) else _classified)(path, request, links)
        except OSError as error:
            links.check()
            raise UserError(f"data {error.filename}: {error.strerror}") from None
        return replace(source, notes=(*links.notes, *source.notes))


SOURCE = Texts


def _begins_with_texts(path: Path) -> bool:
    """Whether the first folder below a folder that has files of a kind that is known has texts alone.

    Files of the folder itself, and of its training part, are no samples: there, a text is a README.
    """
    looked_at, own = 0, (str(path), str(train_folder(path)))
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        looked_at += 1 + len(folders) + len(files)
        names = [name.lower() for name in files if not name.startswith(".")]
        known = [name for name in names if name.endswith((*SUFFIXES, *_OTHER))]
        if known and folder not in own:
            return not any(name.endswith(_OTHER) for name in known)
        if looked_at > _LOOKED_AT:
            return False
    return False


def _classified(path: Path, request: DataRequest, links: FolderLinks) -> Source:
    """Return texts with a class each, that of their folder."""
    folders = PartFolders.of(path)
    train, classes = scan_classes(path, folders.train, links)
    names = [train.names[i] for i in range(len(train))]
    sample_index = NamedSampleIndex.of(request.folder, request.config.source, classes, names)
    files = {TRAIN: train.subset(sample_index.order(names))}
    for name, folder in ((VALIDATION, folders.validation), (TEST, folders.test)):
        if folder:
            files[name] = scan_like(path, folder, links, classes)
    written = {
        name: WrittenTexts([read_text(Path(part.path(i))) for i in range(len(part))], part.labels)
        for name, part in files.items()
    }
    return classified_texts(request, written, classes, sample_index)


@dataclass(frozen=True)
class WrittenTexts:
    """The texts of a part, and the number of each one's class, `(N,)`."""

    texts: list[str]
    labels: Labels

    def __len__(self) -> int:
        return len(self.texts)

    def some(self, chosen: Indices) -> WrittenTexts:
        """Return some of them."""
        return WrittenTexts([self.texts[i] for i in chosen.tolist()], self.labels[chosen])


def classified_texts(
    request: DataRequest, written: Mapping[str, WrittenTexts], classes: tuple[str, ...], sample_index: SampleIndex
) -> Source:
    """Return texts with a class each as tokens; where there is no part for validation, one is held out by the seed.

    Args:
        written: the texts of `train`, and of `val` and `test` where they are there.

    Raises:
        UserError: all texts to train on are empty, or there is one alone.
    """
    notes: tuple[str, ...] = ()
    train, held, test = written[TRAIN], written.get(VALIDATION), written.get(TEST)
    if held is None:
        divided = held_out_of_begun(request, sample_index, test is not None, "text")
        train, held, notes = train.some(divided.train), train.some(divided.evaluation), divided.notes
    used = [part for part in (train, held, test) if part is not None]
    texts = [text for part in used for text in part.texts]
    if not any(text.strip() for text in train.texts):
        raise UserError(f"data {request.config.source}: all texts to train on are empty")
    column = encode_texts(request, texts, len(train), len(train) - (sample_index.count - sample_index.begun))
    ends = np.cumsum([0, *map(len, used)])
    samples = [
        TensorArray({name: ids.subset(np.arange(a, b)) for name, ids in column.inputs.items()}, part.labels)
        for part, a, b in zip(used, ends[:-1], ends[1:], strict=True)
    ]
    info = DataInfo(
        request.config.source, classes, 1, 1, len(train), len(held),
        tuple(np.bincount(train.labels, minlength=len(classes)).tolist()),
        several=column.specs, targets=CLASS_NUMBER, task=TEXT_CLASSIFICATION, tokeniser=column.tokeniser,
        stages=sample_index.trained_stages(len(train)),
    )  # fmt: skip
    note = f"texts are cut into tokens, of a vocabulary of {column.tokeniser.count:,}"
    return Source(samples[0], samples[1], info, (*notes, note), samples[2] if test is not None else None, sample_index)


def _one_text(path: Path, request: DataRequest, links: FolderLinks) -> Source:
    """Return the files of each part as one text."""
    folders = PartFolders.of(path)
    links.count(path / part for part in (folders.train, folders.validation, folders.test) if part)
    links.check()
    text = _joined(path / folders.train, links)
    held, last = (_joined(path / part, links) if part else "" for part in (folders.validation, folders.test))
    links.check()
    return text_source(request, TextParts.of(request, text, held, last))


def _joined(folder: Path, links: FolderLinks) -> str:
    """Return the texts below a folder, one after the other."""
    names = files_below(folder, "", links, ())
    if not names:
        raise UserError(f"data {folder}: it holds no {TEXT_FILES.plural}")
    return _BETWEEN.join(read_text(folder / name).strip("\n") for name in names)
