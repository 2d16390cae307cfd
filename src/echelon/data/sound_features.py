"""What a model is given of a sound: a log-mel spectrogram, the waveform, or what a model of transformers asks for.

The filters of spectrograms are those of the HTK book, as torchaudio and transformers have them; torch computes the
rest, for a release of torchaudio can only be imported beside the one release of torch that it was built for. Models of
transformers say in files beside their weights what they were trained on: waveforms (wav2vec 2.0 and its like), or
spectrograms of one length, which the library's own feature extractors make (AST, Whisper).

Shapes: T frames, F frequencies of the short-time Fourier transform, M mel bands, S samples of a waveform.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.errors import UserError
from echelon.core.features import AUTO, LOG_MEL, WAVEFORM, FeatureChoice
from echelon.tasks.nest import TensorSpec

BANDS = 64
_WINDOW_S, HOP_S = 0.025, 0.010
_FLOOR = 1e-6
_MODEL_FILE, _OWN_FILE, _SHARED_FILE = "config.json", "preprocessor_config.json", "processor_config.json"
_KIND = "feature_extractor_type"

ExtractorSettings = Mapping[str, object]
"""What a folder of transformers says of its feature extractor, by name."""


@dataclass(frozen=True)
class SoundFeatures(ABC):
    """How a waveform becomes a model's inputs.

    Attributes:
        name: in descriptions of what is done to samples.
        rate: samples per second of the waveforms; 0: any.
    """

    name: ClassVar[str]
    rate: int = 0

    @abstractmethod
    def specs(self, longest: int) -> dict[str, TensorSpec]:
        """Return a model's inputs by name for sounds of at most so many frames: features, then a mask if it has one."""

    @abstractmethod
    def frames(self, samples: int, rate: int) -> int:
        """Return the frames of so many samples, those among them that are not heard."""

    @abstractmethod
    def of(self, wave: Tensor, rate: int) -> NDArray[np.float32]:
        """Return the features `(T, ...)` of a wave `(S,)`, or of the one shape that they have whatever its length."""

    def by_time(self, features: NDArray[np.float32], frames: int) -> NDArray[np.float32]:
        """Return a view `(T, ...)` of the frames of a sound in its features, its padding left out."""
        return features[:frames]

    def slack(self, rate: int) -> int:
        """Return by how many frames a header may be wrong."""
        return 1

    @property
    def bands(self) -> int:
        """How many mel bands a frame has; 0: it is a sample of the waveform."""
        return 0

    @property
    def most_frames(self) -> int:
        """How many frames of a sound are heard; 0: all."""
        return 0

    def extractor(self, rate: int) -> Any:
        """Return the feature extractor of transformers that makes the same; None: there is none."""
        return None


@dataclass(frozen=True)
class LogMel(SoundFeatures):
    """Spectrograms `features` `(T, 64)` of mean 0 and standard deviation 1, 100 frames a second, and `mask` `(T,)`."""

    name: ClassVar[str] = LOG_MEL

    def specs(self, longest: int) -> dict[str, TensorSpec]:
        """Return `features` and `mask`."""
        return {"features": TensorSpec((longest, BANDS), ragged=True), "mask": TensorSpec((longest,), ragged=True)}

    def frames(self, samples: int, rate: int) -> int:
        """Return the frames of a spectrogram of so many samples."""
        return frame_count(samples, rate)

    def of(self, wave: Tensor, rate: int) -> NDArray[np.float32]:
        """Return the spectrogram `(T, M)`."""
        spectrogram: NDArray[np.float32] = log_mel(wave, rate).numpy()
        return spectrogram

    @property
    def bands(self) -> int:
        """The mel bands of `features`."""
        return BANDS


