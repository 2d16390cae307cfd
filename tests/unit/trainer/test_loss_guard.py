"""A loss that is not finite: what is said of it, and when the run stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon.data.base import Batch
from echelon.observe.phases import HostClock
from echelon.parallel.base import alone
from echelon.records.events import LossNotFinite
from echelon.records.file import read_records
from echelon.trainer.loss_guard import Diverged, GuardSettings, LossGuard
from echelon.trainer.step import Step, StepResult, StepSettings
from echelon.trainer.world import World
from tests.ranks.layouts import TASK
from tests.unit.trainer.alone import Alone

WORLD = World(0, 1, 0, torch.device("cpu"), None, alone())


class Model(nn.Module):
    """Divides by a feature that may be 0."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs) / inputs[:, :1].abs().sqrt()


@pytest.fixture
def step_of(tmp_path: Path) -> Callable[[bool, Model], Callable[[], StepResult]]:
    """Return a function that takes one step, in two micro-batches, whose fourth sample divides by 0."""

    def made(skip: bool, model: Model) -> Callable[[], StepResult]:
        guard = LossGuard(TASK, model.parameters(), WORLD, GuardSettings(skip, tmp_path, 0, print))
        settings = StepSettings(WORLD.device, None, 2, 0.0, False)
        step = Step(TASK, settings, HostClock(), torch.amp.GradScaler("cpu", enabled=False), None, guard)
        inputs = torch.ones(5, 3)
        inputs[3, 0] = 0.0
        batch = Batch(inputs, torch.zeros(5, dtype=torch.int64), 5, 6, epoch=1, numbers=lambda: np.arange(20, 25))
        return lambda: step.forward_backward(batch, Alone(model))  # type: ignore[arg-type]

    return made


def test_the_run_stops_with_rank_batch_and_sample(step_of: Callable[..., Callable[[], StepResult]]) -> None:
    model = Model()
    with pytest.raises(Diverged, match=r"rank 0, step 0 \(batch 7 of epoch 2\): the loss of sample 23 of the data is"):
        step_of(False, model)()
    with pytest.raises(Diverged, match=r"outputs are not: start a new run with a lower --lr, .*; or resume with --on-"):
        step_of(False, model)()


def test_the_batch_is_left_out_and_told(
    step_of: Callable[..., Callable[[], StepResult]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step_of(True, Model())().left_out
    (event,) = read_records(tmp_path, LossNotFinite)
    assert event.rank == 0 and "sample 23 of the data" in event.message and "left out of training" in event.message
    assert capsys.readouterr().out.strip() == event.message


def test_no_batch_helps_where_parameters_are_not_finite(step_of: Callable[..., Callable[[], StepResult]]) -> None:
    model = Model()
    model.head.weight.data[0, 0] = torch.inf
    with pytest.raises(Diverged, match="parameters are not finite since an earlier update"):
        step_of(True, model)()


def test_samples_that_count_nothing_leave_zeros_whatever_the_derivative() -> None:
    model = Model()
    step = Step(TASK, StepSettings(WORLD.device, None, 2, 0.0, False), HostClock(), torch.amp.GradScaler(enabled=False))
    batch = Batch(torch.zeros(1, 3), torch.zeros(0, dtype=torch.int64), 5, 0)
    result = step.forward_backward(batch, Alone(model))  # type: ignore[arg-type]
    assert result.loss == 0 and all(not parameter.grad.any() for parameter in model.parameters())
