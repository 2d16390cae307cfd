"""Data sets from Python have the defaults of their task, whether it is named or told by their targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from echelon import api
from echelon.config import Resolved


class Stopped(Exception):
    """Ends `train` where a run would start."""


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        ({}, "adamw"),
        ({"task": "regression"}, "adamw"),
        ({"optimizer": "rmsprop"}, "rmsprop"),
        ({"loss": "MSELoss"}, "sgd"),
        ({"loss": nn.MSELoss()}, "sgd"),
    ],
)
def test_targets_with_fractions_have_regressions_defaults(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], optimizer: str
) -> None:
    described: list[Resolved] = []

    def started(resolved: Resolved, objects: object) -> None:
        described.append(resolved)
        raise Stopped

    monkeypatch.setattr(api, "_started", started)
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 2))
    with pytest.raises(Stopped):
        api.train(nn.Linear(3, 2), data, workers=1, **settings)
    assert described[0].config.optimizer.name == optimizer
