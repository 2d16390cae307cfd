"""The precisions of a run: what each means, and where one is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.config import build
from echelon.config.schema import TrainingConfig
from echelon.core.errors import UserError
from echelon.data.base import Batch
from echelon.models.base import ModelInput
from echelon.observe.phases import HostClock
from echelon.optim.build import idle_optimizer
from echelon.tasks.base import EvaluationResult
from echelon.trainer.evaluate import evaluate
from echelon.trainer.precision import (
    autocast_to,
    build_scaler,
    check_fp8,
    check_narrow,
    fp8_layers,
    set_numerics,
    to_fp8,
)
from echelon.trainer.step import Step, StepSettings, warmup_backward
from echelon.trainer.update import Update
from echelon.trainer.world import World
from tests.ranks.layouts import SumTask
from tests.unit.trainer.alone import Alone

CPU = torch.device("cpu")


class MatrixLoss(SumTask):
    """A loss with a matrix product."""

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        product = outputs @ outputs.T
        assert product.dtype == torch.float32
        return product.diagonal().sum()


def test_a_loss_is_computed_in_float32_in_training() -> None:
    made = StepSettings(CPU, torch.bfloat16, 1, 0.0, False)
    step = Step(MatrixLoss(), made, HostClock(), torch.amp.GradScaler("cpu", enabled=False), None)
    batch = Batch(torch.ones(5, 3), torch.zeros(5, dtype=torch.int64), 5, 0)
    assert float(step.forward_backward(batch, Alone(nn.Linear(3, 4))).loss) > 0  # type: ignore[arg-type]


class Recurrent(nn.Module):
    """Notes of each forward pass whether it trains, and whether layers are cuDNN's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.GRU(3, 4), list[tuple[bool, bool]]()

    def forward(self, x: Tensor) -> Tensor:
        self.passes.append((self.training, torch.backends.cudnn.enabled))
        out: Tensor = self.layer(x)[0]
        return out


def test_recurrent_layers_of_a_part_without_samples_have_a_backward_pass_on_a_gpu() -> None:
    model, made = Recurrent(), StepSettings(CPU, None, 2, 0.0, False)
    step = Step(MatrixLoss(), made, HostClock(), torch.amp.GradScaler("cpu", enabled=False), None)
    step.forward_backward(Batch(torch.ones(1, 3), torch.zeros(1), 1, 0), Alone(model))  # type: ignore[arg-type]
    warmup_backward(Alone(model), torch.ones(1, 3))  # type: ignore[arg-type]
    assert model.passes == [(True, True), (False, False), (False, False)]


@pytest.mark.parametrize(
    ("dtype", "found"), [(None, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)]
)
@pytest.mark.parametrize("outer", [False, True], ids=["alone", "inside another"])
def test_autocast_is_the_run_s_own(dtype: torch.dtype | None, found: torch.dtype, outer: bool) -> None:
    """A caller's autocast changes nothing, and without either none is entered."""
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=outer), autocast_to(dtype, CPU):
        assert (x @ x).dtype == found and torch.is_autocast_enabled("cpu") is (dtype is not None)


