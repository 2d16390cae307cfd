"""From sample indices to the rows of a batch: the part of loading that any process can do."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.errors import UserError
from echelon.data.augment import FLIP_CROP_DRAWS, IMAGENET_DRAWS, flip_crop, random_resized_crop, resize_and_crop
from echelon.data.base import CLASS_NUMBER, BadSample
from echelon.data.decode import CannotDecode, Picture
from echelon.data.images import (
    EncodedImages,
    ImageArray,
    ImageItems,
    Images,
    RandomState,
    TensorArray,
    TensorItems,
    random_state_kept,
)
from echelon.data.order import Indices, item_seeds, numbers_in, uniforms
from echelon.data.ragged import RaggedArray, SampleLengths, batch_specs, padded_lengths, sample_lengths, with_lengths
from echelon.data.stream import Stream
from echelon.data.transforms import InputTransform
from echelon.tasks import nest
from echelon.tasks.nest import Nest, TensorSpec

CACHE_BYTES = 512 * 10**6
_ASKED_TWICE = 4  # images of a user's own data set: whether they are drawn by a generator of their own
_LOOKED_AT_ONCE = 64 << 20  # bytes in memory: a few hundredths of a second


@dataclass(frozen=True)
class Recipe:
    """What is done to a sample.

    Args:
        side: S of the images that come out, `(C, S, S)`.
        shorter: the shorter side is resized to this before the central crop; unused by `imagenet`.
        augment: none, flip_crop or imagenet.
        mean: per channel, of pixels in [0, 1]; with `std` None or empty: pixels stay uint8.
        skip_bad: leave out images that cannot be decoded, instead of stopping.
        transform: a user's own, after augmentation and before normalisation.
    """

    side: int
    shorter: int
    augment: str
    seed: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skip_bad: bool
    transform: InputTransform | None = None


def normalise(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write `(images / 255 - mean) / std` to `out`; mean and std are `(C, 1, 1)` in units of pixel values, 0 to 255.

    One rounding per operation: the result does not depend on how a batch is cut, on threads or on the device.
    """
    return out.copy_(images).sub_(mean).div_(std)


