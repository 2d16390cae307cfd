"""What a model is told about the data it will see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ModelInput:
    """The data's side of a model: inputs are (batch, channels, image_size, image_size), outputs (batch, classes).

    Attributes:
        classes: number of classes, the length of the classifier's output.
        channels: colour channels of an image.
        image_size: side of the square image in pixels.
        shape: of one input that is no image, such as (tokens,); None: images.
        dtype: name of the inputs' type in torch.
    """

    classes: int
    channels: int
    image_size: int
    shape: tuple[int, ...] | None = None
    dtype: str = "float32"

    def blank(self, samples: int) -> Tensor:
        """Return inputs of zeros, which are also ids that any vocabulary has."""
        shape = (self.channels, self.image_size, self.image_size) if self.shape is None else self.shape
        return torch.zeros(samples, *shape, dtype=getattr(torch, self.dtype))

    def describe(self) -> str:
        """Return the input in words: `3-channel images of 32x32, 10 classes`."""
        if self.shape is None:
            return f"{self.channels}-channel images of {self.image_size}x{self.image_size}, {self.classes} classes"
        return f"inputs of shape {self.shape} and type {self.dtype}, {self.classes} classes"
