"""Loading in this process; what loader processes add is in tests/laws/test_data.py."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import EvalLoader, LoaderConfig, Shard, TrainLoader, assemble, from_datasets, open_data, source_of
from tests.unit.data.images import make_folder

CPU = torch.device("cpu")


def settings(**data: Any) -> LoaderConfig:
    return LoaderConfig(DataConfig(**{"loaders": 0, **data}), seed=0, device=CPU)


class Noisy(Dataset[tuple[Tensor, int]]):
    """Draws from every generator that a data set may draw from."""

    targets = (0, 1) * 6

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.tensor([i, torch.rand(()), random.random(), np.random.rand()]), self.targets[i]


def test_images_are_normalised(tmp_path: Path) -> None:
    config = settings(source=str(make_folder(tmp_path, per_class=20)), batch_size=32, augment="none")
    source = open_data(config.data, 0)
    batch = next(TrainLoader(source, config, Shard(0, 1)).epoch(0))
    assert batch.inputs.shape == (32, 3, 40, 40)
    assert batch.inputs.mean(dim=(0, 2, 3)).abs().max() < 0.05
    assert (batch.inputs.std(dim=(0, 2, 3)) - 1).abs().max() < 0.05
    assert (batch.targets.dtype, batch.global_size, batch.index) == (torch.int64, 32, 0)


def test_augmentation_changes_with_the_epoch_and_not_in_evaluation(tmp_path: Path) -> None:
    config = settings(source=str(make_folder(tmp_path, per_class=8)), batch_size=16)
    source = open_data(config.data, 0)
    assert source.info.image_size == 40
    train = TrainLoader(source, config, Shard(0, 1))
    first, second = (torch.cat([b.inputs for b in train.epoch(epoch)]).sort(0)[0] for epoch in (0, 1))
    assert not torch.equal(first, second)
    held = EvalLoader(source, config, Shard(0, 1))
    assert torch.equal(next(iter(held)).inputs, next(iter(held)).inputs)


def test_small_images_are_decoded_once(tmp_path: Path) -> None:
    config = settings(source=str(make_folder(tmp_path, per_class=5)), augment="none")
    source = open_data(config.data, 0)
    train = TrainLoader(source, config, Shard(0, 1))
    before = next(train.epoch(0)).inputs.sort(0)[0]
    for path in tmp_path.rglob("*.jpg"):
        path.unlink()
    assert torch.equal(next(train.epoch(1)).inputs.sort(0)[0], before)


def test_own_tensors_come_as_they_are_and_draw_seeded_numbers() -> None:
    source = from_datasets(Noisy(), Noisy())
    torch_state, state = torch.get_rng_state(), random.getstate()
    whole = [b.inputs for b in TrainLoader(source, settings(batch_size=6), Shard(0, 1)).epoch(3)]
    halves = [
        [b.inputs for b in TrainLoader(source, settings(batch_size=6), Shard(rank, 2)).epoch(3)] for rank in range(2)
    ]
    assert all(torch.equal(torch.cat(pair), both) for pair, both in zip(zip(*halves), whole))
    assert len(torch.cat(whole)[:, 1:].unique()) == 36
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == state


def test_own_tensors_of_several_shapes_are_refused() -> None:
    items = [(torch.zeros(2), 0)] * 12
    source = from_datasets(items, items)  # type: ignore[arg-type]
    items[5] = (torch.zeros(3), 0)
    with pytest.raises(UserError, match=r"all inputs must have one shape.*give the data set `lengths`"):
        list(TrainLoader(source, settings(), Shard(0, 1)).epoch(0))


@pytest.mark.parametrize(
    ("data", "world", "words"),
    [
        ({"batch_size": 2}, 3, "--batch-size 2 is smaller than the 3 workers"),
        ({}, 13, "12 training samples for 13 workers"),
        ({"augment": "flip_crop"}, 1, "--augment flip_crop"),
        ({"image_size": 32}, 1, "--image-size"),
    ],
)
def test_settings_that_do_not_fit(data: dict[str, Any], world: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainLoader(from_datasets(Noisy(), Noisy()), settings(**data), Shard(0, world))


def test_a_batch_stays_what_it_is() -> None:
    data = TensorDataset(torch.arange(20.0).view(20, 1), torch.zeros(20, dtype=torch.int64))
    train = TrainLoader(from_datasets(data, data, classes=("a", "b")), settings(batch_size=4), Shard(0, 1))
    kept = [(b, b.inputs.clone()) for b in train.epoch(0)]
    assert all(torch.equal(b.inputs, copy) for b, copy in kept)


@pytest.mark.parametrize("in_memory", [True, False])
def test_numbers_that_are_not_finite_are_refused_or_left_out(in_memory: bool) -> None:
    values = torch.ones(12, 3)
    values[5, 1], values[7, 0] = float("nan"), float("inf")
    data: Any = TensorDataset(values, torch.arange(12) % 2)
    if not in_memory:
        data = torch.utils.data.ConcatDataset([data])
    source = from_datasets(data, data)
    with pytest.raises(UserError, match=r"sample [57] of the data and 1 more of its batch: .* --on-nan skip"):
        next(TrainLoader(source, settings(batch_size=12), Shard(0, 1)).epoch(0))
    loader = TrainLoader(source, settings(batch_size=12, on_nan="skip"), Shard(0, 1))
    batch = next(loader.epoch(0))
    assert batch.inputs.shape == (10, 3) and batch.inputs.isfinite().all() and batch.global_size == 12
    assert sorted(loader.bad_images) == [(f"sample {i}", "its numbers are not finite") for i in (5, 7)]


@pytest.mark.parametrize("bytes_at_once", [0, 1 << 20])
def test_few_numbers_are_looked_at_once_and_many_batch_by_batch(
    bytes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(assemble, "_LOOKED_AT_ONCE", bytes_at_once)
    monkeypatch.setattr(assemble, "samples_not_finite", lambda numbers, rows, skip: looks.append(len(numbers)) or [])
    data = TensorDataset(torch.ones(12, 3), torch.arange(12) % 2)
    list(TrainLoader(from_datasets(data, data), settings(batch_size=4), Shard(0, 1)).epoch(0))
    assert looks == ([] if bytes_at_once else [4, 4, 4])


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_bad_sample_is_named_by_its_place_in_the_data_that_was_given(in_memory: bool) -> None:
    x, y = torch.zeros(50, 3), torch.zeros(50)
    kept = TensorDataset(x, y)
    data = kept if in_memory else ConcatDataset([kept])
    source = source_of(data, 0.2, seed=0)
    number = int(source.train.origin[10])  # type: ignore[attr-defined]
    x[number, 1] = float("nan")
    source = source_of(data, 0.2, seed=0)
    config = LoaderConfig(DataConfig(batch_size=8, loaders=0), 0, torch.device("cpu"))
    with pytest.raises(UserError, match=f"^sample {number} of the data: its numbers are not finite"):
        list(TrainLoader(source, config, Shard(0, 1)).epoch(0))


@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_a_part_without_samples_has_the_inputs_of_one_of_another_rank(mixup: float) -> None:
    items = TensorDataset(torch.arange(1.0, 13.0).view(12, 1), torch.arange(12) % 2)
    source, config = from_datasets(items, items), settings(batch_size=11, mixup=mixup)
    first, second = (list(TrainLoader(source, config, Shard(rank, 2)).epoch(0))[-1] for rank in range(2))
    assert second.inputs.tolist() == first.inputs.tolist() and (len(first.targets), len(second.targets)) == (1, 0)
    assert second.targets.shape[1:] == first.targets.shape[1:] and second.global_size == 1
    assert second.samples is None or not len(second.samples)


def test_a_part_of_bad_samples_alone_has_inputs_without_targets() -> None:
    items = TensorDataset(torch.tensor([[1.0], [torch.nan]]), torch.tensor([0, 1]))
    source, config = from_datasets(items, items), settings(batch_size=1, on_nan="skip")
    parts = list(TrainLoader(source, config, Shard(0, 1)).epoch(0))
    assert sorted((part.inputs.tolist(), len(part.targets)) for part in parts) == [([[0.0]], 0), ([[1.0]], 1)]


def test_a_bad_sample_that_is_lent_to_a_part_without_samples_is_zeros() -> None:
    items = TensorDataset(torch.tensor([[1.0], [1.0], [torch.nan]]), torch.tensor([0, 1, 1]))
    loader = TrainLoader(from_datasets(items, items), settings(batch_size=2, on_nan="skip"), Shard(1, 2))
    lent = [list(loader.epoch(epoch))[-1] for epoch in range(8)]
    assert {part.inputs.item() for part in lent} == {0.0, 1.0} and not any(len(part.targets) for part in lent)


def test_a_rank_without_evaluation_samples_has_an_example() -> None:
    items = TensorDataset(torch.ones(3, 1), torch.zeros(3, dtype=torch.int64))
    loader = EvalLoader(from_datasets(items, items), settings(batch_size=8), Shard(3, 4))
    assert not list(loader) and loader.example().tolist() == [[1.0]]