@dataclass(frozen=True)
class KeptImages:
    """Images that all lie in memory.

    Attributes:
        pixels: uint8 `(N, C, S, S)`, before augmentation.
        labels: `(N,)`.
        seed: of crops and mirrors (`flip_crop`); None: images stay as they are.
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    seed: int | None


class RowsOfOneShape:
    """Makes rows of samples that are all of one shape.

    Attributes:
        specs: of inputs and targets.
        lengths: of the samples; None: they are of one.
        origin: their numbers in the data that they are a part of; None: they are all of it.
    """

    specs: tuple[Nest, Nest]
    lengths: Indices | None = None
    origin: Indices | None = None

    def batch_specs(self, draws: Indices) -> tuple[Nest, Nest]:
        """Return the specs of a global batch of inputs and targets."""
        return self.specs


def _differ(images: Images) -> bool:
    """Whether one of the first images is another when it is asked for again."""
    with random_state_kept():
        for i in range(min(_ASKED_TWICE, len(images))):
            try:
                first, second = (np.asarray(images.picture(i).load(1.0)) for _ in range(2))
            except CannotDecode:  # left out or refused as it is asked for, and named
                continue
            if not np.array_equal(first, second):
                return True
    return False


class ImageRows(RowsOfOneShape):
    """Makes rows of images. Small ones are decoded once and kept, in memory that forked loaders share."""

    def __init__(self, images: Images, recipe: Recipe) -> None:
        self.labels, self._images, self._recipe = images.labels, images, recipe
        self._shape = (recipe.channels, recipe.side, recipe.side)
        dtype = "float32" if recipe.mean else "uint8"
        self.specs = (TensorSpec(self._shape, dtype), CLASS_NUMBER)
        self.targets: Nest = images.labels
        self.origin = images.origin if isinstance(images, ImageArray | ImageItems) else None
        self._mean = torch.tensor(recipe.mean).view(-1, 1, 1) * 255
        self._std = torch.tensor(recipe.std).view(-1, 1, 1) * 255
        # A user's own data set may draw its images: each is seeded, and kept only where it drew nothing.
        self._may_draw = isinstance(images, ImageItems) and not images.are_fixed
        self._kept, self._known = self._make_cache()
        self.kept = self._kept is not None  # in memory, at least from the second epoch on
        self.in_memory = self.kept and isinstance(images, ImageArray)

    def fill(self, epoch: int, draws: Indices, inputs: NDArray[Any], targets: NDArray[np.int64]) -> list[BadSample]:
        """Write the samples of `draws` to `inputs` `(N, C, S, S)` and `targets` `(N,)`; returns those that are bad.

        Args:
            draws: indices of samples, plus the samples in all times how often one was drawn before in this epoch.

        Raises:
            UserError: a bad image, unless they are to be skipped.
        """
        indices = draws % len(self.labels)
        targets[:] = self.labels[indices]
        pixels = np.empty(inputs.shape, dtype=np.uint8) if self._recipe.mean else inputs
        bad: list[BadSample] = []
        seeds = item_seeds(self._recipe.seed, epoch, draws) if self._may_draw else []
        with random_state_kept() if seeds else nullcontext():
            if (numbers := self.crop_draws(epoch, draws)) is not None:
                self._decode(indices, pixels, bad, numbers, seeds)
            else:
                self._plain(indices, pixels, bad, np.array(seeds, dtype=object))
        if self._recipe.augment == "flip_crop":
            numbers = uniforms(self._recipe.seed, epoch, draws, FLIP_CROP_DRAWS)
            pixels[:] = flip_crop(pixels, numbers)
        if self._recipe.transform is not None:
            self._recipe.transform.apply(epoch, draws, pixels)
        if self._recipe.mean:
            normalise(torch.from_numpy(pixels), self._mean, self._std, torch.from_numpy(inputs))
        return bad

    def kept_images(self) -> KeptImages | None:
        """Return the images once every one lies in memory, if what is done to them can be done elsewhere; else None."""
        recipe = self._recipe
        if self._kept is None or self._known is None or not self._known.all():
            return None
        if recipe.mean or recipe.transform is not None:
            return None
        return KeptImages(self._kept, self.labels, recipe.seed if recipe.augment == "flip_crop" else None)

    def _plain(
        self, indices: Indices, pixels: NDArray[np.uint8], bad: list[BadSample], seeds: NDArray[np.object_]
    ) -> None:
        """Write the images before augmentation, from memory where they are there."""
        if self._kept is None or self._known is None:
            self._decode(indices, pixels, bad, None, seeds.tolist())
            return
        missing = np.flatnonzero(self._known[indices] == 0)
        if len(missing):
            fresh = np.empty((len(missing), *self._shape), dtype=np.uint8)
            found: list[BadSample] = []
            of_missing = seeds[missing].tolist() if len(seeds) else []
            good = self._decode(
                indices[missing], fresh, found, None, of_missing
            )  # what it drew is drawn anew next time
            good[[each.position for each in found]] = False
            self._kept[indices[missing[good]]] = fresh[good]
            self._known[indices[missing[good]]] = 1
            bad += [BadSample(int(missing[b.position]), b.path, b.reason) for b in found]
            pixels[missing] = fresh
        there = self._known[indices] == 1
        pixels[there] = self._kept[indices[there]]

    def _in_channels(self, image: Tensor) -> Tensor:
        """Return an image `(C, S, S)` as the model was trained on it: files are read in colour."""
        if image.shape[0] == 3 and self._shape[0] == 1:
            from torchvision.transforms.functional import rgb_to_grayscale

            return rgb_to_grayscale(image)
        return image

    def _decode(
        self,
        indices: Indices,
        pixels: NDArray[np.uint8],
        bad: list[BadSample],
        draws: NDArray[np.float64] | None,
        seeds: Sequence[int] = (),
    ) -> NDArray[np.bool_]:
        """Write images; returns which of them were made without random numbers, `(N,)`."""
        rows, fixed = torch.from_numpy(pixels), np.ones(len(indices), dtype=bool)
        for row, i in enumerate(indices.tolist()):
            before = RandomState.seed(seeds[row]) if seeds else None
            try:
                rows[row] = self.fitted(self._images.picture(i), None if draws is None else draws[row])
            except CannotDecode as error:
                bad.append(self.refused_or_skipped(row, i, error))
                rows[row] = 0
            fixed[row] = before is None or before.is_same(RandomState.now())
        return fixed

    @property
    def encoded(self) -> EncodedImages | None:
        """The images, where they lie in files that are decoded again for each epoch; else None."""
        if self.kept or self._recipe.transform is not None or not isinstance(self._images, EncodedImages):
            return None
        return self._images

    def crop_draws(self, epoch: int, draws: Indices) -> NDArray[np.float64] | None:
        """Return the random numbers of samples' crops, a row each; None: they are not cropped at random."""
        if self._recipe.augment != "imagenet":
            return None
        return uniforms(self._recipe.seed, epoch, draws, IMAGENET_DRAWS)

    def fitted(self, picture: Picture, draws: NDArray[np.float64] | None) -> Tensor:
        """Return an image as `(C, S, S)`: cropped as its row of `crop_draws` says, or at the centre.

        Raises:
            CannotDecode: it is damaged.
        """
        if draws is None:
            return self._in_channels(resize_and_crop(picture, self._recipe.shorter, self._recipe.side))
        return self._in_channels(random_resized_crop(picture, self._recipe.side, draws))

    def refused_or_skipped(self, row: int, i: int, error: CannotDecode) -> BadSample:
        """Return what is told of image `i`, in a row of a batch, which cannot be decoded.

        Raises:
            UserError: such images are not to be skipped.
        """
        path = self._images.path(i)
        if not self._recipe.skip_bad:
            raise UserError(
                f"{path}: cannot be decoded ({error}): replace or remove it; a run that is trained with "
                "--on-bad-image skip leaves it out"
            ) from error
        return BadSample(row, path, str(error))

    @property
    def _n_bytes(self) -> int:
        return len(self.labels) * int(np.prod(self._shape))

    def _make_cache(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.uint8] | None]:
        if self._recipe.augment == "imagenet" or (self._may_draw and _differ(self._images)):
            return None, None
        if isinstance(self._images, ImageArray) and self._images.pixels.shape[1:] == self._shape:
            return self._images.pixels, np.ones(len(self.labels), dtype=np.uint8)
        n_bytes = self._n_bytes
        if n_bytes > CACHE_BYTES or not n_bytes:
            return None, None
        # anonymous shared memory: no name to leave behind, no limit of /dev/shm, pages taken as images come
        kept = np.frombuffer(mmap.mmap(-1, n_bytes), dtype=np.uint8).reshape(-1, *self._shape)
        return kept, np.frombuffer(mmap.mmap(-1, len(self.labels)), dtype=np.uint8)


