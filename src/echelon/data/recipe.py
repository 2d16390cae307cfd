"""From the description of a run to what is done to its samples, and by how many processes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data.assemble import ArrayRows, ImageRows, ItemRows, Recipe, StreamRows
from echelon.data.base import DataInfo
from echelon.data.drawn import DrawnRows, DrawnSamples
from echelon.data.images import Images, TensorArray, TensorItems
from echelon.data.masks import MaskedImages, MaskRecipe, MaskRows
from echelon.data.sounds import SoundFiles, SoundRows
from echelon.data.statistics import SMALL_IMAGE
from echelon.data.stream import Stream
from echelon.data.transforms import NO_TRANSFORMS, InputTransform, Transforms, own_transform

Rows = ImageRows | ArrayRows | ItemRows | SoundRows | DrawnRows | MaskRows
_MOST_LOADERS = 32  # each has a pipe and a part of every batch
_NOT_MIRRORED = ("gtsrb", "kmnist", "mnist", "svhn", "usps")  # in which left and right are classes, or no letters
_LEAST_CROPPED = 32  # pixels of side; in smaller images four pixels to a side are too many


@dataclass(frozen=True)
class LoaderConfig:
    """How a rank loads its samples.

    Args:
        data: the data's part of a run's description.
        seed: of order and augmentation.
        device: where batches are delivered; for a GPU, images are normalised there.
        workers_here: ranks on this machine, which share its cores.
        timeout_s: how long a batch waits for any sign of life from the loaders.
        transforms: a caller's own, in place of those that `data` names.
    """

    data: DataConfig
    seed: int
    device: torch.device
    workers_here: int = 1
    timeout_s: float = 120.0
    transforms: Transforms = NO_TRANSFORMS

    @classmethod
    def of(
        cls, data: DataConfig, seed: int, device: torch.device, transforms: Transforms = NO_TRANSFORMS
    ) -> LoaderConfig:
        """Build it for a rank started by a launcher, which says in LOCAL_WORLD_SIZE how many ranks are here."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return cls(data, seed, device, here, transforms=transforms)

    @property
    def decodes_on_gpu(self) -> bool:
        """Whether image files are decoded where batches are delivered."""
        return self.data.decode == "gpu" and self.device.type == "cuda"

    def transform(self, training: bool) -> InputTransform | None:
        """Return the user's own transform of training, or evaluation, samples; None: there is none.

        Raises:
            UserError: what the description names is not there.
        """
        if training:
            return own_transform("--transform", self.data.transform, self.transforms.training, self.seed)
        return own_transform("--eval-transform", self.data.eval_transform, self.transforms.evaluation, self.seed)


def make_rows(samples: Any, info: DataInfo, config: LoaderConfig, training: bool) -> Rows:
    """Build what makes rows of one part of a source.

    Raises:
        UserError: the augmentation or image size does not fit the data.
    """
    data, transform = config.data, config.transform(training)
    if isinstance(samples, (TensorArray, TensorItems)):
        if data.augment not in ("auto", "none"):
            raise UserError(f"--augment {data.augment} is for uint8 images (1 or 3, S, S); {info.name} gives others")
        if data.image_size:
            raise UserError(f"--image-size is for images; inputs of {info.name} are used as they come")
        if isinstance(samples, TensorItems) and samples.lengths is not None and transform is not None:
            raise UserError(
                f"a transform of your own sees padded samples, and those of {info.name} differ in length: do it in the "
                "data set's __getitem__"
            )
        if isinstance(samples, TensorArray):
            return ArrayRows(samples, transform, data.on_nan == "skip")
        kind = StreamRows if isinstance(samples.items, Stream) else ItemRows
        return kind(samples, config.seed, transform, data.on_nan == "skip")
    if isinstance(samples, DrawnSamples):
        if data.augment not in ("auto", "none") or data.image_size:
            raise UserError(f"--augment and --image-size are for images; {info.name} is none")
        return DrawnRows(samples, transform)
    if isinstance(samples, SoundFiles):
        return _sound_rows(samples, config, training)
    if isinstance(samples, MaskedImages):
        return _mask_rows(samples, info, config, training)
    if not isinstance(samples, Images):
        raise UserError(f"data {info.name}: make the Source with echelon.data.from_datasets or open_data")
    side = info.image_size
    if data.image_size not in (0, side):
        raise UserError(f"--image-size {data.image_size}: images of {info.name} are {side} pixels; resize them there")
    on_device = config.device.type == "cuda"
    recipe = Recipe(
        side=side,
        shorter=shorter_side(side),
        augment=_augment(data.augment, side, info.name) if training else "none",
        seed=config.seed,
        channels=info.channels,
        mean=() if on_device else info.mean,
        std=() if on_device else info.std,
        skip_bad=data.on_bad_image == "skip",
        transform=transform,
    )
    rows = ImageRows(samples, recipe)
    if training and data.decode == "gpu" and rows.encoded is None:
        raise UserError(
            f"--decode gpu is for image files that are decoded again in each epoch; those of {info.name} are not "
            "(small images are kept in memory, and a transform of your own works on the processor): use --decode cpu"
        )
    return rows


