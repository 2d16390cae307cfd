"""`echelon predict` on several processes: the rows of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import echelon
from echelon.core.errors import UserError
from echelon.inference.predict import MaskOutput
from tests.ranks.run_many import run_many
from tests.web_server import web_server

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def test_rows_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    outcome = echelon.train("mlp", "digits", tmp_path / "run", max_steps=2, workers=1, batch_size=8, device="cpu")
    images = np.random.default_rng(0).integers(0, 255, (50, 1, 8, 8), np.uint8)
    one, three = (echelon.predict(outcome.folder, images, workers=n, device="cpu") for n in (1, 3))
    assert [row.sample for row in three] == list(range(1, 51))
    assert [row.prediction.value for row in three] == [row.prediction.value for row in one]
    for a, b in zip(one, three, strict=True):
        assert b.prediction.probabilities == pytest.approx(a.prediction.probabilities, abs=1e-6)
    few = echelon.predict(outcome.folder, images[:2], workers=3, device="cpu")
    assert len(few) == 2
    with pytest.raises(UserError, match="this run's samples are images"):
        echelon.predict(outcome.folder, ["nothing"], workers=2, device="cpu")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    with web_server(tmp_path / "web") as url:
        yield url


def test_samples_and_data_at_urls_give_what_files_give(tmp_path: Path, web: str) -> None:
    rows = [f"{i},{i * i % 7},{'xy'[i % 2]}" for i in range(60)]
    for name, lines in {"train": rows[:40], "other": rows[40:]}.items():
        (tmp_path / "web" / f"{name}.csv").write_text("\n".join(["a,b,y", *lines]) + "\n")
    train = [
        "train", f"{web}/train.csv", "--target", "y", "--max-steps", "5", "--workers", "1", "--batch-size", "8",
        "--device", "cpu", "--data-root", tmp_path / "root", "--run", "run",
    ]  # fmt: skip
    used = [
        command
        for where in (f"{web}/other.csv", tmp_path / "web" / "other.csv")
        for command in (["predict", "run", where, "--json", "--workers", "2"], ["evaluate", "run", "--data", where])
    ]
    results = run_many(tmp_path, [train, *used])
    assert [result.code for result in results] == [0] * 5, results
    said = [result.out for result in results[1:]]
    assert said[:2] == said[2:] and said[0].count("\n") == 20
    assert len(list((tmp_path / "root" / "urls").glob("other.csv-*/held.json"))) == 1


def test_masks_have_the_same_names_in_every_process(tmp_path: Path) -> None:
    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    folder = MaskOutput.of(tmp_path)
    names = [each.name for each in folder.files(["x/a.jpg", "y/a.jpg", "b.jpg"])]
    assert names == ["a-1.png", "a-2.png", "b.png"]
