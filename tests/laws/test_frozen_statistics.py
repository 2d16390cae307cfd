"""Statistics of frozen normalisation stay, and nothing of them travels or is saved again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.models.still_buffers import moving_buffers
from echelon.models.tuning.plan import tuning_plan
from echelon.sync.averaging.values import model_values


def model(affine: bool) -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=affine), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(body, nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("tune", "moves"), [("head", False), ("all", True), ("layer_decay(0.5)", True)])
def test_statistics_move_with_what_is_trained(affine: bool, tune: str, moves: bool) -> None:
    built = model(affine)
    tuned = tuning_plan(tune, "eval").apply(built)
    before = {name: buffer.clone() for name, buffer in built.named_buffers()}
    built.train()(torch.randn(8, 1, 6, 6))
    after = dict(built.named_buffers())
    assert any(not torch.equal(before[name], after[name]) for name in before) is moves
    assert bool(list(moving_buffers(built))) is moves
    assert any(value.kind == "buffer" for value in model_values(built)) is moves
    assert (tuned.frozen >= before.keys()) is not moves


def test_frozen_statistics_move_where_that_is_asked_for() -> None:
    built = model(affine=True)
    tuned = tuning_plan("head", "train").apply(built)
    assert len(list(moving_buffers(built))) == 3 and not any("running" in name for name in tuned.frozen)