class Positions(nn.Module):
    """Adds a table that is no parameter."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.casts, self.head = casts, nn.Linear(64, 10)
        self.register_buffer("table", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.get_buffer("table")
        return self.head(x.flatten(1) + (table.to(x.dtype) if self.casts else table))  # type: ignore[no-any-return]


def test_narrow_parameters_are_refused_where_a_buffer_makes_their_inputs_wide() -> None:
    data = ModelInput(10, 1, 8)
    check_narrow(Positions(casts=True), data, "bf16-params")
    with pytest.raises(UserError, match=r"casts parameters and inputs of Positions, not its buffers.*use --precision"):
        check_narrow(Positions(casts=False), data, "bf16-params")
    check_narrow(nn.Linear(3, 3), data, "bf16-params")  # that cannot take zeros at all


def test_half_precision_trains_on_a_cpu() -> None:
    """Autocast and the gradient scaler: the loss falls, an overflow skips the step and halves the scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = build_scaler("fp16", CPU, None)
    x, y = torch.randn(32, 1, 8, 8), torch.arange(32) % 10
    losses = []
    for _ in range(20):
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
        assert logits.dtype == torch.float16
        loss = F.cross_entropy(logits.float(), y)
        losses.append(float(loss.detach()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 2
    before, scale = [p.clone() for p in model.parameters()], scaler.get_scale()
    scaler.scale(model(x).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == scale / 2


def test_other_precisions_scale_nothing() -> None:
    """float32 and bfloat16 have the range."""
    assert not any(build_scaler(name, CPU, None).is_enabled() for name in ("fp32", "bf16", "bf16-params", "fp8"))


def test_fp8_is_refused_on_a_cpu() -> None:
    """In words, before anything is built."""
    with pytest.raises(UserError, match=r"fp8 needs a GPU with 8-bit matrix units .* use --precision bf16"):
        to_fp8(nn.Linear(16, 16), CPU)


def test_fp8_is_refused_on_an_older_gpu(monkeypatch: Any) -> None:
    """Names the device and what it lacks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(UserError, match=r"A100 has compute capability 8\.0"):
        check_fp8(torch.device("cuda", 0))


def test_fp8_layers_are_those_that_fit() -> None:
    """Both sides multiples of 16, and not the logits."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 20), nn.Linear(20, 16), nn.Linear(16, 16))
    assert fp8_layers(model) == {"0"}


def test_tf32_is_switched_and_left_alone() -> None:
    """`auto` leaves torch's own choice."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        set_numerics(TrainingConfig(tf32="on"))
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
        set_numerics(TrainingConfig())
        assert torch.get_float32_matmul_precision() == "high"
        set_numerics(TrainingConfig(tf32="off"))
        assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_a_stage_with_nothing_to_train_hears_of_overflows(clip_norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stage's overflow halves its scale, so that all stages go on with the same one."""
    group, reduced = object(), []

    def all_reduce(tensor: torch.Tensor, **settings: Any) -> SimpleNamespace:
        reduced.append(settings["group"])
        tensor.fill_(1.0)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    scaler = build_scaler("fp16", CPU, group)  # type: ignore[arg-type]
    optimizer = idle_optimizer(build(None, {}).config.optimizer, 8)
    before = scaler.get_scale()
    Update(torch.nn.Linear(1, 1).requires_grad_(False), optimizer, scaler, clip_norm)()
    assert reduced == [group] and scaler.get_scale() == before / 2


def test_an_evaluation_runs_in_8_bit_floats() -> None:
    """They are a subclass of tensors that fails in inference mode; products are emulated where there is no such GPU."""
    float8 = pytest.importorskip("torchao.float8")
    layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model = float8.convert_to_float8_training(
        layers, config=float8.Float8LinearConfig(emulate=True, pad_inner_dim=True)
    )
    seen: list[torch.Tensor] = []
    metrics = SimpleNamespace(
        update=lambda outputs, targets: seen.append(outputs), compute=lambda group: EvaluationResult({}, {})
    )
    task = SimpleNamespace(
        metrics=lambda device: metrics, examples=lambda: None, generation_samples=0, units=len,
        loss_sum=lambda outputs, targets: outputs.square().sum(),
        generated=lambda *_: SimpleNamespace(metrics={}, section=None),
    )  # fmt: skip
    batches = [(torch.ones(n, 16), torch.zeros(n)) for n in (8, 3)]  # the last one is ragged
    loader = SimpleNamespace(first=0, total=11)
    with patch("echelon.trainer.evaluate.batches_of_all", lambda loader, world: batches):
        report = evaluate(model, loader, task, World(0, 1, 0, CPU, None), autocast=torch.bfloat16)  # type: ignore[arg-type]
    assert [len(outputs) for outputs in seen] == [8, 3] and report.samples == 11
