"""A model from Python is tried out before anything starts: one line for what the first step could not use."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from echelon.core.errors import UserError
from echelon.data import from_datasets
from echelon.tasks.base import TaskSettings
from echelon.tasks.registry import build_task
from echelon.trainer.parts import Work, check_own_model

X = torch.randn(12, 8)
Y = torch.arange(12) % 3


class Raises(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")


def check(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> str:
    """Try a model out on data of one's own; returns the name of the task."""
    data = TensorDataset(inputs, targets)
    info = from_datasets(data, data).info
    task = build_task(info.task).fitted(info, TaskSettings())
    check_own_model(model, Work(info, task, model))
    return info.task


@pytest.mark.parametrize(
    ("model", "inputs", "targets", "words"),
    [
        (nn.Linear(8, 2), X, Y, r"shape \(batch, 3\), one per class; for a batch of 2 it returned \[2, 2\]$"),
        (nn.Linear(8, 7), X, Y, r"it returned \[2, 7\]$"),
        (nn.Linear(8, 3), X, Y + 1, "no sample has label 0: classes are numbered from 0, not from 1"),
        (nn.Linear(8, 3), X.double(), Y, "inputs are float64 and the parameters of Linear are float32: give float32"),
        (nn.Linear(8, 2), X, X.sum(1), "must return 1 numbers for each sample"),
    ],
)
def test_what_cannot_be_used_is_refused(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        check(model, inputs, targets)


def test_numbers_with_fractions_are_learnt_by_regression_and_whole_ones_are_classes() -> None:
    assert check(nn.Linear(8, 1), X, X.sum(1)) == "regression"
    assert check(nn.Linear(8, 2), X, X[:, :2]) == "regression"
    assert check(nn.Linear(8, 3), X, Y) == "image_classification"


def test_what_its_forward_raises_is_left_to_the_first_step() -> None:
    check(Raises(8, 3), X, Y)
