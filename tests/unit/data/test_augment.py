from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from echelon.data import decode
from echelon.data.augment import (
    FLIP_CROP_DRAWS,
    IMAGENET_DRAWS,
    crop_box,
    flip_crop,
    random_resized_crop,
    resize_and_crop,
)
from echelon.data.decode import as_picture, open_picture
from echelon.data.order import uniforms
from tests.unit.data.images import make_image

F = v2.functional


def pixels_of(height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("height", "width"), [(300, 400), (375, 281), (64, 64), (256, 700)])
def test_evaluation_is_torchvisions_resize_and_centre_crop(height: int, width: int) -> None:
    pixels = pixels_of(height, width)
    expected = F.center_crop(F.resize(pixels, [256], antialias=True), [224, 224])
    assert torch.equal(resize_and_crop(as_picture(pixels), 256, 224), expected)


def test_random_resized_crop_is_torchvisions_for_the_same_box() -> None:
    pixels = pixels_of(300, 400)
    for draws in uniforms(0, 0, np.arange(20), IMAGENET_DRAWS):
        top, left, height, width = crop_box(300, 400, draws)
        expected = F.resized_crop(pixels, top, left, height, width, [224, 224], antialias=True)
        expected = F.horizontal_flip(expected) if draws[-1] < 0.5 else expected
        assert torch.equal(random_resized_crop(as_picture(pixels), 224, draws), expected)


def test_crop_boxes_are_spread_as_torchvisions() -> None:
    ours = np.array([crop_box(375, 500, d) for d in uniforms(0, 0, np.arange(3000), IMAGENET_DRAWS)], dtype=float)
    torch.manual_seed(0)
    pixels = torch.empty(3, 375, 500)
    make = v2.RandomResizedCrop(224).make_params
    theirs = np.array(
        [[p[k] for k in ("top", "left", "height", "width")] for p in (make([pixels]) for _ in range(3000))]
    )
    error = 5 * math.sqrt(2 / 3000) * theirs.std(axis=0)
    assert np.all(np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < error)
    assert ours.std(axis=0) == pytest.approx(theirs.std(axis=0), rel=0.1)


@pytest.mark.parametrize(("height", "width"), [(1, 500), (500, 1), (1, 1), (3, 40)])
def test_boxes_of_odd_images_lie_inside(height: int, width: int) -> None:
    for draws in uniforms(0, 0, np.arange(50), IMAGENET_DRAWS):
        top, left, h, w = crop_box(height, width, draws)
        assert 0 <= top <= top + h <= height
        assert 0 <= left <= left + w <= width
        assert h > 0
        assert w > 0
        assert random_resized_crop(as_picture(pixels_of(height, width)), 32, draws).shape == (3, 32, 32)


def test_scaled_decoding_crops_the_same_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(make_image(tmp_path / "a.jpg", (800, 600)))
    draws = uniforms(0, 0, np.arange(10), IMAGENET_DRAWS)
    whole = [random_resized_crop(open_picture(path), 64, d).float() for d in draws]
    monkeypatch.setattr(decode, "_LARGE_BYTES", 0)
    scaled = [random_resized_crop(open_picture(path), 64, d).float() for d in draws]
    assert max((a - b).abs().mean() for a, b in zip(whole, scaled)) < 4


def test_flip_crop_is_pad_crop_and_mirror() -> None:
    batch = torch.stack([pixels_of(32, 32), 255 - pixels_of(32, 32)])
    for draws in np.random.default_rng(0).random((20, 2, FLIP_CROP_DRAWS)):
        result = flip_crop(batch.numpy(), draws)
        for pixels, (down, across, mirror), made in zip(batch, draws, result):
            padded = F.pad(pixels, [4])
            top, left = int(down * 9), int(across * 9)
            expected = padded[:, top : top + 32, left : left + 32]
            assert np.array_equal(made, (expected.flip(-1) if mirror < 0.5 else expected).numpy())
