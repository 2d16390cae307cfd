"""Mean and standard deviation of the pixels, for normalisation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echelon.data.augment import resize_and_crop
from echelon.data.decode import CannotDecode
from echelon.data.images import ImageArray, Images
from echelon.data.normalise import IMAGENET_MEAN, IMAGENET_STD, Channels

SMALL_IMAGE = 96  # up to this side images are used whole; larger ones as ImageNet's
_MEASURED_FILES, _MEASURED_IN_MEMORY = 512, 4096


def measure(images: Images, side: int) -> tuple[Channels, Channels]:
    """Measure (mean, std) per channel, pixels in [0, 1], over a fixed sample of evenly spaced images.

    Images that cannot be decoded are left out here: whoever loads them reports them.
    """
    if isinstance(images, ImageArray):
        pixels = images.pixels[_spaced(len(images), _MEASURED_IN_MEMORY)].astype(np.int64)
        return _mean_std(pixels.sum(axis=(0, 2, 3)), (pixels**2).sum(axis=(0, 2, 3)), pixels[:, 0].size)
    sums, squares, count = np.zeros(1, np.int64), np.zeros(1, np.int64), 0
    for i in _spaced(len(images), _MEASURED_FILES):
        try:
            pixels = resize_and_crop(images.picture(int(i)), side, side).numpy().astype(np.int64)
        except CannotDecode:
            continue  # its loader tells the user
        sums = sums + pixels.sum(axis=(1, 2))
        squares = squares + (pixels**2).sum(axis=(1, 2))
        count += pixels[0].size
    return _mean_std(sums, squares, count) if count else (IMAGENET_MEAN, IMAGENET_STD)


def _spaced(n: int, most: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, n - 1, most).astype(np.int64))


def _mean_std(sums: NDArray[np.int64], squares: NDArray[np.int64], count: int) -> tuple[Channels, Channels]:
    mean = sums / count / 255
    deviation = np.sqrt(np.maximum(squares / count / 255**2 - mean**2, 0))
    std = np.where(deviation > 1e-3, deviation, 1.0)  # a channel without contrast is only centred
    return tuple(round(float(m), 6) for m in mean), tuple(round(float(s), 6) for s in std)
