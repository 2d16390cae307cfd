"""torchvision's classification data sets by name, downloaded once."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from echelon.core.errors import UserError
from echelon.data.base import DataRequest, Source
from echelon.data.cache import locked
from echelon.data.images import ImageArray, ImageFiles, ImageItems, Images, labels_of
from echelon.data.labelled_files import FileNames, Labels
from echelon.data.sources.base import SourceKind, began_with_all, held_out, image_source

_DOWNLOAD_S = 3600.0
_NETWORK_S = 30.0


@dataclass(frozen=True)
class _Set:
    """A class of torchvision.datasets, and the arguments of its training and evaluation parts."""

    name: str
    train: Mapping[str, str | bool] = field(default_factory=lambda: {"train": True})
    evaluation: Mapping[str, str | bool] = field(default_factory=lambda: {"train": False})

    @property
    def has_test(self) -> bool:
        """Whether the part for evaluation is a test set."""
        return self.evaluation.get("split", "test") == "test"


def _splits(name: str, evaluation: str = "test", train: str = "train", **more: str) -> _Set:
    return _Set(name, {"split": train, **more}, {"split": evaluation, **more})


SETS: Mapping[str, _Set] = {
    "cifar10": _Set("CIFAR10"),
    "cifar100": _Set("CIFAR100"),
    "country211": _splits("Country211", evaluation="valid"),
    "dtd": _splits("DTD"),
    "fashion_mnist": _Set("FashionMNIST"),
    "fgvc_aircraft": _splits("FGVCAircraft", train="trainval"),
    "flowers102": _splits("Flowers102"),
    "food101": _splits("Food101"),
    "gtsrb": _splits("GTSRB"),
    "imagenette": _splits("Imagenette", evaluation="val", size="320px"),
    "kmnist": _Set("KMNIST"),
    "mnist": _Set("MNIST"),
    "oxford_iiit_pet": _splits("OxfordIIITPet", train="trainval"),
    "stl10": _splits("STL10"),
    "svhn": _splits("SVHN"),
    "usps": _Set("USPS"),
}


class TorchvisionSet(SourceKind):
    """A data set of torchvision, by its name."""

    names: ClassVar[tuple[str, ...]] = tuple(SETS)
    packages: ClassVar[tuple[str, ...]] = ("torchvision",)
    shapes: ClassVar[Mapping[str, tuple[int, int, int]]] = {
        "cifar10": (3, 32, 10), "cifar100": (3, 32, 100), "svhn": (3, 32, 10), "mnist": (1, 28, 10),
        "fashion_mnist": (1, 28, 10), "kmnist": (1, 28, 10), "usps": (1, 16, 10),
    }  # fmt: skip

    def open(self, request: DataRequest) -> Source:
        """Open the set below the configured root; of one that comes with a test set alone, some are held out."""
        config = request.config
        train, evaluation, classes = open_torchvision(config.source, Path(config.root))
        if not SETS[config.source].has_test or began_with_all(request, len(train)):
            return image_source(config, train, evaluation, classes)
        divided = held_out(request, len(train), has_test=True, noun="image")
        kept, held = train.subset(divided.train), train.subset(divided.evaluation)
        return replace(image_source(config, kept, held, classes), notes=divided.notes, test=evaluation)


SOURCE = TorchvisionSet


def open_torchvision(name: str, root: Path) -> tuple[Images, Images, tuple[str, ...]]:
    """Open one of `SETS`, downloading it below `root` where it is not there; one process downloads, others wait.

    Raises:
        UserError: it is not there and cannot be downloaded.
    """
    chosen = SETS[name]
    busy = f"data {name}: another process has been downloading it for an hour"
    with locked(root / f".{name}.lock", _DOWNLOAD_S, busy, is_required=False), _network_deadline():
        train, evaluation = (_open(name, chosen.name, root, part) for part in (chosen.train, chosen.evaluation))
    images = _images(train)
    return images, _images(evaluation), _class_names(train, images.labels)


def _open(name: str, class_name: str, root: Path, part: Mapping[str, str | bool]) -> Any:
    from torchvision import datasets

    kind = getattr(datasets, class_name)
    try:
        return kind(str(root), **part)
    except (RuntimeError, OSError):
        pass  # not there, or not all of it: what keeps the download from mending that is told below
    try:
        return kind(str(root), download=True, **part)
    except (RuntimeError, OSError) as error:
        reason = str(getattr(error, "reason", error)).splitlines()[0]
        raise UserError(
            f"data {name}: not in {root}, and the download failed ({reason}): "
            f"connect to a network, or copy the files to {root} (--data-root)"
        ) from error


def _images(data: Any) -> Images:
    labels = labels_of(data)
    if labels is None:
        raise UserError(f"data {type(data).__name__}: its labels cannot be read without decoding every image")
    pixels = getattr(data, "data", None)
    if pixels is not None and np.asarray(pixels).dtype == np.uint8:
        return ImageArray(_channels_first(np.asarray(pixels)), labels)
    samples = getattr(data, "_samples", None)
    if samples and isinstance(samples[0][0], (str, os.PathLike)):
        return ImageFiles("", FileNames([os.fspath(path) for path, _ in samples]), labels)
    return ImageItems(data, labels, are_fixed=True)


def _channels_first(pixels: Any) -> Any:
    if pixels.ndim == 3:
        return np.ascontiguousarray(pixels[:, None])
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)) if pixels.shape[-1] == 3 else np.ascontiguousarray(pixels)


def _class_names(data: Any, labels: Labels) -> tuple[str, ...]:
    names = getattr(data, "classes", None)
    if names is None:
        return tuple(str(i) for i in range(int(labels.max()) + 1))
    return tuple(", ".join(name) if isinstance(name, tuple) else str(name) for name in names)


@contextlib.contextmanager
def _network_deadline() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_NETWORK_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
