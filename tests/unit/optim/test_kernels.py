"""torch's fused update: the same rule, also where gradients or state lie otherwise in memory than parameters."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from echelon.config.schema import OptimizerConfig
from echelon.optim.build import build_optimizer
from echelon.optim.kernels import fuse_where_possible

NAMES = ("sgd", "adam", "adamw")


def image_network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 3), nn.Flatten(), nn.Linear(7 * 16, 3)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def optimizer_of(model: nn.Module, name: str, fused: bool) -> torch.optim.Optimizer:
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.01, momentum=0.9, weight_decay=1e-3), 32)
    if fused:
        fuse_where_possible(optimizer, model)
        assert all(group["fused"] for group in optimizer.param_groups)
    return optimizer


def weights_after(
    name: str, fused: bool, turn: Callable[[torch.optim.Optimizer, nn.Module], None] = lambda *_: None
) -> torch.Tensor:
    model = image_network()
    optimizer = optimizer_of(model, name, fused)
    torch.manual_seed(1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8)).square().sum().backward()
        turn(optimizer, model)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def contiguous_gradients(_: torch.optim.Optimizer, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.contiguous()


def through_a_file(optimizer: torch.optim.Optimizer, _: nn.Module) -> None:
    """What lies channel by channel comes back as it was saved, in the order of indices."""
    state = optimizer.state_dict()
    for entries in state["state"].values():
        entries.update({name: value.contiguous() for name, value in entries.items()})
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("turn", [lambda *_: None, contiguous_gradients, through_a_file])
def test_a_fused_update_is_the_same_rule(name: str, turn: Callable[[torch.optim.Optimizer, nn.Module], None]) -> None:
    assert torch.allclose(weights_after(name, fused=True, turn=turn), weights_after(name, fused=False), atol=1e-6)


def test_what_has_no_fused_kernel_or_was_chosen_otherwise_is_left() -> None:
    def fused_after(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        fuse_where_possible(optimizer, model)
        return bool(optimizer.param_groups[0].get("fused"))

    model = image_network()
    assert fused_after(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not fused_after(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True))
    assert not fused_after(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=False))
    assert not fused_after(model, torch.optim.RMSprop(model.parameters(), lr=0.1))
    table = nn.Embedding(4, 2, sparse=True)
    assert not fused_after(table, torch.optim.SGD(table.parameters(), lr=0.1))
    numbers = nn.Linear(2, 2, dtype=torch.complex64)
    assert not fused_after(numbers, torch.optim.SGD(numbers.parameters(), lr=0.1))


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_may_be_reached_first_in_a_later_step_or_not_in_each(name: str) -> None:
    def trained(fused: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
        optimizer = optimizer_of(layers, name, fused)
        for step in range(6):
            x = layers[0](torch.ones(2, 4))
            for i in (1, 2):
                x = layers[i](x) if step % 3 == i else x
            optimizer.zero_grad()
            x.square().sum().backward()
            optimizer.step()
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
        return torch.cat([parameter.detach().flatten() for parameter in layers.parameters()])

    assert torch.allclose(trained(fused=True), trained(fused=False), atol=1e-6)


def test_an_optimizer_whose_first_step_differs_is_left() -> None:
    model = image_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    fuse_where_possible(optimizer, model)
    assert not optimizer.param_groups[0]["fused"]
