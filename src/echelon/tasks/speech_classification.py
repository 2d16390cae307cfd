"""Short sounds, each of one class, such as spoken words: cross-entropy, judged by top-1; worst ones as spectrograms.

Helps: Keywords, and other sounds with one class each.
Needs: a folder of sound files in one folder per class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.core.task import TaskDefaults
from echelon.tasks.base import DataFacts, Encoding, TaskSettings
from echelon.tasks.image_classification import ImageClassification
from echelon.tasks.nest import Nest


class SpeechClassification(ImageClassification):
    """Logits `(B, C)` and class numbers `(B,)`, of spectrograms and their masks."""

    name = "speech_classification"
    takes_shares = False
    encoding = Encoding.SPEECH
    default_model: ClassVar[str] = "speech_cnn"
    defaults: ClassVar[TaskDefaults] = TaskDefaults("adamw", lr=2e-3, weight_decay=0.05, epochs=12, batch_size=32)

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: as for images.
        """
        task = super().fitted(data, settings)
        names = list(data.inputs) if isinstance(data.inputs, Mapping) else []
        task._pictures = Spectrograms() if names and names[0] in _INPUTS else None
        return task


TASK = SpeechClassification


_INPUTS = ("features", "input_values", "input_features")  # as sources make them of sounds
_WINDOW = 400  # samples of a waveform in a frame of its picture


class Spectrograms:
    """Pictures of spectrograms: time from left to right, frequency from bottom to top."""

    thumbnail: ClassVar[tuple[int, int, int]] = (1, 64, 96)

    def thumbnails(self, inputs: Nest) -> Tensor:
        """Return sounds as pictures, uint8 on the CPU, each as long as its mask `(B, T)` says, if there is one.

        Args:
            inputs: `features` or `input_values` `(B, T, M)`, `input_features` `(B, M, T)`, or `input_values` `(B, T)`,
                which are waveforms.
        """
        (name, features), *masks = inputs.items()
        features = features.detach().float()
        if name == "input_features":
            features = features.transpose(1, 2)
        pictures = features.new_zeros(len(features), *self.thumbnail)
        for i, (picture, sound) in enumerate(zip(pictures, features, strict=True)):
            there = int(masks[0][1][i].sum()) if masks else len(sound)
            seen = _spectrum(sound[:there]) if sound.ndim == 1 else sound[: max(1, there)]
            if name != "features":  # else of mean 0 and deviation 1
                seen = (seen - seen.mean()) / seen.std().clamp(min=1e-3)
            picture[:] = F.interpolate(seen.T.flip(0)[None, None], self.thumbnail[1:], mode="bilinear")[0]
        return ((pictures + 2) / 5).clamp(0, 1).mul(255).round().to("cpu", torch.uint8)


def _spectrum(wave: Tensor) -> Tensor:
    """Return the logarithm of the short-time spectrum `(frames, frequencies)` of a wave `(S,)`."""
    wave = F.pad(wave, (0, max(0, _WINDOW - len(wave))))
    window = torch.hann_window(_WINDOW, device=wave.device)
    spectrum = torch.stft(wave, _WINDOW, _WINDOW // 2, window=window, center=False, return_complex=True)
    return (spectrum.abs().square() + 1e-6).log().T
