"""Data that another run's measures hold for: the same input is the same number, whatever else the new data has."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import open_data
from echelon.data.base import Source
from echelon.data.kept_info import keep_info


def table(path: Path, towns: list[str], scale: float, kinds: list[str]) -> Path:
    rows = [f"{scale * i},{towns[i % len(towns)]},{kinds[i % len(kinds)]}" for i in range(24)]
    path.write_text("\n".join(["size,town,kind", *rows]) + "\n")
    return path


def opened(data: Path, folder: Path | None = None, measures: Path | None = None, target: str = "kind") -> Source:
    config = DataConfig(source=str(data), target=target, measures=str(measures or ""))
    source = open_data(config, 0, folder=folder)
    if folder is not None:
        keep_info(folder, source.info)
    return source


def rows(source: Source) -> list[tuple[list[float], list[int]]]:
    values = source.train.values  # type: ignore[attr-defined]
    return list(zip(values["numbers"].tolist(), values["categories"].tolist(), strict=True))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    opened(table(tmp_path / "old.csv", ["Bonn", "Ulm", "Wien"], 1.0, ["a", "b"]), folder)
    return folder


def test_categories_and_scales_are_the_runs(tmp_path: Path, base: Path) -> None:
    data = table(tmp_path / "new.csv", ["Ulm", "Zell"], 10.0, ["a", "b"])
    alone, measured = opened(data), opened(data, measures=base)
    assert {each for _, (each,) in rows(alone)} == {1, 2}  # Ulm would be what Bonn was
    assert {each for _, (each,) in rows(measured)} == {0, 2}  # Zell is unknown
    assert any("did not know: 1; they share one place" in note for note in measured.notes)
    sizes = [np.std([numbers[0] for numbers, _ in rows(each)]) for each in (alone, measured)]
    assert sizes[1] > 5 * sizes[0]


def test_other_classes_are_measured_anew(tmp_path: Path, base: Path) -> None:
    source = opened(table(tmp_path / "new.csv", ["Ulm"], 1.0, ["b", "c"]), measures=base)
    assert source.info.classes == ("b", "c") and any("its classes are others" in note for note in source.notes)
    fewer = opened(table(tmp_path / "few.csv", ["Ulm"], 1.0, ["b"]), measures=base)
    assert fewer.info.classes == ("a", "b")


def test_new_ids_of_what_users_took_share_one_place(tmp_path: Path) -> None:
    def taken(name: str, users: range) -> Path:
        path = tmp_path / name
        path.write_text("user,item\n" + "".join(f"{u},{i}\n" for u in users for i in range(5)))
        return path

    def opened_ids(data: Path, folder: Path | None, measures: Path | str) -> Source:
        config = DataConfig(source=str(data), input="user,item", measures=str(measures))
        source = open_data(config, 0, "recommendation", folder)
        if folder is not None:
            keep_info(folder, source.info)
        return source

    folder = tmp_path / "base"
    folder.mkdir()
    opened_ids(taken("old.csv", range(8)), folder, "")
    source = opened_ids(taken("new.csv", range(6, 12)), None, folder)
    assert any("values of column user" in note and ": 4; they share" in note for note in source.notes), source.notes


def test_a_run_that_goes_on_needs_the_other_no_more(tmp_path: Path, base: Path) -> None:
    data, folder = table(tmp_path / "new.csv", ["Ulm", "Zell"], 10.0, ["a", "b"]), tmp_path / "tuned"
    folder.mkdir()
    first = opened(data, folder, base)
    shutil.rmtree(base)
    assert rows(opened(data, folder, base)) == rows(first)
    with pytest.raises(UserError, match="no run that keeps what it measured"):
        opened(data, measures=base)


def test_images_are_normalised_as_the_runs(tmp_path: Path) -> None:
    def images(name: str, side: int, light: int) -> Path:
        for part in ("train", "test"):
            for label in ("x", "y"):
                place = tmp_path / name / part / label
                place.mkdir(parents=True)
                for i in range(4):
                    Image.fromarray(np.full((side, side, 3), light + 9 * i, np.uint8)).save(place / f"{i}.png")
        return tmp_path / name

    folder = tmp_path / "base"
    folder.mkdir()
    old = opened(images("old", 16, 10), folder, target="").info
    data = images("new", 24, 200)
    new = opened(data, measures=folder, target="").info
    assert (new.mean, new.std, new.image_size) == (old.mean, old.std, 16)
    assert opened(data, target="").info.image_size == 24
