"""Images that stay on a device, here on the CPU: the same bits as rows that loaders make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from echelon.data.assemble import ImageRows, Recipe
from echelon.data.images import ImageArray
from echelon.data.on_gpu import ResidentImages


def _rows(channels: int = 3, **recipe: Any) -> ImageRows:
    numbers = np.random.default_rng(0)
    pixels = numbers.integers(0, 256, (50, channels, 32, 32), dtype=np.uint8)
    settings = {"side": 32, "shorter": 32, "augment": "flip_crop", "seed": 7, "channels": channels, "skip_bad": False}
    return ImageRows(
        ImageArray(pixels, numbers.integers(0, 10, 50)), Recipe(**{**settings, "mean": (), "std": (), **recipe})
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", ["none", "flip_crop"])
@pytest.mark.parametrize("count", [1, 37])
def test_the_same_bits_as_in_memory(channels: int, augment: str, count: int) -> None:
    rows = _rows(channels, augment=augment)
    draws = np.random.default_rng(1).permutation(200)[:count]  # some are drawn again
    pixels, labels = np.empty((count, channels, 32, 32), np.uint8), np.empty(count, np.int64)
    rows.fill(3, draws, pixels, labels)
    kept = rows.kept_images()
    assert kept is not None
    cuts = np.array_split(draws, min(count, 5))
    batches = [*ResidentImages(kept, torch.device("cpu")).batches(3, cuts)]
    assert [len(labels) for _, labels in batches] == [len(cut) for cut in cuts]
    assert all(images.is_contiguous() for images, _ in batches)
    assert torch.equal(torch.cat([images for images, _ in batches]), torch.from_numpy(pixels))
    assert torch.equal(torch.cat([labels for _, labels in batches]), torch.from_numpy(labels))


def test_more_batches_than_are_drawn_at_once_are_those_of_each_alone() -> None:
    kept = _rows().kept_images()
    assert kept is not None
    images = ResidentImages(kept, torch.device("cpu"))
    draws = [np.random.default_rng(i).permutation(50)[:3] for i in range(150)]
    alone = [next(images.batches(2, [each])) for each in draws]
    for made, wanted in zip(images.batches(2, draws), alone, strict=True):
        assert torch.equal(made[0], wanted[0]) and torch.equal(made[1], wanted[1])


def test_images_whose_pixels_loaders_change_are_not_kept() -> None:
    assert _rows(mean=(0.5,) * 3, std=(0.5,) * 3).kept_images() is None
