"""What a model is told about the data it will see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInput:
    """The data's side of a model: inputs are (batch, channels, image_size, image_size), outputs (batch, classes).

    Attributes:
        classes: number of classes, the length of the classifier's output.
        channels: colour channels of an image.
        image_size: side of the square image in pixels.
    """

    classes: int
    channels: int
    image_size: int

    def describe(self) -> str:
        """Return the input in words: `3-channel images of 32x32, 10 classes`."""
        return f"{self.channels}-channel images of {self.image_size}x{self.image_size}, {self.classes} classes"
