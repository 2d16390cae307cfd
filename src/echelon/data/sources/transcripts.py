"""Folders of sounds with what is said in them: a text beside each sound, or LibriSpeech's lists, one a folder.

`1.wav` has its transcript in `1.txt`; `84-121123.trans.txt` has a line for each sound of its folder, which begins with
the sound's name without its suffix. Parts are `train`, `val` (or `valid`, `validation`, `dev`) and `test`, also in
names such as `train-clean-100` and `test-other`; one folder without parts is split.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from echelon.core.errors import UserError
from echelon.core.tokeniser import AUTO, CHARACTERS, TokeniserChoice
from echelon.data.base import DataInfo, DataOutline, DataRequest, Source
from echelon.data.class_folders import SOUND_FILES, FileKind, FolderLinks, files_below
from echelon.data.labelled_files import AnyFiles, FileNames, LabelledFiles
from echelon.data.order import Indices
from echelon.data.parts import part_of
from echelon.data.ragged import RaggedArray
from echelon.data.sample_index import NamedSampleIndex, SampleIndex
from echelon.data.sound_features import SoundFeatures, open_features
from echelon.data.sounds import SoundFiles, feature_notes, measured, transcript_spec
from echelon.data.sources.base import SourceKind, held_out, held_out_of_begun
from echelon.data.sources.sounds import Sounds, has_transcripts
from echelon.data.sources.text_file import read_lines, read_text
from echelon.data.tokenisers import Characters, Tokeniser, tokeniser_for
from echelon.tasks.base import NO_TARGET, Encoding, TightSample

SPEECH_RECOGNITION = "speech_recognition"
_LIST = ".trans.txt"
_TEXT = ".txt"
_FILES = FileKind((*SOUND_FILES.extensions, _TEXT), SOUND_FILES.plural)


class Transcripts(SourceKind):
    """The path of a folder of sounds with transcripts."""

    form: ClassVar[str] = "a folder of sounds with transcripts"
    reads: ClassVar[tuple[str, ...]] = ("follow_links",)

    def takes(self, name: str) -> bool:
        """Whether the first sounds below a folder have transcripts."""
        path = Path(name).expanduser()
        return path.is_dir() and has_transcripts(path)

    def outline(self, request: DataRequest) -> DataOutline:
        """Return the task that such sounds are for, unless they are to be of classes."""
        return Sounds().outline(request) if request.encoding is Encoding.SPEECH else DataOutline(SPEECH_RECOGNITION)

    def open(self, request: DataRequest) -> Source:
        """Open the folder; where it has no part for evaluation, one is held out by the seed.

        For `--task speech-classification` its folders are classes, and the texts are not read.
        """
        if request.encoding is Encoding.SPEECH:
            return Sounds().open(request)
        if request.encoding not in (Encoding.AUTO, Encoding.TRANSCRIPTS):
            raise UserError(
                f"data {request.config.source} is a folder of sounds with transcripts: --task {request.task} is for "
                "others"
            )
        path = Path(request.config.source).expanduser()
        links = FolderLinks(path, request.config.follow_links, _FILES)
        try:
            folders = _folders_of_parts(path, links)
            parts = {part: Recordings.below(path, names, links) for part, names in folders.items()}
        except OSError as error:
            links.check()
            raise UserError(f"data {error.filename}: {error.strerror}") from None
        train = parts["train"]
        sample_index = NamedSampleIndex.of(request.folder, request.config.source, (), train.names)
        train = train.some(sample_index.order(train.names))
        source = transcribed(request, train, parts.get("val"), parts.get("test"), sample_index)
        return replace(source, notes=(*links.notes, *source.notes))


SOURCE = Transcripts


@dataclass(frozen=True)
class Recordings:
    """Sound files, each with its transcript.

    Attributes:
        files: of no class.
        names: of the files, in whose order samples are known.
    """

    files: AnyFiles
    names: list[str]
    texts: list[str]

    @classmethod
    def below(cls, path: Path, folders: Sequence[str], links: FolderLinks) -> Recordings:
        """Read the transcripts of all sounds below some folders of a folder.

        Raises:
            UserError: there are none, a sound has no transcript, or links lead out of the folder.
            OSError: a folder cannot be read.
        """
        top, files = os.path.realpath(path), []
        for folder in folders:
            files += files_below(path / folder, f"{folder}/" if folder else "", links, (top,))
        links.check()
        names = [name for name in files if not name.lower().endswith(_TEXT)]
        if not names:
            raise UserError(f"data {path / folders[0]}: it holds no sound files")
        texts = _read_texts(path, files, {_stem(name) for name in names})
        silent = [name for name in names if _stem(name) not in texts]
        if silent:
            others = f", nor have {len(silent) - 1} other sounds" if len(silent) > 1 else ""
            raise UserError(
                f"data {path / silent[0]}: it has no transcript{others}: write what is said to "
                f"{Path(silent[0]).stem}{_TEXT} beside it, or remove it"
            )
        return cls.in_folder(path, names, [texts[_stem(name)] for name in names])

    @classmethod
    def in_folder(cls, path: Path, names: list[str], texts: list[str]) -> Recordings:
        """Return files of a folder with their transcripts."""
        return cls(LabelledFiles(str(path), FileNames(names), np.zeros(len(names), np.int64)), names, texts)

    def some(self, chosen: Indices) -> Recordings:
        """Return some of them."""
        rows = chosen.tolist()
        return Recordings(self.files.subset(chosen), [self.names[i] for i in rows], [self.texts[i] for i in rows])

    def sounds(self, features: SoundFeatures, rate: int = 0) -> SoundFiles:
        """Return the files with their lengths, as `measured` does; their transcripts are not yet encoded."""
        return measured(self.files, features, rate)


def transcribed(
    request: DataRequest,
    train: Recordings,
    validation: Recordings | None,
    test: Recordings | None,
    sample_index: SampleIndex | None = None,
) -> Source:
    """Return recordings as sounds with token ids: of characters, unless `--tokeniser` says otherwise.

    Args:
        validation: None: some of `train` are held out by the seed.
        sample_index: of `train`, where new ones can be told from those that a run knows.

    Raises:
        UserError: there is one recording alone, a file is no sound, or no text is written.
    """
    notes: tuple[str, ...] = ()
    if validation is None:
        has_test = test is not None
        divided = (
            held_out(request, len(train.names), has_test, "sound")
            if sample_index is None
            else held_out_of_begun(request, sample_index, has_test, "sound")
        )
        train, validation, notes = train.some(divided.train), train.some(divided.evaluation), divided.notes
    if not any(train.texts):
        raise UserError(f"data {request.config.source}: its transcripts are empty")
    tokeniser = _tokeniser_of(request, train.texts)
    parts = [part for part in (train, validation, test) if part is not None]
    features, rate, sounds = open_features(request.preparation.features), 0, []
    for part in parts:
        plain = part.sounds(features, rate)
        rows = RaggedArray.of(tokeniser.encode(part.texts), NO_TARGET)
        sounds.append(replace(plain, transcripts=rows))
        rate = plain.rate
    info = _info(request, sounds, tokeniser)
    if sample_index is not None:
        info = replace(info, stages=sample_index.trained_stages(len(sounds[0])))
    notes = (*notes, *_notes(parts, tokeniser), *feature_notes(sounds))
    return Source(sounds[0], sounds[1], info, notes, sounds[2] if test is not None else None, sample_index)


def plain_text(text: str) -> str:
    """Return a text in Unicode's composed form, with one space between words."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _tokeniser_of(request: DataRequest, texts: Sequence[str]) -> Tokeniser:
    if request.preparation.tokeniser.name == AUTO:
        characters = replace(request.preparation, tokeniser=TokeniserChoice(CHARACTERS))
        request = replace(request, preparation=characters)
    return tokeniser_for(request, texts)


