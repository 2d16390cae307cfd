"""Folders and files that are parts of a data set, by the names that people give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.data.parts import PartFolders, by_part, part_of_file, train_folder


def made(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (("train", "val", "test"), ("train", "val", "test")),
        (("Train", "Test"), ("Train", "", "Test")),
        (("train", "dev"), ("train", "dev", "")),
        (("training", "validation", "testing"), ("training", "validation", "testing")),
        (("cat", "dog"), ("", "", "")),
        (("test", "production"), ("", "", "")),  # classes, one of which is called so
        (("train", "other", ".cache"), ("train", "", "")),
    ],
)
def test_parts_are_known_by_their_names(tmp_path: Path, names: tuple[str, ...], parts: tuple[str, str, str]) -> None:
    found = PartFolders.of(made(tmp_path, *names))
    assert (found.train, found.validation, found.test) == parts
    assert train_folder(tmp_path) == tmp_path / parts[0]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("val", "test"), "there is test/ but no train/ beside it"),
        (("Validation", ".cache"), "there is Validation/ but no train/"),
        (("train", "val", "dev"), "dev and val are both its part val: remove or rename one"),
        (("train", "Train"), "Train and train are both its part train"),
    ],
)
def test_parts_that_cannot_be_used_are_refused(tmp_path: Path, names: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        PartFolders.of(made(tmp_path, *names))


def test_files_are_parts_by_their_names_without_suffix() -> None:
    assert by_part("x", ["Test.csv", "train.csv", "notes.csv"], part_of_file) == {
        "train": "train.csv", "test": "Test.csv",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"data x: train.csv and train.jsonl are both its part train"):
        by_part("x", ["train.jsonl", "train.csv"], part_of_file)
