"""What values targets from Python have is looked at before anything starts."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import (
    EvalLoader,
    LoaderConfig,
    Shard,
    TrainLoader,
    evaluation_digest,
    from_datasets,
    samples_digest,
)
from echelon.tasks.base import Task, TaskSettings
from echelon.tasks.classification import Classification
from echelon.tasks.image_classification import ImageClassification
from echelon.tasks.multi_label import MultiLabel
from echelon.tasks.regression import Regression
from echelon.tasks.segmentation import Segmentation

X = torch.randn(6, 4)
MARKS = torch.tensor([[1, 0, 1], [0, 0, 0]] * 3).float()
ONE_HOT = torch.eye(3).repeat(2, 1)


class Items(Dataset[tuple[Tensor, Tensor]]):
    """Made one by one."""

    def __init__(self, targets: Tensor) -> None:
        self.wanted = targets

    def __len__(self) -> int:
        return len(self.wanted)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i], self.wanted[i]


class Listed(Dataset[tuple[Tensor, Tensor]]):
    """Items as they are."""

    def __init__(self, items: list[tuple[Tensor, Tensor]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.items[i]


@pytest.mark.parametrize("made", [Items, lambda targets: TensorDataset(X, targets)])
@pytest.mark.parametrize(
    ("targets", "task", "words"),
    [
        (MARKS * 5, MultiLabel(), r"targets reach from 0 to 5, .* 0 or 1 for each label"),
        (MARKS * 0.5, MultiLabel(), "targets reach from 0 to 0.5"),
        (ONE_HOT, ImageClassification(), r"they are one-hot: give targets.argmax\(1\)"),
        (torch.full((6, 2, 2), 5), Segmentation(["a", "b"]), "masks have numbers from 5 to 5, and the 2 classes"),
        (torch.arange(6) % 3 + 1, Classification(), "labels are 1 to 3, and classes are numbered from 0"),
    ],
)  # fmt: skip
def test_what_no_task_can_learn_from_is_refused(made: type[Items], targets: Tensor, task: Task, words: str) -> None:
    info = from_datasets(made(targets), made(targets)).info
    with pytest.raises(UserError, match=words):
        task.fitted(info, TaskSettings())


def test_one_hot_rows_are_learnt_by_no_task_that_nobody_named() -> None:
    info = from_datasets(Items(ONE_HOT), Items(ONE_HOT)).info
    assert info.task == "image_classification", "which refuses them"
    assert from_datasets(Items(MARKS), Items(MARKS)).info.task == "regression"
    assert Regression().fitted(info, TaskSettings()).outputs == 3
    assert MultiLabel().fitted(info, TaskSettings()).outputs == 3


def test_numbers_that_stand_for_no_class_are_none() -> None:
    masks = torch.tensor([[[0, 1], [255, -100]]] * 6)
    info = from_datasets(Items(masks), Items(masks)).info
    assert info.target_values is not None and info.target_values.span == (0, 1)
    assert Segmentation(["a", "b"]).fitted(info, TaskSettings()).outputs == 2


def test_a_class_that_is_evaluated_alone_is_said_and_one_that_nobody_has_is_not() -> None:
    train, held = (TensorDataset(torch.randn(4, 3), torch.tensor(labels)) for labels in ([0, 1, 0, 1], [0, 2, 2, 1]))
    (note,) = from_datasets(train, held, classes=("a", "b", "c", "d")).notes
    assert note == "no training sample has the class c: 2 samples for evaluation have it and cannot be predicted right"
    assert from_datasets(train, train, classes=("a", "b", "c")).notes == ()


@pytest.mark.parametrize(
    ("targets", "task"),
    [(torch.rand(6, 3) > 0.5, "multi-label"), (torch.arange(96).view(6, 4, 4) % 3, "segmentation")],
)
def test_targets_that_another_task_learns_name_it(targets: torch.Tensor, task: str) -> None:
    data = TensorDataset(torch.randn(6, 3), targets)
    with pytest.raises(UserError, match=f"--task {task} learns these"):
        Classification().fitted(from_datasets(data, data).info, TaskSettings())


def test_class_0_may_be_missing_where_classes_are_named() -> None:
    data = Items(torch.arange(6) % 2 + 1)
    info = from_datasets(data, data, classes=["none", "cat", "dog"]).info
    assert Classification().fitted(info, TaskSettings()).outputs == 3


def test_a_digest_tells_data_of_other_values_and_asks_no_item_again() -> None:
    labels = torch.arange(6) % 3
    digests = {
        name: samples_digest(from_datasets(data, data))
        for name, data in {
            "memory": TensorDataset(X, labels),
            "again": TensorDataset(X.clone(), labels.clone()),
            "inputs": TensorDataset(X + 1, labels),
            "targets": TensorDataset(X, labels.flip(0)),
            "items": Items(labels),
            "other items": Items(labels.flip(0)),
        }.items()
    }
    assert digests["memory"] == digests["again"]
    assert len(set(digests.values())) == len(digests) - 1


def test_a_digest_tells_evaluation_data_of_other_values_or_another_size() -> None:
    train = TensorDataset(X, torch.arange(6) % 3)
    same, fewer, other = (
        evaluation_digest(from_datasets(train, TensorDataset(x, torch.arange(len(x)) % 3))) for x in (X, X[:4], X + 1)
    )
    assert evaluation_digest(from_datasets(train, train)) == same
    assert len({same, fewer, other}) == 3
    items = [from_datasets(Items(torch.ones(6)), Items(torch.ones(count))) for count in (6, 5)]
    assert evaluation_digest(items[0]) != evaluation_digest(items[1]), "their number is known, whatever they hold"


class Longer(Listed):
    """Has fewer items than it says, or loses one later."""

    def __init__(self, items: list[tuple[Tensor, Tensor]], missing: int = 1) -> None:
        super().__init__(items)
        self.count = len(items) + missing

    def __len__(self) -> int:
        return self.count


def test_an_item_that_is_not_there_or_raises_is_named() -> None:
    labelled = Longer([(torch.ones(3), torch.tensor(i % 2)) for i in range(4)])
    with pytest.raises(UserError, match=r"^data Longer: IndexError: .* \(item 4 of .*, which its __len__ counts"):
        from_datasets(labelled, labelled)
    rows = [(torch.ones(3), torch.ones(1))] * 20
    rows.append(rows[0])
    source = from_datasets(Longer(rows, 0), Longer(rows, 0))
    rows.pop()
    config = LoaderConfig(DataConfig(batch_size=7, loaders=0), seed=0, device=torch.device("cpu"))
    loader = TrainLoader(source, config, Shard(0, 1))
    with pytest.raises(IndexError) as raised:
        list(loader.epoch(2))
    item, place = raised.value.__notes__
    assert item == "item 20 of the data, which its __len__ counts"
    assert re.fullmatch(r"rank 0, batch [123] of epoch 3", place)
    with pytest.raises(IndexError) as raised:
        list(EvalLoader(source, config, Shard(0, 1)))
    assert raised.value.__notes__ == [item, "rank 0, batch 3 of the evaluation data"]
