"""Optimizers of torch, of timm or of the user's own, learning-rate schedules, and an average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from echelon.compression.base import working_dtype
from echelon.config.schema import OptimizerConfig
from echelon.core.errors import UserError
from echelon.core.rate_search import rate_of
from echelon.core.state_tree import StateTree, StateView
from echelon.optim.names import NOT_SUPPORTED, unknown_optimizer
from echelon.optim.own import NO_RATES, OptimizerFactory, ParamGroup, build_own, weight_decay_groups
from echelon.optim.traits import is_nesterov, is_sgd
from echelon.torch_compat import foreach_lerp_

STEP_FACTOR = 0.1
POLY_POWER = 2.0
NO_TABLES: Mapping[str, nn.Parameter] = {}


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    batch_size: int,
    user_factory: OptimizerFactory | None = None,
    rates: Mapping[str, float] = NO_RATES,
    tables: Mapping[str, nn.Parameter] = NO_TABLES,
) -> torch.optim.Optimizer:
    """Build the optimizer of that name among timm's, or the user's own, for a model's trainable parameters.

    `sgd` and `nesterov` are SGD with Nesterov momentum, `momentum` is SGD with plain momentum. torch's SGD keeps
    v <- m v + g and steps w <- w - lr v: the learning rate is not folded into v, so a changing one needs no momentum
    correction (Goyal et al. 2017, remark 2). Biases, normalisation parameters (all with one dim) and what the model
    lists in `no_weight_decay()` have no weight decay (same paper, section 5.3). With `scale_lr = b`, the learning
    rate is lr * batch_size / b (the linear scaling rule, section 2.1; b = 256 there).

    Args:
        batch_size: samples per optimizer step over all workers.
        user_factory: the user's, in place of timm's.
        rates: factors of the learning rate by name of parameter, of which groups are then made.
        tables: weights with sparse gradients by name, which `sparse_adam` is for.

    Raises:
        UserError: unknown optimizer (with the nearest name), or settings that it does not take.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("the model has no trainable parameters: nothing to optimize")
    lr = _base_rate(config, batch_size)
    if user_factory is not None:
        optimizer = build_own(user_factory, config.name, model, lr, config.weight_decay, rates)
    else:
        optimizer = _build_named(model, config, lr, rates, tables)
    for group in optimizer.param_groups:
        # What schedules start from. Set here, so that saved groups and those they are restored into have the same keys.
        group["initial_lr"] = lr
    return optimizer


def idle_optimizer(config: OptimizerConfig, batch_size: int) -> torch.optim.Optimizer:
    """Build an optimizer without parameters, which carries the schedule where nothing is trained."""
    lr = _base_rate(config, batch_size)
    return torch.optim.SGD([{"params": [], "initial_lr": lr}], lr=lr)


def _base_rate(config: OptimizerConfig, batch_size: int) -> float:
    return config.lr * batch_size / config.scale_lr if config.scale_lr else config.lr


def _build_named(
    model: nn.Module,
    config: OptimizerConfig,
    lr: float,
    rates: Mapping[str, float],
    tables: Mapping[str, nn.Parameter],
) -> torch.optim.Optimizer:
    name = config.name.lower()
    try:
        if is_sgd(name):
            # torch refuses Nesterov's rule without momentum, where it is no other than the plain one.
            nesterov = is_nesterov(name) and config.momentum != 0
            groups = weight_decay_groups(model, config.weight_decay, rates)
            return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, nesterov=nesterov)
        if name == "sparse_adam":
            if not tables:
                raise UserError(
                    "--optimizer sparse_adam is for models with sparse tables, and this one has none: use adam, or add "
                    "--sparse-tables"
                )
            return TableAdam(weight_decay_groups(model, config.weight_decay, rates), tables, lr)
        if name in ("adam", "adamw"):
            kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
            return kind(weight_decay_groups(model, config.weight_decay, rates), lr=lr, weight_decay=0.0)
        return _build_timm(model, config, lr, rates)
    except (ValueError, TypeError) as error:
        raise UserError(f"--optimizer {name} does not take these settings: {error}") from error


def _build_timm(
    model: nn.Module, config: OptimizerConfig, lr: float, rates: Mapping[str, float]
) -> torch.optim.Optimizer:
    # Importing timm imports all its models and torchvision's: as long as importing torch. What torch has needs none.
    from timm.optim import create_optimizer_v2, get_optimizer_info

    name = config.name.lower()
    _check_name(name)
    nesterov = (get_optimizer_info(name).defaults or {}).get("nesterov", False)
    options: dict[str, Any] = {"nesterov": False} if nesterov and not config.momentum else {}
    if rates:
        options["param_group_fn"] = lambda whole: weight_decay_groups(whole, config.weight_decay, rates)
    return create_optimizer_v2(
        model, opt=name, lr=lr, weight_decay=config.weight_decay, momentum=config.momentum, **options
    )


