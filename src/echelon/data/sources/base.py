"""What a kind of data is asked; order, division over ranks and resume are the loader's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data.base import DataInfo, DataOutline, DataRequest, Source
from echelon.data.decode import CannotDecode
from echelon.data.images import ImageArray, ImageFiles, ImageItems, ImageRanges, Images
from echelon.data.normalise import IMAGENET_MEAN, IMAGENET_STD, MEASURED
from echelon.data.order import Indices, split
from echelon.data.sample_index import SampleIndex
from echelon.data.statistics import SMALL_IMAGE, measure
from echelon.records.file import newest
from echelon.records.kinds import Start

_PEEKED = 32
HELD_OF_TRAIN = 0.1  # where only a test set is given
_LARGE_SIDE = 224
GrownImages = ImageFiles | ImageRanges


class SourceKind(ABC):
    """A kind of data: the names that it takes, and how these are opened.

    Attributes:
        names: those that are its own; a kind that takes others answers by `takes`.
        form: how a user writes its other names, such as `a folder`; empty: it has none.
        folders: that a folder of this kind holds, it or its `train/`: by them it is known without an import.
        suffixes: of a file of this kind.
        tasks: that data of this kind is for where none is named, one alone or as its columns tell.
        shapes: channels, side in pixels and classes of small images, where the name alone tells them.
        takes_whatever_is_there: it has what no other kind takes.
        reads: settings that only some kinds of data have, which it reads: those of `Source.reads`.
        packages: that it may import to read samples, beside those that all data needs.
        is_read_by_url: it reads what lies at `DataRequest.path`, which is where data from a URL was brought.
    """

    names: ClassVar[tuple[str, ...]] = ()
    form: ClassVar[str] = ""
    folders: ClassVar[tuple[str, ...]] = ()
    suffixes: ClassVar[tuple[str, ...]] = ()
    tasks: ClassVar[tuple[str, ...]] = ()
    shapes: ClassVar[Mapping[str, tuple[int, int, int]]] = {}
    takes_whatever_is_there: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[tuple[str, ...]] = ()
    is_read_by_url: ClassVar[bool] = False

    def takes(self, name: str) -> bool:
        """Whether data of this name is of this kind. A name that is some kind's own is asked of no other kind."""
        return name in self.names

    def check(self, name: str) -> None:  # noqa: B027 (a name that is known may be enough)
        """Refuse data that is not there, without opening, calling or downloading anything.

        Raises:
            UserError: as `open` would.
        """

    def outline(self, request: DataRequest) -> DataOutline | None:
        """Return the task that data is for, whose defaults a run then has, and its inputs; None: only opening tells.

        Raises:
            UserError: the data cannot be read.
        """
        return None

    @abstractmethod
    def open(self, request: DataRequest) -> Source:
        """Open data, the same in every process.

        Raises:
            UserError: there is no such data, or it cannot be used.
        """


@dataclass(frozen=True)
class HeldOut:
    """How the samples of a training part are divided where there is no validation part.

    Attributes:
        train: the samples that are trained on.
        evaluation: those that are held out to choose the best checkpoint by.
        notes: what a user is told, where there is a test set, so that nobody takes it for what is chosen by.
    """

    train: Indices
    evaluation: Indices
    notes: tuple[str, ...] = ()


def held_out(request: DataRequest, count: int, has_test: bool, noun: str = "sample") -> HeldOut:
    """Divide `count` training samples by the seed: where there is a test set, a tenth at most is held out.

    Of data that is evaluated and is not the run's, all are in both parts.

    Args:
        noun: what one of them is called.

    Raises:
        UserError: there is one alone.
    """
    source = request.config.source
    if request.tell_whole is not None:
        if not has_test:
            request.tell_whole()
        return HeldOut(np.arange(count), np.arange(count))
    if count < 2:
        raise UserError(f"data {source}: one {noun} cannot be split into training and evaluation; give more, or val/")
    if not has_test:
        return HeldOut(*split(count, request.config.holdout, request.seed))
    train, held = split(count, min(HELD_OF_TRAIN, request.config.holdout), request.seed)
    why = "to choose the best checkpoint by: never by the test set"
    note = f"{len(held):,} of {count:,} training {noun}s are held out {why}"
    return HeldOut(train, held, (note,))


def held_out_of_begun(request: DataRequest, sample_index: SampleIndex, has_test: bool, noun: str = "sample") -> HeldOut:
    """Divide the samples that a run began with as `held_out` does; those that came later are trained on."""
    divided = held_out(request, sample_index.begun, has_test, noun)
    return replace(divided, train=np.append(divided.train, np.arange(sample_index.begun, sample_index.count)))


def began_with_all(request: DataRequest, count: int) -> bool:
    """Whether the run of a folder began with all `count` training samples, choosing by its test set: so it goes on."""
    begun = None if request.folder is None else next(newest(request.folder, Start), None)
    return begun is not None and begun.train_size == count


def grown_images(
    request: DataRequest, train: GrownImages, evaluation: Images, classes: tuple[str, ...], sample_index: SampleIndex
) -> Source:
    """Return images as `image_source`, with what was measured of those that the run began with, whatever came later."""
    later = sample_index.count - sample_index.begun
    source = image_source(request.config, train.subset(np.arange(len(train) - later)), evaluation, classes)
    if not later:
        return source
    counts = tuple(np.bincount(train.labels, minlength=len(classes)).tolist())
    stages = sample_index.trained_stages(len(train))
    info = replace(source.info, train_size=len(train), class_counts=counts, stages=stages)
    return replace(source, train=train, info=info)


def image_source(config: DataConfig, train: Images, evaluation: Images, classes: tuple[str, ...]) -> Source:
    """Return images with what is known of them: side as the model sees them, mean and standard deviation.

    Raises:
        UserError: none of the images that were tried can be read.
    """
    side = config.image_size or _own_size(train)
    if side > SMALL_IMAGE and config.normalise != MEASURED:
        mean, std = IMAGENET_MEAN, IMAGENET_STD
        if isinstance(train, ImageArray) and train.pixels.shape[1] == 1:
            mean, std = measure(train, side)
    else:
        mean, std = measure(train, side)
    info = DataInfo(
        name=config.source,
        classes=classes,
        channels=train.pixels.shape[1] if isinstance(train, ImageArray) else 3,
        image_size=side,
        train_size=len(train),
        eval_size=len(evaluation),
        class_counts=tuple(np.bincount(train.labels, minlength=len(classes)).tolist()),
        mean=mean,
        std=std,
    )
    return Source(train, evaluation, info)


def _own_size(images: Images) -> int:
    """Return the side at which images are used: their own if small (of files, the median of a few), else 224."""
    if isinstance(images, ImageArray):
        side = min(images.pixels.shape[-2:])
    elif isinstance(images, ImageItems):
        picture = images.picture(0)
        side = min(picture.height, picture.width)
    else:
        side = _median_side(images)
    return side if side <= SMALL_IMAGE else _LARGE_SIDE


def _median_side(images: Images) -> int:
    sides, refused = [], ""
    for i in np.unique(np.linspace(0, len(images) - 1, _PEEKED).astype(int)):
        try:
            picture = images.picture(int(i))
            sides.append(min(picture.height, picture.width))
        except CannotDecode as error:
            refused = refused or f"{images.path(int(i))}: cannot be decoded ({error})"
    if not sides:
        raise UserError(f"{refused}; nor can any other image that was tried: is this an image folder?")
    return int(np.median(sides))
