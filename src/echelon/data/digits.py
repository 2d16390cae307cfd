"""Real handwritten digits that need no download: 1,797 images of 8x8 pixels that come with scikit-learn.

Kaynak 1995; UCI Optical Recognition of Handwritten Digits, its test part.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echelon.data.images import ImageArray
from echelon.data.order import split

_SPLIT_SEED = 0
_EVALUATION_SHARE = 0.2


def open_digits() -> tuple[ImageArray, ImageArray, tuple[str, ...]]:
    """Return training (1,438) and evaluation (359) images, always split the same way, and the class names."""
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
