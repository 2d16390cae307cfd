from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from echelon.config.schema import OptimizerConfig
from echelon.core.errors import UserError
from echelon.optim.build import EMA, Schedule, build_optimizer, build_schedule


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, schedule: Schedule | None = None) -> None:
    for step in range(steps):
        if schedule:
            schedule.set_step(step)
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(5, 1, 4, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize(
    ("name", "momentum", "kind", "options"),
    [
        ("sgd", 0.9, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("nesterov", 0.9, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("momentum", 0.9, torch.optim.SGD, {"momentum": 0.9}),
        ("sgd", 0.0, torch.optim.SGD, {}),
        ("SGD", 0.0, torch.optim.SGD, {}),
        ("adamw", 0.9, torch.optim.AdamW, {}),
    ],
)
def test_names_mean_torchs_rules(name: str, momentum: float, kind: type, options: dict[str, Any]) -> None:
    ours, plain = network(), network()
    config = OptimizerConfig(name=name, lr=0.01, momentum=momentum)
    train(ours, build_optimizer(ours, config, 5), 3)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
    ]
    train(plain, kind(groups, lr=0.01, **options), 3)
    assert torch.equal(weights(ours), weights(plain))


@pytest.mark.parametrize("name", ["sgd", "lars", "lamb", "adamw", "lion", "rmsprop"])
def test_no_decay_on_biases_and_normalisation(name: str) -> None:
    model = network()
    optimizer = build_optimizer(model, OptimizerConfig(name=name), 5)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {n: decay[id(p)] for n, p in model.named_parameters()} == {
        n: 0.0 if n in ("0.bias", "1.weight", "1.bias", "4.bias") else 5e-4 for n, _ in model.named_parameters()
    }
    before = weights(model)
    train(model, optimizer, 2)
    assert not torch.equal(before, weights(model)) and weights(model).isfinite().all()


def test_what_a_model_lists_has_no_decay_and_frozen_parameters_take_no_part() -> None:
    class Listing(nn.Linear):
        def no_weight_decay(self) -> set[str]:
            return {"weight"}

    (group,) = build_optimizer(Listing(2, 2), OptimizerConfig(), 5).param_groups
    assert group["weight_decay"] == 0
    frozen = network().requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameters"):
        build_optimizer(frozen, OptimizerConfig(), 5)


def test_linear_scaling() -> None:
    config = OptimizerConfig(lr=0.1, scale_lr=256)
    assert build_optimizer(network(), config, 1024).param_groups[0]["lr"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("name", "words"), [("adamm", "did you mean adam"), ("fusedlamb", "unknown"), ("qqq", "known: sgd, nesterov")]
)
def test_unknown_names_are_refused(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_optimizer(network(), OptimizerConfig(name=name), 5)


def rates(config: OptimizerConfig, steps_per_epoch: int = 10, epochs: int = 4, batch_size: int = 256) -> list[float]:
    optimizer = build_optimizer(network(), config, batch_size)
    schedule = build_schedule(optimizer, config, steps_per_epoch, epochs)
    taken = []
    for step in range(steps_per_epoch * epochs):
        schedule.set_step(step)
        taken.append(schedule.lr)
        assert {group["lr"] for group in optimizer.param_groups} == {schedule.lr}
    return taken


FORMULAS = {
    "cosine": lambda step: (1 + math.cos(math.pi * step / 40)) / 2,
    "poly": lambda step: (1 - step / 40) ** 2,
    "step": lambda step: 0.1 ** (step // 15),
    "constant": lambda step: 1.0,
}


@pytest.mark.parametrize("warmup", [0, 1, 0.25])
@pytest.mark.parametrize("kind", FORMULAS)
def test_schedules_are_the_documented_formulas(kind: str, warmup: float) -> None:
    config = OptimizerConfig(lr=0.3, schedule=kind, warmup_epochs=warmup, step_epochs=1.5)  # type: ignore[arg-type]
    expected = [0.3 * FORMULAS[kind](step) for step in range(40)]
    length = 10 * warmup
    for step in range(math.ceil(length)):
        expected[step] = 0.3 / max(1, length) * (1 - step / length) + 0.3 * step / length
    assert rates(config) == pytest.approx(expected, rel=1e-12)


def test_the_rate_is_a_function_of_the_step_alone() -> None:
    config = OptimizerConfig(schedule="cosine", warmup_epochs=1)
    schedule = build_schedule(build_optimizer(network(), config, 5), config, 10, 4)
    taken = {}
    for step in (39, 0, 12, 40, 1000, 5):
        schedule.set_step(step)
        taken[step] = schedule.lr
    expected = rates(config)
    assert taken == {**{step: expected[step] for step in (39, 0, 12, 5)}, 40: 0.0, 1000: 0.0}


def test_warm_up_after_scaling_starts_at_the_base_rate() -> None:
    config = OptimizerConfig(lr=0.1, scale_lr=256, warmup_epochs=1, schedule="constant")
    taken = rates(config, batch_size=2560)
    assert taken[0] == pytest.approx(0.1) and taken[5] == pytest.approx(0.55) and taken[10] == pytest.approx(1.0)


def test_a_restored_optimizer_continues_the_schedule() -> None:
    """Also where the schedule is built after the optimizer has got a lower rate back from a checkpoint."""
    config = OptimizerConfig(schedule="cosine", warmup_epochs=1)
    model = network()
    optimizer = build_optimizer(model, config, 5)
    train(model, optimizer, 30, build_schedule(optimizer, config, 10, 4))
    saved = get_optimizer_state_dict(model, optimizer)
    resumed = network()
    fresh = build_optimizer(resumed, config, 5)
    set_optimizer_state_dict(resumed, fresh, saved)
    schedule = build_schedule(fresh, config, 10, 4)
    schedule.set_step(31)
    assert schedule.lr == rates(config)[31]


@pytest.mark.parametrize(
    "config",
    [OptimizerConfig(warmup_epochs=4), OptimizerConfig(schedule="step", step_epochs=0)],
    ids=["warm-up", "step"],
)
def test_impossible_schedules_are_refused(config: OptimizerConfig) -> None:
    with pytest.raises(UserError, match="epochs"):
        rates(config)


def test_average_of_the_weights() -> None:
    model = network()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    average = EMA(model, decay=0.5)
    expected = start
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.01), 5)
    for n in range(12):
        train(model, optimizer, 1)
        average.update(model)
        decay = min(0.5, (1 + n) / (10 + n))
        now = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        expected = {name: decay * expected[name] + (1 - decay) * now[name] for name in now}
    expected["1.num_batches_tracked"] = now["1.num_batches_tracked"]
    with average.swapped(model):
        torch.testing.assert_close(dict(model.state_dict()), expected)
    torch.testing.assert_close(dict(model.state_dict()), now, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_average_of_narrow_weights_moves(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4).to(dtype)
    average = EMA(model, decay=0.999)
    ones = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    average.load_state_dict({"updates": 100_000, "average": ones})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.5)
    for _ in range(1000):
        average.update(model)
    with average.swapped(model):
        assert model.weight.dtype == dtype
        torch.testing.assert_close(model.weight.float(), torch.full((4, 4), 1.5 - 0.5 * 0.999**1000), rtol=0, atol=0.01)


def test_average_gives_the_weights_back_after_a_failure_and_survives_a_resume() -> None:
    model = network()
    average = EMA(model, decay=0.9)
    train(model, build_optimizer(model, replace(OptimizerConfig(), lr=0.01), 5), 2)
    average.update(model)
    before = weights(model)
    with pytest.raises(KeyboardInterrupt), average.swapped(model):
        raise KeyboardInterrupt
    assert torch.equal(before, weights(model))
    restored = EMA(network(), decay=0.9)
    restored.load_state_dict(average.state_dict())
    for each in (average, restored):
        each.update(model)
    torch.testing.assert_close(restored.state_dict(), average.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="another model"):
        EMA(nn.Linear(2, 2), 0.9).load_state_dict(average.state_dict())


@pytest.mark.parametrize("name", ["sgd", "nesterov", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("decay", [0.0, 1e-3])
def test_optimizers_that_torch_has_are_what_timm_would_build(name: str, decay: float) -> None:
    from timm.optim import create_optimizer_v2

    model = network()
    ours = build_optimizer(model, OptimizerConfig(name=name, lr=0.03, weight_decay=decay, momentum=0.8), 5)
    timms = create_optimizer_v2(model, opt=name, lr=0.03, weight_decay=decay, momentum=0.8)
    assert type(ours) is type(timms) and ours.defaults == timms.defaults
    for mine, theirs in zip(ours.param_groups, timms.param_groups, strict=True):
        assert mine.pop("initial_lr") == 0.03
        assert [id(p) for p in mine.pop("params")] == [id(p) for p in theirs.pop("params")]
        assert mine == theirs


@pytest.mark.parametrize("kind", FORMULAS)
def test_schedules_are_timms_bit_for_bit(kind: str) -> None:
    from timm.scheduler.scheduler_factory import create_scheduler_v2

    config = OptimizerConfig(lr=0.3, schedule=kind, warmup_epochs=0.7, step_epochs=1.3)  # type: ignore[arg-type]
    optimizer = build_optimizer(network(), config, 5)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        "step" if kind == "constant" else kind,
        num_epochs=3,
        decay_epochs=1.3,
        decay_rate={"step": 0.1, "poly": 2.0}.get(kind, 1.0),
        warmup_epochs=0.7,  # type: ignore[arg-type]
        warmup_lr=0.3 / max(1.0, 0.7 * 17),
        step_on_epochs=False,
        updates_per_epoch=17,
    )
    expected = []
    for step in range(60):
        scheduler.step_update(step)
        expected.append(optimizer.param_groups[0]["lr"])
    schedule = build_schedule(build_optimizer(network(), config, 5), config, 17, 3)
    taken = []
    for step in range(60):
        schedule.set_step(step)
        taken.append(schedule.lr)
    assert taken == expected
