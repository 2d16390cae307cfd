"""Kinds of tuning that would do nothing are refused, in words that name another."""

from __future__ import annotations

import pytest
from torch import nn

from echelon.core.errors import UserError
from echelon.models.tuning.plan import tuning_plan


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))


@pytest.mark.parametrize(("tune", "words"), [
    ("norm", "no normalisation layer"),
    ("bias", "has no bias"),
    ("unfreeze(epoch=3)", "nothing is frozen that epoch 3 could unfreeze"),
    ("head+unfreeze(epoch=2)+unfreeze(epoch=3)", "nothing is frozen that epoch 3 could unfreeze"),
])  # fmt: skip
def test_what_would_do_nothing(tune: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        tuning_plan(tune, "eval").apply(plain())


def test_one_layer_has_one_rate() -> None:
    with pytest.raises(UserError, match="layer_decay: nothing tells layers"):
        tuning_plan("layer_decay(0.5)", "eval").apply(nn.Linear(4, 2))


def test_the_head_is_named() -> None:
    words = tuning_plan("head", "eval").apply(plain()).words
    assert words == "tuning head: 32 of 96 parameters are trained, with the head (2)"
