"""The parts of a data set, by the names that folders, files and splits have: training, validation, test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.core.errors import UserError

TRAIN, VALIDATION, TEST = "train", "val", "test"
_NAMES: Mapping[str, str] = {
    "train": TRAIN, "training": TRAIN,
    "val": VALIDATION, "valid": VALIDATION, "validation": VALIDATION, "dev": VALIDATION,
    "test": TEST, "testing": TEST,
}  # fmt: skip


def part_of(name: str) -> str:
    """Return the part that a name stands for, in letters of any size: `train`, `val` or `test`; empty: none."""
    return _NAMES.get(name.lower(), "")


def part_of_file(name: str) -> str:
    """Return the part that a file's name stands for without its suffix; empty: none."""
    return part_of(Path(name).stem)


def by_part(source: Path | str, names: Iterable[str], stands_for: Callable[[str], str] = part_of) -> dict[str, str]:
    """Return the names that stand for a part, by part, in the order train, val, test; other names are left out.

    Args:
        stands_for: gives the part of a name.

    Raises:
        UserError: two stand for one part.
    """
    found: dict[str, str] = {}
    for name in sorted(names):
        part = stands_for(name)
        if part in found:
            raise UserError(f"data {source}: {found[part]} and {name} are both its part {part}: remove or rename one")
        if part:
            found[part] = name
    return {part: found[part] for part in (TRAIN, VALIDATION, TEST) if part in found}


def subfolders(path: Path) -> list[str]:
    """Return the names of the folders in a folder, hidden ones left out."""
    return sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))


def train_folder(path: Path) -> Path:
    """Return the folder of the training part; a folder without parts is its own."""
    return next((path / name for name in subfolders(path) if part_of(name) == TRAIN), path)


@dataclass(frozen=True)
class PartFolders:
    """The names of the folders of each part; empty: there is none, and all below is for training.

    Attributes:
        train: empty: the folder itself.
    """

    train: str = ""
    validation: str = ""
    test: str = ""

    @classmethod
    def of(cls, path: Path) -> PartFolders:
        """Find the parts of a folder.

        Raises:
            UserError: there are parts, but none to train on; or two folders are one part.
            OSError: the folder cannot be read.
        """
        names = subfolders(path)
        if not any(part_of(name) == TRAIN for name in names):
            parts = [name for name in names if part_of(name)]
            if parts and len(parts) == len(names):
                raise UserError(f"data {path}: there is {parts[0]}/ but no train/ beside it")
            return cls()  # one that is called as a part is a class here
        found = by_part(path, names)
        return cls(found[TRAIN], found.get(VALIDATION, ""), found.get(TEST, ""))
