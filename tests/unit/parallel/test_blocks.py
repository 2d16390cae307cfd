"""Blocks whose weights others read are left to the root to gather; what cannot be sharded is refused in a line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.parallel.blocks import find_blocks, read_outside, shard


class TiedAutoencoder(nn.Module):
    """Its decoder reads one layer's weight, in training a penalty another's; of the third the shape is read."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        code = self.third(self.norm(self.second(self.first(x)).relu()))
        out = F.linear(code, self.second.weight.t())[:, : self.first.weight.shape[0]]
        return out + self.third.weight.square().sum() if self.training else out


def test_a_block_whose_weight_is_read_outside_of_it_is_found_and_the_trial_leaves_no_trace() -> None:
    model = TiedAutoencoder()
    blocks = find_blocks(model, None)
    assert list(blocks) == ["first", "second", "third"]
    before, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    assert read_outside(model, blocks, lambda: model(torch.randn(2, 6))) == {"second", "third"}
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks.values())


def test_blocks_that_alone_read_their_weights_stay_blocks() -> None:
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)))
    assert read_outside(model, find_blocks(model, None), lambda: model(torch.randn(2, 3, 8))) == set()


class TwoTypes(nn.Module):
    """Parameters of two types in what the root gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(4))
        self.wide = nn.Parameter(torch.zeros(4, dtype=torch.float64))


class Scaled(nn.Module):
    """A parameter without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class _MeshOfTwo:
    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (TwoTypes(), "the parameter wide is float64 and narrow is float32.*use dp=N"),
        (Scaled(), r"the parameter scale is a single number.*torch.ones\(1\), or use dp=N"),
    ],
)
def test_parameters_that_cannot_be_sharded_are_refused_with_advice(model: nn.Module, said: str) -> None:
    mesh: Any = _MeshOfTwo()
    with pytest.raises(UserError, match=said):
        shard(model, {}, mesh)
