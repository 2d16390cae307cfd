"""Steps for some parameters each are one step for all of them, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from echelon.config import OptimizerConfig
from echelon.optim.build import build_optimizer
from echelon.optim.kernels import fuse_where_possible
from echelon.optim.some_parameters import BY_PARAMETER, settings_of, step_for


def _trained(name: str, momentum: float, by_parameter: bool, fused: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.Linear(7, 1))
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.1, momentum=momentum, weight_decay=0.01), 8)
    if fused:
        fuse_where_possible(optimizer, model)
    parameters = [*model.parameters()]
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        if step == 2:
            parameters[1].grad = None
        if not by_parameter:
            optimizer.step()
            optimizer.zero_grad()
            continue
        settings = settings_of(optimizer)
        for group in optimizer.param_groups:
            group["lr"] = 99.0  # of the step after it
        for some in (parameters[4:], parameters[1:4], parameters[:1]):
            step_for(optimizer, some, settings)
        assert all(parameter.grad is None for parameter in parameters)
        assert [group["lr"] for group in optimizer.param_groups] == [99.0] * len(optimizer.param_groups)
    moments = [
        value for p in parameters for _, value in sorted(optimizer.state[p].items()) if isinstance(value, Tensor)
    ]
    return [*parameters, *moments]


@pytest.mark.parametrize("name", BY_PARAMETER)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_for_some_parameters_are_one_step(name: str, fused: bool, momentum: float) -> None:
    at_once = _trained(name, momentum, by_parameter=False, fused=fused)
    one_by_one = _trained(name, momentum, by_parameter=True, fused=fused)
    assert len(at_once) == len(one_by_one)
    assert all(torch.equal(a, b) for a, b in zip(at_once, one_by_one, strict=True))
