"""What a step of the loop computes beside what a plain one does: next to nothing, or small models pay for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.data.base import Batch
from echelon.observe.phases import HostClock
from echelon.parallel.base import alone
from echelon.trainer.loss_guard import GuardSettings, LossGuard
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.update import Update
from echelon.trainer.world import World
from tests.ranks.layouts import TASK
from tests.unit.trainer.alone import Alone

WORLD = World(0, 1, 0, torch.device("cpu"), None, alone())
BATCH = Batch({"input": torch.ones(5, 3)}, torch.zeros(5, dtype=torch.int64), 5, 0)


class Operations(TorchDispatchMode):
    """Counts the operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(step: Callable[[], object]) -> Counter[str]:
    """Return what a step computes, once it was warm."""
    step()
    with Operations() as seen:
        step()
    return seen.count


def test_a_step_computes_what_a_plain_loop_does_and_keeps_its_loss(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    guard = LossGuard(TASK, model.parameters(), WORLD, GuardSettings(False, tmp_path, 0, print))
    made = Step(TASK, StepSettings(WORLD.device, None, 1, 0.0, False), HostClock(), scaler, None, guard)
    update = Update(model, optimizer, scaler, 0.0)

    def ours() -> None:
        """Step as the loop does."""
        made.forward_backward(BATCH, Alone(model))  # type: ignore[arg-type]
        update()

    def plain() -> None:
        """Step as everyone does."""
        loss = TASK.loss_sum(model(BATCH.inputs["input"]), BATCH.targets) / 5
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    scored = operations(lambda: TASK.training_score(torch.zeros(5, 4), BATCH.targets))
    extra = operations(ours) - operations(plain) - scored
    # The loss is looked at, taken from the graph and added to the step's sum.
    assert extra == Counter({"_local_scalar_dense": 1, "detach": 1, "add": 1})


class CountedSGD(torch.optim.SGD):
    """Counts how often its gradients are cleared."""

    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("kind", [torch.optim.SGD, CountedSGD])
def test_an_update_clears_gradients_by_itself_unless_the_optimizer_has_its_own_way(
    kind: type[torch.optim.SGD], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 4)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = kind(groups, lr=0.1)
    if kind is torch.optim.SGD:
        monkeypatch.setattr(optimizer, "zero_grad", pytest.fail)
    update = Update(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), 0.0)
    model(torch.ones(1, 3)).sum().backward()
    update()
    assert model.weight.grad is None and model.bias.grad is None
    assert getattr(optimizer, "cleared", 1) == 1
