"""Folders of images and masks: `images/` and `masks/`, also below `train/` with `val/` and `test/`; names are the same.

A mask is a PNG of class numbers, grey or with a palette; 255 is ignored. `classes.txt`, one name a line, names the
classes; without it they are 0 up to the largest number of the training masks.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import UserError
from echelon.data.base import DataInfo, DataOutline, DataRequest, Source
from echelon.data.class_folders import FolderLinks, files_below
from echelon.data.decode import CannotDecode
from echelon.data.images import ImageFiles
from echelon.data.labelled_files import FileNames, LabelledFiles
from echelon.data.masks import IGNORED, MaskedImages, pixel_counts
from echelon.data.parts import PartFolders, train_folder
from echelon.data.sample_index import FixedSampleIndex
from echelon.data.sources.base import SourceKind, held_out
from echelon.data.statistics import measure
from echelon.tasks.base import Encoding
from echelon.tasks.nest import TensorSpec

_IMAGES, _MASKS, _NAMES = "images", "masks", "classes.txt"
_STEP, _MOST = 16, 256  # pixels of side, where none is asked for
_LOOKED_AT = 32


class MaskFolder(SourceKind):
    """The path of a folder of images and masks."""

    form: ClassVar[str] = "a folder with images/ and masks/"
    reads: ClassVar[tuple[str, ...]] = ("follow_links",)
    folders: ClassVar[tuple[str, ...]] = ("images", "masks")
    packages: ClassVar[tuple[str, ...]] = ("torchvision",)
    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)

    def takes(self, name: str) -> bool:
        """Whether a folder, or its `train/`, holds `images/` and `masks/`, or one of them and no other folder."""
        path = Path(name).expanduser()
        return path.is_dir() and any(_looks_like_masks(each) for each in (path, train_folder(path)))

    def outline(self, request: DataRequest) -> DataOutline:
        """Return the task that masks are for."""
        return DataOutline("segmentation")

    def open(self, request: DataRequest) -> Source:
        """Open the folder; where it has no part for evaluation, one is held out by the seed."""
        if request.encoding not in (Encoding.AUTO, Encoding.MASKS):
            raise UserError(
                f"data {request.config.source} is a folder of images and masks: --task {request.task} is for others, "
                "use --task segmentation"
            )
        path = Path(request.config.source).expanduser()
        links = FolderLinks(path, request.config.follow_links)
        try:
            return _open(path, request, links)
        except OSError as error:
            links.check()
            raise UserError(f"data {error.filename}: {error.strerror}") from None


SOURCE = MaskFolder


def _looks_like_masks(path: Path) -> bool:
    has = _folders_in(path)
    return bool(has) and ({_IMAGES, _MASKS} <= has or has <= {_IMAGES, _MASKS})


def _folders_in(path: Path) -> set[str]:
    return {each.name for each in path.iterdir() if each.is_dir() and each.name[0] != "."} if path.is_dir() else set()


def _open(path: Path, request: DataRequest, links: FolderLinks) -> Source:
    config, folders = request.config, PartFolders.of(path)
    others = {name: path / part for name, part in (("val", folders.validation), ("test", folders.test)) if part}
    links.count(part / name for part in (path / folders.train, *others.values()) for name in (_IMAGES, _MASKS))
    links.check()
    pairs = _pairs(path / folders.train, links)
    parts = {name: _pairs(part, links) for name, part in others.items()}
    links.check()
    skips_bad = config.on_bad_image == "skip"
    counts = pixel_counts(pairs, config.root, skips_bad)
    names = _class_names(path, pairs, counts)
    sample_index = FixedSampleIndex.of(request.folder, config.source, len(pairs), _digest(pairs, counts))
    for part in parts.values():
        _check_classes(part, pixel_counts(part, config.root, skips_bad), len(names), path)
    notes: tuple[str, ...] = ()
    validation, test = parts.get("val"), parts.get("test")
    if validation is None:
        divided = held_out(request, len(pairs), test is not None, "image")
        pairs, validation, counts = pairs.subset(divided.train), pairs.subset(divided.evaluation), counts[divided.train]
        notes = divided.notes
    side = config.image_size or _own_side(pairs.images)
    mean, std = measure(pairs.images, side)
    of_classes = counts.sum(0)[: len(names)]
    info = DataInfo(
        config.source, names, 3, side, len(pairs), len(validation), tuple(of_classes.tolist()), mean, std,
        targets=TensorSpec((side, side), "int64"), task="segmentation",
    )  # fmt: skip
    told = (*links.notes, *notes, *_notes(config.source, names, of_classes))
    return Source(pairs, validation, info, told, test, sample_index)


def _digest(pairs: MaskedImages, counts: NDArray[np.int64]) -> str:
    """Return a hash of the names of the files, and of how many pixels of each number each mask has, `(N, 256)`."""
    hashed = hashlib.sha256(np.ascontiguousarray(counts).tobytes())
    for files in (pairs.images, pairs.masks):
        for i in range(len(pairs)):
            hashed.update(f"{files.names[i]}\0".encode("utf-8", "surrogateescape"))
    return hashed.hexdigest()


def _pairs(folder: Path, links: FolderLinks) -> MaskedImages:
    """Pair the images and masks of one part by their names without suffix.

    Raises:
        UserError: a folder is missing or empty, or an image or a mask has no other of its name.
    """
    for needed, other in ((_IMAGES, _MASKS), (_MASKS, _IMAGES)):
        if not (folder / needed).is_dir():
            raise UserError(f"data {folder}: there is no {needed}/ beside {other}/: a folder of masks has both")
    images, masks = (_by_stem(folder / name, links) for name in (_IMAGES, _MASKS))
    if not images:
        raise UserError(f"data {folder / _IMAGES}: the folder holds no images")
    wrong = next((name for name in masks.values() if not name.lower().endswith(".png")), None)
    if wrong is not None:
        raise UserError(f"data {folder / _MASKS / wrong}: masks must be PNG, which keeps class numbers as they are")
    alone = sorted(images.keys() - masks.keys())
    if alone:
        raise UserError(
            f"data {folder / _IMAGES / images[alone[0]]}: this image has no mask{_and_more(alone)}: "
            f"add {folder / _MASKS / alone[0]}.png, or remove the image"
        )
    alone = sorted(masks.keys() - images.keys())
    if alone:
        raise UserError(
            f"data {folder / _MASKS / masks[alone[0]]}: this mask has no image{_and_more(alone)}: "
            f"add {alone[0]}.jpg or the like to {folder / _IMAGES}, or remove the mask"
        )
    stems = sorted(images)
    none = np.zeros(len(stems), np.int64)
    return MaskedImages(
        ImageFiles(str(folder / _IMAGES), FileNames([images[stem] for stem in stems]), none),
        LabelledFiles(str(folder / _MASKS), FileNames([masks[stem] for stem in stems]), none),
    )


def _and_more(alone: list[str]) -> str:
    return f", nor have {len(alone) - 1} more" if len(alone) > 1 else ""


def _by_stem(folder: Path, links: FolderLinks) -> dict[str, str]:
    """Return the images below a folder by their names without suffix.

    Raises:
        UserError: two differ in their suffixes alone.
    """
    found: dict[str, str] = {}
    for name in files_below(folder, "", links, (os.path.realpath(folder.parent),)):
        stem = os.path.splitext(name)[0]  # noqa: PTH122 - a Path for each of many files
        if stem in found:
            raise UserError(f"data {folder}: {found[stem]} and {name} have one name: remove one")
        found[stem] = name
    return found


def _class_names(path: Path, pairs: MaskedImages, counts: NDArray[np.int64]) -> tuple[str, ...]:
    """Return the names of the classes: those of `classes.txt`, else their numbers.

    Raises:
        UserError: fewer than two, or a mask has a number beyond those of the file.
    """
    file, most = path / _NAMES, int(np.flatnonzero(counts.sum(0)[:IGNORED]).max(initial=0))
    if not file.is_file():
        if not most:
            raise UserError(
                f"data {pairs.masks.root}: the masks hold class 0 alone{_ignored_too(counts)}: "
                "write the class numbers 0, 1, 2, ... into the masks"
            )
        return tuple(str(number) for number in range(most + 1))
    try:
        names = tuple(line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip())
    except UnicodeDecodeError:
        raise UserError(f"data {file}: it is not UTF-8 text: write one name of a class a line") from None
    if len(names) < 2:
        raise UserError(f"data {file}: it names {len(names)} classes: write one name a line, at least two")
    _check_classes(pairs, counts, len(names), path)
    return names


def _ignored_too(counts: NDArray[np.int64]) -> str:
    return " (beside 255, which is ignored and is no class)" if counts[:, IGNORED].any() else ""


def _check_classes(pairs: MaskedImages, counts: NDArray[np.int64], classes: int, path: Path) -> None:
    rows, numbers = np.nonzero(counts[:, :IGNORED])
    beyond = [i for i, number in enumerate(numbers.tolist()) if number >= classes]
    if beyond:
        known = f"{_NAMES} names" if (path / _NAMES).is_file() else "the training masks have"
        raise UserError(
            f"data {pairs.masks.path(int(rows[beyond[0]]))}: this mask has class {numbers[beyond[0]]}, and {known} "
            f"0 to {classes - 1}: mend the mask (255 is ignored), or name all classes in {path / _NAMES}"
        )


def _own_side(images: ImageFiles) -> int:
    """Return the median of the longer sides of a few images, rounded up to a multiple of 16; at most 256."""
    sides = []
    for i in np.unique(np.linspace(0, len(images) - 1, _LOOKED_AT).astype(int)):
        try:
            picture = images.picture(int(i))
            sides.append(max(picture.height, picture.width))
        except CannotDecode:
            continue  # its loader tells the user
    if not sides:
        raise UserError(f"data {images.root}: none of the images that were tried can be decoded")
    return min(_MOST, -(-int(np.median(sides)) // _STEP) * _STEP)


def _notes(name: str, names: tuple[str, ...], pixels: NDArray[np.int64]) -> tuple[str, ...]:
    absent = [each for each, count in zip(names, pixels.tolist(), strict=True) if not count]
    if not absent:
        return ()
    listed = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
    return (f"data {name}: no training mask has {len(absent)} of the {len(names)} classes ({listed})",)
