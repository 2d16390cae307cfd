"""What the start of a run says of data whose targets look like another task's."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from echelon.config import build
from echelon.data import from_datasets
from echelon.trainer.assemble import run_notes


@pytest.mark.parametrize(
    ("settings", "largest", "is_said"),
    [
        ({}, 1.0, True),
        ({"task": "multi-label"}, 1.0, False),
        ({"optimizer.loss": "MSELoss"}, 1.0, False),
        ({}, 2.0, False),
    ],
)
def test_labels_that_are_learnt_as_numbers_are_told(settings: dict[str, str], largest: float, is_said: bool) -> None:
    targets = torch.tensor([[0.0, largest, largest], [largest, 0.0, largest]] * 8)
    data = TensorDataset(torch.randn(16, 4), targets)
    notes = [text for _, text in run_notes(build(None, settings).config, from_datasets(data, data), (), ())]
    assert any("--task multi-label learns them as labels" in note for note in notes) is is_said
