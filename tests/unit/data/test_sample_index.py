"""A folder that grows under a run: the epoch in progress keeps its samples, each once; new ones come after it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, Source, TrainLoader, open_data
from echelon.data.images import ImageFiles
from tests.unit.data.images import make_folder, make_image


def opened(data: Path, run: Path) -> Source:
    return open_data(DataConfig(source=str(data), batch_size=4, loaders=0), 0, folder=run)


def batches(source: Source, epoch: int, shard: Shard, start: int = 0) -> list[list[str]]:
    """Return the files of each batch of an epoch, as one rank has them."""
    config = LoaderConfig(DataConfig(source=source.info.name, batch_size=4, loaders=0), 0, torch.device("cpu"))
    loader = TrainLoader(source, config, shard)
    assert isinstance(source.train, ImageFiles)
    try:
        return [[source.train.path(int(i)) for i in batch.samples] for batch in loader.epoch(epoch, start)]  # type: ignore[union-attr]
    finally:
        loader.close()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A folder of 20 images, and a run's folder that knows them."""
    data, run = make_folder(tmp_path / "data", per_class=10, side=16), tmp_path / "run"
    run.mkdir()
    sample_index = opened(data, run).sample_index
    assert sample_index is not None and not sample_index.is_kept
    sample_index.keep(run)
    return data, run


@pytest.mark.parametrize("world", [1, 2])
def test_every_sample_comes_once_in_each_epoch_and_new_ones_after_the_one_in_progress(
    folders: tuple[Path, Path], world: int
) -> None:
    data, run = folders
    before = opened(data, run)
    as_begun = batches(before, 1, Shard(0, 1))
    held = [before.evaluation.path(i) for i in range(len(before.evaluation))]  # type: ignore[attr-defined, arg-type]
    for i in range(6):  # some names sort before all others, some behind them
        make_image(data / ("cat" if i % 2 else "dog") / f"{'0' if i < 3 else 'z'}{i}.jpg", (16, 16), seed=70 + i)
    grown = opened(data, run)
    assert grown.sample_index is not None and len(grown.sample_index.new) == 6 and grown.info.train_size == 16
    with pytest.raises(UserError, match=r"6 samples are new .* `echelon resume .* --rescan`"):
        grown.sample_index.check(run)
    grown.sample_index.grown(epoch=2).keep(run)
    after = opened(data, run)
    assert after.sample_index is not None and not after.sample_index.new
    assert (after.info.train_size, after.info.eval_size, after.info.mean) == (22, 4, before.info.mean)
    assert [after.evaluation.path(i) for i in range(4)] == held  # type: ignore[attr-defined]
    assert batches(after, 1, Shard(0, 1)) == as_begun and batches(after, 1, Shard(0, 1), 2) == as_begun[2:]
    seen = [name for rank in range(world) for batch in batches(after, 2, Shard(rank, world)) for name in batch]
    there = {str(path) for path in data.rglob("*.jpg")} - set(held)
    assert len(seen) == 22 and set(seen) == there
    make_image(data / "cat" / "again.jpg", (16, 16))
    again = opened(data, run).sample_index
    assert again is not None
    again.grown(epoch=3).keep(run)
    last = opened(data, run)
    assert [sum(map(len, batches(last, epoch, Shard(0, 1)))) for epoch in range(5)] == [16, 16, 22, 23, 23]
    assert np.bincount(last.train.labels).tolist() == list(last.info.class_counts)  # type: ignore[attr-defined]


def test_what_is_gone_renamed_or_of_a_new_class_is_refused(folders: tuple[Path, Path]) -> None:
    data, run = folders
    (data / "cat" / "3.jpg").rename(data / "cat" / "x.jpg")
    with pytest.raises(UserError, match=r"cat/3\.jpg of the run's samples is gone, or has another name: put it back"):
        opened(data, run)
    (data / "cat" / "x.jpg").rename(data / "cat" / "3.jpg")
    make_image(data / "emu" / "1.jpg", (16, 16))
    with pytest.raises(UserError, match="the class emu is new since the run began"):
        opened(data, run)