def _info(request: DataRequest, sounds: Sequence[SoundFiles], tokeniser: Tokeniser) -> DataInfo:
    longest = max(int(part.frames.max()) for part in sounds)
    most = max(part.transcripts.shape[1] for part in sounds if part.transcripts is not None)
    return DataInfo(
        request.config.source, (), 1, 1, len(sounds[0]), len(sounds[1]), (),
        several=sounds[0].features.specs(longest),
        targets=transcript_spec(most, tokeniser.count), task=SPEECH_RECOGNITION,
        tokeniser=tokeniser, tightest=min(map(_tightest, sounds), key=_room), rate=sounds[0].rate,
    )  # fmt: skip


def _tightest(sounds: SoundFiles) -> TightSample:
    """Return the sample whose frames are the fewest for its labels: one each, and a blank between two of the same."""
    rows: RaggedArray = sounds.transcripts  # type: ignore[assignment]
    same = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows.values[1:] == rows.values[:-1])])
    ends = np.cumsum(rows.lengths)
    starts = np.minimum(ends - rows.lengths, len(same) - 1)
    needed = rows.lengths + np.where(rows.lengths > 0, same[ends - 1] - same[starts], 0)
    i = int((sounds.frames / np.maximum(needed - 1, 1e-9)).argmin())
    return TightSample(sounds.path(i), int(sounds.frames[i]), int(needed[i]))


def _room(sample: TightSample) -> float:
    """Return how many frames may become one: fewer than this."""
    return sample.frames / max(sample.needed - 1, 1e-9)


def _notes(recordings: Sequence[Recordings], tokeniser: Tokeniser) -> tuple[str, ...]:
    kind = "characters" if isinstance(tokeniser, Characters) else "pieces of words"
    notes = [f"transcripts are cut into {kind}: a vocabulary of {tokeniser.count}, and the blank, which is the last"]
    empty = sum(not text for part in recordings for text in part.texts)
    if empty:
        notes.append(f"{empty} transcripts are empty")
    if isinstance(tokeniser, Characters):
        unknown = set().union(*(text for part in recordings for text in part.texts)) - set(tokeniser.alphabet)
        if unknown:
            shown = " ".join(sorted(unknown)[:10])
            notes.append(f"{len(unknown)} characters are in no training transcript and cannot be recognised: {shown}")
    return tuple(notes)


def _folders_of_parts(path: Path, links: FolderLinks) -> dict[str, list[str]]:
    """Return the folders of each part; all of a folder that has no part for training is one to be split."""
    with os.scandir(path) as entries:
        seen = sorted(e.name for e in entries if e.is_dir() and links.usable(e, (os.path.realpath(path),)))
    folders: dict[str, list[str]] = {}
    for name in seen:
        if part := part_of(name.partition("-")[0]):
            folders.setdefault(part, []).append(name)
    return folders if "train" in folders else {"train": [""]}


def _read_texts(path: Path, files: Sequence[str], sounds: set[str]) -> dict[str, str]:
    """Return transcripts by the name of their sound without its suffix."""
    texts: dict[str, str] = {}
    for name in files:
        lower = name.lower()
        if lower.endswith(_LIST):
            folder = f"{name.rpartition('/')[0]}/" if "/" in name else ""
            for line in read_lines(path / name):
                sound, _, text = line.partition(" ")
                texts[folder + sound] = plain_text(text)
        elif lower.endswith(_TEXT) and _stem(name) in sounds:
            texts[_stem(name)] = plain_text(read_text(path / name))
    return texts


def _stem(name: str) -> str:
    return name.rpartition(".")[0]
