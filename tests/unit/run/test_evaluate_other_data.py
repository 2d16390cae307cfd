"""Other data than a run's is evaluated as the run's model knows its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import DataInfo, Source, open_data
from echelon.data.preparation import USUAL, read_preparation
from echelon.data.sources import SourceChoice
from echelon.run.evaluator import as_trained_on, left_out
from tests.unit.data.images import make_image
from tests.unit.data.test_parallel_text import make_parallel

KEPT = DataInfo("own", ("r", "g", "b"), 1, 24, 8, 2, (4, 4), mean=(0.5,), std=(0.25,))


def other(**facts: Any) -> Source:
    nothing: Any = ()
    return Source(nothing, nothing, replace(KEPT, name="other", **facts))


def test_classes_that_the_run_does_not_know_or_that_cannot_be_renumbered_are_refused() -> None:
    with pytest.raises(UserError, match="its classes are b, g, r; the run's are r, g, b: some are missing, or in anot"):
        as_trained_on(other(classes=("b", "g", "r")), KEPT)  # its parts are no known kind
    with pytest.raises(UserError, match="the run knows no x, y, and the model knows each by its number"):
        as_trained_on(other(classes=("r", "x", "y")), KEPT)


@pytest.mark.parametrize("kind", ["images", "sounds", "texts"])
def test_some_of_the_runs_classes_are_known_by_their_names(kind: str, tmp_path: Path) -> None:
    for name in ("g", "r"):
        for i in range(4):
            write_sample(tmp_path / kind / name, kind, i)
    opened: Any = open_data(DataConfig(source=str(tmp_path / kind), root=str(tmp_path)), 0)
    kept = replace(opened.info, classes=("r", "b", "g"), class_counts=(4, 4, 4))
    source: Any = as_trained_on(opened, kept)
    before, after = (getattr(each.train, "labels", each.train) for each in (opened, source))
    if kind == "texts":
        before, after = before.targets, after.targets
    assert after.tolist() == [{0: 2, 1: 0}[label] for label in before.tolist()]
    counts = np.bincount(after, minlength=3)
    assert source.info.classes == kept.classes and source.info.class_counts == tuple(counts) and counts[1] == 0
    assert f"data {opened.info.name} has no sample of b" in source.notes


def write_sample(folder: Path, kind: str, i: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "images":
        make_image(folder / f"{i}.png", (20, 20))
    elif kind == "sounds":
        soundfile.write(folder / f"{i}.wav", np.zeros(4000, np.float32), 8000)
    else:
        (folder / f"{i}.txt").write_text(f"text {i} of {folder.name}")


def test_images_are_normalised_and_sized_as_the_runs_own(tmp_path: Path) -> None:
    found = other(channels=3, image_size=32, mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0))
    assert replace(as_trained_on(found, KEPT).info, name="own") == KEPT
    for name in KEPT.classes:
        for i in range(4):
            make_image(tmp_path / "images" / name / f"{i}.png", (20, 20))
    opened = open_data(DataConfig(source=str(tmp_path / "images")), 0)
    kept = replace(KEPT, classes=opened.info.classes)
    info = as_trained_on(opened, kept).info
    assert (info.image_size, info.mean, info.std) == (24, (0.5,), (0.25,))
    assert f"{opened.info.train_size} samples of" in left_out(opened)


def test_targets_are_in_the_units_of_the_run_and_sounds_at_its_rate(tmp_path: Path) -> None:
    units = {"classes": (), "mean": (), "std": (), "target_mean": (3.0,), "target_std": (2.0,)}
    found = replace(other(**units), info=replace(KEPT, **{**units, "target_mean": (0.0,), "target_std": (1.0,)}))
    assert as_trained_on(found, replace(KEPT, **units)).info.target_mean == (3.0,)
    for name in ("low", "high"):
        (tmp_path / name).mkdir()
        for i in range(4):
            soundfile.write(tmp_path / name / f"{i}.wav", np.zeros(4000, np.float32), 8000)
    opened: Any = open_data(DataConfig(source=str(tmp_path)), 0)
    assert opened.info.rate == opened.evaluation.rate == 8000
    sounds: Any = as_trained_on(opened, replace(opened.info, rate=16000))
    assert sounds.info.rate == sounds.evaluation.rate == 16000
    assert len(sounds.evaluation.wave(0)) == 8000
    assert sounds.evaluation.frames.tolist() == [51] * len(sounds.evaluation)


def opened(path: Path, **settings: str) -> tuple[int, str]:
    """Return how many samples of other data are evaluated, and of which part."""
    source, part = SourceChoice(DataConfig(source=str(path), **settings), 0, USUAL).open_other()  # type: ignore[arg-type]
    evaluated: Any = source.evaluation if source.test is None else source.test
    return len(evaluated), part


@pytest.mark.parametrize(
    ("parts", "settings", "found"),
    [
        ((), {}, (30, "")),
        ((), {"split": "fold"}, (30, "")),  # the run's own column
        (("train", "val", "test"), {"split": "fold"}, (10, "test")),
        (("train", "val", "test"), {}, (10, "test")),
        (("train", "val"), {}, (15, "val")),
        (("test", "val"), {"split": "fold"}, (15, "test")),
        (("test",), {}, (30, "test")),
        (("val",), {}, (30, "val")),
        (("train",), {}, (30, "")),
    ],
)
def test_rows_of_a_file_are_evaluated_by_the_parts_that_it_names_else_all(
    parts: tuple[str, ...], settings: dict[str, str], found: tuple[int, str], tmp_path: Path
) -> None:
    rows = [f"{i},{i * i % 7},{'xy'[i % 2]}" + (f",{parts[i % len(parts)]}" if parts else "") for i in range(30)]
    (tmp_path / "other.csv").write_text("\n".join(["a,b,y" + ",fold" * bool(parts), *rows]) + "\n")
    assert opened(tmp_path / "other.csv", target="y", **settings) == found


def test_a_table_is_refused_by_a_run_of_other_data_in_words_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(UserError, match=r"rows\.csv is a table, and the run's data is none"):
        opened(tmp_path / "rows.csv")


def test_one_row_alone_and_a_text_are_evaluated_whole(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("a,b,y\n1,2,3.5\n")
    assert opened(tmp_path / "one.csv", target="y") == (1, "")
    (tmp_path / "text.txt").write_text("to be or not to be " * 400)
    whole, part = opened(tmp_path / "text.txt", tokeniser="characters")
    assert part == "" and whole == pytest.approx(19 * 400 / 128, abs=1)


def test_pairs_without_parts_are_evaluated_whole_and_none_is_said_to_be_held_out(tmp_path: Path) -> None:
    folder = make_parallel(tmp_path / "pairs", {"train": 20})
    config = DataConfig(str(folder), root=str(tmp_path), input="en", target="de", tokeniser="bpe(300)")
    source, part = SourceChoice(config, 0, read_preparation(config, None), "translation").open_other()
    evaluated: Any = source.evaluation
    assert (len(evaluated), part) == (20, "") and not any("held out" in note for note in source.notes)


@pytest.mark.parametrize("kind", ["images", "sounds", "texts"])
def test_folders_of_classes_are_evaluated_whole_where_they_are_no_parts(kind: str, tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 2)):
        for each in ("low", "high"):
            for i in range(count):
                write_sample(tmp_path / "parts" / part / each, kind, i)
    assert opened(tmp_path / "parts") == (4, "test")
    assert opened(tmp_path / "parts" / "train") == (6, "")
