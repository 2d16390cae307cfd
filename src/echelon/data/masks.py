"""Images with a mask each, the class number of every pixel: read, brought to one size and augmented together.

An image keeps its shape: it is scaled until its longer side fits the square that the model sees, and what is left of
the square counts nothing. Masks are counted once, to know the classes, and the counts kept in a cache.

Shapes: N samples, S side of the square, H W height and width of an image.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.data.assemble import RowsOfOneShape, normalise
from echelon.data.base import BadSample
from echelon.data.cache import locked
from echelon.data.decode import CannotDecode, Picture
from echelon.data.images import ImageFiles
from echelon.data.labelled_files import LabelledFiles
from echelon.data.order import Indices, uniforms
from echelon.tasks.base import NO_TARGET
from echelon.tasks.nest import Nest, TensorSpec

IGNORED = 255  # in a mask: the pixel counts nothing
_NUMBERS = 256  # that a pixel of a mask can be
_ZOOM = (0.75, 1.5)  # of training images, around the size that fits
_DRAWS = 4  # random numbers of a sample: zoom, place down and across, mirrored or not
_COUNTING_S = 3600.0
_FORMAT = 1  # of what is cached
Mask = NDArray[np.uint8]


@dataclass(frozen=True)
class MaskedImages(Dataset[tuple[Tensor, Tensor]]):
    """Image files and their masks, in the same order."""

    images: ImageFiles
    masks: LabelledFiles

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.images.picture(i).load(1.0), torch.from_numpy(read_mask(self.masks.path(i)))

    def subset(self, chosen: NDArray[np.int64]) -> MaskedImages:
        """Return some of the pairs, by their numbers `(n,)`."""
        return MaskedImages(self.images.subset(chosen), self.masks.subset(chosen))


class ImagesToMask(MaskedImages):
    """Images alone, whose masks a model is to predict."""

    @classmethod
    def of(cls, images: ImageFiles) -> ImagesToMask:
        """Return images without masks."""
        return cls(images, images)


def read_mask(path: str) -> Mask:
    """Return the numbers of a mask `(H, W)`: of a palette its indices, of grey pixels their values.

    Raises:
        CannotDecode: it is damaged.
        UserError: its pixels are no numbers from 0 to 255.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode, pixels = image.mode, np.asarray(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CannotDecode(f"its mask cannot be decoded: {reason}") from None
    if pixels.ndim != 2:
        raise UserError(
            f"data {path}: this mask has colours ({mode}): write the class number of each pixel, "
            "0, 1, 2, ..., as a grey or palette PNG; 255 is ignored"
        )
    if pixels.size and (pixels.max() >= _NUMBERS or pixels.min() < 0):
        raise UserError(
            f"data {path}: this mask has the number {pixels.max()}: class numbers are 0 to 254, 255 is ignored"
        )
    return pixels.astype(np.uint8)


def pixel_counts(pairs: MaskedImages, root: str, skips_bad: bool = False) -> NDArray[np.int64]:
    """Return how many pixels of each number each mask has, `(N, 256)`; checks the masks beside.

    A damaged one has none where such are left out.

    Kept below the data's root by a hash of names, sizes and times of the files: one process of a machine counts, others
    wait.

    Raises:
        UserError: a mask cannot be used: damaged, colours, another size than its image's, or ignored pixels alone.
    """
    digest = hashlib.sha256(f"{_FORMAT} {pairs.images.root} {pairs.masks.root}{' skip' * skips_bad}".encode())
    for i in range(len(pairs)):
        for path in (pairs.images.path(i), pairs.masks.path(i)):
            about = os.stat(path)  # noqa: PTH116 - a Path for each of many files
            digest.update(f"{path}\0{about.st_size}\0{about.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    file = Path(root).expanduser() / "masks" / f"{digest.hexdigest()[:32]}.json"
    busy = f"data {pairs.masks.root}: another process counts its pixels for an hour: remove {file.parent} if none does"
    if not file.is_file():
        with locked(file.with_suffix(".lock"), _COUNTING_S, busy):
            if not file.is_file():
                counts = np.stack([_counted(pairs, i, skips_bad) for i in range(len(pairs))])
                rows, numbers = np.nonzero(counts)
                write_atomic(file, json.dumps([rows.tolist(), numbers.tolist(), counts[rows, numbers].tolist()]))
    rows, numbers, pixels = json.loads(file.read_text())
    counts = np.zeros((len(pairs), _NUMBERS), np.int64)
    counts[rows, numbers] = pixels
    return counts


def _counted(pairs: MaskedImages, i: int, skips_bad: bool) -> NDArray[np.int64]:
    path = pairs.masks.path(i)
    try:
        mask = read_mask(path)
    except CannotDecode as error:
        if skips_bad:
            return np.zeros(_NUMBERS, np.int64)  # its loader leaves the pair out
        raise UserError(
            f"data {path}: {error}: write it again, or remove it and its image; a run that is trained with "
            "--on-bad-image skip leaves the pair out"
        ) from None
    try:
        picture = pairs.images.picture(i)
        _check_size(path, mask, picture)
    except CannotDecode:
        pass  # its loader says so, or leaves it out
    counts = np.bincount(mask.ravel(), minlength=_NUMBERS)
    if counts[IGNORED] == mask.size:
        raise UserError(
            f"data {path}: all pixels of this mask are 255, which is ignored: write the class as 1, "
            "or remove the mask and its image"
        )
    return counts


def _check_size(path: str, mask: Mask, picture: Picture) -> None:
    if mask.shape != (picture.height, picture.width):
        raise UserError(
            f"data {path}: this mask is {mask.shape[1]}x{mask.shape[0]} pixels, its image "
            f"{picture.width}x{picture.height}: resize one of them (a mask without smoothing)"
        )


@dataclass(frozen=True)
class MaskRecipe:
    """What is done to an image and its mask.

    Args:
        side: S.
        classes: how many there are.
        seed: of augmentation; None: there is none.
        fill: per channel, 0 to 255, beside the image.
        mean: per channel, of pixels in [0, 1]; empty: pixels stay uint8.
        std: likewise.
        skip_bad: leave out images that cannot be decoded, instead of stopping.
    """

    side: int
    classes: int
    seed: int | None
    fill: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skip_bad: bool


class MaskRows(RowsOfOneShape):
    """Makes rows of images `(3, S, S)` and of class numbers `(S, S)`, `NO_TARGET` where a pixel counts nothing."""

    kept = in_memory = False
    targets: Nest = None  # those of a sample depend on how it is augmented

    def __init__(self, pairs: MaskedImages, recipe: MaskRecipe) -> None:
        self._pairs, self._recipe = pairs, recipe
        side = recipe.side
        images = TensorSpec((3, side, side), "float32" if recipe.mean else "uint8")
        self.specs = (images, TensorSpec((side, side), "int64"))
        self._mean = torch.tensor(recipe.mean).view(-1, 1, 1) * 255
        self._std = torch.tensor(recipe.std).view(-1, 1, 1) * 255

    def fill(self, epoch: int, draws: Indices, inputs: NDArray[Any], targets: NDArray[np.int64]) -> list[BadSample]:
        """Write the samples of `draws` (see `ImageRows.fill`) to `inputs` `(N, 3, S, S)` and `targets` `(N, S, S)`.

        Raises:
            UserError: a bad image, unless they are to be skipped; a mask that has changed and does not fit any more.
        """
        recipe = self._recipe
        numbers = None if recipe.seed is None else uniforms(recipe.seed, epoch, draws, _DRAWS)
        pixels = np.empty(inputs.shape, np.uint8) if recipe.mean else inputs
        pixels[:] = np.array(recipe.fill, np.uint8)[:, None, None]
        targets[:] = NO_TARGET
        bad: list[BadSample] = []
        for row, i in enumerate((draws % len(self._pairs)).tolist()):
            try:
                picture = self._pairs.images.picture(i)
                frame = Frame.of(picture, recipe.side, None if numbers is None else numbers[row])
                image, mask = picture.load(frame.scale), self._mask(i, picture)
            except CannotDecode as error:
                path = self._pairs.images.path(i)
                if not recipe.skip_bad:
                    raise UserError(
                        f"{path}: cannot be decoded ({error}): replace or remove the pair; a run that is trained with "
                        "--on-bad-image skip leaves it out"
                    ) from error
                bad.append(BadSample(row, path, str(error)))
                continue
            frame.place(image, mask, pixels[row], targets[row])
        if recipe.mean:
            normalise(torch.from_numpy(pixels), self._mean, self._std, torch.from_numpy(inputs))
        return bad

    def _mask(self, i: int, picture: Picture) -> Tensor:
        if isinstance(self._pairs, ImagesToMask):
            return torch.zeros(picture.height, picture.width, dtype=torch.uint8)
        path = self._pairs.masks.path(i)
        mask = read_mask(path)
        _check_size(path, mask, picture)
        beyond = mask[(mask >= self._recipe.classes) & (mask != IGNORED)]
        if len(beyond):
            raise UserError(
                f"data {path}: this mask has class {beyond.max()}, and the run's are 0 to {self._recipe.classes - 1}: "
                "it has changed since the run began"
            )
        return torch.from_numpy(mask)


@dataclass(frozen=True)
class Frame:
    """Where an image comes to lie in the square of side S.

    Attributes:
        height: of the scaled image; with `width` it may be more than S.
        top: of the square in the scaled image; negative: of the scaled image in the square.
        left: likewise.
        mirrored: whether left and right are exchanged.
        scale: of the image, at most 1: what a decoder may already do.
    """

    side: int
    height: int
    width: int
    top: int
    left: int
    mirrored: bool
    scale: float

    @classmethod
    def of(cls, picture: Picture, side: int, numbers: NDArray[np.float64] | None) -> Frame:
        """Return the frame of an image, by random numbers `(4,)` in [0, 1); None: the one that just fits."""
        fitting = side / max(picture.height, picture.width)
        zoom, down, across, mirror = (0.0, 0.0, 0.0, 1.0) if numbers is None else numbers.tolist()
        if numbers is not None:
            low, high = (math.log(each) for each in _ZOOM)
            fitting *= math.exp(low + zoom * (high - low))
        height, width = (max(1, round(length * fitting)) for length in (picture.height, picture.width))
        top, left = _offset(height, side, down), _offset(width, side, across)
        return cls(side, height, width, top, left, mirror < 0.5, min(1.0, fitting))

    def place(self, image: Tensor, mask: Tensor, pixels: NDArray[np.uint8], classes: NDArray[np.int64]) -> None:
        """Write an image `(3, h, w)` and its mask `(H, W)` to `(3, S, S)` and `(S, S)`, both the same way."""
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import InterpolationMode, functional

        top, left = max(0, self.top), max(0, self.left)
        height, width = min(self.height - top, self.side), min(self.width - left, self.side)
        size = [self.height, self.width]
        image = functional.resize(image, size, antialias=True)
        # what `resize` does to a Mask by itself moves it by half a pixel against the image
        mask = functional.resize(mask[None], size, InterpolationMode.NEAREST_EXACT)
        pair: list[Any] = [tv_tensors.Image(image), tv_tensors.Mask(mask)]
        for i, each in enumerate(pair):
            part = functional.crop(each, top, left, height, width)
            pair[i] = functional.horizontal_flip(part) if self.mirrored else part
        down, across = max(0, -self.top), max(0, -self.left)
        there = (slice(down, down + height), slice(across, across + width))
        pixels[(slice(None), *there)] = pair[0].numpy()
        numbers = pair[1][0].numpy()
        classes[there] = np.where(numbers == IGNORED, NO_TARGET, numbers.astype(np.int64))


def mask_of_image(square: Mask, picture: Picture) -> Mask:
    """Return a mask of the square `(S, S)` that an evaluation sees, as one of its image `(H, W)`."""
    from torchvision.transforms.v2 import InterpolationMode, functional

    frame = Frame.of(picture, len(square), None)
    top, left = max(0, -frame.top), max(0, -frame.left)
    there = torch.from_numpy(square[top : top + frame.height, left : left + frame.width])
    size = [picture.height, picture.width]
    mask: Mask = functional.resize(there[None], size, InterpolationMode.NEAREST_EXACT)[0].numpy()
    return mask


def _offset(length: int, side: int, number: float) -> int:
    """Return a place of the square along a scaled image, or of the image in the square, as a negative number."""
    most = length - side
    return int(number * (most + 1)) if most >= 0 else -int(number * (1 - most))
