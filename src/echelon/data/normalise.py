"""Mean and standard deviation that pixels are normalised by: the data's own, ImageNet's, or numbers that are given."""

from __future__ import annotations

import math
from dataclasses import replace

from echelon.core.errors import UserError
from echelon.data.base import Source
from echelon.data.statistics import IMAGENET_MEAN, IMAGENET_STD, Channels

NORMALISE_AUTO, MEASURED, IMAGENET = "auto", "measured", "imagenet"
"""Values of `data.normalise` beside numbers."""


def as_text(mean: Channels, std: Channels) -> str:
    """Return numbers for each channel, pixels in [0, 1], as `data.normalise` takes them."""
    return "/".join(",".join(f"{value:g}" for value in values) for values in (mean, std))


def read_normalise(text: str) -> tuple[Channels, Channels] | None:
    """Return the (mean, std) that `data.normalise` gives, one number for all channels or one for each.

    Returns:
        None where it gives none: `auto` and `measured`.

    Raises:
        UserError: it is none of the values that are known, nor such numbers.
    """
    if text in (NORMALISE_AUTO, MEASURED):
        return None
    if text == IMAGENET:
        return IMAGENET_MEAN, IMAGENET_STD
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
    return mean, std


def _for_channels(values: Channels, channels: int) -> Channels:
    """Return one number for each channel: of gray images, where each of three is given, their mean."""
    if channels == 1:
        return (sum(values) / len(values),)
    return values * channels if len(values) == 1 else values


def normalised(source: Source, text: str) -> Source:
    """Return images that are normalised as `data.normalise` says; other data, and what it leaves open, as it is.

    Raises:
        UserError: it gives another number of channels than the images have.
    """
    given, info = read_normalise(text), source.info
    if given is None or not info.mean:
        return source
    mean, std = (_for_channels(values, info.channels) for values in given)
    if len(mean) != info.channels:
        raise UserError(
            f"--normalise {text} is for {len(mean)} channels, and the images of {info.name} have {info.channels}"
        )
    return replace(source, info=replace(info, mean=mean, std=std))
