"""Image folders: one folder per class, below `train/` with `val/` or `test/`, or in one folder that is split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from echelon.core.errors import UserError
from echelon.data.base import DataRequest, Source
from echelon.data.class_folders import FolderLinks, scan_classes, scan_like
from echelon.data.images import ImageFiles
from echelon.data.order import split
from echelon.data.sources.base import SourceKind, image_source

_EVALUATION_FOLDERS = ("val", "valid", "validation", "test")


class Folder(SourceKind):
    """The path of a folder of images."""

    form: ClassVar[str] = "a folder"
    takes_whatever_is_there: ClassVar[bool] = True

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

    def open(self, request: DataRequest) -> Source:
        """Open the folder; where it has no part for evaluation, one is held out by the seed."""
        config = request.config
        path = Path(config.source).expanduser()
        links = FolderLinks(path, config.follow_links)
        return replace(image_source(config, *open_folder(path, config.holdout, request.seed, links)), notes=links.notes)


SOURCE = Folder


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
        files, classes = scan_classes(path, "train" if "train" in folders else "", links)
        images = ImageFiles.of(files)
        if len(images) < 2:
            raise UserError(f"data {path}: one image cannot be split into training and evaluation; add val/")
        train, evaluation = split(len(images), holdout, seed)
        return images.subset(train), images.subset(evaluation), classes
    files, classes = scan_classes(path, "train", links)
    return ImageFiles.of(files), ImageFiles.of(scan_like(path, held_out, links, classes)), classes
