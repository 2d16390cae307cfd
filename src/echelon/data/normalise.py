"""Mean and standard deviation that pixels are normalised by: the data's own, ImageNet's, or numbers that are given."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.core.errors import UserError

Channels = tuple[float, ...]
"""A number for each channel of an image, or one for all."""
IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)
NORMALISE_AUTO, MEASURED, IMAGENET = "auto", "measured", "imagenet"
"""Values of `data.normalise` beside numbers."""


@dataclass(frozen=True)
class Normalisation:
    """What pixels are normalised by.

    Attributes:
        text: as described.
        mean, std: one number for all channels, or one for each, pixels in [0, 1]; empty: those that the data has.
    """

    text: str
    mean: Channels = ()
    std: Channels = ()

    def for_channels(self, channels: int, data: str) -> tuple[Channels, Channels]:
        """Return mean and standard deviation of each channel, of images that have so many.

        Args:
            data: its name, for messages.

        Raises:
            UserError: it is for another number of channels.
        """
        mean, std = _for_channels(self.mean, channels), _for_channels(self.std, channels)
        if len(mean) != channels:
            raise UserError(
                f"--normalise {self.text} is for {len(mean)} channels, and the images of {data} have {channels}"
            )
        return mean, std


AS_MEASURED = Normalisation(NORMALISE_AUTO)


def as_text(mean: Channels, std: Channels) -> str:
    """Return numbers for each channel, pixels in [0, 1], as `data.normalise` takes them."""
    return "/".join(",".join(f"{value:g}" for value in values) for values in (mean, std))


def read_normalise(text: str) -> Normalisation:
    """Return what `data.normalise` says; `auto` and `measured` give no numbers.

    Raises:
        UserError: it is none of the values that are known, nor such numbers.
    """
    if text in (NORMALISE_AUTO, MEASURED):
        return Normalisation(text)
    if text == IMAGENET:
        return Normalisation(text, IMAGENET_MEAN, IMAGENET_STD)
    parts = text.split("/")
    try:
        mean, std = (tuple(float(value) for value in part.split(",")) for part in parts)
    except ValueError:
        mean = std = ()
    if not mean or len(mean) != len(std) or not all(map(math.isfinite, mean + std)) or min(std) <= 0:
        raise UserError(
            f"--normalise {text}: write auto, measured, imagenet, or means and positive standard deviations of pixels "
            "between 0 and 1, of all channels or of each: 0.5/0.25, or 0.49,0.46,0.41/0.23,0.22,0.23"
        )
    return Normalisation(text, mean, std)


def _for_channels(values: Channels, channels: int) -> Channels:
    """Return one number for each channel: of gray images, where each of three is given, their mean."""
    if channels == 1:
        return (sum(values) / len(values),)
    return values * channels if len(values) == 1 else values
