"""Image folders: one folder per class, below `train/` with `val/` or `test/`, or in one folder that is split."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import numpy as np

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data.base import Source
from echelon.data.images import FileNames, ImageFiles
from echelon.data.order import split
from echelon.data.sources.base import SourceKind, image_source

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif")
_EVALUATION_FOLDERS = ("val", "valid", "validation", "test")


class Folder(SourceKind):
    """The path of a folder of images."""

    form: ClassVar[str] = "a folder"

    def takes(self, name: str) -> bool:
        """Whether something is there under this path."""
        return Path(name).expanduser().exists()

    def check(self, name: str) -> None:
        """Refuse a file.

        Raises:
            UserError: it is no folder.
        """
        path = Path(name).expanduser()
        if not path.is_dir():
            raise UserError(f"data {path}: it is a file, not a folder")

    def open(self, config: DataConfig, seed: int) -> Source:
        """Open the folder; where it has no part for evaluation, one is held out by the seed."""
        return image_source(config, *open_folder(Path(config.source).expanduser(), config.holdout, seed))


SOURCE = Folder


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
