"""What the data room gives to others: sources, batches, and who gets which part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset


@dataclass(frozen=True)
class DataInfo:
    """What a data set is.

    Args:
        name: as the user wrote it.
        classes: names, in the order of the labels.
        channels: of an input `(channels, image_size, image_size)`; the first dim of inputs of another shape.
        image_size: side in pixels as the model sees it; 1 where inputs are not images.
        class_counts: training samples per class.
        mean: per channel, of pixels in [0, 1]; empty where inputs are used as they come.
        std: likewise.
        shape: of one input that is used as it comes; None: images, `(channels, image_size, image_size)`.
        dtype: name of the inputs' type in torch.
    """

    name: str
    classes: tuple[str, ...]
    channels: int
    image_size: int
    train_size: int
    eval_size: int
    class_counts: tuple[int, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = "float32"


@dataclass(frozen=True)
class Source:
    """Training and evaluation data: map-style data sets, items before any transform."""

    train: Dataset[Any]
    evaluation: Dataset[Any]
    info: DataInfo


@dataclass
class Batch:
    """One rank's part of a global batch.

    Args:
        inputs: `(B, channels, image_size, image_size)` float32, or the user's own; B may be 0.
        targets: `(B,)` int64.
        global_size: samples of the whole batch over all ranks, images that could not be decoded included.
        index: of the batch in its epoch.
    """

    inputs: Tensor
    targets: Tensor
    global_size: int
    index: int


@dataclass(frozen=True)
class Shard:
    """Which of the ranks that divide the samples this is."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class BadImage:
    """An image that could not be decoded: where it stands in its part of the batch, its file, and why."""

    position: int
    path: str
    reason: str