@dataclass(frozen=True)
class Waveform(SoundFeatures):
    """The samples themselves, `input_values` `(S,)`, and `attention_mask` `(S,)`.

    Attributes:
        normalised: each sound has mean 0 and standard deviation 1.
    """

    name: ClassVar[str] = WAVEFORM
    normalised: bool = True

    def specs(self, longest: int) -> dict[str, TensorSpec]:
        """Return `input_values` and `attention_mask`."""
        values, mask = TensorSpec((longest,), ragged=True), TensorSpec((longest,), "int64", ragged=True)
        return {"input_values": values, "attention_mask": mask}

    def frames(self, samples: int, rate: int) -> int:
        """Return the samples: each is a frame."""
        return samples

    def of(self, wave: Tensor, rate: int) -> NDArray[np.float32]:
        """Return the samples `(S,)`."""
        values: NDArray[np.float32] = wave.numpy()
        if not self.normalised:
            return values
        return (values - values.mean()) / np.sqrt(values.var() + 1e-7)  # as Wav2Vec2FeatureExtractor has it

    def slack(self, rate: int) -> int:
        """Return the samples of a frame of other features."""
        return round(HOP_S * rate)

    def extractor(self, rate: int) -> Any:
        """Return a Wav2Vec2FeatureExtractor."""
        return _transformers(f"--features {WAVEFORM}").Wav2Vec2FeatureExtractor(
            sampling_rate=rate, do_normalize=self.normalised, return_attention_mask=True
        )


