"""How pixels are normalised: measured, ImageNet's, given numbers, or as published weights know them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from echelon.config import DataConfig
from echelon.config.build import build
from echelon.core.errors import UserError
from echelon.data import open_data
from echelon.data.normalise import IMAGENET_MEAN, IMAGENET_STD, as_text, read_normalise
from echelon.models.pretrained import pixels_of
from echelon.run.defaults import with_task_defaults


def test_numbers_are_of_all_channels_or_of_each() -> None:
    assert open_data(DataConfig("digits", normalise="0.5/0.25"), 0).info.mean == (0.5,)
    measured = open_data(DataConfig("digits"), 0).info
    assert measured.mean == open_data(DataConfig("digits", normalise="measured"), 0).info.mean != (0.5,)
    gray = open_data(DataConfig("digits", normalise="imagenet"), 0).info.mean
    assert np.allclose(gray, np.mean(IMAGENET_MEAN))


def test_numbers_for_other_channels_are_refused(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        for part in ("train", "val"):
            (tmp_path / part / kind).mkdir(parents=True)
            Image.new("RGB", (8, 8), (90, 10, 30)).save(tmp_path / part / kind / "1.png")
    assert open_data(DataConfig(str(tmp_path), normalise="0.5/0.25"), 0).info.std == (0.25, 0.25, 0.25)
    with pytest.raises(UserError, match=r"is for 2 channels, and the images of .* have 3"):
        open_data(DataConfig(str(tmp_path), normalise="1,1/1,1"), 0)


@pytest.mark.parametrize("text", ["", "0.5", "0.5/0", "0.5/-1", "a/b", "0.5,0.5/1", "nan/1", "0/1/2", "measurd"])
def test_what_is_no_normalisation_is_refused_with_how_it_is_written(text: str) -> None:
    with pytest.raises(UserError, match="write auto, measured, imagenet, or means"):
        read_normalise(text)


def test_text_and_numbers_are_the_same() -> None:
    known = read_normalise(as_text(IMAGENET_MEAN, IMAGENET_STD))
    assert (known.mean, known.std) == (IMAGENET_MEAN, IMAGENET_STD)
    assert not read_normalise("auto").mean and not read_normalise("measured").mean


@pytest.mark.parametrize(
    ("model", "mean"),
    [
        ("timm/vit_tiny_patch16_224", (0.5, 0.5, 0.5)),
        ("timm/resnet18", IMAGENET_MEAN),
        ("torchvision/googlenet", (0.5, 0.5, 0.5)),
        ("torchvision/resnet18", IMAGENET_MEAN),
        ("torchvision/deeplabv3_resnet50", IMAGENET_MEAN),
    ],
)
def test_published_weights_know_their_pixels(model: str, mean: tuple[float, ...]) -> None:
    given = {"model.name": model, "model.weights": "pretrained", "data.source": "digits"}
    resolved = with_task_defaults(build(None, given))
    known = read_normalise(resolved.config.data.normalise)
    assert known.mean and np.allclose(known.mean, mean)
    assert resolved.origins["data.normalise"] == "--weights"
    asked = with_task_defaults(build(None, {**given, "data.normalise": "measured"}))
    assert asked.config.data.normalise == "measured"
    anew = with_task_defaults(build(None, {"model.name": model, "data.source": "digits"}))
    assert anew.config.data.normalise == "auto"


def test_a_preprocessor_beside_a_model_of_transformers_tells_its_pixels(tmp_path: Path) -> None:
    said = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.5], "do_normalize": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    assert pixels_of("pretrained", f"transformers/{tmp_path}") == ((0.5, 0.4, 0.3), (0.5, 0.5, 0.5))
    assert pixels_of("", f"transformers/{tmp_path}") is None
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**said, "do_normalize": False}))
    assert pixels_of("pretrained", f"transformers/{tmp_path}") is None
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": 0.5, "image_std": 1}), "utf-8-sig")
    assert pixels_of("pretrained", f"transformers/{tmp_path}") == ((0.5, 0.5, 0.5), (1.0, 1.0, 1.0))


@pytest.mark.parametrize("text", ["{", "[]", '{"image_mean": ["a"], "image_std": [1]}', "\xff"])
def test_a_damaged_preprocessor_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text, "latin-1")
    with pytest.raises(UserError, match=r"preprocessor_config.json does not say how images are normalised"):
        pixels_of("pretrained", f"transformers/{tmp_path}")


def test_the_same_weights_by_their_name_on_the_hub_are_normalised_alike() -> None:
    name, weights = "timm/vit_tiny_patch16_224", "hf:timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert pixels_of(weights, name) == pixels_of("pretrained", name) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert pixels_of("hf:timm/another", name) is None and pixels_of("file.pth", name) is None
