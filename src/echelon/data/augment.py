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
PAD = 4
Box = tuple[int, int, int, int]  # top, left, height, width


def flip_crop(pixels_NCHW: NDArray[np.uint8], draws: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Pad by 4 black pixels, crop back at a random place, mirror half of the samples (He et al. 2016, section 4.2).

    Args:
        draws: `(N, FLIP_CROP_DRAWS)`.
    """
    n, channels, height, width = pixels_NCHW.shape
    padded = np.zeros((n, channels, height + 2 * PAD, width + 2 * PAD), dtype=np.uint8)
    padded[:, :, PAD:-PAD, PAD:-PAD] = pixels_NCHW
    top, left, is_mirrored = crops_and_mirrors(draws)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    cropped = windows[np.arange(n), :, top, left]
    mirrored = np.flatnonzero(is_mirrored)
    cropped[mirrored] = cropped[mirrored, :, :, ::-1]
    return cropped


def crops_and_mirrors(draws: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return what `flip_crop` does to each of N samples, `(3, N)`: top and left of the crop, 1 where it is mirrored."""
    return np.stack([*(draws[:, :2].T * (2 * PAD + 1)).astype(np.int64), (draws[:, 2] < 0.5).astype(np.int64)])


def padded(pixels_NCHW: Tensor) -> Tensor:
    """Return images `(N, C, H, W)` on any device as `flip_crop` pads them, `PAD` pixels wider on each side."""
    return torch.nn.functional.pad(pixels_NCHW, (PAD, PAD, PAD, PAD))


def windows(crops: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return rows and columns of padded images, `(N, S)` each, that make what `flip_crop` does of images of that side.

    Args:
        crops: `(3, N)`, from `crops_and_mirrors`, on any device.
    """
    line = torch.arange(side, device=crops.device)
    top, left, mirrored = crops[:, :, None]
    return top + line, left + torch.where(mirrored.bool(), line.flip(0), line)


def cut(padded_NCHW: Tensor, samples: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return these rows and columns of these samples, `(n, C, S, S)`; `rows` and `columns`: from `windows`."""
    channels = torch.arange(padded_NCHW.shape[1], device=samples.device)[:, None, None]
    return padded_NCHW[samples[:, None, None, None], channels, rows[:, None, :, None], columns[:, None, None]]


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
    """Return the box of a random resized crop: the first of ten attempts that fits, else the centre.

    Args:
        draws: `(IMAGENET_DRAWS,)`.
    """
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
    """Resize `(C, h, w)`; on a GPU the result is float32 and not rounded yet."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    # what torchvision.transforms.v2 calls for uint8, without its dispatch
    return torch.nn.functional.interpolate(
        (pixels.float() if pixels.is_cuda else pixels)[None],
        size=(height, width),
        mode="bilinear",
        align_corners=False,
        antialias=True,
    )[0]
