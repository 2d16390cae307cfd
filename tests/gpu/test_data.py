"""Images on a CUDA device: the batches that a CPU's loader gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.gpu_data import Images

from echelon.config import DataConfig
from echelon.data import LoaderConfig, Shard, TrainLoader, from_datasets, open_data
from echelon.data.gpu_images import LIBRARY
from tests.unit.data.images import make_folder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _batches(data: DataConfig, source: object, place: str, epochs: int) -> list[torch.Tensor]:
    loader = TrainLoader(source, LoaderConfig(data, 0, torch.device(place)), Shard(0, 1))  # type: ignore[arg-type]
    made = [batch.inputs.cpu() for epoch in range(epochs) for batch in loader.epoch(epoch)]
    loader.close()
    return made


@pytest.mark.parametrize("loaders", [0, 2])
def test_small_images_stay_on_the_device_with_the_same_bits(loaders: int) -> None:
    source = from_datasets(Images(200, 32), Images(64, 32), [str(i) for i in range(1000)])
    data = DataConfig("images", batch_size=48, augment="flip_crop", loaders=loaders)
    for wanted, made in zip(_batches(data, source, "cpu", 3), _batches(data, source, "cuda", 3), strict=True):
        assert torch.equal(wanted, made)


def test_files_decoded_there_differ_by_rounding(tmp_path: Path) -> None:
    pytest.importorskip(LIBRARY, reason="needs nvImageCodec")
    folder, made = str(make_folder(tmp_path, per_class=20, side=300)), {}
    for place, decode in (("cpu", "cpu"), ("cuda", "gpu")):
        data = DataConfig(folder, batch_size=16, image_size=224, augment="imagenet", loaders=0, decode=decode)  # type: ignore[arg-type]
        made[place] = torch.cat(_batches(data, open_data(data, 0), place, 1))
    assert (made["cpu"] - made["cuda"]).abs().mean() < 0.02