def _check_name(name: str) -> None:
    from timm.optim import list_optimizers

    known = [each for each in list_optimizers() if not each.startswith(NOT_SUPPORTED)]
    if name not in known:
        raise unknown_optimizer(name, known)


class TableAdam(torch.optim.Optimizer):
    """Adam whose moments of a table's row move when that row is touched (torch's SparseAdam).

    Dense parameters follow torch's Adam. Groups carry `sparse`, which says whose rule is theirs.
    """

    def __init__(self, groups: list[ParamGroup], tables: Mapping[str, nn.Parameter], lr: float) -> None:
        """Divide each group in its tables and its other parameters, and build both optimizers."""
        ids = {id(table) for table in tables.values()}
        divided = []
        for group in groups:
            for sparse in (False, True):
                params = [p for p in group["params"] if (id(p) in ids) is sparse]
                if params:
                    divided.append({**group, "params": params, "sparse": sparse})
        dense = [group for group in divided if not group["sparse"]]
        rows = [group for group in divided if group["sparse"]]
        idle = nn.Parameter(torch.empty(0))
        # They compute; groups and state are this object's, which both are given at each step.
        self._rules = {
            False: torch.optim.Adam(dense or [{"params": [idle]}], lr=lr, weight_decay=0.0),
            True: torch.optim.SparseAdam([{k: v for k, v in g.items() if k != "weight_decay"} for g in rows], lr=lr),
        }
        super().__init__(divided, {"lr": lr})
        defaults = {sparse: rule.defaults for sparse, rule in self._rules.items()}
        for group in self.param_groups:
            for key, value in defaults[group["sparse"]].items():
                group.setdefault(key, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update rows that have a gradient by SparseAdam, and all else by Adam; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for sparse, rule in self._rules.items():
            rule.param_groups = [group for group in self.param_groups if group["sparse"] is sparse]
            rule.state = self.state
            if sparse:
                _as_rows(rule)
            rule.step()
        return loss


def _as_rows(rule: torch.optim.Optimizer) -> None:
    """Turn gradients of zeros, which stand for a step that is left out, into none of any row."""
    for group in rule.param_groups:
        for table in group["params"]:
            if table.grad is not None and not table.grad.is_sparse:
                table.grad = table.grad.to_sparse(1)


@dataclass(frozen=True)
class ScheduleCurve:
    """A learning rate as a function of the step, for a base rate: a linear warm-up, then a shape.

    Attributes:
        shape: `cosine`, `poly`, `step` or `constant`.
        steps: of the whole run, the warm-up among them.
        warmup_steps: of the warm-up, which may end within a step.
        warmup_rate: where the warm-up begins.
        drop_steps: between two drops of the shape `step`.
    """

    shape: str
    steps: int
    warmup_steps: float
    warmup_rate: float
    drop_steps: float

    def rate(self, base: float, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.warmup_rate + step * ((base - self.warmup_rate) / self.warmup_steps)
        if self.shape == "constant":
            return base
        if self.shape == "step":
            return float(base * STEP_FACTOR ** (step // self.drop_steps))
        if step >= self.steps:
            return 0.0
        if self.shape == "poly":
            return float(base * (1 - step / self.steps) ** POLY_POWER)
        return 0.5 * base * (1 + math.cos(math.pi * step / self.steps))


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step. It keeps no state: after a resume, `set_step` is all that is needed.

    Attributes:
        optimizer: whose groups' `lr` is set.
        curve: rates of optimizer steps.
    """

    optimizer: torch.optim.Optimizer
    curve: ScheduleCurve
    _bases: list[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "_bases",
            [float(group.setdefault("initial_lr", group["lr"])) for group in self.optimizer.param_groups],
        )

    @property
    def lr(self) -> float:
        """The learning rate that the optimizer has now, of layers without a factor of their own."""
        groups = self.optimizer.param_groups
        whole = next((group for group in groups if group.get("lr_scale", 1.0) == 1.0), None)
        return float(whole["lr"] if whole else groups[0]["lr"] / groups[0]["lr_scale"])

    def set_step(self, step: int) -> None:
        """Set the learning rate for optimizer step `step`, counted from 0 over the whole run, before it is taken."""
        rates = {base: self.curve.rate(base, step) for base in {*self._bases}}  # most groups have the same base
        for group, base in zip(self.optimizer.param_groups, self._bases, strict=True):
            group["lr"] = rates[base] * group.get("lr_scale", 1.0)


@dataclass(frozen=True)
class SearchSchedule(Schedule):
    """The rising rates of a search of the learning rate, in place of the curve's."""

    def set_step(self, step: int) -> None:
        """Set the rate of a step, counted from 0; groups keep their share of it."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate_of(step) * group.get("lr_scale", 1.0)


def build_schedule(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, steps_per_epoch: int, epochs: int
) -> Schedule:
    """Build the schedule of an optimizer of `build_optimizer`, and set it to step 0.

    During W steps of warm-up the rate is start + (base - start) step / W. Then, with p = step / all steps, cosine:
    base (1 + cos(pi p)) / 2; poly: base (1 - p)^2 (You et al. 2017); step: base * 0.1^(drops so far); constant: base.
    At and after the end, cosine and poly give 0. They are timm's formulas, bit for bit.

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
    base, warmup_steps = float(optimizer.defaults["lr"]), config.warmup_epochs * steps_per_epoch
    curve = ScheduleCurve(
        shape=config.schedule,
        steps=epochs * steps_per_epoch,
        warmup_steps=warmup_steps,
        warmup_rate=_warmup_start(config, base, warmup_steps),
        drop_steps=config.step_epochs * steps_per_epoch,
    )
    schedule = (SearchSchedule if config.lr_find else Schedule)(optimizer, curve)
    schedule.set_step(0)
    return schedule


def _warmup_start(config: OptimizerConfig, base: float, warmup: float) -> float:
    """From the rate that one base batch would have, where scaling raised it (Goyal et al.); else from base / W."""
    if config.scale_lr and config.lr < base:
        return config.lr
    return base / max(1.0, warmup)


class EMA:
    """An exponential moving average of a model's parameters and floating-point buffers (BatchNorm statistics too).

    a <- d a + (1 - d) w after each step, with d = min(decay, (1 + n) / (10 + n)) at update n = 0, 1, ...: a short run
    is not an average of its random start (the warm-up of TensorFlow's ExponentialMovingAverage). Integer buffers are
    copied. Averages are in float32 at least: in bf16 so small a part of the way is lost in rounding. torch's
    AveragedModel and timm's ModelEmaV3 deep-copy the module, which `fully_shard` forbids; this keeps tensors alone.
    """

    def __init__(self, model: nn.Module, decay: float, frozen: Set[str] = frozenset()) -> None:
        """Begin with the present weights, but for those that stay as they are."""
        self.decay = decay
        self.updates = 0
        self._average = {
            name: tensor.detach().to(_dtype_of_average(tensor), copy=True)
            for name, tensor in model.state_dict().items()
            if name not in frozen
        }

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after an optimizer step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        held = model.state_dict()
        for name, average in self._average.items():
            tensor = held[name]
            if average.is_floating_point() and average.dtype != tensor.dtype:
                average.lerp_(tensor.to(average.dtype), 1 - decay)
            elif average.is_floating_point() or average.is_complex():
                real = torch.view_as_real if average.is_complex() else Tensor.detach
                averages.append(real(average))
                weights.append(real(tensor.detach()))
            else:
                average.copy_(tensor)
        if averages:  # none, where nothing moves on this rank
            foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Give a model the averaged weights, in place, and its own back at the end."""
        held = model.state_dict()
        own = {name: held[name].detach().clone() for name in self._average}
        _copy_into(model, self._average)
        try:
            yield
        finally:
            _copy_into(model, own)

    def state_dict(self) -> StateTree:
        """Return the number of updates and the averages (not copied)."""
        return {"updates": self.updates, "average": dict(self._average)}

    def load_state_dict(self, state: StateView) -> None:
        """Restore what `state_dict` returned; averages of what stays as it is are not looked at.

        Raises:
            ValueError: it is of another model.
        """
        average = state["average"]
        if any(name not in average or average[name].shape != own.shape for name, own in self._average.items()):
            raise ValueError("the saved average of the weights is of another model")
        self.updates = int(state["updates"])
        for name, tensor in self._average.items():
            tensor.copy_(average[name])


def _dtype_of_average(tensor: Tensor) -> torch.dtype:
    return working_dtype(tensor.dtype) if tensor.is_floating_point() else tensor.dtype


@torch.no_grad()
def _copy_into(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    held = model.state_dict()
    for name, value in values.items():
        held[name].copy_(value)
