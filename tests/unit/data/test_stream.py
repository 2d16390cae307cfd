"""Data that can only be iterated: batches in its order, the same for any number of ranks and after a resume."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, Source, TrainLoader
from echelon.data.loader import EvalLoader
from echelon.data.own import source_of


class Shuffled(IterableDataset):  # type: ignore[type-arg]
    """Numbers in a random order, with noise of numpy's."""

    def __init__(self, count: int = 11, classes: bool = False) -> None:
        self.count, self.classes, self.epoch = count, classes, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Any]]:
        order = list(range(self.count))
        random.shuffle(order)
        for i in order:
            yield torch.tensor([float(i), np.random.random()]), i % 3 if self.classes else torch.tensor(i / 2)


class Endless(Shuffled):
    """An epoch is as many items as its length says."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Any]]:
        while True:
            yield from super().__iter__()


def rows(source: Source, epoch: int, shard: Shard, start: int = 0, **settings: Any) -> list[list[tuple[float, ...]]]:
    """Return the inputs of each batch that have targets, as one rank has them."""
    config = DataConfig(batch_size=4, **settings)
    loader = TrainLoader(source, LoaderConfig(config, 3, torch.device("cpu")), shard)
    state = torch.get_rng_state(), random.getstate()
    found = [[tuple(row) for row in b.inputs[: len(b.targets)].tolist()] for b in loader.epoch(epoch, start)]
    loader.close()
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    return found


@pytest.mark.parametrize("data", [Shuffled(), Shuffled(classes=True), Endless()], ids=["floats", "classes", "endless"])
def test_an_epoch_has_each_sample_once_on_any_number_of_ranks_and_after_a_resume(data: Shuffled) -> None:
    source = source_of((data, Shuffled(7, data.classes)), 0.2, 0)
    source = pickle.loads(pickle.dumps(source))  # as other processes get it
    whole = rows(source, 2, Shard(0, 1))
    assert [len(batch) for batch in whole] == [4, 4, source.info.train_size - 8]
    assert len({row[0] for batch in whole for row in batch}) == source.info.train_size
    parts = [rows(source, 2, Shard(rank, 3)) for rank in range(3)]
    assert [[row for part in parts for row in part[i]] for i in range(3)] == whole
    assert rows(source, 2, Shard(0, 1), 1, loaders=2) == whole[1:]
    assert rows(source, 1, Shard(0, 1)) != whole and rows(source, 2, Shard(0, 1)) == whole
    if data.classes:
        assert source.info.class_counts == (4, 4, 3)
    config = LoaderConfig(DataConfig(batch_size=4), 3, torch.device("cpu"))
    held = [EvalLoader(source, config, Shard(rank, 2)) for rank in range(2)]
    seen = [row[0] for loader in held for batch in loader for row in batch.inputs.tolist()]
    assert sorted(seen) == list(range(7))


class Short(Shuffled):
    def __len__(self) -> int:
        return 20


def test_what_cannot_be_trained_on_is_refused_with_what_works() -> None:
    good = Shuffled()
    cases: list[tuple[Any, str]] = [
        (good, r"can only be iterated, and no part of it can be held out: give two, \(training, evaluation\)"),
        ((iter(good), good), r"can be iterated just once: give an object whose __iter__ begins anew"),
        ((DataLoader(good), good), "is a DataLoader, which gives batches: give the data set that it reads"),
        ((good, Shuffled(0)), "evaluation data ends after 0 items: it is empty"),
        ((Short(classes=True), good), "ends after 11 items, and its length is 20"),
    ]
    for given, words in cases:
        with pytest.raises(UserError, match=words):
            source_of(given, 0.2, 0)
    source = source_of((Short(), good), 0.2, 0)  # floats: its length is believed until it is read
    with pytest.raises(UserError, match="ends after 11 items, and its length is 20"):
        rows(source, 0, Shard(0, 1))
    with pytest.raises(UserError, match="--sample-weights draws samples in any order"):
        rows(source_of((good, good), 0.2, 0), 0, Shard(0, 1), sample_weights="inverse-class")
