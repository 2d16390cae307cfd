"""Samples of different lengths: batches of an epoch, their padding, and units of a loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon.config import DataConfig
from echelon.core.shares import share_sizes
from echelon.data import EvalLoader, LoaderConfig, Shard, Source, TrainLoader, example_samples
from echelon.data.base import Batch, DataInfo
from echelon.data.images import TensorArray
from echelon.data.order import grouped_batches
from echelon.data.ragged import RaggedArray
from echelon.tasks.nest import Nest, TensorSpec

LENGTHS = np.random.default_rng(0).integers(1, 30, 101)


def ragged_source() -> Source:
    """Return sentences whose words are their number, as many as they are long; targets are as long as they."""
    ids = RaggedArray.of([np.full(n, i, np.int64) for i, n in enumerate(LENGTHS)], pad=-1)
    mask = RaggedArray.of([np.ones(n, np.int64) for n in LENGTHS])
    targets = RaggedArray.of([np.full(n, i, np.int64) for i, n in enumerate(LENGTHS)], pad=-100)
    array = TensorArray({"ids": ids, "mask": mask}, targets)
    spec = TensorSpec((29,), "int64", count=101, ragged=True)
    info = DataInfo(
        "sentences", (), 1, 1, 101, 101, (), several={"ids": spec, "mask": spec}, targets=spec, task="supervised"
    )
    return Source(array, array, info)


def count_units(targets: Nest) -> int:
    return int((targets != -100).sum())


def loader(world_size: int, rank: int, loaders: int = 0) -> TrainLoader:
    config = LoaderConfig(DataConfig(batch_size=16, loaders=loaders), seed=3, device=torch.device("cpu"))
    return TrainLoader(ragged_source(), config, Shard(rank, world_size), count_units, largest=16)


@pytest.mark.parametrize(("n", "size"), [(0, 4), (3, 4), (101, 16), (5000, 7)])
def test_batches_of_similar_lengths_hold_each_sample_once(n: int, size: int) -> None:
    lengths = np.random.default_rng(n).integers(1, 100, n)
    batches = grouped_batches(lengths, size, 1, 2)
    assert sorted(np.concatenate([np.empty(0, np.int64), *batches]).tolist()) == list(range(n))
    assert [len(batch) for batch in batches] == [size] * (n // size) + [n % size] * (n % size > 0)
    assert all(np.array_equal(a, b) for a, b in zip(batches, grouped_batches(lengths, size, 1, 2), strict=True))
    if n > 1000:
        assert any(not np.array_equal(a, b) for a, b in zip(batches, grouped_batches(lengths, size, 1, 3), strict=True))
        padding = sum(int(lengths[batch].max()) * len(batch) for batch in batches) / lengths.sum()
        assert padding < 1.05


@pytest.mark.parametrize(("world_size", "loaders"), [(1, 0), (3, 0), (2, 2)])
def test_a_global_batch_is_the_same_on_any_number_of_ranks(world_size: int, loaders: int) -> None:
    ranks = [loader(world_size, rank, loaders) for rank in range(world_size)]
    try:
        batches = [list(rank.epoch(1)) for rank in ranks]
        for wanted, *parts in zip(loader(1, 0).epoch(1), *batches, strict=True):
            for name in ("ids", "mask"):
                assert torch.equal(torch.cat([part.inputs[name] for part in parts]), wanted.inputs[name])
            assert torch.equal(torch.cat([part.targets for part in parts]), wanted.targets)
            assert {part.global_units for part in parts} == {count_units(wanted.targets)}
            check_padding(wanted.inputs["ids"], wanted.inputs["mask"])
    finally:
        for rank in ranks:
            rank.close()


def test_each_batch_is_begun_before_the_one_before_it_is_given() -> None:
    ranks = [loader(2, rank) for rank in range(2)]
    for rank in ranks:
        begun: list[Batch] = []
        for number, batch in enumerate(rank.epoch(0, 0, begun.append)):
            assert begun[-1].index == min(number + 1, rank.batches_per_epoch - 1)
            assert batch.counted is None and any(batch is each for each in begun)
            if number == 2:  # the part of the fourth that was begun is nobody's any more
                rank.deal(Shard(rank.shard.rank, 2, (3, 5)))
            if number >= 3:
                assert batch.sizes == tuple(share_sizes(batch.global_size, 2, (3, 5)))
        assert [each.index for each in begun] == [0, 1, 2, 3, *range(3, rank.batches_per_epoch)]


def check_padding(ids: Tensor, mask: Tensor) -> None:
    assert ids.shape == mask.shape and ids.shape[1] == mask.sum(1).max()
    for row, real in zip(ids, mask, strict=True):
        number, length = int(row[0]), int(real.sum())
        assert length == LENGTHS[number]
        assert row[:length].eq(number).all() and row[length:].eq(-1).all()


def test_evaluation_sees_each_sample_once() -> None:
    config = LoaderConfig(DataConfig(batch_size=16, loaders=0), seed=3, device=torch.device("cpu"))
    seen = [
        batch.inputs["ids"][:, 0] for rank in range(3) for batch in EvalLoader(ragged_source(), config, Shard(rank, 3))
    ]
    assert torch.cat(seen).tolist() == list(range(101))


def test_a_part_of_ragged_samples() -> None:
    part = RaggedArray.of([np.arange(n) for n in LENGTHS]).subset(np.array([5, 0]))
    assert [len(part[i]) for i in range(2)] == [LENGTHS[5], LENGTHS[0]]


def test_an_example_of_inputs_is_padded() -> None:
    """Split models are tried out on it."""
    example = example_samples(ragged_source())[0]
    assert example["ids"].shape == example["mask"].shape == (2, max(LENGTHS[:2]))
