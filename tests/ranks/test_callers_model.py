"""A caller's model stays as it is, though what a run never trains of it lies in one memory with the run's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import echelon
from echelon.models.trial import own_copy
from echelon.models.tuning.plan import tuning_plan


def model() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(body, nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


@pytest.mark.parametrize("tune", [
    "all", "head", "lora(r=2)", "head+unfreeze(epoch=2)", 'head+unfreeze(epoch=2, pattern="1")', "layer_decay(0.5)",
])  # fmt: skip
def test_it_is_left_as_it_was(tmp_path: Path, tune: str) -> None:
    if "lora" in tune:
        pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    own, data = model(), TensorDataset(torch.randn(24, 1, 8, 8), torch.arange(24) % 3)
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    settings = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "device": "cpu", "threads": 1, "batch_size": 8}
    echelon.train(own, (data, data), tmp_path / "run", tune=tune, epochs=3, workers=1, **settings)
    after = own.state_dict()
    assert not [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert all(parameter.requires_grad and parameter.grad is None for parameter in own.parameters())


def test_what_is_never_trained_is_there_once() -> None:
    own = model()
    still = tuning_plan('head+unfreeze(epoch=2, pattern="1")', "eval").never_trained(own)
    assert still == {name for name, _ in own.named_parameters() if name.startswith("0.")}
    copied = dict(own_copy(own, still).named_parameters())
    for name, parameter in own.named_parameters():
        assert (copied[name].data_ptr() == parameter.data_ptr()) is (name in still)
        assert copied[name] is not parameter
