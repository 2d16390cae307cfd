"""Statistics of replicas are averaged for an evaluation or a checkpoint, and given back after it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.sync.buffers import averaged_buffers
from tests.ranks.spawn import Rank, run_ranks

EQUAL = torch.tensor([0.1, -1 / 3, 3e-39, float("-inf")])


class Stateful(nn.Module):
    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("equal", EQUAL.to(dtype))
        self.register_buffer("own", torch.tensor([rank, -1.0], dtype=dtype))
        self.register_buffer("counter", torch.tensor(rank))
        self.register_buffer("empty", torch.zeros(0, dtype=dtype))


def _look(rank: Rank, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = Stateful(rank.index, dtype)
    with averaged_buffers(model, dist.group.WORLD):
        inside = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return inside, dict(model.named_buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_statistics_stay_and_others_are_averaged(dtype: torch.dtype) -> None:
    world = 7
    for index, (inside, after) in enumerate(run_ranks(_look, world, dtype)):
        assert torch.equal(inside["equal"], EQUAL.to(dtype)), "a mean of equal values is that value"
        torch.testing.assert_close(inside["own"], torch.tensor([3.0, -1.0], dtype=dtype))
        assert inside["counter"] == world - 1
        own = Stateful(index, dtype)
        assert all(torch.equal(after[name], buffer) for name, buffer in own.named_buffers())
