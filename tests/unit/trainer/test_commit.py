"""What a rank returns to when a step is begun again: generators and buffers of before it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from echelon.trainer.commit import Draws, KeptBuffers


def _run(model: nn.Module) -> Any:
    return SimpleNamespace(parts=SimpleNamespace(local_model=model, sync=SimpleNamespace(steps_together=True)))


@pytest.mark.parametrize("in_place", [True, False])
def test_generators_and_buffers_go_back_to_the_newest_copy(in_place: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    run, kept = _run(model), KeptBuffers(model) if in_place else None
    for _ in range(2):  # the second copy is written over the first one
        model(torch.randn(4, 3))
        draws = Draws.of(run, kept)
        before = [buffer.clone() for buffer in model.buffers()]
        drawn = torch.rand(1).item(), random.random(), np.random.rand()
        model(torch.randn(4, 3))
        assert any(not torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))
        draws.restore(run)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))
        assert drawn == (torch.rand(1).item(), random.random(), np.random.rand())


def test_a_model_without_buffers_has_nothing_to_copy() -> None:
    assert KeptBuffers(nn.Linear(2, 2)).copied() == []
