"""A run of objects from Python is evaluated with the same objects given again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanAbsoluteError

import echelon
from echelon.core.errors import UserError


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(-1) / 2


def pairs(samples: int, seed: int) -> TensorDataset:
    inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, 2 * inputs[:, :2])


def test_the_same_objects_give_what_training_measured(tmp_path: Path) -> None:
    model, data, metric = nn.Linear(3, 2), (pairs(32, 0), pairs(10, 1)), MeanAbsoluteError()
    settings = {"epochs": 1, "batch_size": 8, "workers": 1, "device": "cpu"}
    outcome = echelon.train(model, data, tmp_path / "run", loss=half_square, metrics=metric, **settings)  # type: ignore[arg-type]
    again = nn.Linear(3, 2)
    kept = again.weight.detach().clone()
    given = echelon.evaluate(tmp_path / "run", workers=1, model=again, data=data, loss=half_square, metrics=metric)
    assert given == pytest.approx(outcome.metrics) and set(given) == {"loss", "mean_absolute_error"}
    assert torch.equal(again.weight, kept)
    with pytest.raises(UserError, match=r"give them again, echelon.evaluate\(.*, model=..., data=..., metrics=...\)"):
        echelon.evaluate(tmp_path / "run", workers=1)
