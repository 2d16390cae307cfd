"""What the data room gives to others: sources, batches, and who gets which part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from echelon.config import DataConfig
from echelon.core.units import first_few, many
from echelon.data.normalise import Normalisation
from echelon.data.preparation import USUAL, Preparation
from echelon.data.sample_index import Growth, SampleIndex
from echelon.tasks.base import Batch, Encoding, SentenceMarks, TargetValues, TextDecoder, TightSample
from echelon.tasks.nest import Nest, TensorSpec

if TYPE_CHECKING:
    from torch.utils.data import Dataset

__all__ = ["BadSample", "Batch", "DataInfo", "DataOutline", "DataRequest", "Shard", "Source"]


CLASS_NUMBER = TensorSpec((), "int64")


@dataclass(frozen=True)
class DataInfo:
    """What a data set is.

    Args:
        name: as the user wrote it.
        classes: names, in the order of the labels; empty where targets are no classes.
        channels: of an input `(channels, image_size, image_size)`; the first dim of inputs of another shape.
        image_size: side in pixels as the model sees it; 1 where inputs are not images.
        class_counts: training samples per class; of masks, pixels.
        mean: per channel, of pixels in [0, 1]; empty where inputs are used as they come.
        std: likewise.
        shape: of one input that is used as it comes; None: images, `(channels, image_size, image_size)`.
        dtype: name of the inputs' type in torch.
        several: specs of inputs that are more than one tensor, or ids, or ragged, as the model takes them; None: they
            are one tensor of `shape` and `dtype`.
        targets: specs of the targets.
        label_span: the least and the greatest of targets that are whole numbers without names.
        target_values: what values targets were seen to have, where data came from Python; None: nobody looked.
        target_names: of targets that are numbers, where they have names.
        target_mean, target_std: of targets that are numbers, over the training samples, which a task may learn in
            these units; empty: they are learnt as they come.
        task: that the data is for, where the run names none.
        tokeniser: that texts were cut with.
        tightest: of sounds with transcripts, the one whose frames are the fewest for its labels.
        marks: the ids that begin and end a sentence that a model is to write; None: it writes none.
        columns: names of a table's columns that inputs are made of, in their order; empty: it is no table.
        rate: of sounds, samples per second; 0: these are no sounds.
        stages: training samples by epoch, where the data grew while the run went on; empty: it did not.
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
    label_span: tuple[int, int] | None = None
    target_values: TargetValues | None = None
    target_names: tuple[str, ...] = ()
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()
    task: str = "image_classification"
    tokeniser: TextDecoder | None = None
    tightest: TightSample | None = None
    marks: SentenceMarks | None = None
    columns: tuple[str, ...] = ()
    rate: int = 0
    stages: tuple[Growth, ...] = ()

    @property
    def inputs(self) -> Nest:
        """Return the specs of the inputs as the model sees them."""
        if self.several is not None:
            return self.several
        images = (self.channels, self.image_size, self.image_size)
        return TensorSpec(images if self.shape is None else self.shape, self.dtype)


@dataclass(frozen=True)
class DataOutline:
    """What is known of data before it is opened.

    Attributes:
        task: name of the task that it is for.
        inputs: a spec for each input of a sample; only their number counts.
    """

    task: str
    inputs: tuple[TensorSpec, ...] = (TensorSpec(),)


@dataclass(frozen=True)
class DataRequest:
    """What a run asks of a source.

    Attributes:
        config: the data's part of the run's description, with the name.
        seed: of the split, where the data has none.
        encoding: what the task wants to be made of columns.
        task: its name, for messages; `auto`: the data's own.
        folder: of the run, which keeps the tokeniser; None: there is none.
        preparation: how samples are made; an outline asks for nothing of it.
        brought: where data at a URL lies on this machine; None: its name says where it is.
        tell_whole: of data that is not the run's, and is evaluated: is called where it has no part for that, and so is
            evaluated whole; None: a share is held out there.
    """

    config: DataConfig
    seed: int = 0
    encoding: Encoding = Encoding.AUTO
    task: str = "auto"
    folder: Path | None = None
    preparation: Preparation = USUAL
    brought: Path | None = None
    tell_whole: Callable[[], None] | None = None

    @property
    def path(self) -> Path:
        """Where the data is on this machine, if its name is one of files."""
        return self.brought or Path(self.config.source).expanduser()


@dataclass(frozen=True)
class Source:
    """Training and evaluation data: map-style data sets, items before any transform.

    Attributes:
        evaluation: by which checkpoints are compared.
        notes: what a user has to know of where the data comes from.
        test: that no choice is made by: it is evaluated whenever a checkpoint is the best so far; None: there is none.
        sample_index: the training samples as a run knows them, where the source can tell whether they are these.
        reads: settings that only some kinds of data have, which its kind reads.
        of_new: what a user has to know of samples that came after the run began; in `notes` too.
    """

    train: Dataset[Any]
    evaluation: Dataset[Any]
    info: DataInfo
    notes: tuple[str, ...] = ()
    test: Dataset[Any] | None = None
    sample_index: SampleIndex | None = None
    reads: tuple[str, ...] = ()
    of_new: tuple[str, ...] = ()

    def normalised(self, by: Normalisation) -> Source:
        """Return it with images that are normalised so; other data, and where no numbers are given, as it is.

        Raises:
            UserError: the numbers are of another count of channels than the images have.
        """
        if not by.mean or not self.info.mean:
            return self
        mean, std = by.for_channels(self.info.channels, self.info.name)
        return replace(self, info=replace(self.info, mean=mean, std=std))


def class_notes(info: DataInfo, evaluated: NDArray[Any], noun: str = "sample") -> tuple[str, ...]:
    """Say which classes are only evaluated, and so cannot be learnt, and which only trained; nothing where none are.

    Args:
        evaluated: class numbers `(n,)` of the samples that are not trained on.
        noun: what a sample is called.
    """
    counts = np.bincount(evaluated[evaluated >= 0], minlength=len(info.classes))  # others are refused later
    unlearnt = [number for number, count in enumerate(info.class_counts) if not count and counts[number]]
    unseen = [number for number, count in enumerate(info.class_counts) if count and not counts[number]]
    notes = []
    if unlearnt:
        held, several = int(counts[unlearnt].sum()), len(unlearnt) > 1
        notes.append(
            f"no training {noun} has {_classes(info, unlearnt)}: {many(held, noun)} for evaluation "
            f"{'have' if held > 1 else 'has'} {'them' if several else 'it'} and cannot be predicted right"
        )
    if unseen:
        notes.append(f"no {noun} for evaluation has {_classes(info, unseen)}: how that is learnt is not seen")
    return tuple(notes)


def _classes(info: DataInfo, numbers: Sequence[int]) -> str:
    return f"the class{'es' * (len(numbers) > 1)} {first_few([info.classes[number] for number in numbers])}"


@dataclass(frozen=True)
class Shard:
    """Which of the ranks that divide the samples this is, and how they divide them.

    Attributes:
        weights: of the ranks' parts, in their order: parts of a batch are as large as these say (see
            `core.shares.share_sizes`); empty: all are of one size.
    """

    rank: int
    world_size: int
    weights: tuple[int, ...] = ()


@dataclass(frozen=True)
class BadSample:
    """An image that could not be decoded: where it stands in its part of the batch, its file, and why."""

    position: int
    path: str
    reason: str
