"""Kinds of tuning that would do nothing are refused, in words that name another."""

from __future__ import annotations

import pytest
import torch
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


@pytest.mark.parametrize(("name", "last", "before"), [
    ("swin_t", "features.7.1.", "features.7.0."),
    ("vit_b_32", "encoder.layers.encoder_layer_11.", "encoder.layers.encoder_layer_10."),
    ("convnext_tiny", "features.7.2.", "features.7.1."),
    ("densenet121", "features.denseblock4.", "features.transition3."),
])  # fmt: skip
def test_a_normalisation_behind_the_last_block_is_none(name: str, last: str, before: str) -> None:
    models = pytest.importorskip("torchvision.models", reason="needs torchvision")
    for tune, first in (("last", last), ("last(2)", before)):
        with torch.device("meta"):
            model = models.get_model(name, num_classes=3)
        tuning_plan(tune, "eval").apply(model)
        assert next(n for n, p in model.named_parameters() if p.requires_grad).startswith(first)


def test_the_head_is_named() -> None:
    words = tuning_plan("head", "eval").apply(plain()).words
    assert words == "tuning head: 32 of 96 parameters are trained, with the head (2)"
