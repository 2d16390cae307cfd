"""From sample indices to the rows of a batch: the part of loading that any process can do."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.core.errors import UserError
from echelon.data.augment import FLIP_CROP_DRAWS, IMAGENET_DRAWS, flip_crop, random_resized_crop, resize_and_crop
from echelon.data.base import CLASS_NUMBER, BadSample
from echelon.data.decode import CannotDecode
from echelon.data.images import ImageArray, Images, TensorArray, TensorItems, random_state_kept
from echelon.data.order import Indices, item_seeds, uniforms
from echelon.tasks import nest
from echelon.tasks.nest import Nest, TensorSpec

CACHE_BYTES = 512 * 10**6


@dataclass(frozen=True)
class Recipe:
    """What is done to a sample.

    Args:
        side: S of the images that come out, `(C, S, S)`.
        shorter: the shorter side is resized to this before the central crop; unused by `imagenet`.
        augment: none, flip_crop or imagenet.
        mean: per channel, of pixels in [0, 1]; with `std` None or empty: pixels stay uint8.
        skip_bad: leave out images that cannot be decoded, instead of stopping.
    """

    side: int
    shorter: int
    augment: str
    seed: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skip_bad: bool


def normalise(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write `(images / 255 - mean) / std` to `out`; mean and std are `(C, 1, 1)` in units of pixel values, 0 to 255.

    One rounding per operation: the result does not depend on how a batch is cut, on threads or on the device.
    """
    return out.copy_(images).sub_(mean).div_(std)


class ImageRows:
    """Makes rows of images. Small ones are decoded once and kept, in memory that forked loaders share."""

    def __init__(self, images: Images, recipe: Recipe) -> None:
        self.labels, self._images, self._recipe = images.labels, images, recipe
        self._shape = (recipe.channels, recipe.side, recipe.side)
        dtype = "float32" if recipe.mean else "uint8"
        self.specs: tuple[Nest, Nest] = (TensorSpec(self._shape, dtype), CLASS_NUMBER)
        self.targets: Nest = images.labels
        self._mean = torch.tensor(recipe.mean).view(-1, 1, 1) * 255
        self._std = torch.tensor(recipe.std).view(-1, 1, 1) * 255
        self._kept, self._known = self._make_cache()
        self.kept = self._kept is not None  # in memory, at least from the second epoch on
        self.in_memory = self.kept and isinstance(images, ImageArray)

    def fill(self, epoch: int, indices: Indices, inputs: NDArray[Any], targets: NDArray[np.int64]) -> list[BadSample]:
        """Write the samples of `indices` to `inputs` `(N, C, S, S)` and `targets` `(N,)`; returns those that are bad.

        Raises:
            UserError: a bad image, unless they are to be skipped.
        """
        targets[:] = self.labels[indices]
        pixels = np.empty(inputs.shape, dtype=np.uint8) if self._recipe.mean else inputs
        bad: list[BadSample] = []
        if self._recipe.augment == "imagenet":
            draws = uniforms(self._recipe.seed, epoch, indices, IMAGENET_DRAWS)
            self._decode(indices, pixels, bad, draws)
        else:
            self._plain(indices, pixels, bad)
        if self._recipe.augment == "flip_crop":
            draws = uniforms(self._recipe.seed, epoch, indices, FLIP_CROP_DRAWS)
            pixels[:] = flip_crop(pixels, draws)
        if self._recipe.mean:
            normalise(torch.from_numpy(pixels), self._mean, self._std, torch.from_numpy(inputs))
        return bad

    def _plain(self, indices: Indices, pixels: NDArray[np.uint8], bad: list[BadSample]) -> None:
        """Write the images before augmentation, from memory where they are there."""
        if self._kept is None or self._known is None:
            self._decode(indices, pixels, bad, None)
            return
        missing = np.flatnonzero(self._known[indices] == 0)
        if len(missing):
            fresh = np.empty((len(missing), *self._shape), dtype=np.uint8)
            found: list[BadSample] = []
            self._decode(indices[missing], fresh, found, None)
            good = np.ones(len(missing), dtype=bool)
            good[[each.position for each in found]] = False
            self._kept[indices[missing[good]]] = fresh[good]
            self._known[indices[missing[good]]] = 1
            bad += [BadSample(int(missing[b.position]), b.path, b.reason) for b in found]
        pixels[:] = self._kept[indices]

    def _decode(
        self,
        indices: Indices,
        pixels: NDArray[np.uint8],
        bad: list[BadSample],
        draws: NDArray[np.float64] | None,
    ) -> None:
        side, shorter = self._recipe.side, self._recipe.shorter
        rows = torch.from_numpy(pixels)
        for row, i in enumerate(indices.tolist()):
            try:
                picture = self._images.picture(i)
                if draws is None:
                    rows[row] = resize_and_crop(picture, shorter, side)
                else:
                    rows[row] = random_resized_crop(picture, side, draws[row])
            except CannotDecode as error:
                path = self._images.path(i)
                if not self._recipe.skip_bad:
                    raise UserError(
                        f"{path}: cannot be decoded ({error}): replace or remove it, or use --on-bad-image skip"
                    ) from error
                bad.append(BadSample(row, path, str(error)))
                rows[row] = 0

    def _make_cache(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.uint8] | None]:
        if self._recipe.augment == "imagenet":
            return None, None
        if isinstance(self._images, ImageArray) and self._images.pixels.shape[1:] == self._shape:
            return self._images.pixels, np.ones(len(self.labels), dtype=np.uint8)
        n_bytes = len(self.labels) * int(np.prod(self._shape))
        if n_bytes > CACHE_BYTES or not n_bytes:
            return None, None
        # anonymous shared memory: no name to leave behind, no limit of /dev/shm, pages taken as images come
        kept = np.frombuffer(mmap.mmap(-1, n_bytes), dtype=np.uint8).reshape(-1, *self._shape)
        return kept, np.frombuffer(mmap.mmap(-1, len(self.labels)), dtype=np.uint8)


