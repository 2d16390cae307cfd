"""What a model is told about the data it will see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from echelon.tasks import nest
from echelon.tasks.base import TightSample
from echelon.tasks.nest import Nest


@dataclass(frozen=True)
class ModelInput:
    """The data's side of a model: inputs are (batch, channels, image_size, image_size), outputs (batch, classes).

    Attributes:
        classes: number of classes, or of the numbers that the task wants for each sample; 0: any.
        channels: colour channels of an image.
        image_size: side of the square image in pixels.
        shape: of one input that is no image, such as (tokens,); None: images.
        dtype: name of the inputs' type in torch.
        several: specs of inputs that are more than one tensor, or ids, or ragged; None: they are one of `shape`.
        auto: name of the model that the task chooses where none is named; empty: by the size of images.
        transcribes: whether outputs are symbols of frames, which are aligned to what is said in a sound.
        tightest: of sounds with transcripts, the one whose frames are the fewest for its labels; None: not known.
        takes_records: whether the loss is given a record with logits in it, as the model returns it; else its logits.
        wrong_outputs: says what is wrong with the outputs for some samples; None: they are logits `(batch, classes)`.
    """

    classes: int
    channels: int
    image_size: int
    shape: tuple[int, ...] | None = None
    dtype: str = "float32"
    several: Nest = None
    wrong_outputs: Callable[[Any, int], str] | None = None
    auto: str = ""
    takes_records: bool = False
    transcribes: bool = False
    tightest: TightSample | None = None

    @property
    def is_image(self) -> bool:
        """Whether an input is an image."""
        return self.shape is None and self.several is None

    def blank(self, samples: int) -> Nest:
        """Return inputs of zeros, which are also ids that any vocabulary has."""
        if self.several is not None:
            return nest.blank(self.several, samples)
        shape = (self.channels, self.image_size, self.image_size) if self.shape is None else self.shape
        return torch.zeros(samples, *shape, dtype=getattr(torch, self.dtype))

    def describe(self) -> str:
        """Return the input in words: `3-channel images of 32x32, 10 classes`."""
        if self.several is not None:
            return f"inputs {nest.describe(self.several)}, {self.classes} outputs"
        if self.shape is None:
            return f"{self.channels}-channel images of {self.image_size}x{self.image_size}, {self.classes} classes"
        return f"inputs of shape {self.shape} and type {self.dtype}, {self.classes} classes"
