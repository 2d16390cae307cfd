from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from echelon.core.errors import UserError
from echelon.parallel.sync_batchnorm import GlooSyncBatchNorm, convert_sync_batchnorm, has_sync_batchnorm
from tests.ranks.spawn import Rank, run_ranks

PARTS = [(5, 3), (8, 0), (1, 7)]
STEPS = 3


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, stride=2),
        nn.BatchNorm2d(3, momentum=None, affine=False),
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.BatchNorm1d(5),
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 2, 7, 7, generator=generator, dtype=torch.float64) * 3 + 50,
            torch.randn(8, 5, generator=generator, dtype=torch.float64),
        )
        for _ in range(STEPS)
    ]


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], ranks: int = 1) -> dict[str, Any]:
    """Train with the sum of a non-linear loss; returns outputs, input gradients and all state."""
    outputs, input_gradients = [], []
    for x, weight in batches:
        x.requires_grad_()
        y = model(x)
        # DistributedDataParallel averages gradients: with the loss times the ranks, they are summed.
        ((y * weight).tanh().sum() * ranks).backward()
        assert x.grad is not None
        outputs.append(y.detach())
        input_gradients.append(x.grad / ranks)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    state = {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}
    return {"outputs": outputs, "input_gradients": input_gradients, "state": state}


def train_on_ranks(rank: Rank, part: tuple[int, ...]) -> dict[str, Any]:
    assert dist.group.WORLD is not None
    model = convert_sync_batchnorm(network(), dist.group.WORLD)
    assert has_sync_batchnorm(model)
    # Small buckets: gradients travel while BatchNorm's collectives go on.
    model = DistributedDataParallel(model, bucket_cap_mb=1e-4, forward_sync_buffers=False)
    start = sum(part[: rank.index])
    mine = slice(start, start + part[rank.index])
    result = train(model, [(x[mine].clone(), w[mine]) for x, w in batches()], rank.world_size)
    model.eval()
    result["evaluated"] = model(batches()[0][0]).detach()
    return result


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_equals_batchnorm_of_one_process(part: tuple[int, ...]) -> None:
    model = network()
    expected = train(model, batches())
    model.eval()
    evaluated = model(batches()[0][0]).detach()
    results = run_ranks(train_on_ranks, len(part), part)
    for kind in ("outputs", "input_gradients"):
        for step in range(STEPS):
            together = torch.cat([result[kind][step] for result in results])
            torch.testing.assert_close(together, expected[kind][step], rtol=1e-9, atol=1e-9)
    for result in results:
        assert list(result["state"]) == list(expected["state"])
        torch.testing.assert_close(result["state"], expected["state"], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(result["evaluated"], evaluated, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(results[0]["state"], results[1]["state"], rtol=0, atol=0)


class ActivatedBatchNorm(nn.BatchNorm2d):
    """Has the shape of timm's BatchNormAct2d."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.drop = nn.Identity()
        self.act = nn.PReLU(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class OddBatchNorm(nn.BatchNorm2d):
    """Does something that a replacement could not know."""


def variants(rank: Rank) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, 3)
    own = x[rank.index : rank.index + 1]
    activated = ActivatedBatchNorm(4)
    expected = activated(x)[rank.index : rank.index + 1].detach()
    keys = list(activated.state_dict())
    activated = ActivatedBatchNorm(4)
    converted = convert_sync_batchnorm(activated, group)
    half = convert_sync_batchnorm(nn.BatchNorm2d(4), group)(own.bfloat16().requires_grad_())
    half.sum().backward()
    with pytest.raises(UserError, match="OddBatchNorm"):
        convert_sync_batchnorm(nn.Sequential(OddBatchNorm(4)), group)
    plain = nn.Linear(2, 2)
    empty = convert_sync_batchnorm(nn.BatchNorm2d(4), group)
    assert isinstance(empty, GlooSyncBatchNorm)
    assert empty(torch.zeros(0, 4, 3, 3)).shape == (0, 4, 3, 3)
    assert empty.num_batches_tracked is not None
    return {
        "same": torch.allclose(converted(own), expected, atol=1e-5),
        "keys": list(converted.state_dict()) == keys and converted.act is activated.act,
        "half": half.dtype == torch.bfloat16,
        "untouched": convert_sync_batchnorm(plain, group) is plain,
        "no_statistics_of_nothing": int(empty.num_batches_tracked) == 0,
        "timeout": _timeout_s(converted.process_group) == _timeout_s(group),
    }


def _timeout_s(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_variants() -> None:
    for result in run_ranks(variants, 2):
        assert all(result.values()), result
