"""The mean of former ranks' optimizers can be loaded, and is their mean."""

from __future__ import annotations

import torch
from torch import nn

from echelon.trainer.state import mean_of


def stepped(scale: float, steps: int = 1) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    for _ in range(steps):
        weight.grad = torch.full((3,), scale)
        optimizer.step()
    return optimizer


def test_moments_are_averaged() -> None:
    one, other, new = stepped(1.0), stepped(3.0), stepped(0.0)
    new.load_state_dict(mean_of([one.state_dict(), other.state_dict()]))
    state = new.state_dict()["state"][0]
    torch.testing.assert_close(state["exp_avg"], torch.full((3,), 0.2))
    assert float(state["step"]) == 1.0


def test_what_some_have_not_stepped_is_the_others() -> None:
    ones, threes = ({"state": {0: {"exp_avg": torch.full((2,), scale)}, 1: {}}} for scale in (1.0, 3.0))
    threes["state"][1] = {"exp_avg": torch.full((2,), 5.0)}
    for states in ([ones, threes], [threes, ones]):
        mean = mean_of([*states, {"state": {}}])["state"]
        assert {i: each["exp_avg"].tolist() for i, each in mean.items()} == {0: [2.0] * 2, 1: [5.0] * 2}
