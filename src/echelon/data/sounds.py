"""Sound files as what models are given of them, spectrograms or waveforms, made where they are needed.

Shapes: T frames, which are samples where waveforms are given, M mel bands.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from echelon.core.errors import UserError
from echelon.data.base import CLASS_NUMBER, BadSample
from echelon.data.labelled_files import AnyFiles, Labels
from echelon.data.order import Indices, uniforms
from echelon.data.ragged import RaggedArray
from echelon.data.sound_features import HOP_S, WAVEFORM, LogMel, SoundFeatures
from echelon.tasks.nest import Nest, TensorSpec

MOST_HZ = 16_000
_KEPT_BYTES = 512 * 10**6
_UNKNOWN = 1 << 62  # frames, and more: a header without their number, as libsndfile reads it
_DRAWS = 8  # random numbers of a sample: two masks of frames and two of bands, their lengths and places
_MOST_FRAMES, _MOST_BANDS = 0.1, 0.15  # of all, that a mask takes


class CannotReadSound(ValueError):
    """A file is no sound that can be read."""


@dataclass(frozen=True)
class SoundFiles(Dataset[tuple[Tensor, Tensor]]):
    """Sound files, under one folder or within tar shards.

    Attributes:
        files: each of a class, unless there are transcripts.
        rate: samples per second, to which files of others are resampled.
        frames: of each file, `(N,)`.
        transcripts: token ids of what is said in each file; None: each is of a class.
        features: what is made of each file.
    """

    files: AnyFiles
    rate: int = MOST_HZ
    frames: Indices = field(default_factory=lambda: np.zeros(0, np.int64))
    transcripts: RaggedArray | None = None
    features: SoundFeatures = field(default_factory=LogMel)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.features.of(self.wave(i), self.rate)), torch.as_tensor(self.targets[i])

    @property
    def labels(self) -> Labels:
        """Return the numbers of classes."""
        return self.files.labels

    def path(self, i: int) -> str:
        """Return what file `i` is called in messages."""
        return self.files.path(i)

    @property
    def targets(self) -> RaggedArray | Indices:
        """Return the transcripts, or the numbers of classes."""
        return self.labels if self.transcripts is None else self.transcripts

    def subset(self, chosen: NDArray[np.int64]) -> SoundFiles:
        """Return some of the files, by their numbers `(n,)`."""
        spoken = None if self.transcripts is None else self.transcripts.subset(chosen)
        return replace(self, files=self.files.subset(chosen), frames=self.frames[chosen], transcripts=spoken)

    def wave(self, i: int) -> Tensor:
        """Return file `i` as `(samples,)` at `rate`, the mean of its channels, in -1 to 1.

        Raises:
            CannotReadSound: it is none.
        """
        import soundfile

        try:
            channels, rate = soundfile.read(self.files.opened(i), dtype="float32", always_2d=True)
        except (soundfile.LibsndfileError, OSError) as error:
            raise CannotReadSound(str(error)) from error
        if not len(channels):
            raise CannotReadSound("it is empty")
        if not np.isfinite(channels).all():
            raise CannotReadSound("its numbers are not finite (NaN, or infinite)")
        wave = channels.mean(1)
        if rate != self.rate:
            from scipy.signal import resample_poly

            wave = resample_poly(wave, self.rate, rate).astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(wave))


def measured(files: AnyFiles, features: SoundFeatures, rate: int = 0, keeps_unreadable: bool = False) -> SoundFiles:
    """Return files with their lengths in frames, which their headers tell.

    Args:
        rate: samples per second, where the features are of any; 0: of the first file, at most 16 kHz.
        keeps_unreadable: files that are no sounds, or empty, count as one frame: who reads them is told.

    Raises:
        UserError: a file is no sound.
    """
    import soundfile

    lengths, rate = np.zeros(len(files), np.int64), features.rate or rate
    for i in range(len(files)):
        try:
            header = soundfile.info(files.opened(i))
        except (soundfile.LibsndfileError, OSError) as error:
            if keeps_unreadable:
                lengths[i] = 1
                continue
            raise UserError(f"data {files.path(i)}: this is no sound that can be read ({error}): remove it") from None
        if header.frames >= _UNKNOWN:
            raise UserError(
                f"data {files.path(i)}: its header does not say how long it is, as where it was written to a pipe: "
                f"write it again, such as with ffmpeg -i {Path(files.path(i)).name} again{Path(files.path(i)).suffix}"
            )
        if not header.frames and not keeps_unreadable:
            raise UserError(f"data {files.path(i)}: this sound is empty: remove it")
        rate = rate or min(header.samplerate, MOST_HZ)
        told = features.frames(-(-header.frames * rate // header.samplerate), rate)
        lengths[i] = told if header.frames else 1
    return SoundFiles(files, rate, lengths, features=features)


def at_rate(sounds: SoundFiles, rate: int) -> SoundFiles:
    """Return sounds as they are at another rate, samples per second.

    Raises:
        UserError: a file is no sound.
    """
    return replace(measured(sounds.files, sounds.features, rate), transcripts=sounds.transcripts)


def feature_notes(sounds: Sequence[SoundFiles]) -> tuple[str, ...]:
    """Return what a user has to know of what is made of all parts' sounds."""
    features, rate = sounds[0].features, sounds[0].rate
    most, notes = features.most_frames, list[str]()
    if features.name == WAVEFORM:
        notes.append(f"the model is given waveforms of {rate:,} samples a second")
    if most and (longer := sum(int((part.frames > most).sum()) for part in sounds)):
        seconds = f"{most * HOP_S:g} s"
        notes.append(f"{longer} sounds are longer than {seconds}: the model is given their first {seconds}")
    return tuple(notes)


