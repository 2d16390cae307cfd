"""Folders of files, one folder for each class: which files are there, and where links lead."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echelon.core.errors import UserError
from echelon.data.labelled_files import FileNames, LabelledFiles

_MOST_WAYS = 100  # to one folder, through links: these multiply where links lie behind links


@dataclass(frozen=True)
class FileKind:
    """Files that a folder is looked through for.

    Attributes:
        extensions: of their names, in small letters.
        plural: what they are called.
    """

    extensions: tuple[str, ...]
    plural: str


IMAGE_FILES = FileKind((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif"), "images")
SOUND_FILES = FileKind((".wav", ".flac", ".ogg", ".aiff", ".aif"), "sound files")


class FolderLinks:
    """Links in a data folder: what they lead to may lie outside it, or lead back to where they are.

    Attributes:
        files: that the folder is looked through for.
        outside: how many lead out of the folder.
        first: the first of these, and where it leads.
    """

    def __init__(self, top: Path, follow: bool, files: FileKind = IMAGE_FILES) -> None:
        """Begin with none. The folder itself may be a link.

        Args:
            follow: whether those that lead out of the folder are used.
            files: that the folder is looked through for.
        """
        self._top, self._follow, self.files = top, follow, files
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
        return self._stays(entry.path, target) or self._follow

    def count(self, named: Iterable[Path]) -> None:
        """Count the links out of the folder on the way to files and folders that are known by their names.

        A name that leads out by itself, being absolute or beginning with `..`, counts as one.
        """
        paths = set(named)
        on_the_way = {way for each in paths for way in (each, *each.parents) if self._top in way.parents}
        leaving = {each for each in paths - {self._top} if self._top not in Path(os.path.normpath(each)).parents}
        for way in sorted(on_the_way | leaving):
            if way in leaving or way.is_symlink():
                self._stays(str(way), os.path.realpath(way))

    def _stays(self, path: str, target: str) -> bool:
        """Whether a link leads to what lies in the folder; else it is counted."""
        if target == self._real_top or target.startswith(self._real_top.rstrip("/") + "/"):
            return True
        self.outside += 1
        self.first = self.first or f"{os.path.relpath(path, self._top)} -> {target}"
        return False

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


def scan_classes(path: Path, part: str, links: FolderLinks) -> tuple[LabelledFiles, tuple[str, ...]]:
    """List the files of the whole folder, or of one part of it, such as `train`, and the names of their classes.

    Raises:
        UserError: no files, a class without files, one class only, or links that lead in a circle or out of the folder.
        OSError: a folder cannot be read.
    """
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
        kind = links.files
        loose = any(name.lower().endswith(kind.extensions) for name, _ in listed)
        raise UserError(
            f"data {root}: {kind.plural} must lie in one folder per class, such as {root}/cat/1{kind.extensions[0]}"
            if loose
            else f"data {root}: the folder is empty; it must hold one folder of {kind.plural} per class"
        )
    inside = {name: files_below(root / name, f"{name}/", links, within) for name in classes}
    links.check()
    for name, files in inside.items():
        if not files:
            raise UserError(
                f"data {root / name}: the class folder holds no {links.files.plural}; add some, or remove it"
            )
    if len(classes) < 2:
        raise UserError(f"data {root}: {classes[0]}/ is the only class folder; is {root / classes[0]} the one meant?")
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in inside.values()]).astype(np.int64)
    names = FileNames([name for files in inside.values() for name in files])
    return LabelledFiles(str(root), names, labels), tuple(classes)


def scan_like(path: Path, part: str, links: FolderLinks, classes: tuple[str, ...]) -> LabelledFiles:
    """List the files of one part of a folder, whose classes must be those of `train/`.

    Raises:
        UserError: as `scan_classes`, or it has other classes.
    """
    files, own_classes = scan_classes(path, part, links)
    if classes != own_classes:
        differing = sorted(set(classes) ^ set(own_classes))
        raise UserError(
            f"data {path}: train/ and {part}/ must have the same class folders; {_named(differing)} only in one"
        )
    return files


def files_below(folder: Path, prefix: str, links: FolderLinks, within: Sequence[str]) -> list[str]:
    """List the files below a folder, sorted, folders within folders included; names start with `prefix`.

    Args:
        links: told of each link, which may then be left out.
        within: real paths of the folders that the folder lies in.

    Raises:
        OSError: a folder cannot be read.
    """
    within = (*within, os.path.realpath(folder))
    files, inner = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if not _is_seen(entry, links, within):
                continue
            if name.lower().endswith(links.files.extensions):
                files.append(prefix + name)
            elif entry.is_dir():
                inner.append(name)
    for name in inner:
        files += files_below(folder / name, f"{prefix}{name}/", links, within)
    return sorted(files)


def _is_seen(entry: os.DirEntry[str], links: FolderLinks, within: Sequence[str]) -> bool:
    return not entry.name.startswith(".") and links.usable(entry, within)


def _named(classes: list[str]) -> str:
    more = len(classes) - 3
    return ", ".join(classes[:3]) + (f" and {more} more are" if more > 0 else " are" if len(classes) > 1 else " is")
