"""Sound files as log-mel spectrograms, made where they are needed.

The filters are those of the HTK book, as torchaudio and transformers have them; torch computes the rest, for a release
of torchaudio can only be imported beside the one release of torch that it was built for.

Shapes: T frames, F frequencies of the short-time Fourier transform, M mel bands.
"""

from __future__ import annotations

import mmap
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
from echelon.tasks.nest import Nest, TensorSpec

MOST_HZ = 16_000
BANDS = 64
_WINDOW_S, _HOP_S = 0.025, 0.010
_KEPT_BYTES = 512 * 10**6
_FLOOR = 1e-6
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
        frames: of each file's spectrogram, `(N,)`.
        transcripts: token ids of what is said in each file; None: each is of a class.
    """

    files: AnyFiles
    rate: int = MOST_HZ
    frames: Indices = field(default_factory=lambda: np.zeros(0, np.int64))
    transcripts: RaggedArray | None = None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return log_mel(self.wave(i), self.rate), torch.as_tensor(self.targets[i])

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
        return SoundFiles(self.files.subset(chosen), self.rate, self.frames[chosen], spoken)

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
        if not np.isfinite(channels).all():
            raise CannotReadSound("its numbers are not finite (NaN, or infinite)")
        wave = channels.mean(1)
        if rate != self.rate:
            from scipy.signal import resample_poly

            wave = resample_poly(wave, self.rate, rate).astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(wave))


def measured(files: AnyFiles, rate: int = 0) -> SoundFiles:
    """Return files with the lengths of their spectrograms, which their headers tell.

    Args:
        rate: samples per second; 0: of the first file, at most 16 kHz.

    Raises:
        UserError: a file is no sound.
    """
    import soundfile

    lengths = np.zeros(len(files), np.int64)
    for i in range(len(files)):
        try:
            header = soundfile.info(files.opened(i))
        except (soundfile.LibsndfileError, OSError) as error:
            raise UserError(f"data {files.path(i)}: this is no sound that can be read ({error}): remove it") from None
        if header.frames >= _UNKNOWN:
            raise UserError(
                f"data {files.path(i)}: its header does not say how long it is, as where it was written to a pipe: "
                f"write it again, such as with ffmpeg -i {Path(files.path(i)).name} again{Path(files.path(i)).suffix}"
            )
        if not header.frames:
            raise UserError(f"data {files.path(i)}: this sound is empty: remove it")
        rate = rate or min(header.samplerate, MOST_HZ)
        lengths[i] = frame_count(-(-header.frames * rate // header.samplerate), rate)
    return SoundFiles(files, rate, lengths)


def at_rate(sounds: SoundFiles, rate: int) -> SoundFiles:
    """Return sounds as they are at another rate, samples per second.

    Raises:
        UserError: a file is no sound.
    """
    return replace(measured(sounds.files, rate), transcripts=sounds.transcripts)


def frame_count(samples: int, rate: int) -> int:
    """Return the frames of a spectrogram of so many samples."""
    return 1 + samples // round(_HOP_S * rate)


def log_mel(wave: Tensor, rate: int) -> Tensor:
    """Return the log-mel spectrogram `(T, M)` of a wave `(samples,)`, of mean 0 and standard deviation 1."""
    window, hop = round(_WINDOW_S * rate), round(_HOP_S * rate)
    size = 1 << (window - 1).bit_length()
    wave = torch.nn.functional.pad(wave, (size // 2, size // 2))  # zeros: a reflection needs more sound than some have
    spectrum = torch.stft(wave, size, hop, window, torch.hann_window(window), center=False, return_complex=True)
    bands = (mel_filters(size // 2 + 1, BANDS, rate) @ spectrum.abs().square()).T
    logs = (bands + _FLOOR).log()
    return (logs - logs.mean()) / logs.std().clamp(min=1e-3)


def mel_filters(frequencies: int, bands: int, rate: int) -> Tensor:
    """Return triangular filters `(M, F)`, evenly spaced on the mel scale of O'Shaughnessy (1987).

    mel(f) = 2595 log10(1 + f / 700); a band rises from the centre of the one before to its own, and falls to the next.
    """
    hertz = torch.linspace(0, rate / 2, frequencies)
    mels = torch.linspace(0, 2595 * float(np.log10(1 + rate / 2 / 700)), bands + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0)


class SoundRows:
    """Makes rows of spectrograms and of masks, 1 where there is sound. Small sets are kept, in memory that is shared.

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
        self._ends = np.cumsum(sounds.frames)
        size = int(sounds.frames.sum()) * BANDS * 4
        self.kept = 0 < size <= _KEPT_BYTES
        if self.kept:  # anonymous shared memory, which forked loaders share
            self._memory = np.frombuffer(mmap.mmap(-1, size), dtype=np.float32).reshape(-1, BANDS)
            self._known = np.frombuffer(mmap.mmap(-1, len(sounds)), dtype=np.uint8)

    def batch_specs(self, draws: Indices) -> tuple[Nest, Nest]:
        """Return the specs of a global batch, as long as its longest sound and transcript."""
        indices, spoken = draws % len(self._sounds), self._sounds.transcripts
        longest = int(self._sounds.frames[indices].max(initial=1))
        return sound_specs(longest), CLASS_NUMBER if spoken is None else transcript_spec(spoken.longest(indices))

    def fill(self, epoch: int, draws: Indices, inputs: Nest, targets: NDArray[np.int64]) -> list[BadSample]:
        """Write the sounds of `draws` (see `ImageRows.fill`) to `features` `(N, T, M)` and `mask` `(N, T)`.

        Raises:
            UserError: a file cannot be read, unless these are to be skipped.
        """
        indices = draws % len(self._sounds)
        if self._sounds.transcripts is None:
            targets[:] = self._sounds.labels[indices]
        else:
            self._sounds.transcripts.copy(indices, targets)
        features, mask = inputs["features"], inputs["mask"]
        features[:], mask[:] = 0, 0
        bad: list[BadSample] = []
        for row, i in enumerate(indices.tolist()):
            try:
                sound = self._spectrogram(i)
            except CannotReadSound as error:
                path = self._sounds.path(i)
                if not self._skip_bad:
                    raise UserError(
                        f"data {path}: cannot be read ({error}): training leaves it out with --on-bad-image skip"
                    ) from error
                bad.append(BadSample(row, path, str(error)))
                continue
            features[row, : len(sound)], mask[row, : len(sound)] = sound, 1
        if self._seed is not None:
            numbers = uniforms(self._seed, epoch, draws, _DRAWS)
            for row, i in enumerate(indices.tolist()):
                mask_out(features[row, : self._sounds.frames[i]], numbers[row])
        return bad

    def _spectrogram(self, i: int) -> NDArray[np.float32]:
        frames = int(self._sounds.frames[i])
        if not self.kept:
            return self._computed(i, frames)
        place = self._memory[self._ends[i] - frames : self._ends[i]]
        if not self._known[i]:
            place[:] = self._computed(i, frames)
            self._known[i] = 1
        return place

    def _computed(self, i: int, frames: int) -> NDArray[np.float32]:
        """Return the spectrogram of a file, whose header may have promised a frame more or less."""
        sound: NDArray[np.float32] = log_mel(self._sounds.wave(i), self._sounds.rate).numpy()
        if abs(len(sound) - frames) > 1:
            raise CannotReadSound(f"{len(sound)} frames where its header says {frames}")
        return np.pad(sound, ((0, max(0, frames - len(sound))), (0, 0)))[:frames]


def sound_specs(longest: int) -> dict[str, TensorSpec]:
    """Return what a model is given of a sound of at most so many frames."""
    return {"features": TensorSpec((longest, BANDS), ragged=True), "mask": TensorSpec((longest,), ragged=True)}


def transcript_spec(longest: int, tokens: int = 0) -> TensorSpec:
    """Return the spec of transcripts of at most so many tokens, of a vocabulary of `tokens`."""
    return TensorSpec((longest,), "int64", tokens, ragged=True)


def mask_out(features: NDArray[Any], numbers: NDArray[np.float64]) -> None:
    """Put zeros, the mean, in place of some frames and some bands of a spectrogram `(T, M)`."""
    for axis, most in ((0, _MOST_FRAMES), (1, _MOST_BANDS)):
        for each in (0, 4):
            width, place = numbers[each + 2 * axis : each + 2 * axis + 2]
            size = features.shape[axis]
            length = int(width * (most * size + 1))
            start = int(place * (size - length + 1))
            features[(slice(start, start + length), slice(None))[:: 1 - 2 * axis]] = 0
