"""Samples of different lengths from Python: the same global batches on any number of ranks, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import (
    EvalLoader,
    LoaderConfig,
    Shard,
    Source,
    TrainLoader,
    example_samples,
    from_datasets,
    samples_digest,
    source_of,
)
from echelon.data import lengths as lengths_module
from echelon.tasks import nest
from echelon.tasks.base import TaskSettings
from echelon.tasks.language_modelling import LanguageModelling
from echelon.tasks.nest import TensorSpec

LENGTHS = np.random.default_rng(0).integers(1, 30, 61)
CPU = torch.device("cpu")


def ids_of(i: int) -> Tensor:
    """Return as many times the number of a sample as it is long."""
    return torch.full((int(LENGTHS[i]),), i + 1)


class Samples(Dataset[Any]):
    """Samples of one form; counts how often one is read."""

    def __init__(self, form: str, count: int = 61) -> None:
        self.form, self.count, self.read = form, count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        self.read += 1
        ids, label = ids_of(i), i % 3
        if self.form == "classes":
            return ids, label
        if self.form == "dict":
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "label": label}
        if self.form == "tokens":
            return ids, ids
        return ids[:, None].expand(-1, 4).float(), torch.full((1 + i % 5,), i)  # "sounds": two lengths


class Said(Samples):
    """Says how long its items are at most; some are drawn shorter at random."""

    def __init__(self, form: str, count: int = 61) -> None:
        super().__init__(form, count)
        self.targets, self.lengths = [i % 3 for i in range(count)], LENGTHS[:count].tolist()

    def __getitem__(self, i: int) -> Any:
        ids, label = super().__getitem__(i)
        return ids[: int(torch.randint(1, len(ids) + 1, ()))], label


class Flow(IterableDataset[Any]):
    """The same samples one after the other."""

    def __init__(self, form: str, count: int = 61) -> None:
        self.samples = Samples(form, count)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[i] for i in range(len(self.samples)))


class Measured(Flow):
    """Whose length is known: not read through before."""

    def __len__(self) -> int:
        return len(self.samples)


def config(batch_size: int = 8, loaders: int = 0) -> LoaderConfig:
    return LoaderConfig(DataConfig(batch_size=batch_size, loaders=loaders), 3, CPU, timeout_s=30)


def epoch_of(source: Source, shard: Shard, loaders: int = 0, start: int = 0) -> list[list[Tensor]]:
    loader = TrainLoader(source, config(loaders=loaders), shard)
    try:
        return [nest.leaves((batch.inputs, batch.targets)) for batch in loader.epoch(1, start)]
    finally:
        loader.close()


CASES = [
    Samples("classes"), Samples("dict"), Samples("tokens"), Samples("sounds"), Said("classes"), Flow("classes"),
    Flow("dict"), Measured("sounds"), Measured("tokens"),
]  # fmt: skip


@pytest.mark.parametrize("data", CASES, ids=lambda data: f"{type(data).__name__}-{getattr(data, 'form', '')}")
def test_global_batches_are_the_same_on_any_number_of_ranks_and_loaders_and_after_a_stop(data: Any) -> None:
    held = type(data)(data.form if isinstance(data, Samples) else data.samples.form, 20)
    source: Source = pickle.loads(pickle.dumps(from_datasets(data, held)))  # as other processes get it
    whole = epoch_of(source, Shard(0, 1))
    assert len(whole) == 8
    for world, loaders in ((1, 2), (3, 0), (2, 1)):
        ranks = [epoch_of(source, Shard(rank, world), loaders) for rank in range(world)]
        for batch, parts in zip(whole, zip(*ranks, strict=True), strict=True):
            for leaf, pieces in zip(batch, zip(*parts, strict=True), strict=True):
                assert torch.equal(torch.cat(pieces), leaf)
    for batch, again in zip(whole[5:], epoch_of(source, Shard(0, 1), start=5), strict=True):
        assert all(map(torch.equal, batch, again))
    seen = [int(row.max()) for batch in whole for row in batch[0]]
    assert sorted(seen) == list(range(1, 62))
    evaluated = [
        int(row.max())
        for rank in range(3)
        for batch in EvalLoader(source, config(), Shard(rank, 3))
        for row in nest.leaves(batch.inputs)[0]
    ]
    assert evaluated == list(range(1, 21))


@pytest.mark.parametrize("kind", [Samples, Flow, Measured])
@pytest.mark.parametrize("form", ["dict", "tokens", "sounds"])
def test_batches_are_as_long_as_the_longest_sample_and_padded(kind: Any, form: str) -> None:
    source = from_datasets(kind(form), kind(form, 20))
    for leaves in epoch_of(source, Shard(1, 2)):
        ids = leaves[0] if leaves[0].ndim == 2 else leaves[0][..., 0]
        numbers = [int(row.max()) - 1 for row in ids]
        for row, number in enumerate(numbers):
            length = int(LENGTHS[number])
            assert (ids[row, :length] == number + 1).all() and (ids[row, length:] == 0).all()
            if form == "dict":
                assert leaves[1][row].sum() == length and leaves[1].shape == ids.shape
            if form == "tokens":
                assert (leaves[-1][row, length:] == -100).all() and (leaves[-1][row, :length] == number + 1).all()
            if form == "sounds":
                assert (leaves[-1][row] != -100).sum() == 1 + number % 5
    whole = epoch_of(source, Shard(0, 1))
    there = [(batch[0] if batch[0].ndim == 2 else batch[0][..., 0]) != 0 for batch in whole]
    assert all(int(each.sum(1).max()) == each.shape[1] for each in there)


def test_samples_of_similar_lengths_come_together_and_each_item_is_read_once_for_it() -> None:
    data = Samples("dict")
    source = from_datasets(data, Samples("dict", 20))
    assert data.read <= 61 + 20  # all, and those that are looked at
    padding = sum(batch[0].numel() for batch in epoch_of(source, Shard(0, 1))) / LENGTHS.sum()
    assert padding < 1.3
    said = Said("classes")
    assert from_datasets(said, Said("classes", 20)).info.class_counts == (21, 20, 20)
    assert said.read <= 30


def test_what_a_model_and_a_task_are_told() -> None:
    source = from_datasets(Samples("dict"), Samples("dict", 20))
    longest = int(LENGTHS.max())
    ids = TensorSpec((longest,), "int64", ragged=True)
    assert source.info.inputs == {"input_ids": ids, "attention_mask": ids} and source.info.classes == ("0", "1", "2")
    (note,) = source.notes
    assert "1 to 29 long: a batch is padded to its longest" in note and "No input says" not in note
    (note,) = from_datasets(Samples("classes"), Samples("classes", 20)).notes
    assert "give items one more, a mask" in note
    example, targets = example_samples(source)
    assert example["input_ids"].shape == (2, max(LENGTHS[:2])) and targets.tolist() == [0, 1]
    tokens = from_datasets(Samples("tokens"), Samples("tokens", 20))
    assert tokens.info.targets == ids and tokens.info.inputs == ids
    task = LanguageModelling().fitted(tokens.info, TaskSettings())
    assert task.units_per_sample == 0 and task.units(torch.tensor([[3, 4, -100]])) == 2
    assert task.wrong_outputs(torch.zeros(2, 7, 5), 2) == ""
    assert "(batch, T, 0)" in task.wrong_outputs(torch.zeros(2, 5), 2)
    assert samples_digest(source) != samples_digest(from_datasets(Samples("dict", 60), Samples("dict", 20)))


def test_one_data_set_is_divided() -> None:
    source = source_of(Said("classes"), 0.2, 0)
    assert source.info.train_size == 49 and any("1 to 29 long" in note for note in source.notes)
    seen = [int(row.max()) for batch in epoch_of(source, Shard(0, 1)) for row in batch[0]]
    assert len(set(seen)) == 49


class Listed(Dataset[Any]):
    """Items as they are listed, or made."""

    def __init__(self, items: list[Any], lengths: Any = None) -> None:
        self.items, self.lengths = items, lengths

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        item = self.items[i]
        return item() if callable(item) else item


LISTED = [(torch.ones(n), 0.5) for n in (2, 3)]


@pytest.mark.parametrize(
    ("items", "lengths", "words"),
    [
        ([(torch.ones(4, n), 0.5) for n in (2, 3)], None, r"\(4, 3\) and item 0 \(4, 2\).*axis that differs first"),
        ([(torch.ones(n, n, 2), 0.5) for n in (2, 3)], None, "may differ in the length of their first axis alone"),
        ([(lambda: (torch.ones(int(torch.randint(1, 99, ()))), 0.5))] * 4, None, "drawn at random, or change, need"),
        (LISTED, [2, 2], r"item 1 is 3 long, and 2 long where"),
        (LISTED, [2], "its `lengths` must be a sequence of 2 whole numbers"),
        ([(torch.ones(n), torch.ones(n, dtype=torch.uint8)) for n in (2, 3)], None, "uint8 cannot hold: give int64"),
    ],
)  # fmt: skip
def test_what_cannot_be_padded_is_refused_before_the_start(items: list[Any], lengths: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_datasets(Listed(items, lengths), Listed(items, lengths))


def test_a_length_that_grows_later_is_refused_and_one_that_shrinks_is_padded() -> None:
    data = Listed([(torch.ones(2), 0.5), (torch.ones(4), 0.5)])
    source = from_datasets(data, data)
    data.items[0] = (torch.ones(1), 0.5)
    assert epoch_of(source, Shard(0, 1))[0][0].sum() == 5
    data.items[0] = (torch.ones(3), 0.5)
    with pytest.raises(UserError, match="item 0 of the data is 3 long, and 2 long where lengths were known"):
        epoch_of(source, Shard(0, 1))


def test_data_that_takes_long_to_measure_is_asked_for_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths_module, "MEASURING_S", -1.0)
    with pytest.raises(UserError, match="give the data set `lengths`, a whole number for each item"):
        from_datasets(Samples("tokens"), Samples("tokens", 20))
    assert from_datasets(Said("classes"), Said("classes", 20)).info.train_size == 61


def test_padded_items_with_lengths_of_their_own_stay_as_they_are() -> None:
    data = Listed([(torch.ones(5), 0.5)] * 9, [3] * 9)
    assert from_datasets(data, data).info.shape == (5,)


def test_a_transform_of_padded_samples_is_refused() -> None:
    source = from_datasets(Samples("classes"), Samples("classes", 20))
    settings = LoaderConfig(DataConfig(batch_size=8, transform="torch:abs"), 3, CPU)
    with pytest.raises(UserError, match="differ in length: do it in the data set's __getitem__"):
        TrainLoader(source, settings, Shard(0, 1))
