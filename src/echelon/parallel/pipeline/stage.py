"""A stage as a module: the part of a model that runs some steps of its chain, its parameters under their own names.

What goes from stage to stage is found without computing: the whole model is run on tensors that have no data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.core.errors import UserError
from echelon.parallel.pipeline.chain import ChainStep, is_under
from echelon.parallel.pipeline.settings import Types
from echelon.parallel.precision import computing_in
from echelon.tasks import nest
from echelon.tasks.nest import Nest
from echelon.torch_compat import FakeTensorMode, copy_with, detect_fake_mode, registered_modules, registered_tensors

Stages = tuple[tuple[ChainStep, ...], ...]


def make_stage(
    model: nn.Module, steps: tuple[ChainStep, ...], first: bool, last: bool, example: Nest = None
) -> nn.Module:
    """Return a module that shares a model's submodules and tensors of some steps, and runs these.

    It is of a class derived from the model's own, so that the model's methods and plain attributes are there; all
    containers on the way are copies without what other stages have.

    Args:
        first: whether inputs come from the data; else from another stage, with a gradient to give back.
        last: whether outputs are logits; else they are sent on, as contiguous plain tensors.
        example: inputs of the model, whose containers those of the first stage have; None: one tensor.
    """
    keep = tuple(name for step in steps for name in step.owns)
    stage = _without_others(model, "", keep)
    kind = type(model)
    stage.__class__ = type(f"{kind.__name__}Stage", (_Stage, kind), {"__doc__": kind.__doc__})
    stage._stage_steps = steps
    stage._stage_ends = (first, last)
    stage._stage_inputs = nest.map_leaves(lambda _: None, example) if first else None
    set_types(stage, None, None)
    return stage


def set_types(stage: nn.Module, autocast: torch.dtype | None, parameters: torch.dtype | None) -> None:
    """Say in which types a stage's forward pass computes: under autocast, or with narrow copies of its parameters."""
    stage._stage_types = (autocast, parameters)  # type: ignore[assignment]


class _Stage(nn.Module):
    _stage_steps: tuple[ChainStep, ...]
    _stage_ends: tuple[bool, bool]
    _stage_types: tuple[torch.dtype | None, torch.dtype | None]
    _stage_inputs: Nest

    def forward(self, *given: Tensor) -> Tensor:
        """Run the stage's steps on the leaves of the model's inputs, or on what the stage before gives."""
        if not self._stage_ends[0] and given[0].requires_grad:
            given[0].register_hook(_contiguous)  # what is sent back must be, and the gradient of a mean is not
        return _plain(run_steps(self, given))


def run_steps(stage: Any, inputs: tuple[Tensor, ...]) -> Any:
    """Run a stage's steps on its inputs `(B, ...)`.

    The result lies in memory as the last step leaves it, which rounding may depend on.
    """
    dtype, param_dtype = stage._stage_types
    if param_dtype is not None:
        inputs = tuple(each.to(param_dtype) if each.is_floating_point() else each for each in inputs)
    autocast = torch.autocast(inputs[0].device.type, dtype or torch.bfloat16, enabled=dtype is not None)
    x: Nest = nest.rebuild(stage._stage_inputs, iter(inputs))
    with autocast, computing_in(stage, param_dtype):
        for number, step in enumerate(stage._stage_steps):
            x = _run(stage, step, x, nest.call if stage._stage_ends[0] and not number else _call_with_one)
    return x


def _run(stage: Any, step: ChainStep, x: Nest, call: Callable[[Any, Nest], Any]) -> Tensor:
    """Run a step; several inputs of the model reach its first step as the model itself takes them."""
    name = step.name
    if name == "=flatten":
        flat: Tensor = x.flatten(1)
        return flat
    if name == "=relu":
        return F.relu(x)
    found: Tensor | tuple[Tensor]
    if step.function is not None:
        found = call(partial(step.function, stage), x)
    else:
        found = call(getattr(stage, name[1:]) if name.startswith(":") else stage.get_submodule(name), x)
    return found[0] if isinstance(found, tuple) and len(found) == 1 else found


def _call_with_one(function: Any, x: Nest) -> Any:
    return function(x)


