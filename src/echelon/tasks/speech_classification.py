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
        is_sound = isinstance(data.inputs, Mapping) and set(data.inputs) == {"features", "mask"}
        task._pictures = Spectrograms() if is_sound else None
        return task


TASK = SpeechClassification


class Spectrograms:
    """Pictures of spectrograms: time from left to right, frequency from bottom to top."""

    thumbnail: ClassVar[tuple[int, int, int]] = (1, 64, 96)

    def thumbnails(self, inputs: Nest) -> Tensor:
        """Return `features` `(B, T, M)`, as long as their `mask` `(B, T)`, as pictures, uint8 on the CPU."""
        features, mask = inputs["features"].detach().float(), inputs["mask"]
        pictures = features.new_zeros(len(features), *self.thumbnail)
        for picture, sound, there in zip(pictures, features, mask, strict=True):
            image = sound[: max(1, int(there.sum()))].T.flip(0)[None, None]
            picture[:] = F.interpolate(image, self.thumbnail[1:], mode="bilinear")[0]
        return ((pictures + 2) / 5).clamp(0, 1).mul(255).round().to("cpu", torch.uint8)  # of mean 0 and deviation 1
