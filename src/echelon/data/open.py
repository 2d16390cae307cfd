"""From the data's name to a source."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echelon.config import DataConfig
from echelon.core.errors import UserError, nearest
from echelon.core.own import find_own
from echelon.data.base import DataInfo, Source
from echelon.data.folder import SMALL_IMAGE, common_size, open_folder
from echelon.data.images import ImageArray, ImageFiles, Images
from echelon.data.order import split
from echelon.data.own import from_function
from echelon.data.statistics import IMAGENET_MEAN, IMAGENET_STD, measure
from echelon.data.torchvision_sets import SETS, open_torchvision

_SPLIT_SEED = 0  # of the digits
_EVALUATION_SHARE = 0.2


def open_data(config: DataConfig, seed: int) -> Source:
    """Open data by name: `digits`, a torchvision name, a folder, or `module:function`.

    A known name wins over a folder of that name; write `./cifar10` for the folder.

    Args:
        config: the data's part of a run's description.
        seed: of the split, where the data has none.

    Raises:
        UserError: there is no such data, or it cannot be used.
    """
    name = config.source
    if name == "digits":
        return _source(config, *open_digits())
    if name in SETS:
        return _source(config, *open_torchvision(name, Path(config.root)))
    path = Path(name).expanduser()
    if path.exists():
        return _source(config, *open_folder(path, config.holdout, seed))
    if ":" in name:
        return from_function(name)
    raise _unknown(name)


def check_source(name: str) -> None:
    """Refuse data that is not there, without opening, calling or downloading anything.

    Raises:
        UserError: as `open_data` would.
    """
    path = Path(name).expanduser()
    if name == "digits" or name in SETS or path.is_dir():
        return
    if path.exists():
        raise UserError(f"data {path}: it is a file, not a folder")
    if ":" not in name:
        raise _unknown(name)
    find_own("data", name)


def _unknown(name: str) -> UserError:
    if "/" in name or name.startswith((".", "~")):
        return UserError(f"data {name}: no such folder")
    hint = nearest(name.lower(), ["digits", *SETS])  # CIFAR-10 is meant for cifar10
    known = ", ".join(sorted(["digits", *SETS]))
    return UserError(f"unknown data {name!r}: {hint}known: {known}, a folder, or module:function")


def _source(config: DataConfig, train: Images, evaluation: Images, classes: tuple[str, ...]) -> Source:
    side = config.image_size or _own_size(train)
    if side > SMALL_IMAGE:
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
    if isinstance(images, ImageArray):
        side = min(images.pixels.shape[-2:])
        return side if side <= SMALL_IMAGE else 224
    if isinstance(images, ImageFiles):
        return common_size(images)
    picture = images.picture(0)
    side = min(picture.height, picture.width)
    return side if side <= SMALL_IMAGE else 224


def open_digits() -> tuple[ImageArray, ImageArray, tuple[str, ...]]:
    """Return training (1,438) and evaluation (359) images, always split the same way, and the class names.

    Real handwritten digits that come with scikit-learn (Kaynak 1995; UCI Optical Recognition of Handwritten Digits,
    its test part).
    """
    table = _table()
    pixels = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = table[:, -1].astype(np.int64)
    train, evaluation = split(len(labels), _EVALUATION_SHARE, _SPLIT_SEED)
    classes = tuple(str(digit) for digit in range(10))
    return ImageArray(pixels[train], labels[train]), ImageArray(pixels[evaluation], labels[evaluation]), classes


def _table() -> NDArray[np.float64]:
    """Return 64 pixels in 0..16 and the label per row; scikit-learn's file is read without its slow import."""
    package = importlib.util.find_spec("sklearn")
    for folder in (package.submodule_search_locations or []) if package else []:
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.exists():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])
