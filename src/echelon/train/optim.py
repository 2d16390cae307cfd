"""Optimizers by timm's names, learning-rate schedules as pure functions of the step, and an average of the weights.

Importing timm costs seconds, so the optimizers that are torch's own are built without it, and the schedules, four
formulas, are written out; the tests hold both against timm's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.config.schema import OptimizerConfig
from echelon.core.errors import UserError, nearest

TORCH_OPTIMIZERS = ("sgd", "nesterov", "momentum", "adam", "adamw")
SHOWN = (*TORCH_OPTIMIZERS, "lars", "lamb", "lion", "nadamw", "rmsprop")
# Those want a GPU library that is no dependency, or a closure or a second backward pass.
NOT_SUPPORTED = ("fused", "bnb", "adahessian")
STEP_FACTOR = 0.1
POLY_POWER = 2.0


def build_optimizer(model: nn.Module, config: OptimizerConfig, batch_size: int) -> torch.optim.Optimizer:
    """Build the optimizer for a model's trainable parameters; names mean what they mean in timm.

    `sgd` and `nesterov` are SGD with Nesterov momentum, `momentum` is SGD with plain momentum. torch's SGD keeps
    v <- m v + g and steps w <- w - lr v: the learning rate is not folded into v, so a changing one needs no momentum
    correction (Goyal et al. 2017, remark 2). Biases, normalisation parameters (all with one dim) and what the model
    lists in `no_weight_decay()` have no weight decay (same paper, section 5.3). With `scale_lr = b`, the learning
    rate is lr * batch_size / b (the linear scaling rule, section 2.1; b = 256 there).

    Args:
        batch_size: samples per optimizer step over all workers.

    Raises:
        UserError: unknown optimizer (with the nearest name), or settings that it does not take.
    """
    name = config.name.lower()
    lr = config.lr * batch_size / config.scale_lr if config.scale_lr else config.lr
    groups = _parameter_groups(model, config.weight_decay)
    if not groups:
        raise UserError("the model has no trainable parameters: nothing to optimize")
    if name in ("adam", "adamw"):
        return (torch.optim.AdamW if name == "adamw" else torch.optim.Adam)(groups, lr=lr)
    if name in TORCH_OPTIMIZERS:
        nesterov = name != "momentum" and config.momentum > 0
        return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, nesterov=nesterov)
    return _timm_optimizer(groups, name, lr, config.momentum)


def _timm_optimizer(groups: list[dict[str, Any]], name: str, lr: float, momentum: float) -> torch.optim.Optimizer:
    from timm.optim import create_optimizer_v2, list_optimizers

    known = [each for each in list_optimizers() if not each.startswith(NOT_SUPPORTED)]
    if name not in known:
        raise UserError(
            f"unknown --optimizer {name!r}: {nearest(name, known)}known: {', '.join(SHOWN)} "
            f"and {len(known) - len(SHOWN)} more of timm's (timm.optim.list_optimizers())"
        )
    try:
        return create_optimizer_v2(groups, opt=name, lr=lr, momentum=momentum)
    except (ValueError, TypeError) as error:
        raise UserError(f"--optimizer {name} does not take these settings: {error}") from error


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    no_weight_decay: Any = getattr(model, "no_weight_decay", tuple)
    listed = set(no_weight_decay())
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = parameter.ndim <= 1 or name.endswith(".bias") or name in listed
            (plain if exempt else decayed).append(parameter)
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": weight_decay}]
    return [group for group in groups if group["params"]]


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step. It keeps no state: after a resume, `set_step` is all that is needed.

    Attributes:
        optimizer: whose groups' `lr` is set.
        config: kind of schedule, warm-up and drops.
        base_lr: learning rate after the warm-up, scaled by the batch size.
        steps_per_epoch: optimizer steps per epoch.
        total_steps: optimizer steps of the whole schedule, warm-up included.
    """

    optimizer: torch.optim.Optimizer
    config: OptimizerConfig
    base_lr: float
    steps_per_epoch: int
    total_steps: int

    @property
    def lr(self) -> float:
        """The learning rate that the optimizer has now."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_step(self, step: int) -> None:
        """Set the learning rate for optimizer step `step`, counted from 0 over the whole run, before it is taken."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_at(step)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step; 0 at and after the end of `cosine` and `poly`.

        During W steps of warm-up: start + (base - start) step / W. Then, with p = step / total_steps,
        cosine: base (1 + cos(pi p)) / 2; poly: base (1 - p)^2 (You et al. 2017); step: base * 0.1^(drops so far);
        constant: base.
        """
        warmup = self.config.warmup_epochs * self.steps_per_epoch
        if step < warmup:
            start = self._warmup_start(warmup)
            return start + (self.base_lr - start) * step / warmup
        p = min(1.0, step / self.total_steps)
        match self.config.schedule:
            case "cosine":
                return self.base_lr * (1 + math.cos(math.pi * p)) / 2
            case "poly":
                return self.base_lr * (1 - p) ** POLY_POWER
            case "step":
                return self.base_lr * STEP_FACTOR ** (step // (self.config.step_epochs * self.steps_per_epoch))
            case "constant":
                return self.base_lr

    def _warmup_start(self, warmup: float) -> float:
        """From the rate that one base batch would have, where scaling raised it (Goyal et al.); else from base / W."""
        if self.config.scale_lr and self.config.lr < self.base_lr:
            return self.config.lr
        return self.base_lr / max(1.0, warmup)


def build_schedule(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, steps_per_epoch: int, epochs: int
) -> Schedule:
    """Build the schedule, and set the optimizer to step 0.

    It may be built before or after the optimizer's state is restored: the base is what the optimizer was built with.

    Raises:
        UserError: the warm-up is as long as the run, or drops are 0 epochs apart.
    """
    if config.warmup_epochs >= epochs > 0 and config.warmup_epochs > 0:
        raise UserError(
            f"--warmup-epochs {config.warmup_epochs:g} leaves nothing of --epochs {epochs}: use a shorter warm-up"
        )
    if config.schedule == "step" and config.step_epochs <= 0:
        raise UserError("--step-epochs 0: the step schedule needs some epochs between drops")
    schedule = Schedule(optimizer, config, float(optimizer.defaults["lr"]), steps_per_epoch, steps_per_epoch * epochs)
    schedule.set_step(0)
    return schedule


class EMA:
    """An exponential moving average of a model's parameters and floating-point buffers (BatchNorm statistics too).

    a <- d a + (1 - d) w after each step, with d = min(decay, (1 + n) / (10 + n)) at update n = 0, 1, ...: a short run
    is not an average of its random start (the warm-up of TensorFlow's ExponentialMovingAverage). Integer buffers are
    copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._average = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after an optimizer step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for name, tensor in model.state_dict().items():
            average = self._average[name]
            if average.is_floating_point():
                averages.append(average)
                weights.append(tensor.detach())
            else:
                average.copy_(tensor)
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Give a model the averaged weights, in place, and its own back at the end."""
        own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        _copy_into(model, self._average)
        try:
            yield
        finally:
            _copy_into(model, own)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the averages (not copied)."""
        return {"updates": self.updates, "average": dict(self._average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: it is of another model.
        """
        average = state["average"]
        if {n: t.shape for n, t in average.items()} != {n: t.shape for n, t in self._average.items()}:
            raise ValueError("the saved average of the weights is of another model")
        self.updates = int(state["updates"])
        for name, tensor in self._average.items():
            tensor.copy_(average[name])


@torch.no_grad()
def _copy_into(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        tensor.copy_(values[name])
