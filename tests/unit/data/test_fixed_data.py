"""Data that cannot grow under a run: other data of the same name and size is refused where the run goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import Source, open_data
from tests.laws.extras import NEEDS_DATASETS
from tests.unit.data.shapes import make_shapes

ROWS = 30


def write_text(folder: Path, change: int) -> DataConfig:
    (folder / "t.txt").write_text("and so it goes on, " * 60 + "abcd"[change] + " and on it goes" * 60)
    return DataConfig(str(folder / "t.txt"), root=str(folder / "cache"))


def write_folder_of_text(folder: Path, change: int) -> DataConfig:
    (folder / "books" / "novels").mkdir(parents=True, exist_ok=True)
    for i in range(3):
        (folder / "books" / "novels" / f"{i}.txt").write_text("and so it goes on, " * 50 + f"{i * change}")
    return DataConfig(str(folder / "books"), root=str(folder / "cache"))


def write_interactions(folder: Path, change: int) -> DataConfig:
    rows = [f"{i // 6},{i % 6},{i if i > 6 else i * (1 - 2 * change)}" for i in range(ROWS)]
    (folder / "taken.csv").write_text("\n".join(["user,item,time", *rows]))
    return DataConfig(str(folder / "taken.csv"), input="user,item")


def write_masks(folder: Path, change: int) -> DataConfig:
    shutil.rmtree(folder / "shapes", ignore_errors=True)
    made = make_shapes(folder / "shapes")
    if change:
        mask = made / "masks" / "000.png"
        with Image.open(mask) as image:
            pixels = np.array(image)
        pixels[0, 0] = 1 - min(1, pixels[0, 0])
        Image.fromarray(pixels).save(mask)
    return DataConfig(str(made), root=str(folder / "cache"))


def write_saved(folder: Path, change: int) -> DataConfig:
    import datasets

    shutil.rmtree(folder / "saved", ignore_errors=True)
    pixels = np.random.default_rng(change % 2).integers(0, 256, (20, 12, 12, 3), dtype=np.uint8)
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["zebra", "ape"])})
    kinds = [(i + change // 2) % 2 for i in range(20)]
    rows = {"picture": [Image.fromarray(each) for each in pixels], "kind": kinds}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder / "saved")
    return DataConfig(str(folder / "saved"))


TASKS = {write_interactions: "recommendation", write_folder_of_text: "language-modelling"}
CHANGES = [
    (write_text, 1), (write_folder_of_text, 1), (write_interactions, 1), (write_masks, 1),
    pytest.param(write_saved, 1, marks=NEEDS_DATASETS), pytest.param(write_saved, 2, marks=NEEDS_DATASETS),
]  # fmt: skip


@pytest.mark.parametrize(("write", "change"), CHANGES)
def test_other_data_of_the_same_size_is_refused(
    write: Callable[[Path, int], DataConfig], change: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def opened(change: int) -> Source:
        return open_data(write(tmp_path, change), 0, TASKS.get(write, "auto"), run)

    first = opened(0)
    assert first.sample_index is not None and not first.sample_index.is_kept and not first.sample_index.can_grow
    first.sample_index.keep(run)
    first.sample_index.check(run)
    again = opened(0)
    assert again.sample_index is not None and again.sample_index.is_kept and again.info == first.info
    other = open_data(write(tmp_path, change), 0, TASKS.get(write, "auto"))
    assert other.info.train_size == first.info.train_size, "nothing else tells"
    with pytest.raises(UserError, match=r"is not what it was when the run began, .* put it back as it was, or start"):
        opened(change)