class SoundRows:
    """Makes rows of features, and of masks that are 1 where there is sound. Small sets are kept, in shared memory.

    Args:
        seed: of masks over frames and bands (SpecAugment, Park et al. 2019, arXiv:1904.08779); None: none are laid.
        skip_bad: leave out files that cannot be read, instead of stopping.
    """

    in_memory = False
    origin: Indices | None = None

    def __init__(self, sounds: SoundFiles, seed: int | None, skip_bad: bool) -> None:
        self._sounds, self._seed, self._skip_bad = sounds, seed, skip_bad
        self.lengths: Indices | None = sounds.frames
        self.targets: Nest = sounds.targets
        self.specs: tuple[Nest, Nest] = self.batch_specs(np.arange(len(sounds)))
        sizes = self._sizes()
        self._ends = np.cumsum(sizes)
        size = int(sizes.sum()) * 4
        self.kept = 0 < size <= _KEPT_BYTES
        if self.kept:  # anonymous shared memory, which forked loaders share
            self._memory = np.frombuffer(mmap.mmap(-1, size), dtype=np.float32)
            self._known = np.frombuffer(mmap.mmap(-1, len(sounds)), dtype=np.uint8)

    def _sizes(self) -> Indices:
        """Return how many numbers the features of each sound are, `(N,)`."""
        spec, *_ = self._sounds.features.specs(1).values()
        numbers = math.prod(spec.shape)
        return self._sounds.frames * numbers if spec.ragged else np.full(len(self._sounds), numbers)

    def batch_specs(self, draws: Indices) -> tuple[Nest, Nest]:
        """Return the specs of a global batch, as long as its longest sound and transcript."""
        indices, spoken = draws % len(self._sounds), self._sounds.transcripts
        longest = int(self._sounds.frames[indices].max(initial=1))
        specs = self._sounds.features.specs(longest)
        return specs, CLASS_NUMBER if spoken is None else transcript_spec(spoken.longest(indices))

    def fill(self, epoch: int, draws: Indices, inputs: Nest, targets: NDArray[np.int64]) -> list[BadSample]:
        """Write the sounds of `draws` (see `ImageRows.fill`) to the inputs that the features' specs name.

        Raises:
            UserError: a file cannot be read, unless these are to be skipped.
        """
        indices = draws % len(self._sounds)
        if self._sounds.transcripts is None:
            targets[:] = self._sounds.labels[indices]
        else:
            self._sounds.transcripts.copy(indices, targets)
        features, *masks = inputs.values()
        for array in (features, *masks):
            array[:] = 0
        bad: list[BadSample] = []
        for row, i in enumerate(indices.tolist()):
            try:
                sound = self._features(i)
            except CannotReadSound as error:
                path = self._sounds.path(i)
                if not self._skip_bad:
                    raise UserError(
                        f"data {path}: cannot be read ({error}): replace or remove it; a run that is trained with "
                        "--on-bad-image skip leaves it out"
                    ) from error
                bad.append(BadSample(row, path, str(error)))
                continue
            for array, value in zip((features, *masks), (sound, *(1 for _ in masks)), strict=True):
                array[row, : len(sound)] = value
        if self._seed is not None:
            numbers = uniforms(self._seed, epoch, draws, _DRAWS)
            for row, i in enumerate(indices.tolist()):
                mask_out(self._sounds.features.by_time(features[row], self._sounds.frames[i]), numbers[row])
        return bad

    def _features(self, i: int) -> NDArray[np.float32]:
        """Return the features of a file `(T, ...)`."""
        if not self.kept:
            return self._computed(i)
        place = self._memory[self._ends[i - 1] if i else 0 : self._ends[i]]
        if not self._known[i]:
            place[:] = self._computed(i).ravel()
            self._known[i] = 1
        spec, *_ = self._sounds.features.specs(1).values()
        return place.reshape(-1, *spec.shape[1:])

    def _computed(self, i: int) -> NDArray[np.float32]:
        """Return the features of a file, whose header may have promised a frame more or less."""
        features, rate, frames = self._sounds.features, self._sounds.rate, int(self._sounds.frames[i])
        sound = features.of(self._sounds.wave(i), rate)
        if features.most_frames:
            return sound
        if abs(len(sound) - frames) > features.slack(rate):
            raise CannotReadSound(f"{len(sound)} frames where its header says {frames}")
        missing = [(0, max(0, frames - len(sound))), *((0, 0) for _ in sound.shape[1:])]
        return np.pad(sound, missing)[:frames]


def transcript_spec(longest: int, tokens: int = 0) -> TensorSpec:
    """Return the spec of transcripts of at most so many tokens, of a vocabulary of `tokens`."""
    return TensorSpec((longest,), "int64", tokens, ragged=True)


def mask_out(features: NDArray[Any], numbers: NDArray[np.float64]) -> None:
    """Put zeros, the mean, in place of some frames and some bands of features `(T, M)`; of waveforms there are none."""
    for axis, most in ((0, _MOST_FRAMES), (1, _MOST_BANDS))[: features.ndim]:
        for each in (0, 4):
            width, place = numbers[each + 2 * axis : each + 2 * axis + 2]
            size = features.shape[axis]
            length = int(width * (most * size + 1))
            start = int(place * (size - length + 1))
            features.swapaxes(0, axis)[start : start + length] = 0
