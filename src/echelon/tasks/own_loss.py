"""A loss of the user's own in place of a task's: a function of outputs and targets, or a module of `torch.nn`.

The engine divides sums of losses by the units of the global batch, so that the gradient is the same in every layout. So
a loss must be a sum over samples, or their mean: which of them is found out on the first batches, and anything else (a
mean by weights, negatives from the same batch) is refused there.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError, nearest
from echelon.core.own import OwnCall, call_with, find_own, read_calls
from echelon.tasks import nest
from echelon.tasks.base import SAMPLE, Task
from echelon.tasks.nest import Nest, beside, logits_in

FLAG = "--loss"
LossFunction = Callable[[Any, Any], Tensor]
_SAME = 1e-4  # relative: sums of float32 in another order
_LOOKED_AT = 8  # samples: of many, another way to reduce differs little from a mean
_ENOUGH = 32  # samples looked at, of several batches: those of one may be alike, such as of one class
_SUM, _MEAN = "sum", "mean"
_SAID = 300  # characters of what a loss raises


class OwnLoss:
    """The scalar sum of a loss of the user's own over the units of B samples, whatever the loss itself returns.

    It may return

    - one number for each sample, `(B,)` or `(B, 1)`; of a task whose unit is no sample, any tensor: added up;
    - a scalar: their sum, or their mean, which is multiplied by the units. Which it is, the first batch shows: the sum
      of two parts' values, or their mean weighted by units.

    Where its units are other ones than the task's, as words that count, it has `units(targets)`, their number, and may
    have `unit`, their name.

    Some samples of the first batches are also cut in two, without gradients: where the parts' losses do not add up to
    the whole's, the loss depends on which samples are together, and a layout would change it.
    """

    def __init__(self, function: LossFunction, task: Task) -> None:
        """Take the loss, and the task whose units it is over.

        Raises:
            UserError: it has parameters, which nothing would train.
        """
        if isinstance(function, nn.Module):
            if any(True for _ in function.parameters()):
                raise UserError(
                    f"{FLAG} {type(function).__name__} has parameters of its own, which nothing would train: put them "
                    "into the model"
                )
            function = copy.deepcopy(function)
        self._function, self._task = function, task
        self._is_of_torch = not takes_whole_outputs(function)
        self._reduction = ""  # of a scalar, once it is known
        self._checked = False
        self._seen = 0  # samples that were looked at

    def __call__(self, outputs: Any, targets: Nest) -> Tensor:
        """Return the sum for a batch.

        Raises:
            UserError: it is no sum and no mean over units.
        """
        if not self._checked:
            self._checked = self._check(outputs, targets)
        return self._sum(outputs, targets)

    def refusal(self, outputs: Any, targets: Nest) -> str:
        """Say why it cannot be computed of a model's outputs; empty: it can."""
        try:
            self._value(outputs, targets)
        except UserError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  the caller's code may raise any
            said = " ".join(str(error).split())[:_SAID]
            whole = "" if isinstance(logits_in(outputs), type(outputs)) else ", whose logits are outputs.logits"
            return (
                f"{FLAG}: it cannot take what the model returned, {_described(outputs)}{whole}, with targets "
                f"{_described(targets)}: {type(error).__name__}: {said}"
            )
        return ""

    def _sum(self, outputs: Any, targets: Nest) -> Tensor:
        value, rows = self._value(outputs, targets), nest.rows(targets)
        if value.ndim:
            if self._task.unit == SAMPLE and value.numel() != rows:
                raise UserError(
                    f"{FLAG}: it returned {list(value.shape)} for {rows} samples, of outputs {_described(outputs)} and "
                    f"targets {_described(targets)}: return one number for each sample, or their sum or mean"
                )
            return value.sum()
        return value * self._task.units(targets) if self._reduction == _MEAN else value

    def _value(self, outputs: Any, targets: Nest) -> Tensor:
        value = self._function(beside(outputs, targets) if self._is_of_torch else outputs, targets)
        if not isinstance(value, Tensor):
            hint = ""
            if isinstance(value, tuple):
                hint = ", the sum; where it is over units of your own, give the loss units(targets), their number"
            raise UserError(f"{FLAG}: it returned a {type(value).__name__}: return a tensor{hint}")
        return value

    def _check(self, outputs: Any, targets: Nest) -> bool:
        """Find out what the loss returns; False: too few samples have told.

        Raises:
            UserError: it is no sum and no mean over units.
        """
        if isinstance(self._function, nn.Module):
            self._function.to(next(iter(nest.leaves(outputs))).device)
        rows = nest.rows(targets)
        if rows < 2:
            if self._task.units(targets) > 1 and not self._reduction and not self._value(outputs, targets).ndim:
                raise UserError(
                    f"{FLAG}: a scalar is a sum or a mean, which one sample does not tell: use larger batches"
                )
            return False
        count = min(rows, _LOOKED_AT)
        places = torch.linspace(0, rows - 1, count).long().tolist()  # of any order of classes
        cuda = [leaf.device for leaf in nest.leaves(outputs) if leaf.is_cuda][:1]
        with torch.no_grad(), torch.random.fork_rng(devices=cuda):
            parts = [places, *(places[part] for cut in {1, count // 2} for part in (slice(0, cut), slice(cut, count)))]
            values = [self._part_of(outputs, targets, part) for part in parts]
        found = [self._judge(values[0], values[i : i + 2]) for i in range(1, len(values), 2)]
        self._seen += count if all(found) else 0
        return self._seen >= _ENOUGH

    def _part_of(self, outputs: Any, targets: Nest, places: list[int]) -> _Part:
        some, wanted = nest.take(outputs, places), nest.take(targets, places)
        value = self._value(some, wanted)
        total = self._sum(some, wanted) if value.ndim else value
        return _Part(float(total), self._task.units(wanted), scalar=not value.ndim)

    def _judge(self, looked_at: _Part, halves: list[_Part]) -> bool:
        """Find out whether the halves add up to all that is looked at, or it is their mean; False: they do not tell.

        Raises:
            UserError: neither.
        """
        first, second = halves
        if not all(math.isfinite(part.value) for part in (looked_at, first, second)):
            return False
        sums = _is_same(looked_at.value, first.value + second.value)
        mean = (first.value * first.units + second.value * second.units) / max(1, looked_at.units)
        means = looked_at.scalar and _is_same(looked_at.value, mean)
        if sums and means:
            return False  # all losses are 0
        if (not sums and not means) or self._reduction not in ("", _SUM if sums else _MEAN):
            raise UserError(
                f"{FLAG}: it gives {looked_at.value:.6g} for some samples of a batch, and {first.value:.6g} and "
                f"{second.value:.6g} for two parts of them: it is no sum and no mean over samples, so layouts would "
                "change it. Look at the shapes of outputs and targets, return one number a sample (reduction='none'), "
                "or write a task of your own"
            )
        self._reduction = _SUM if sums else _MEAN
        return True


def units_of(function: LossFunction | None) -> Callable[[Nest], int] | None:
    """Return what counts the units that a loss of the user's own is over; None: they are the task's."""
    units = getattr(function, "units", None)
    return units if callable(units) else None


def takes_whole_outputs(function: LossFunction) -> bool:
    """Whether a loss is given a record as the model returns it: those of torch take tensors alone."""
    while isinstance(function, functools.partial):
        function = function.func
    where = type(function) if isinstance(function, nn.Module) else function
    return not str(getattr(where, "__module__", "")).startswith("torch.")


def _described(value: Nest) -> str:
    tensors = [f"{tuple(leaf.shape)} of {str(leaf.dtype).removeprefix('torch.')}" for leaf in nest.leaves(value)]
    return tensors[0] if isinstance(value, Tensor) else f"{type(value).__name__} of {', '.join(tensors)}"


@dataclass(frozen=True)
class _Part:
    """What a loss gives for some samples, as it is, and their units."""

    value: float
    units: int
    scalar: bool


def _is_same(value: float, other: float) -> bool:
    return abs(value - other) <= _SAME * max(abs(value), abs(other)) + 1e-9


def read_loss(text: str) -> LossFunction | None:
    """Return the loss that a description names: `module:name`, or a class of `torch.nn`, with arguments; None: none.

    Raises:
        UserError: there is no such loss, or it does not take these arguments.
    """
    calls = read_calls(text)
    if not calls:
        return None
    if len(calls) > 1:
        raise UserError(f"{FLAG} {text}: name one loss")
    [call] = calls
    found = find_own(FLAG, call.name) if call.is_own else _of_torch(call)
    if inspect.isclass(found):
        found = call_with(found, call.spec, FLAG)
    elif call.spec.args:
        raise UserError(f"{FLAG} {text}: a function's arguments are named: {call.spec.name}(name=value)")
    elif call.spec.kwargs:
        found = functools.partial(found, **dict(call.spec.kwargs))
    if not callable(found):
        raise UserError(f"{FLAG} {text}: it is a {type(found).__name__}, not a function of outputs and targets")
    function: LossFunction = found
    return function


def _of_torch(call: OwnCall) -> type[nn.Module]:
    known = [name for name in dir(nn) if name.endswith("Loss")]
    if call.name not in known:
        raise UserError(
            f"unknown {FLAG} {call.name!r}: {nearest(call.name, known)}name one of torch.nn, such as SmoothL1Loss, or "
            "module:name"
        )
    kind: type[nn.Module] = getattr(nn, call.name)
    return kind
