"""What the data room gives to others: sources, batches, and who gets which part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.tasks.base import Batch
from echelon.tasks.nest import Nest, TensorSpec

if TYPE_CHECKING:
    from torch.utils.data import Dataset

__all__ = ["BadSample", "Batch", "DataInfo", "Shard", "Source"]


CLASS_NUMBER = TensorSpec((), "int64")


@dataclass(frozen=True)
class DataInfo:
    """What a data set is.

    Args:
        name: as the user wrote it.
        classes: names, in the order of the labels; empty where targets are no classes.
        channels: of an input `(channels, image_size, image_size)`; the first dim of inputs of another shape.
        image_size: side in pixels as the model sees it; 1 where inputs are not images.
        class_counts: training samples per class.
        mean: per channel, of pixels in [0, 1]; empty where inputs are used as they come.
        std: likewise.
        shape: of one input that is used as it comes; None: images, `(channels, image_size, image_size)`.
        dtype: name of the inputs' type in torch.
        several: specs of inputs that are more than one tensor, as the model takes them; None: they are one.
        targets: specs of the targets.
        task: that the data is for, where the run names none.
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
    several: Nest = None
    targets: Nest = CLASS_NUMBER
    task: str = "image_classification"

    @property
    def inputs(self) -> Nest:
        """Return the specs of the inputs as the model sees them."""
        if self.several is not None:
            return self.several
        images = (self.channels, self.image_size, self.image_size)
        return TensorSpec(images if self.shape is None else self.shape, self.dtype)


@dataclass(frozen=True)
class Source:
    """Training and evaluation data: map-style data sets, items before any transform.

    Attributes:
        notes: what a user has to know of where the data comes from.
    """

    train: Dataset[Any]
    evaluation: Dataset[Any]
    info: DataInfo
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shard:
    """Which of the ranks that divide the samples this is."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class BadSample:
    """An image that could not be decoded: where it stands in its part of the batch, its file, and why."""

    position: int
    path: str
    reason: str
