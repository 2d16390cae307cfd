"""An optimizer of the user's own: any subclass of `torch.optim.Optimizer`, by name or as an object from Python."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from echelon.core.errors import UserError
from echelon.core.own import OwnCall, find_own, of_object, read_calls
from echelon.core.spec import show_value

FLAG = "--optimizer"
LIBRARIES = ("torch.", "timm.")
"""Modules of optimizers that are none of the user's own, and whose wrappers of steps are torch's."""
_OTHER_MOMENTA = ("rmsprop", "madgrad", "muon")
NO_RATES: Mapping[str, float] = {}
ParamGroup = dict[str, Any]
"""A group of an optimizer's parameters, `params`, and its settings by name, as torch has it."""
OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""A subclass of `torch.optim.Optimizer`, or what returns one, called with parameter groups and `lr=`."""

_OF_SETTINGS = {"lr": "--lr", "weight_decay": "--weight-decay"}
_PLAIN = (bool, int, float, str)


def is_own(name: str) -> bool:
    """Whether a description names code of the user's.

    >>> is_own("mine:Own(rho=0.04)"), is_own("adamw")
    (True, False)
    """
    return ":" in name.partition("(")[0]


def has_sgd_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its groups' `momentum`, where they have one, is SGD's, which stale gradients add to.

    It is taken to be that but in a library's classes that are known to mean something else by it.
    """
    kind = type(getattr(optimizer, "base_optimizer", optimizer))  # of Lookahead, that of what it is around
    return not (kind.__module__.startswith(LIBRARIES) and kind.__name__.lower().startswith(_OTHER_MOMENTA))


def read_optimizer(text: str) -> OwnCall | None:
    """Read `module:Class(name=value)`; None: it is a name of timm's.

    Raises:
        UserError: several are named, or arguments without their names.
    """
    if not is_own(text):
        return None
    calls = read_calls(text)
    if len(calls) != 1:
        raise UserError(f"{FLAG} {text}: name one optimizer")
    [call] = calls
    if call.spec.args:
        raise UserError(f"{FLAG} {text}: its arguments are named: {call.spec.name}(name=value)")
    return call


def import_optimizer(call: OwnCall, text: str) -> OptimizerFactory:
    """Return what a user's name stands for, with its arguments.

    Args:
        text: as described, for messages.

    Raises:
        UserError: there is no such class, or arguments are not its own to have.
    """
    named = find_own(FLAG, call.name)
    factory = functools.partial(named, **dict(call.spec.kwargs)) if call.spec.kwargs else named
    check_factory(factory, text)
    checked: OptimizerFactory = factory
    return checked


def check_factory(factory: object, text: str) -> None:
    """Refuse what cannot build an optimizer, and arguments that are settings of the run.

    Raises:
        UserError: says which.
    """
    called = factory.func if isinstance(factory, functools.partial) else factory
    if isinstance(called, torch.optim.Optimizer):
        raise UserError(f"{FLAG} {text}: give its class, which is called with the parameters of each process")
    if not callable(called) or (inspect.isclass(called) and not issubclass(called, torch.optim.Optimizer)):
        kind = called.__name__ if inspect.isclass(called) else type(called).__name__
        raise UserError(f"{FLAG} {text}: {kind} is no subclass of torch.optim.Optimizer")
    if not isinstance(factory, functools.partial):
        return
    if factory.args:
        raise UserError(f"{FLAG} {text}: name its arguments: functools.partial({text}, name=value)")
    for name, flag in _OF_SETTINGS.items():
        if name in factory.keywords:
            raise UserError(f"{FLAG} {text}: {name} is the run's setting {flag}: leave it out here")