class ArrayRows:
    """Takes rows of a user's own inputs and targets out of memory."""

    kept = in_memory = True

    def __init__(self, array: TensorArray) -> None:
        self.targets: Nest = array.targets
        self._values = array.values
        self.specs: tuple[Nest, Nest] = nest.map_leaves(array_spec, (array.values, array.targets))

    def fill(self, epoch: int, indices: Indices, inputs: Nest, targets: Nest) -> list[BadSample]:
        """Copy the inputs and targets of `indices`, N of each."""

        def copy(source: NDArray[Any], out: NDArray[Any]) -> None:
            """Copy the rows of `indices`."""
            np.take(source, indices, axis=0, out=out, mode="clip")  # other modes copy twice

        nest.map_leaves(copy, self._values, inputs)
        nest.map_leaves(copy, self.targets, targets)
        return []


class ItemRows:
    """Makes rows of a user's own tensors, each item's random numbers seeded by where it stands."""

    kept = in_memory = True

    def __init__(self, items: TensorItems, seed: int) -> None:
        self.targets: Nest = items.known_targets
        self._items, self._seed = items, seed
        with random_state_kept():
            given, wanted = nest.map_leaves(lambda leaf: leaf[None], items[0])
        known = wanted if self.targets is None else self.targets
        self.specs: tuple[Nest, Nest] = nest.map_leaves(array_spec, (given, known))

    def fill(self, epoch: int, indices: Indices, inputs: Nest, targets: Nest) -> list[BadSample]:
        """Write the items of `indices` to `inputs` and `targets`, `(N, ...)` each.

        Raises:
            UserError: an item of other shapes than the first.
        """
        with random_state_kept():
            for row, (i, seed) in enumerate(zip(indices.tolist(), item_seeds(self._seed, epoch, indices), strict=True)):
                torch.default_generator.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed % 2**32)
                given, wanted = self._items[i]
                _write_row(i, row, given, inputs, "inputs")
                _write_row(i, row, wanted, targets, "targets")
        return []


def array_spec(array: Any) -> TensorSpec:
    """Return the spec of an array or tensor `(N, ...)`."""
    return TensorSpec(tuple(array.shape[1:]), str(array.dtype).removeprefix("torch."))


def _write_row(i: int, row: int, item: Nest, out: Nest, what: str) -> None:
    values, buffers = nest.leaves(item), nest.leaves(out)
    if len(values) != len(buffers):
        raise UserError(f"item {i} of the data has {len(values)} tensors of {what}, the first {len(buffers)}")
    for value, buffer in zip(values, buffers, strict=True):
        if tuple(value.shape) != buffer.shape[1:]:
            raise UserError(
                f"item {i} of the data has shape {tuple(value.shape)}, the first {buffer.shape[1:]}: "
                f"all {what} must have one shape"
            )
        buffer[row] = value.detach().cpu().numpy()


Rows = ImageRows | ArrayRows | ItemRows
