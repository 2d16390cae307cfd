"""What goes from stage to stage, found without computing: the whole model run on tensors that have no data."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.parallel.pipeline.chain import ChainStep
from echelon.parallel.pipeline.settings import Types
from echelon.parallel.pipeline.stage import make_stage, set_types
from echelon.tasks import nest
from echelon.tasks.nest import Nest
from echelon.torch_compat import FakeTensorMode, detect_fake_mode

Stages = tuple[tuple[ChainStep, ...], ...]


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
                f"{shapes}: {reason}; use fsdp=N or tp=N for this model"
            ) from error
        if not isinstance(out, Tensor):
            raise UserError(
                f"--parallel pp: stage {number} of {self._name} gives {type(out).__name__} and not one tensor: "
                "cut it elsewhere, or use fsdp=N or tp=N"
            )
        return out
