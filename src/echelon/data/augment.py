"""What happens to an image between decoding and the model: sizes, crops and flips, on uint8.

Legend: N samples, C channels, H W height and width, S side of the square that the model sees.
All random numbers come in as arguments, uniform in [0, 1).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.decode import Picture

FLIP_CROP_DRAWS = 3
_ATTEMPTS = 10
IMAGENET_DRAWS = 4 * _ATTEMPTS + 1
_PAD = 4
Box = tuple[int, int, int, int]  # top, left, height, width


def flip_crop(pixels_NCHW: NDArray[np.uint8], draws: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Pad by 4 black pixels, crop back at a random place, mirror half of the samples (He et al. 2016, section 4.2).

    Args:
        draws: `(N, FLIP_CROP_DRAWS)`.
    """
    n, channels, height, width = pixels_NCHW.shape
    padded = np.zeros((n, channels, height + 2 * _PAD, width + 2 * _PAD), dtype=np.uint8)
    padded[:, :, _PAD:-_PAD, _PAD:-_PAD] = pixels_NCHW
    top, left = (draws[:, :2].T * (2 * _PAD + 1)).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    cropped = windows[np.arange(n), :, top, left]
    mirrored = np.flatnonzero(draws[:, 2] < 0.5)
    cropped[mirrored] = cropped[mirrored, :, :, ::-1]
    return cropped


def random_resized_crop(picture: Picture, side: int, draws: NDArray[np.float64]) -> Tensor:
    """Crop 8% to 100% of the area at an aspect of 3/4 to 4/3, resize to `(C, side, side)`, mirror every other one.

    Szegedy et al. 2015, with the constants and the rounding of torchvision's RandomResizedCrop.

    Args:
        draws: `(IMAGENET_DRAWS,)`.
    """
    top, left, height, width = crop_box(picture.height, picture.width, draws)
    pixels = picture.load(min(1.0, side / min(height, width)))
    if pixels.shape[-2:] != (picture.height, picture.width):  # the decoder has scaled it
        top, height = _scaled(top, height, pixels.shape[-2] / picture.height)
        left, width = _scaled(left, width, pixels.shape[-1] / picture.width)
    crop = _resized(pixels[:, top : top + height, left : left + width], side, side)
    return crop.flip(-1) if draws[-1] < 0.5 else crop


def _scaled(start: int, length: int, scale: float) -> tuple[int, int]:
    first, last = round(start * scale), round((start + length) * scale)
    return min(first, last - 1), max(1, last - first)


def crop_box(height: int, width: int, draws: NDArray[np.float64]) -> Box:
    """Return the box of a random resized crop: the first of ten attempts that fits, else the centre."""
    low, high = math.log(3 / 4), math.log(4 / 3)
    for i in range(0, 4 * _ATTEMPTS, 4):
        size, shape, down, across = draws[i : i + 4].tolist()
        area, aspect = height * width * (0.08 + 0.92 * size), math.exp(low + shape * (high - low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(down * (height - h + 1)), int(across * (width - w + 1)), h, w
    w, h = width, height
    if width / height < 3 / 4:
        h = min(height, round(width / (3 / 4)))
    elif width / height > 4 / 3:
        w = min(width, round(height * (4 / 3)))
    return (height - h) // 2, (width - w) // 2, h, w


def resize_and_crop(picture: Picture, shorter: int, side: int) -> Tensor:
    """Resize the shorter side to `shorter`, keep the central `(C, side, side)`: how images are evaluated."""
    height, width, load = picture
    pixels = load(min(1.0, shorter / min(height, width)))
    if height == width == shorter == side:
        return pixels
    if height <= width:
        height, width = shorter, int(shorter * width / height)
    else:
        height, width = int(shorter * height / width), shorter
    pixels = _resized(pixels, height, width)
    top, left = round((height - side) / 2.0), round((width - side) / 2.0)
    return pixels[:, top : top + side, left : left + side]


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    if pixels.shape[-2:] == (height, width):
        return pixels
    # what torchvision.transforms.v2 calls for uint8, without its dispatch
    return torch.nn.functional.interpolate(
        pixels[None], size=(height, width), mode="bilinear", align_corners=False, antialias=True
    )[0]
