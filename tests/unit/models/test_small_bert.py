"""The encoder of texts that classifies: padding counts nothing, and a masked language model fits it up to the head."""

from __future__ import annotations

import pytest
import torch

from echelon.models import load_state
from echelon.models.base import ModelInput
from echelon.models.builtin import small_bert
from echelon.tasks.nest import TensorSpec

IDS = TensorSpec((12,), "int64", count=50)
MASK = TensorSpec((12,), "int64")


def _classifier() -> small_bert.BertClassifier:
    torch.manual_seed(0)
    data = ModelInput(channels=1, image_size=1, classes=7, several={"input_ids": IDS, "attention_mask": MASK})
    model = small_bert.build(data)
    assert isinstance(model, small_bert.BertClassifier)
    return model.eval()


def test_padding_counts_nothing() -> None:
    model, ids = _classifier(), torch.randint(0, 50, (3, 8))
    there = torch.ones_like(ids)
    there[1, 5:] = there[2] = 0
    wide, seen = torch.full((3, 12), 9), torch.zeros(3, 12, dtype=torch.int64)
    wide[:, :8], seen[:, :8] = ids, there
    logits = model(ids, there)
    torch.testing.assert_close(logits, model(wide, seen))
    torch.testing.assert_close(logits[1:2], model(ids[1:2, :5], there[1:2, :5]))
    assert logits.isfinite().all() and not logits[2].any()  # without a token


@pytest.mark.parametrize("context", [9, 16, 600])  # of its windows: less and more places than a text's
def test_a_masked_language_model_is_tuned_to_texts(context: int) -> None:
    ids = TensorSpec((context,), "int64", count=51)  # one more: the mask
    masked = small_bert.build(ModelInput(channels=1, image_size=1, classes=50, several=ids))
    model = _classifier()
    own = model.positions.detach().clone()
    loaded = load_state(model, masked.state_dict(), "base")
    assert loaded.new == ("head.weight",) and len(loaded.reshaped) == 1
    both = min(context, small_bert.LONGEST)
    expected = torch.cat([masked.get_parameter("positions")[:, :both], own[:, both:]], dim=1)
    assert torch.equal(model.positions, expected)
    assert torch.equal(model.blocks[3].mlp.fc1.weight, masked.get_parameter("blocks.3.mlp.fc1.weight"))
