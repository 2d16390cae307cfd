"""Folders of sound files: one folder per class, below `train/` with `val/` and `test/`, or in one that is split."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from echelon.core.errors import UserError
from echelon.data.base import DataInfo, DataOutline, DataRequest, Source
from echelon.data.class_folders import IMAGE_FILES, SOUND_FILES, FolderLinks, scan_classes, scan_like
from echelon.data.labelled_files import AnyFiles
from echelon.data.parts import TEST, TRAIN, VALIDATION, PartFolders, train_folder
from echelon.data.sample_index import NamedSampleIndex, SampleIndex
from echelon.data.sound_features import open_features
from echelon.data.sounds import SoundFiles, feature_notes, measured
from echelon.data.sources.base import SourceKind, held_out_of_begun
from echelon.data.sources.text_file import SUFFIXES
from echelon.tasks.base import Encoding

_KNOWN = (*IMAGE_FILES.extensions, *SOUND_FILES.extensions, *SUFFIXES)
_LOOKED_AT = 1000  # files and folders, until the first one tells what a folder holds


class Sounds(SourceKind):
    """The path of a folder of sound files."""

    form: ClassVar[str] = "a folder of sound files"
    reads: ClassVar[tuple[str, ...]] = ("follow_links",)

    def takes(self, name: str) -> bool:
        """Whether the first file below a folder is a sound, and the first sounds have no transcripts."""
        path = Path(name).expanduser()
        is_sound = path.is_dir() and first_file(path).lower().endswith(SOUND_FILES.extensions)
        return is_sound and not has_transcripts(path)

    def outline(self, request: DataRequest) -> DataOutline:
        """Return the task that sounds are for."""
        return DataOutline("speech_classification")

    def open(self, request: DataRequest) -> Source:
        """Open the folder; where it has no part for evaluation, one is held out by the seed."""
        if request.encoding is Encoding.TRANSCRIPTS:
            raise UserError(
                f"data {request.config.source}: its sounds have no transcripts: write what is said in 1.wav to 1.txt "
                "beside it, or to LibriSpeech's lists (NAME.trans.txt)"
            )
        if request.encoding not in (Encoding.AUTO, Encoding.SPEECH):
            raise UserError(f"data {request.config.source} is a folder of sounds: --task {request.task} is for others")
        path = Path(request.config.source).expanduser()
        links = FolderLinks(path, request.config.follow_links, SOUND_FILES)
        try:
            source = _open(path, request, links)
            return replace(source, notes=(*links.notes, *source.notes))
        except OSError as error:
            links.check()
            raise UserError(f"data {error.filename}: {error.strerror}") from None


SOURCE = Sounds


def first_file(path: Path) -> str:
    """Return the name of the first image, sound or text below a folder; empty: none is soon found.

    Left out are hidden ones, and what lies in no class's folder: lists and a README.
    """
    looked_at, own = 0, (str(path), str(train_folder(path)))
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        known = sorted(name for name in files if not name.startswith(".") and name.lower().endswith(_KNOWN))
        looked_at += 1 + len(folders)
        if known and (folder not in own or not folders):
            return known[0]
        if looked_at > _LOOKED_AT:
            return ""
    return ""


def has_transcripts(path: Path) -> bool:
    """Whether the first folder of sounds below a folder has a text beside one of them, or a list of transcripts."""
    looked_at = 0
    for _, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        seen = [name.lower() for name in files if not name.startswith(".")]
        sounds = {name.rpartition(".")[0] for name in seen if name.endswith(SOUND_FILES.extensions)}
        if sounds:
            texts = [name.removesuffix(".txt") for name in seen if name.endswith(".txt")]
            return any(name in sounds or name.endswith(".trans") for name in texts)
        looked_at += 1 + len(folders) + len(seen)
        if looked_at > _LOOKED_AT or any(name.endswith(IMAGE_FILES.extensions) for name in seen):
            return False
    return False


def _open(path: Path, request: DataRequest, links: FolderLinks) -> Source:
    folders = PartFolders.of(path)
    files, classes = scan_classes(path, folders.train, links)
    names = [files.names[i] for i in range(len(files))]
    sample_index = NamedSampleIndex.of(request.folder, request.config.source, classes, names)
    parts: dict[str, AnyFiles] = {TRAIN: files.subset(sample_index.order(names))}
    for part, folder in ((VALIDATION, folders.validation), (TEST, folders.test)):
        if folder:
            parts[part] = scan_like(path, folder, links, classes)
    return classified_sounds(request, parts, classes, sample_index)


def classified_sounds(
    request: DataRequest, files: Mapping[str, AnyFiles], classes: tuple[str, ...], sample_index: SampleIndex
) -> Source:
    """Return sounds with a class each; where there is no part for validation, one is held out by the seed.

    Args:
        files: of `train`, and of `val` and `test` where they are there.

    Raises:
        UserError: a file is no sound, or one alone is there to train on.
    """
    features = open_features(request.preparation.features)
    sounds = measured(files[TRAIN], features)
    validation, test = (measured(files[p], features, sounds.rate) if p in files else None for p in (VALIDATION, TEST))
    notes: tuple[str, ...] = ()
    if validation is None:
        divided = held_out_of_begun(request, sample_index, test is not None, "sound")
        sounds, validation, notes = sounds.subset(divided.train), sounds.subset(divided.evaluation), divided.notes
    parts = [each for each in (sounds, validation, test) if each is not None]
    longest = max(int(each.frames.max()) for each in parts)
    info = replace(
        _info(request, sounds, len(validation), classes, longest), stages=sample_index.trained_stages(len(sounds))
    )
    return Source(sounds, validation, info, (*notes, *feature_notes(parts)), test, sample_index)


def _info(request: DataRequest, sounds: SoundFiles, eval_size: int, classes: tuple[str, ...], longest: int) -> DataInfo:
    counts = tuple(np.bincount(sounds.labels, minlength=len(classes)).tolist())
    return DataInfo(
        request.config.source, classes, 1, 1, len(sounds), eval_size, counts,
        several=sounds.features.specs(longest), task="speech_classification", rate=sounds.rate,
    )  # fmt: skip
