"""Batches of image files made ahead, as on a GPU; here on the CPU, with a decoder of the processor's."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, TrainLoader, open_data
from echelon.data.assemble import ImageRows, Recipe
from echelon.data.gpu_images import GpuImages
from echelon.data.images import ImageFiles, Images
from tests.unit.data.images import make_folder

CPU = torch.device("cpu")


def decode(files: Sequence[bytes], stream: int) -> Sequence[Any]:
    """Decode all but one file, as a GPU's decoder that knows not every kind."""
    return [None if i == 1 else np.array(Image.open(io.BytesIO(file)).convert("RGB")) for i, file in enumerate(files)]


def _rows(folder: Path, **recipe: Any) -> tuple[ImageRows, ImageFiles]:
    images: Images = open_data(DataConfig(str(make_folder(folder, per_class=10, side=150))), 0).train
    assert isinstance(images, ImageFiles)
    settings = {"side": 96, "shorter": 110, "augment": "imagenet", "seed": 7, "channels": 3, "skip_bad": False}
    return ImageRows(images, Recipe(**{**settings, "mean": (), "std": (), **recipe})), images


@pytest.mark.parametrize("augment", ["imagenet", "none"])
def test_the_same_pixels_as_loaders_make(tmp_path: Path, augment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.assemble.CACHE_BYTES", 0)
    rows, images = _rows(tmp_path, augment=augment)
    assert rows.encoded is images
    batches = [np.arange(5), np.array([], np.int64), np.arange(5, 12), np.arange(12, 16) + 16]
    made = GpuImages(rows, images, CPU, decode, 60)
    for draws, batch in zip([b for b in batches if len(b)], made.run(2, [b for b in batches if len(b)]), strict=True):
        pixels, labels = np.empty((len(draws), 3, 96, 96), np.uint8), np.empty(len(draws), np.int64)
        rows.fill(2, draws, pixels, labels)
        assert torch.equal(batch.labels, torch.from_numpy(labels)) and not batch.bad
        assert (batch.pixels - torch.from_numpy(pixels)).abs().max() <= (4 if augment == "none" else 12)  # of JPEG
    made.close()


def test_left_early_and_begun_again(tmp_path: Path) -> None:
    rows, images = _rows(tmp_path)
    made = GpuImages(rows, images, CPU, decode, 60)
    batches = [np.arange(i, i + 2) for i in range(8)]
    first = next(made.run(0, batches))
    assert torch.equal(first.pixels, next(made.run(0, batches)).pixels)
    made.close()


@pytest.mark.parametrize("skip", [True, False])
def test_files_that_cannot_be_decoded(tmp_path: Path, skip: bool) -> None:
    rows, images = _rows(tmp_path, skip_bad=skip)
    Path(images.path(1)).write_bytes(b"nonsense")
    made = GpuImages(rows, images, CPU, decode, 60)
    batches = made.run(0, [np.arange(4)])
    if skip:
        (bad,) = next(batches).bad
        assert (bad.position, bad.path) == (1, images.path(1))
    else:
        with pytest.raises(UserError, match=r"cannot be decoded .*--on-bad-image skip"):
            next(batches)
    made.close()


def test_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    config = LoaderConfig(DataConfig(str(make_folder(tmp_path)), decode="gpu", batch_size=4), seed=0, device=CPU)
    with pytest.raises(UserError, match="--decode gpu: this process trains on a CPU"):
        TrainLoader(open_data(config.data, 0), config, Shard(0, 1))
