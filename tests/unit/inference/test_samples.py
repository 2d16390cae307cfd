"""Samples that are handed over as arrays, or read from files that hold little, as a run's model takes them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import DataInfo
from echelon.inference.samples import samples_of
from echelon.tasks.base import Encoding
from echelon.tasks.nest import TensorSpec

IMAGES = np.random.default_rng(0).integers(0, 255, (5, 3, 4, 4), np.uint8)


def _trained(info: Any, encoding: Encoding = Encoding.CLASSES) -> Any:
    """Return a run that knows some data, without a model."""
    config = SimpleNamespace(data=DataConfig())
    return SimpleNamespace(info=info, task=SimpleNamespace(encoding=encoding), config=config)


def _of_images() -> Any:
    return _trained(DataInfo("toy", ("a", "b"), 3, 4, 5, 5, (3, 2), (0.5,) * 3, (0.2,) * 3))


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, lambda images: [torch.tensor(each) for each in images]])
def test_images_are_one_array_or_a_list_of_them(form: Any) -> None:
    samples = samples_of(_of_images(), form(IMAGES))
    assert list(samples.names) == [1, 2, 3, 4, 5]
    assert all((samples.source.evaluation[i][0].numpy() == image).all() for i, image in enumerate(IMAGES))


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (IMAGES.transpose(0, 2, 3, 1), r"\(N, C, H, W\).* of shape \(5, 4, 4, 3\); channels come last.* transpose"),
        (list(IMAGES.transpose(0, 2, 3, 1)), r"of shape \(4, 4, 3\); channels come last"),
        (IMAGES[:, 0], r"of shape \(5, 4, 4\)$"),
        (IMAGES[0], r"of shape \(3, 4, 4\)$"),
        ([IMAGES[0], IMAGES[1, :, :2]], r"of one shape.* of shape \(3, 4, 4\), \(3, 2, 4\)$"),
        ([IMAGES, IMAGES], r"of shape \(5, 3, 4, 4\)$"),
        (IMAGES.astype(np.int64), "int64: give pixels from 0 to 255 as uint8"),
        (IMAGES / 255, "float64: give pixels"),
        ([[]], "samples are images; give"),
    ],
)
def test_images_of_another_form_are_refused(images: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        samples_of(_of_images(), images)


def test_files_without_a_text_are_nothing_to_predict(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    info = SimpleNamespace(rate=0, columns=(), tokeniser=object(), marks=None)
    with pytest.raises(UserError, match="nothing to predict: the files hold no text"):
        samples_of(_trained(info, Encoding.TEXT_PAIRS), [tmp_path / "a.txt"])


def test_codes_that_are_all_digits_in_a_file_are_the_strings_that_the_run_knows(tmp_path: Path) -> None:
    measured = {"code": {"known": ["0012", "12", "A1"]}, "x": {"mean": 1.0, "std": 2.0, "known": []}}
    (tmp_path / "columns.json").write_text(json.dumps(measured))
    specs = {"numbers": TensorSpec((1,)), "categories": TensorSpec((1,), "int64", 4)}
    trained = _trained(DataInfo("rows", ("a", "b"), 1, 1, 5, 5, (3, 2), several=specs, columns=("code", "x")))
    trained.folder = tmp_path
    (tmp_path / "a.csv").write_text("code ,x\n0012,3\n12,5\n,7\n")
    samples = samples_of(trained, [tmp_path / "a.csv"])
    inputs = [samples.source.evaluation[i][0] for i in range(3)]
    assert [(int(each["categories"]), float(each["numbers"])) for each in inputs] == [(1, 1.0), (2, 2.0), (0, 3.0)]