def pixels_beside(info: DataInfo) -> tuple[int, ...]:
    """Return the pixel that fills a square beside an image, by channel: the mean, about 0 once normalised."""
    return tuple(round(255 * mean) for mean in info.mean)


def shorter_side(side: int) -> int:
    """Return to what an image's shorter side is resized, in pixels, before its centre of `side` is cut out."""
    return side if side <= SMALL_IMAGE else round(side * 256 / 224)


def _sound_rows(sounds: SoundFiles, config: LoaderConfig, training: bool) -> SoundRows:
    data = config.data
    if data.augment not in ("auto", "none") or data.image_size or config.transform(training) is not None:
        raise UserError(f"data {data.source} is sounds: --augment, --image-size and transforms are for other inputs")
    masked = training and data.augment == "auto"
    return SoundRows(sounds, config.seed if masked else None, data.on_bad_image == "skip")


def _mask_rows(pairs: MaskedImages, info: DataInfo, config: LoaderConfig, training: bool) -> MaskRows:
    data, on_device = config.data, config.device.type == "cuda"
    if data.augment not in ("auto", "none"):
        raise UserError(f"--augment {data.augment} moves images alone, and {info.name} has masks: use auto or none")
    if config.transform(training) is not None:
        raise UserError(f"a transform of your own sees images alone, and {info.name} has masks: use --augment auto")
    if training and data.decode == "gpu":
        raise UserError(f"--decode gpu is for images with classes, and {info.name} has masks: use --decode cpu")
    recipe = MaskRecipe(
        side=info.image_size,
        classes=len(info.classes),
        seed=config.seed if training and data.augment == "auto" else None,
        fill=pixels_beside(info),
        mean=() if on_device else info.mean,
        std=() if on_device else info.std,
        skip_bad=data.on_bad_image == "skip",
    )
    return MaskRows(pairs, recipe)


def loader_count(rows: Rows, config: LoaderConfig) -> int:
    """Return the loading processes of this rank: as configured, or chosen from data, cores and device.

    None for data in memory. On a CPU none either for images that are decoded once and kept: another process would
    only take the model's core. Else as many as the rank's share of the cores feeds.
    """
    if config.decodes_on_gpu and isinstance(rows, ImageRows) and rows.encoded is not None:
        return 0
    if isinstance(rows, StreamRows):  # each loader would read through all of it
        return 0
    if config.data.loaders >= 0:
        return config.data.loaders
    on_gpu = config.device.type == "cuda"
    if rows.in_memory or (rows.kept and not on_gpu):
        return 0
    cores = (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1) // config.workers_here
    return max(1, min(_MOST_LOADERS, cores - 1 if on_gpu else cores // 4))


def _augment(wanted: str, side: int, name: str) -> str:
    if wanted != "auto":
        return wanted
    if name.lower() in _NOT_MIRRORED:
        return "none"
    if side > SMALL_IMAGE:
        return "imagenet"
    return "flip_crop" if side >= _LEAST_CROPPED else "none"