class ArrayRows:
    """Takes rows of inputs and targets out of memory; samples of different lengths are padded."""

    kept = in_memory = True

    def __init__(self, array: TensorArray, transform: InputTransform | None = None, skip_nan: bool = False) -> None:
        self.targets: Nest = array.targets
        self.origin, self._skip_nan = array.origin, skip_nan
        self._values, self._n, self._transform = array.values, len(array), transform
        self._arrays: tuple[Nest, Nest] = (array.values, array.targets)
        self.specs: tuple[Nest, Nest] = nest.map_leaves(array_spec, self._arrays)
        self.lengths = sample_lengths(self._arrays)
        self._known_finite: bool | None = None  # None: nobody has looked yet

    def batch_specs(self, draws: Indices) -> tuple[Nest, Nest]:
        """Return the specs of a global batch of inputs and targets, as long as its longest samples."""
        if self.lengths is None:
            return self.specs
        specs: tuple[Nest, Nest] = batch_specs(self._arrays, self.specs, draws % self._n)
        return specs

    def fill(self, epoch: int, draws: Indices, inputs: Nest, targets: Nest) -> list[BadSample]:
        """Copy the inputs and targets of `draws` (see `ImageRows.fill`), N of each.

        Raises:
            UserError: numbers are not finite, unless such samples are to be skipped.
        """
        indices = draws % self._n

        def copy(source: NDArray[Any] | RaggedArray, out: NDArray[Any]) -> None:
            """Copy the rows of `indices`."""
            if isinstance(source, RaggedArray):
                source.copy(indices, out)
                return
            np.take(source, indices, axis=0, out=out, mode="clip")  # other modes copy twice

        nest.map_leaves(copy, self._values, inputs)
        nest.map_leaves(copy, self.targets, targets)
        if self._transform is not None:
            self._transform.apply(epoch, draws, inputs)
        elif self._all_finite:
            return []
        return samples_not_finite(numbers_in(self.origin, indices), (inputs, targets), self._skip_nan)

    @property
    def _all_finite(self) -> bool:
        """Whether all numbers were found finite at once; of many, batches are looked at one by one as they come."""
        if self._known_finite is None:
            stored = [leaf.values if isinstance(leaf, RaggedArray) else leaf for leaf in nest.leaves(self._arrays)]
            few = sum(each.nbytes for each in stored) <= _LOOKED_AT_ONCE
            self._known_finite = few and all(each.dtype.kind != "f" or np.isfinite(each).all() for each in stored)
        return self._known_finite