@dataclass(frozen=True)
class ExtractedFeatures(SoundFeatures):
    """Spectrograms of one length, which a feature extractor of transformers makes; longer sounds are cut off.

    Attributes:
        made_by: the feature extractor.
        input: the model's name for them.
        shape: of them.
        time_dim: which dim of the shape is time.
    """

    name: ClassVar[str] = "extracted"
    made_by: Any = None
    input: str = ""
    shape: tuple[int, int] = (0, 0)
    time_dim: int = 0

    def specs(self, longest: int) -> dict[str, TensorSpec]:
        """Return the one input, whatever the sounds' lengths."""
        return {self.input: TensorSpec(self.shape)}

    def frames(self, samples: int, rate: int) -> int:
        """Return the frames of so many samples."""
        return max(1, samples // round(HOP_S * rate))

    def of(self, wave: Tensor, rate: int) -> NDArray[np.float32]:
        """Return the features, of `shape`."""
        least = round(_WINDOW_S * rate)
        values = np.pad(wave.numpy(), (0, max(0, least - len(wave))))
        made: NDArray[np.float32] = self.made_by(values, sampling_rate=rate, return_tensors="np")[self.input][0]
        return made.astype(np.float32)

    def by_time(self, features: NDArray[np.float32], frames: int) -> NDArray[np.float32]:
        """Return a view `(T, M)` of the frames of a sound."""
        return np.moveaxis(features, self.time_dim, 0)[:frames]

    @property
    def bands(self) -> int:
        """The mel bands of the shape."""
        return self.shape[1 - self.time_dim]

    @property
    def most_frames(self) -> int:
        """The frames of the shape."""
        return self.shape[self.time_dim]

    def extractor(self, rate: int) -> Any:
        """Return what makes them."""
        return self.made_by


def open_features(choice: FeatureChoice) -> SoundFeatures:
    """Return the features that a model is given; those of a model of transformers as the files of its folder say.

    Raises:
        UserError: there is no such folder, or its model is given something else, or none of sounds.
    """
    if choice.name in (AUTO, LOG_MEL):
        return LogMel()
    if choice.name == WAVEFORM:
        return Waveform()
    name, path = choice.setting, choice.path
    file = path / _MODEL_FILE if path.is_dir() else path
    settings = _extractor_settings(file.parent)
    if not file.is_file() and not settings:
        files = f"a folder with a {_OWN_FILE} or {_MODEL_FILE} of transformers"
        way = f"name {files}" if choice.is_of_model else f"write {LOG_MEL}, {WAVEFORM}, or {files}"
        raise UserError(f"{name}: {way}")
    return _of_model(name, _model_config(name, file) if file.is_file() else None, settings)


def _extractor_settings(folder: Path) -> ExtractorSettings:
    """Return what a folder says of its feature extractor; empty: nothing.

    Raises:
        UserError: its file cannot be read.
    """
    for file in (folder / _OWN_FILE, folder / _SHARED_FILE):
        if not file.is_file():
            continue
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
            settings = settings.get("feature_extractor", {}) if file.name == _SHARED_FILE else settings
            return dict(settings)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise UserError(f"{file}: it does not describe a feature extractor ({error})") from error
    return {}


def _model_config(name: str, file: Path) -> Any:
    try:
        return _transformers(name).AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{name}: {file} describes no model that is known here ({reason})") from error


def _transformers(name: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError(f"{name} needs transformers: pip install 'echelon[transformers]'") from None
    return transformers


def _of_model(name: str, config: Any, settings: ExtractorSettings) -> SoundFeatures:
    """Return what a model takes, by its configuration, what its folder says of its feature extractor, or both.

    Raises:
        UserError: they contradict each other, or such models are not known here.
    """
    kind = str(settings.get(_KIND) or _usual_kind(config))
    given = {key: value for key, value in settings.items() if key not in (_KIND, "processor_class")}
    try:
        if kind == "Wav2Vec2FeatureExtractor" and given.get("feature_size", 1) == 1:
            return Waveform(int(str(given.get("sampling_rate", 16_000))), bool(given.get("do_normalize", True)))
        if kind == "ASTFeatureExtractor":
            return _of_ast(name, config, given)
        if kind == "WhisperFeatureExtractor":
            return _of_whisper(name, config, given)
    except (ValueError, TypeError) as error:
        raise UserError(f"{name}: its {kind} cannot be built ({str(error).splitlines()[0]})") from error
    known = "known are models of waveforms (wav2vec2, hubert, wavlm, ...), AST and whisper"
    if kind or config is None:
        raise UserError(f"{name}: {kind or 'its feature extractor'} is not known here: {known}")
    raise UserError(
        f"{name} is of a {config.model_type}, which reads no sounds, or such as are not known here: {known}"
    )


def _usual_kind(config: Any) -> str:
    """Return the feature extractor of a model that names none; empty: it is of no known kind."""
    if getattr(config, "conv_kernel", None) and getattr(config, "conv_stride", None):
        return "Wav2Vec2FeatureExtractor"
    known = {"audio-spectrogram-transformer": "ASTFeatureExtractor", "whisper": "WhisperFeatureExtractor"}
    return known.get(getattr(config, "model_type", ""), "")


def _of_ast(name: str, config: Any, settings: ExtractorSettings) -> SoundFeatures:
    if config is not None:
        settings = {"num_mel_bins": config.num_mel_bins, "max_length": config.max_length, **settings}
    made_by = _transformers(name).ASTFeatureExtractor(**settings)
    shape = (made_by.max_length, made_by.num_mel_bins)
    if config is not None:
        _check_shape(name, shape, (config.max_length, config.num_mel_bins))
    return ExtractedFeatures(made_by.sampling_rate, made_by, "input_values", shape, 0)


def _of_whisper(name: str, config: Any, settings: ExtractorSettings) -> SoundFeatures:
    if config is not None:
        hops_per_s = int(str(settings.get("sampling_rate", 16_000))) // int(str(settings.get("hop_length", 160)))
        seconds = 2 * config.max_source_positions // hops_per_s  # its first layers leave one frame of two
        settings = {"feature_size": config.num_mel_bins, "chunk_length": seconds, **settings}
    made_by = _transformers(name).WhisperFeatureExtractor(**settings)
    shape = (made_by.feature_size, made_by.nb_max_frames)
    if config is not None:
        _check_shape(name, shape[::-1], (2 * config.max_source_positions, config.num_mel_bins))
    return ExtractedFeatures(made_by.sampling_rate, made_by, "input_features", shape, 1)


def _check_shape(name: str, made: tuple[int, int], taken: tuple[int, int]) -> None:
    """Refuse features of another number of frames, or of mel bands, than a model takes (UserError)."""
    if made != taken:
        raise UserError(
            f"{name}: {_OWN_FILE} makes {made[0]} frames of {made[1]} mel bands, and {_MODEL_FILE} takes {taken[0]} of "
            f"{taken[1]}: make them agree"
        )


def frame_count(samples: int, rate: int) -> int:
    """Return the frames of a spectrogram of so many samples."""
    return 1 + samples // round(HOP_S * rate)


def log_mel(wave: Tensor, rate: int) -> Tensor:
    """Return the log-mel spectrogram `(T, M)` of a wave `(S,)`, of mean 0 and standard deviation 1."""
    window, hop = round(_WINDOW_S * rate), round(HOP_S * rate)
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
