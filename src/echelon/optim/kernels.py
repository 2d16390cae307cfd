"""torch's fused update: one call for all parameters, in place of ten for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

HAVE_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_stride = Tensor.stride
_VELOCITY = "momentum_buffer"


def fuse_where_possible(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let an optimizer of torch update plain real numbers in one kernel, where its maker has chosen nothing else.

    It is there for SGD on a GPU, and for SGD, Adam and AdamW on a CPU, where it takes a third to a ninth of the time.
    Not where gradients have rows alone (`sparse=True`).
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    plain = all(type(p) in (Tensor, nn.Parameter) and p.is_floating_point() for p in trained)
    sparse = any(getattr(module, "sparse", 0) is True for module in model.modules())
    chosen = any(group.get("fused") is not None or group.get("foreach") is not None for group in optimizer.param_groups)
    damped = any(group.get("dampening") for group in optimizer.param_groups)  # whose first step is another one
    if not plain or sparse or chosen or damped:
        return
    on_gpu = type(optimizer) is torch.optim.SGD and all(p.is_cuda for p in trained)
    if on_gpu or (type(optimizer) in HAVE_FUSED and all(p.is_cpu for p in trained)):
        fuse(optimizer)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Take the fused kernel for all groups of torch's SGD, Adam or AdamW.

    That of a CPU goes by memory, not by indices: gradients and loaded state are laid out as their parameters before it.
    The groups say so, not an argument of the optimizer, which would take the search for overflows over from the scaler,
    on which ranks that step on parts of one update agree.
    """
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer.register_step_pre_hook(_lay_out_gradients)
    optimizer.register_load_state_dict_post_hook(_lay_out_state)
    if isinstance(optimizer, torch.optim.SGD):
        optimizer.register_step_pre_hook(_give_velocities)


def laid_out_as(parameter: Tensor, values: Tensor) -> Tensor:
    """Return values of a parameter's shape that lie in memory as it does: these, or a copy."""
    if values.stride() == parameter.stride():
        return values
    return torch.empty_like(parameter, dtype=values.dtype, requires_grad=False).copy_(values)


def _lay_out_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.grad is not None]
        if [*map(_stride, trained)] == [*map(_stride, [p.grad for p in trained])]:  # as backward leaves them
            continue
        for parameter in trained:
            parameter.grad = laid_out_as(parameter, parameter.grad)


def give_velocities(optimizer: torch.optim.Optimizer, reached_alone: bool = False) -> None:
    """Give parameters of torch's fused SGD without a momentum one of zeros, which moves them as none does.

    It takes all parameters of a call to have one, or none: a layer that only some steps use ends it.

    Args:
        reached_alone: only those that have a gradient.
    """
    states = optimizer.state
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") and group.get("fused") else ():
            if (parameter.grad is not None or not reached_alone) and states[parameter].get(_VELOCITY) is None:
                states[parameter][_VELOCITY] = torch.zeros_like(parameter, requires_grad=False)


def _give_velocities(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    give_velocities(optimizer, reached_alone=True)


def _lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = laid_out_as(parameter, value)
