"""Image folders: one folder per class, below `train/` with `val/` or `test/`, or in one folder that is split."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
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
_MOST_WAYS = 100  # to one folder, through links: these multiply where links lie behind links


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
        path = Path(config.source).expanduser()
        links = FolderLinks(path, config.follow_links)
        return replace(image_source(config, *open_folder(path, config.holdout, seed, links)), notes=links.notes)


SOURCE = Folder


class FolderLinks:
    """Links in a data folder: what they lead to may lie outside it, or lead back to where they are.

    Attributes:
        outside: how many lead out of the folder.
        first: the first of these, and where it leads.
    """

    def __init__(self, top: Path, follow: bool) -> None:
        """Begin with none. The folder itself may be a link.

        Args:
            follow: whether those that lead out of the folder are used.
        """
        self._top, self._follow = top, follow
        self._real_top = os.path.realpath(top)
        self._entered: Counter[str] = Counter()
        self.outside, self.first = 0, ""

    def usable(self, entry: os.DirEntry[str], within: Sequence[str]) -> bool:
        """Count an entry that is a link out of the folder; returns whether the entry is used.

        Args:
            within: real paths of the folders that the entry lies in, as it was reached.

        Raises:
            UserError: it leads to one of these, or links lead to its target by too many ways.
            OSError: links lead in a circle.
        """
        if not entry.is_symlink():
            return True
        try:
            target = os.path.realpath(entry.path, strict=True)
        except FileNotFoundError:
            return True  # leads nowhere: said when it is read
        if target in within:
            raise UserError(f"data {entry.path}: this link leads back to {target}, which it lies in: remove it")
        if entry.is_dir():
            self._entered[target] += 1
        if self._entered[target] > _MOST_WAYS:
            raise UserError(f"data {entry.path}: links lead to {target} by more than {_MOST_WAYS} ways: remove some")
        if target == self._real_top or target.startswith(self._real_top.rstrip("/") + "/"):
            return True
        self.outside += 1
        self.first = self.first or f"{os.path.relpath(entry.path, self._top)} -> {target}"
        return self._follow

    def check(self) -> None:
        """Refuse links that lead out of the folder, unless they are to be followed.

        Raises:
            UserError: names the first, and how many there are.
        """
        if self.outside and not self._follow:
            raise UserError(
                f"data {self._top}: {self._said()}: put the files there, or give --follow-links if they are meant"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user has to know of links that are followed."""
        return (f"data {self._top}: {self._said()}; followed",) if self.outside else ()

    def _said(self) -> str:
        number = f"{self.outside} links lead" if self.outside > 1 else "1 link leads"
        return f"{number} out of the folder, the first one {self.first}"


def open_folder(
    path: Path, holdout: float, seed: int, links: FolderLinks | None = None
) -> tuple[ImageFiles, ImageFiles, tuple[str, ...]]:
    """Open a folder in ImageFolder layout.

    Args:
        holdout: share held out for evaluation where the folder has no `val/` or `test/`.
        seed: of that split.
        links: told of each link; none that leads out of the folder is followed without it.

    Returns:
        Training images, evaluation images, class names.

    Raises:
        UserError: no folder, no images, a class without images, one class only, classes that differ, or links that
            lead in a circle or out of the folder.
    """
    links = links or FolderLinks(path, follow=False)
    try:
        return _open(path, holdout, seed, links)
    except OSError as error:
        links.check()
        raise UserError(f"data {error.filename}: {error.strerror}") from None


def _open(path: Path, holdout: float, seed: int, links: FolderLinks) -> tuple[ImageFiles, ImageFiles, tuple[str, ...]]:
    if not path.is_dir():
        raise UserError(f"data {path}: it is a file, not a folder" if path.exists() else f"data {path}: no such folder")
    folders = {each.name for each in path.iterdir() if each.is_dir()}
    held_out = next((name for name in _EVALUATION_FOLDERS if name in folders), None)
    if "train" not in folders and held_out is not None and folders <= set(_EVALUATION_FOLDERS):
        raise UserError(f"data {path}: there is {held_out}/ but no train/ beside it")
    if "train" not in folders or held_out is None:
        images, classes = _scan(path, "train" if "train" in folders else "", links)
        if len(images) < 2:
            raise UserError(f"data {path}: one image cannot be split into training and evaluation; add val/")
        train, evaluation = split(len(images), holdout, seed)
        return images.subset(train), images.subset(evaluation), classes
    images, classes = _scan(path, "train", links)
    held, held_classes = _scan(path, held_out, links)
    if classes != held_classes:
        differing = sorted(set(classes) ^ set(held_classes))
        raise UserError(
            f"data {path}: train/ and {held_out}/ must have the same class folders; {_named(differing)} only in one"
        )
    return images, held, classes


def _scan(path: Path, part: str, links: FolderLinks) -> tuple[ImageFiles, tuple[str, ...]]:
    """List the images of the whole folder, or of one part of it, such as `train`."""
    root = path / part
    within = (os.path.realpath(path), os.path.realpath(root))
    with os.scandir(path) as entries:
        followed = all(links.usable(entry, within[:1]) for entry in entries if entry.name == part)
    if not followed:
        links.check()
    with os.scandir(root) as entries:
        listed = sorted((e.name, e.is_dir()) for e in entries if _is_seen(e, links, within))
    classes = [name for name, is_folder in listed if is_folder]
    if not classes:
        links.check()
        loose = any(name.lower().endswith(EXTENSIONS) for name, _ in listed)
        raise UserError(
            f"data {root}: images must lie in one folder per class, such as {root}/cat/1.jpg"
            if loose
            else f"data {root}: the folder is empty; it must hold one folder of images per class"
        )
    images = {name: _images_below(root / name, f"{name}/", links, within) for name in classes}
    links.check()
    for name, inside in images.items():
        if not inside:
            raise UserError(f"data {root / name}: the class folder holds no images; add some, or remove it")
    if len(classes) < 2:
        raise UserError(f"data {root}: {classes[0]}/ is the only class folder; is {root / classes[0]} the one meant?")
    labels = np.repeat(np.arange(len(classes)), [len(inside) for inside in images.values()]).astype(np.int64)
    return ImageFiles(str(root), FileNames([n for inside in images.values() for n in inside]), labels), tuple(classes)


def _images_below(folder: Path, prefix: str, links: FolderLinks, within: Sequence[str]) -> list[str]:
    """List the images of a class, sorted, folders within folders included; names start with `prefix`."""
    within = (*within, os.path.realpath(folder))
    images, inner = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if not _is_seen(entry, links, within):
                continue
            if name.lower().endswith(EXTENSIONS):
                images.append(prefix + name)
            elif entry.is_dir():
                inner.append(name)
    for name in inner:
        images += _images_below(folder / name, f"{prefix}{name}/", links, within)
    return sorted(images)


def _is_seen(entry: os.DirEntry[str], links: FolderLinks, within: Sequence[str]) -> bool:
    return not entry.name.startswith(".") and links.usable(entry, within)


def _named(classes: list[str]) -> str:
    return ", ".join(classes[:3]) + (f" and {len(classes) - 3} more are" if len(classes) > 3 else " stand")
