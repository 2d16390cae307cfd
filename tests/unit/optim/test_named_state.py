"""An optimizer's state by name is what torch's distributed checkpoints have, value for value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from echelon.optim.named_state import load_named_state, named_state

Make = Callable[[Any], torch.optim.Optimizer]
MAKE: dict[str, Make] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "adam with a rate on the device": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.1)),
}


class Tied(nn.Module):
    """Has a weight under two names, one that is frozen, and names that wrappers have made longer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = checkpoint_wrapper(nn.Linear(4, 2))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits `(B, 2)`."""
        return self.frozen(self.head(self.second(self.first(inputs))))


def _built(make: Make, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    heads = [p for name, p in model.named_parameters() if name.startswith("head")]
    others = [p for name, p in model.named_parameters() if not name.startswith(("head", "frozen"))]
    optimizer = make([{"params": others}, {"params": heads, "weight_decay": 0.1}])
    for _ in range(steps):
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", MAKE)
def test_it_is_what_torch_saves_and_restores(name: str, steps: int) -> None:
    saved = named_state(*_built(MAKE[name], steps))
    assert _same(saved, get_optimizer_state_dict(*_built(MAKE[name], steps)))
    (model, ours), (other, theirs) = _built(MAKE[name], 0), _built(MAKE[name], 0)
    load_named_state(model, ours, saved)
    set_optimizer_state_dict(other, theirs, saved, options=StateDictOptions(strict=False))
    assert _same(ours.state_dict(), theirs.state_dict())
    assert all(map(torch.equal, model.parameters(), other.parameters()))