def _contiguous(gradient: Tensor) -> Tensor:
    return gradient.contiguous()


def _plain(x: Any) -> Tensor:
    """A whole tensor: under sequence parallelism blocks pass on a part of the tokens each.

    Raises:
        TypeError: it is no tensor, but several.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"it gives a {type(x).__name__}, not one tensor")
    whole: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return whole.contiguous()


def _without_others(module: nn.Module, prefix: str, keep: tuple[str, ...]) -> Any:
    """Copy a module without the parts that are neither kept, nor inside a kept one, nor on the way to one."""
    if prefix and any(is_under(prefix, name) for name in keep):
        return module
    before = f"{prefix}." if prefix else ""
    children = {
        name: child if child is None else _without_others(child, before + name, keep)
        for name, child in registered_modules(module).items()
        if child is None or any(is_under(before + name, k) or is_under(k, before + name) for k in keep)
    }
    tensors = {n: t for n, t in registered_tensors(module).items() if t is None or before + n in keep}
    return copy_with(module, children, tensors)


@dataclass(frozen=True)
class Boundary:
    """A tensor of a micro-batch between stages: what the next one receives, and whether it sends a gradient back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def blank(self) -> Tensor:
        """Return a tensor without data that has these."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)


class Skeleton:
    """All stages of a model without their data, made before it is split; every rank has one."""

    def __init__(self, model: nn.Module, stages: Stages, example: Nest) -> None:
        self._mode = detect_fake_mode(list(model.parameters())) or FakeTensorMode(allow_non_fake_inputs=True)
        self._device: torch.device = nest.leaves(example)[0].device
        self._name = type(model).__name__
        with self._mode:
            whole = copy.deepcopy(model, self._without_data(model)).eval()
            last = len(stages) - 1
            self._stages = [make_stage(whole, steps, i == 0, i == last, example) for i, steps in enumerate(stages)]
        self._known: dict[tuple[object, ...], tuple[tuple[Boundary, ...], ...]] = {}

    def _without_data(self, model: nn.Module) -> dict[int, object]:
        """Return what `deepcopy` is to take in place of each parameter and buffer, and of hooks."""
        memo: dict[int, object] = {}
        for parameter in model.parameters():
            blank = torch.empty_like(parameter, device=self._device)
            memo[id(parameter)] = nn.Parameter(blank, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo.setdefault(id(buffer), torch.empty_like(buffer, device=self._device))
        return memo

    def boundaries(self, inputs: Nest, types: Types = (None, None)) -> tuple[tuple[Boundary, ...], ...]:
        """Return what enters each stage, and at the end the logits, for a micro-batch of inputs of these shapes.

        The first stage gets as many tensors as the model has inputs, the others one.

        Raises:
            UserError: the forward pass depends on values, or a stage lacks a part that it uses.
        """
        leaves = nest.leaves(inputs)
        key = (*((leaf.shape, leaf.dtype) for leaf in leaves), *types)
        if key not in self._known:
            found = [tuple(Boundary(tuple(leaf.shape), leaf.dtype, False) for leaf in leaves)]
            with self._mode, torch.enable_grad():
                given = [torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device) for leaf in leaves]
                for i, stage in enumerate(self._stages):
                    set_types(stage, *types)
                    x = self._through(stage, i, [each.detach().requires_grad_(each.requires_grad) for each in given])
                    found.append((Boundary(tuple(x.shape), x.dtype, x.requires_grad),))
                    given = [x]
            self._known[key] = tuple(found)
        return self._known[key]

    def _through(self, stage: nn.Module, number: int, inputs: list[Tensor]) -> Tensor:
        try:
            out = stage(*inputs)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            shapes = " and ".join(str(tuple(each.shape)) for each in inputs)
            raise UserError(
                f"--parallel pp: stage {number} of {self._name} cannot run by itself on inputs of shape "
                f"{shapes}: {reason}; use fsdp=N for this model"
            ) from error
        if not isinstance(out, Tensor):
            raise UserError(
                f"--parallel pp: stage {number} of {self._name} gives {type(out).__name__} and not one tensor: "
                "cut it elsewhere, or use fsdp=N"
            )
        return out