class ItemRows:
    """Makes rows of a user's own tensors, each item's random numbers seeded by where it stands.

    Items that differ in length are padded to the longest of a global batch.
    """

    kept = in_memory = True

    def __init__(
        self, items: TensorItems, seed: int, transform: InputTransform | None = None, skip_nan: bool = False
    ) -> None:
        self.origin, self._skip_nan = items.origin, skip_nan
        self.targets: Nest = items.known_targets
        self._items, self._seed, self._transform = items, seed, transform
        with random_state_kept():
            given, wanted = nest.map_leaves(lambda leaf: leaf[None], items[0])
        known = wanted if self.targets is None else self.targets
        specs: tuple[Nest, Nest] = nest.map_leaves(array_spec, (given, known))
        self._like, self._ragged = (given, wanted), items.lengths
        self.specs = specs if self._ragged is None else self._ragged.fitted(specs)
        self.lengths = None if self._ragged is None else self._ragged.of_samples()

    def batch_specs(self, draws: Indices) -> tuple[Nest, Nest]:
        """Return the specs of a global batch of inputs and targets, as long as its longest samples."""
        if self._ragged is None:
            return self.specs
        specs: tuple[Nest, Nest] = with_lengths(self.specs, self._longest(self._ragged, draws % len(self._items)))
        return specs

    def _longest(self, lengths: SampleLengths, indices: Indices) -> Iterator[int]:
        """Return how long each leaf that differs is in a batch of samples."""
        return lengths.of_batch(indices)

    def _item(self, i: int) -> tuple[Nest, Nest]:
        """Return the inputs and targets of an item."""
        return self._items[i]

    def fill(self, epoch: int, draws: Indices, inputs: Nest, targets: Nest) -> list[BadSample]:
        """Write the items of `draws` (see `ImageRows.fill`) to `inputs` and `targets`, `(N, ...)` each.

        Raises:
            UserError: an item of other shapes than the first, longer than was known, or of numbers that are not
                finite, unless such samples are to be skipped.
        """
        indices = draws % len(self._items)
        numbers, seeds = numbers_in(self.origin, indices), item_seeds(self._seed, epoch, draws)
        with random_state_kept():
            for row, (i, seed) in enumerate(zip(indices.tolist(), seeds, strict=True)):
                RandomState.seed(seed)
                number, leaves = int(numbers[row]), self._leaves(int(numbers[row]), self._item(i))
                if self._ragged is not None:
                    self._ragged.check(number, i, leaves)
                _write_row(number, row, leaves, (inputs, targets), self._ragged)
        if self._transform is not None:
            self._transform.apply(epoch, draws, inputs)
        return samples_not_finite(numbers, (inputs, targets), self._skip_nan)

    def _leaves(self, number: int, sample: tuple[Nest, Nest]) -> list[Tensor]:
        """Return the tensors of a sample in the order of the first one's.

        Raises:
            UserError: it has others.
        """
        leaves: list[Tensor] = []
        for what, like, part in zip(("inputs", "targets"), self._like, sample, strict=True):
            try:
                leaves += nest.leaves_as(like, part)
            except ValueError as error:
                raise UserError(f"item {number} of the data has other {what} than the first: {error}") from None
        return leaves