def described(factory: OptimizerFactory) -> str:
    """Return how a run's description names a caller's optimizer: so that it can be imported, where that is possible.

    >>> described(functools.partial(torch.optim.Adagrad, eps=1e-6))
    'torch.optim.adagrad:Adagrad(eps=1e-06)'
    """
    called, arguments = (
        (factory.func, dict(factory.keywords)) if isinstance(factory, functools.partial) else (factory, {})
    )
    name = of_object(called)
    if not arguments:
        return name
    values = [item for value in arguments.values() for item in (value if isinstance(value, tuple) else (value,))]
    if all(isinstance(item, _PLAIN) for item in values):
        text = f"{name}({', '.join(f'{key}={show_value(value)}' for key, value in arguments.items())})"
        if dict(read_calls(text)[0].spec.kwargs) == arguments:
            return text
    return f"object:{getattr(called, '__name__', type(called).__name__)}"


def takes_weight_decay(factory: OptimizerFactory) -> bool:
    """Whether an optimizer has weight decay, which `--weight-decay` sets."""
    return _takes(factory, "weight_decay")


def build_own(
    factory: OptimizerFactory,
    name: str,
    model: nn.Module,
    lr: float,
    decay: float,
    rates: Mapping[str, float] = NO_RATES,
) -> torch.optim.Optimizer:
    """Build an optimizer of the user's for a model's trainable parameters.

    Biases, normalisation parameters and what the model lists in `no_weight_decay()` have no weight decay, as with
    timm's optimizers; an optimizer that takes none has one group of all parameters.

    Args:
        name: how the run's description names it.
        rates: factors of the learning rate by name of parameter.

    Raises:
        UserError: it cannot be built like this.
    """
    if not takes_weight_decay(factory):
        if rates:
            by_rate = weight_decay_groups(model, 0.0, rates)
            groups = [{k: v for k, v in group.items() if k != "weight_decay"} for group in by_rate]
            return construct(factory, name, groups, lr)
        return construct(factory, name, [p for p in model.parameters() if p.requires_grad], lr)
    return construct(factory, name, weight_decay_groups(model, decay, rates), lr)


def weight_decay_groups(model: nn.Module, decay: float, rates: Mapping[str, float] = NO_RATES) -> list[ParamGroup]:
    """Group a model's trainable parameters as timm's optimizers do: first those without weight decay, then the others.

    Biases and parameters of one dim have none, nor has what `model.no_weight_decay()` lists (patterns with *, too).
    Where there are factors of the learning rate by name of parameter, each group has one, as `lr_scale`.
    """
    listed: Iterable[str] = getattr(model, "no_weight_decay", list)()
    without: dict[float, list[nn.Parameter]] = {}
    others: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            free = not decay or parameter.ndim <= 1 or name.endswith(".bias")
            free = free or any(fnmatch.fnmatch(name, pattern) for pattern in listed)
            (without if free else others).setdefault(rates.get(name, 1.0), []).append(parameter)
    return [
        {"params": params, "weight_decay": decays, **({"lr_scale": rate} if rates else {})}
        for by_rate, decays in ((without, 0.0), (others, decay))
        for rate, params in by_rate.items()
    ]


def construct(factory: OptimizerFactory, name: str, groups: ParamsT, lr: float) -> torch.optim.Optimizer:
    """Call a user's optimizer with parameters, or groups of them.

    Raises:
        UserError: it does not take them, or is no optimizer whose learning rate a schedule can set.
    """
    if not _takes(factory, "lr"):
        raise UserError(f"{FLAG} {name}: it takes no lr, which --lr and the schedule set")
    try:
        optimizer = factory(groups, lr=lr)
    except (TypeError, ValueError) as error:
        raise UserError(f"{FLAG} {name} does not take these settings: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"{FLAG} {name}: it built a {type(optimizer).__name__}, no torch.optim.Optimizer")
    if any("lr" not in group for group in optimizer.param_groups):
        raise UserError(f"{FLAG} {name}: its param_groups have no 'lr', which the schedule sets")
    optimizer.defaults["lr"] = lr  # what schedules begin with
    return optimizer


def _takes(factory: OptimizerFactory, name: str) -> bool:
    called = factory.func if isinstance(factory, functools.partial) else factory  # that its arguments fit shows later
    parameters = inspect.signature(called).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
