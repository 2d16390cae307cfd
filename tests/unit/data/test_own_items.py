"""Items of a data set from Python become rows as the first of them says, or are refused: nothing is cut off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, example_samples, from_datasets
from echelon.data.images import ImageItems
from echelon.data.recipe import _augment, make_rows
from echelon.tasks import nest


class Items(torch.utils.data.Dataset):
    """Items as they are listed."""

    def __init__(self, items: list[Any], **attributes: Any) -> None:
        self.items = items
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def filled(data: Any) -> tuple[Any, Any]:
    source = from_datasets(data, data)
    rows = make_rows(source.train, source.info, LoaderConfig(DataConfig(), 0, torch.device("cpu")), training=True)
    inputs, targets = nest.map_leaves(lambda spec: np.zeros((len(data), *spec.shape), spec.dtype), rows.specs)
    rows.fill(0, np.arange(len(data)), inputs, targets)
    return inputs, targets


def test_a_fraction_among_whole_numbers_is_refused_and_not_cut_off() -> None:
    x = torch.zeros(2)
    with pytest.raises(UserError, match=r"the target of item 1 is 2\.7\d*, and that of item 0 a class number"):
        from_datasets(Items([(x, 1), (x, 2.7), (x, 0)]), Items([(x, 1)]))
    with pytest.raises(UserError, match="item 1 of the data has inputs of float64, and the first of int64"):
        filled(Items([(np.array([0, 2]), 1), (np.array([0.5, 2.9]), 0)]))
    inputs, _ = filled(Items([(np.array([0.5, 2.9]), 1), (np.array([0, 2]), 0)]))
    assert inputs.tolist() == [[0.5, 2.9], [0, 2]], "whole numbers are numbers, too"


def test_dicts_go_by_their_keys_and_other_keys_are_refused() -> None:
    inputs, targets = filled(Items([{"a": 1.0, "b": 2.0, "y": 0}, {"y": 1, "b": 2.0, "a": 1.0}]))
    assert (inputs["a"].tolist(), inputs["b"].tolist(), targets.tolist()) == ([1, 1], [2, 2], [0, 1])
    items = [{"a": 1.0, "b": torch.zeros(3), "y": 0}, {"b": torch.ones(3), "a": 2.0, "y": 1}]
    source = from_datasets(Items(items), Items(items))
    assert {name: tuple(leaf.shape) for name, leaf in example_samples(source)[0].items()} == {"a": (2,), "b": (2, 3)}
    with pytest.raises(UserError, match="item 1 has other tensors than item 0: the keys c, a, not a, b"):
        filled(Items([{"a": 1.0, "b": 2.0, "y": 0}, {"c": 9.0, "a": 1.0, "y": 1}]))


@pytest.mark.parametrize("picture", [torch.zeros(3, 8, 8, dtype=torch.uint8), torch.zeros(3)])
def test_what_items_give_counts_where_kept_labels_are_others(picture: torch.Tensor) -> None:
    kept = [i % 4 for i in range(12)]
    data = Items([(picture, label % 2) for label in kept], targets=kept)
    source = from_datasets(data, data)
    assert source.info.classes == ("0", "1") and source.info.class_counts == (6, 6)
    same = Items([(picture, label) for label in kept], targets=kept)
    assert from_datasets(same, same).info.class_counts == (3, 3, 3, 3)


class Drawn(Items):
    """Images that are made anew each time, at random."""

    def __getitem__(self, i: int) -> Any:
        return torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8), self.items[i]


def test_images_that_a_data_set_draws_are_others_in_each_epoch_and_the_same_by_their_seed() -> None:
    source = from_datasets(Drawn([0, 1, 0, 1]), Drawn([0, 1]))
    config = LoaderConfig(DataConfig(), 0, torch.device("cpu"))

    def epoch(number: int, order: list[int]) -> Any:
        rows = make_rows(source.train, source.info, config, training=True)
        inputs, targets = nest.map_leaves(lambda spec: np.zeros((4, *spec.shape), spec.dtype), rows.specs)
        rows.fill(number, np.array(order), inputs, targets)
        return inputs[np.argsort(order)]

    first, other_order, second = epoch(0, [0, 1, 2, 3]), epoch(0, [3, 1, 0, 2]), epoch(1, [0, 1, 2, 3])
    assert np.array_equal(first, other_order) and not np.array_equal(first, second)


class Counted(Items):
    """Images that are the same each time; how often they were asked for."""

    asked = 0

    def __getitem__(self, i: int) -> Any:
        self.asked += 1
        return torch.full((3, 8, 8), i, dtype=torch.uint8), self.items[i]


def test_images_that_draw_nothing_are_made_once() -> None:
    data = Counted([0, 1, 0, 1])
    source = from_datasets(data, data)
    rows = make_rows(source.train, source.info, LoaderConfig(DataConfig(), 0, torch.device("cpu")), training=True)
    inputs, targets = nest.map_leaves(lambda spec: np.zeros((4, *spec.shape), spec.dtype), rows.specs)
    rows.fill(0, np.arange(4), inputs, targets)
    first, asked = inputs.copy(), data.asked
    rows.fill(1, np.arange(4), inputs, targets)
    assert data.asked == asked and np.array_equal(inputs, first)


def test_of_a_part_of_data_without_labels_its_own_items_are_read_and_no_others() -> None:
    data = Counted([i % 3 for i in range(30_000)])  # more than are read to learn their labels
    part = Subset(data, list(range(1, 101)))
    source = from_datasets(part, part)
    assert isinstance(source.train, ImageItems) and source.train.labels.tolist() == [i % 3 for i in range(1, 101)]
    assert data.asked < 400  # the labels of both parts, and images to measure
    data.items[50] = 0.5
    with pytest.raises(UserError, match=r"the target of item 50 is 0\.5"):
        from_datasets(part, part)
    with pytest.raises(UserError, match="30000 items are too many to read"):
        from_datasets(data, part)


@pytest.mark.parametrize("name", ["svhn", "gtsrb", "cifar10"])
def test_digits_and_signs_are_not_mirrored(name: str) -> None:
    assert _augment("auto", 32, name) == ("flip_crop" if name == "cifar10" else "none")
    assert _augment("flip_crop", 32, name) == "flip_crop"


def test_a_tensor_data_set_with_items_of_its_own_is_asked_for_them() -> None:
    class Shifted(torch.utils.data.TensorDataset):
        def __getitem__(self, i: int) -> Any:
            return self.tensors[0][i], int(self.tensors[1][i]) % 2

    data = Shifted(torch.zeros(12, 3), torch.arange(12) % 4)
    assert from_datasets(data, data).info.class_counts == (6, 6)