class StreamRows(ItemRows):
    """Makes rows of data that is read through: its random numbers are seeded once for an epoch.

    Where items differ in length, all of a global batch are read before one of them is written.
    """

    def __init__(
        self, items: TensorItems, seed: int, transform: InputTransform | None = None, skip_nan: bool = False
    ) -> None:
        super().__init__(items, seed, transform, skip_nan)
        self._stream: Stream = items.items
        self._stream_seed = seed
        self._batch: dict[int, tuple[Nest, Nest]] = {}

    def read_batch(self, epoch: int, draws: Indices) -> None:
        """Read the items of a global batch where these differ in length: `batch_specs` and `fill` are of these."""
        if self._ragged is None:
            return
        self._stream.begin(self._stream_seed, epoch)
        self._batch = {i: self._items[i] for i in (draws % len(self._items)).tolist()}

    def _longest(self, lengths: SampleLengths, indices: Indices) -> Iterator[int]:
        found = [lengths.differing(self._leaves(i, self._batch[i])) for i in indices.tolist()]
        if not found:
            return iter(padded_lengths(self.specs))
        return iter([max(1, *column) for column in zip(*found, strict=True)])

    def _item(self, i: int) -> tuple[Nest, Nest]:
        return self._batch[i] if i in self._batch and self._ragged is not None else super()._item(i)

    def fill(self, epoch: int, draws: Indices, inputs: Nest, targets: Nest) -> list[BadSample]:
        """Write the items of `draws`, as `ItemRows` does, of the iteration that belongs to the epoch."""
        self._stream.begin(self._stream_seed, epoch)
        return super().fill(epoch, draws, inputs, targets)


def samples_not_finite(numbers: Indices, rows: Nest, skip: bool) -> list[BadSample]:
    """Return the samples among some rows whose numbers are not all finite.

    Args:
        numbers: of the samples in the data, `(N,)`.
        rows: arrays `(N, ...)`.

    Raises:
        UserError: there are some, and they are not to be skipped.
    """
    finite = np.ones(len(numbers), dtype=bool)
    for leaf in nest.leaves(rows):
        if leaf.dtype.kind == "f" and not np.isfinite(leaf.sum(dtype=np.float64)):
            finite &= np.isfinite(leaf).reshape(len(leaf), -1).all(1)
    places = np.flatnonzero(~finite)
    if len(places) and not skip:
        others = f" and {len(places) - 1} more of its batch" if len(places) > 1 else ""
        raise UserError(
            f"sample {numbers[places[0]]} of the data{others}: its numbers are not finite (NaN, or infinite): "
            "mend or remove it, or use --on-nan skip"
        )
    return [BadSample(int(place), f"sample {numbers[place]}", "its numbers are not finite") for place in places]


def array_spec(array: Any) -> TensorSpec:
    """Return the spec of an array or tensor `(N, ...)`."""
    return TensorSpec(
        tuple(array.shape[1:]), str(array.dtype).removeprefix("torch."), ragged=isinstance(array, RaggedArray)
    )


def _write_row(
    number: int, row: int, leaves: Sequence[Tensor], out: tuple[Nest, Nest], lengths: SampleLengths | None
) -> None:
    """Write a sample to a row of arrays `(N, ...)`, padded at the end where samples differ in length.

    Raises:
        UserError: it is of another shape than the first one, or of a type that cannot be written.
    """
    inputs, targets = (nest.leaves(part) for part in out)
    for leaf, (value, buffer) in enumerate(zip(leaves, (*inputs, *targets), strict=True)):
        what = "inputs" if leaf < len(inputs) else "targets"
        ragged = lengths is not None and lengths.longest[leaf] is not None
        if tuple(value.shape)[ragged:] != buffer.shape[1 + ragged :] or value.ndim != buffer.ndim - 1:
            raise UserError(
                f"item {number} of the data has shape {tuple(value.shape)}, the first {buffer.shape[1:]}: all {what} "
                "must have one shape: pad them, or crop them, in the data set's __getitem__; or, where they differ in "
                "the length of their first axis, give the data set `lengths`, a whole number for each item"
            )
        array = value.detach().cpu().numpy()
        if not np.can_cast(array.dtype, buffer.dtype, "same_kind"):  # fractions would be cut off
            raise UserError(
                f"item {number} of the data has {what} of {array.dtype}, and the first of {buffer.dtype}, which cannot "
                "hold them: give all items one type, such as float32"
            )
        if lengths is not None and ragged:
            buffer[row, : len(array)], buffer[row, len(array) :] = array, lengths.pads[leaf]
        else:
            buffer[row] = array
