"""Handwritten digits that come with scikit-learn: the smallest data that is real."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from echelon.data.base import DataRequest, Source
from echelon.data.images import ImageArray
from echelon.data.order import split
from echelon.data.sources.base import SourceKind, image_source

_SPLIT_SEED = 0
_EVALUATION_SHARE = 0.2


class Digits(SourceKind):
    """`digits`: 1,797 images of 8 by 8 pixels, 10 classes; one set, a fifth of which is held out to choose by."""

    names: ClassVar[tuple[str, ...]] = ("digits",)
    shapes: ClassVar[Mapping[str, tuple[int, int, int]]] = {"digits": (1, 8, 10)}

    def open(self, request: DataRequest) -> Source:
        """Open the digits; their split does not depend on the seed."""
        return image_source(request.config, *open_digits())


SOURCE = Digits


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
