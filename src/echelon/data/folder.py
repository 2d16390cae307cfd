"""Image folders: one folder per class, below `train/` with `val/` or `test/`, or in one folder that is split."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from echelon.core.errors import UserError
from echelon.data.decode import CannotDecode
from echelon.data.images import FileNames, ImageFiles
from echelon.data.order import split

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif")
SMALL_IMAGE = 96  # up to this side images are used whole; larger ones as ImageNet's
_EVALUATION_FOLDERS = ("val", "valid", "validation", "test")
_PEEKED = 32


def open_folder(path: Path, holdout: float, seed: int) -> tuple[ImageFiles, ImageFiles, tuple[str, ...]]:
    """Open a folder in ImageFolder layout.

    Args:
        holdout: share held out for evaluation where the folder has no `val/` or `test/`.
        seed: of that split.

    Returns:
        Training images, evaluation images, class names.

    Raises:
        UserError: no folder, no images, a class without images, one class only, or classes that differ.
    """
    if not path.is_dir():
        raise UserError(f"data {path}: it is a file, not a folder" if path.exists() else f"data {path}: no such folder")
    folders = {each.name for each in path.iterdir() if each.is_dir()}
    held_out = next((name for name in _EVALUATION_FOLDERS if name in folders), None)
    if "train" not in folders and held_out is not None and folders <= set(_EVALUATION_FOLDERS):
        raise UserError(f"data {path}: there is {held_out}/ but no train/ beside it")
    if "train" not in folders or held_out is None:
        images, classes = _scan(path / "train" if "train" in folders else path)
        if len(images) < 2:
            raise UserError(f"data {path}: one image cannot be split into training and evaluation; add val/")
        train, evaluation = split(len(images), holdout, seed)
        return images.subset(train), images.subset(evaluation), classes
    images, classes = _scan(path / "train")
    held, held_classes = _scan(path / held_out)
    if classes != held_classes:
        differing = sorted(set(classes) ^ set(held_classes))
        raise UserError(
            f"data {path}: train/ and {held_out}/ must have the same class folders; {_named(differing)} only in one"
        )
    return images, held, classes


def common_size(images: ImageFiles) -> int:
    """Return the side at which the images are used: their own if small (median of a few), else 224.

    Raises:
        UserError: none of those few can be read.
    """
    sides, refused = [], ""
    for i in np.unique(np.linspace(0, len(images) - 1, _PEEKED).astype(int)):
        try:
            picture = images.picture(int(i))
            sides.append(min(picture.height, picture.width))
        except CannotDecode as error:
            refused = refused or f"{images.path(int(i))}: cannot be decoded ({error})"
    if not sides:
        raise UserError(f"{refused}; nor can any other image that was tried: is this an image folder?")
    side = int(np.median(sides))
    return side if side <= SMALL_IMAGE else 224


def _scan(root: Path) -> tuple[ImageFiles, tuple[str, ...]]:
    with os.scandir(root) as entries:
        found = sorted((e.name, e.is_dir()) for e in entries if not e.name.startswith("."))
    classes = [name for name, is_folder in found if is_folder]
    if not classes:
        loose = any(name.lower().endswith(EXTENSIONS) for name, _ in found)
        raise UserError(
            f"data {root}: images must lie in one folder per class, such as {root}/cat/1.jpg"
            if loose
            else f"data {root}: the folder is empty; it must hold one folder of images per class"
        )
    names: list[str] = []
    counts: list[int] = []
    for each in classes:
        inside = _images_below(root / each, each + "/")
        if not inside:
            raise UserError(f"data {root / each}: the class folder holds no images; add some, or remove it")
        names += inside
        counts.append(len(inside))
    if len(classes) < 2:
        raise UserError(f"data {root}: {classes[0]}/ is the only class folder; is {root / classes[0]} the one meant?")
    labels = np.repeat(np.arange(len(classes)), counts).astype(np.int64)
    return ImageFiles(str(root), FileNames(names), labels), tuple(classes)


def _images_below(folder: Path, prefix: str) -> list[str]:
    """List the images of a class, sorted, folders within folders included; names start with `prefix`."""
    images, inner = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            if name.lower().endswith(EXTENSIONS):
                images.append(prefix + name)
            elif entry.is_dir():
                inner.append(name)
    for name in inner:
        images += _images_below(folder / name, f"{prefix}{name}/")
    return sorted(images)


def _named(classes: list[str]) -> str:
    return ", ".join(classes[:3]) + (f" and {len(classes) - 3} more are" if len(classes) > 3 else " stand")
