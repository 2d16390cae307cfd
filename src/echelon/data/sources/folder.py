"""Image folders: one folder per class, below `train/` with `val/` or `test/`, or in one folder that is split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from echelon.core.errors import UserError
from echelon.data.base import DataRequest, Source
from echelon.data.class_folders import FolderLinks, scan_classes, scan_like
from echelon.data.images import ImageFiles
from echelon.data.parts import PartFolders
from echelon.data.sample_index import NamedSampleIndex
from echelon.data.sources.base import SourceKind, began_with_all, grown_images, held_out_of_begun


class Folder(SourceKind):
    """The path of a folder of images."""

    form: ClassVar[str] = "a folder"
    reads: ClassVar[tuple[str, ...]] = ("follow_links",)
    takes_whatever_is_there: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("torchvision",)

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
        return open_folder(path, request, links)


SOURCE = Folder


def open_folder(path: Path, request: DataRequest, links: FolderLinks) -> Source:
    """Open a folder in ImageFolder layout; without `val/`, some of the training images are held out.

    Args:
        links: told of each link.

    Raises:
        UserError: no folder, no images, a class without images, one class only, classes that differ, or links that
            lead in a circle or out of the folder.
    """
    try:
        return _open(path, request, links)
    except OSError as error:
        links.check()
        raise UserError(f"data {error.filename}: {error.strerror}") from None


def _open(path: Path, request: DataRequest, links: FolderLinks) -> Source:
    if not path.is_dir():
        raise UserError(f"data {path}: it is a file, not a folder" if path.exists() else f"data {path}: no such folder")
    parts = PartFolders.of(path)
    files, classes = scan_classes(path, parts.train, links)
    names = [files.names[i] for i in range(len(files))]
    sample_index = NamedSampleIndex.of(request.folder, request.config.source, classes, names)
    notes: tuple[str, ...] = ()
    train, test = ImageFiles.of(files), None
    if sample_index.is_kept:
        train = train.subset(sample_index.order(names))
    validation = parts.validation
    if parts.test and validation:
        try:
            test = ImageFiles.of(scan_like(path, parts.test, links, classes))
        except UserError as error:  # images without classes, as those of competitions are
            notes += (f"{parts.test}/ is not used: {str(error).removeprefix('data ')}",)
    elif parts.test and began_with_all(request, sample_index.begun):
        validation = parts.test
    elif parts.test:
        test = ImageFiles.of(scan_like(path, parts.test, links, classes))
    if validation:
        evaluation = ImageFiles.of(scan_like(path, validation, links, classes))
    else:
        divided = held_out_of_begun(request, sample_index, test is not None, "image")
        train, evaluation = train.subset(divided.train), train.subset(divided.evaluation)
        notes += divided.notes
    source = grown_images(request, train, evaluation, classes, sample_index)
    return replace(source, notes=(*links.notes, *notes), test=test, sample_index=sample_index)
