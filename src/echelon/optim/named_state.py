"""An optimizer's state by the names of its parameters, which hold in any layout, and back.

It is the form of `torch.distributed.checkpoint.state_dict`, value for value. That module imports DTensor and all of
sympy, for a quarter of a second and 45 MB in each process; what a rank has here are plain tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from echelon.core.state_tree import StateTree, StateView

_WRAPPED = re.compile(r"\b_(orig_mod|checkpoint_wrapped_module)\.")
"""What torch leaves out of the names of parameters in an optimizer's state."""


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateTree:
    """Return the state of an optimizer of some of a model's parameters (not copied), made by a step where it has none.

    Its `state` is by name, and so are the `params` of each of its `param_groups`.
    """
    _make_state(optimizer)
    state, names = optimizer.state_dict(), _names_by_id(model)
    own = [names[id(p)][0] for group in optimizer.param_groups for p in group["params"]]
    return {
        "state": {own[index]: values for index, values in state["state"].items()},
        "param_groups": [{**g, "params": [own[index] for index in g["params"]]} for g in state["param_groups"]],
    }


def load_named_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: StateView) -> None:
    """Restore what `named_state` returned, of groups that may be others; what has no state there has none afterwards.

    Args:
        saved: with a group for each of the optimizer's, or of the same settings.
    """
    _make_state(optimizer)  # so do torch's: some of the user's need to have stepped
    names, groups = _names_by_id(model), saved["param_groups"]
    of_name = {name: group for group in groups for name in group["params"]}
    state, own = {}, []
    for group in optimizer.param_groups:
        listed = [next((n for n in names[id(p)] if n in of_name), names[id(p)][0]) for p in group["params"]]
        trained = [n for n, p in zip(listed, group["params"], strict=True) if p.requires_grad]
        state.update({name: saved["state"][name] for name in trained if name in saved["state"]})
        own.append({**_settings(listed, of_name, groups), "params": listed})
    optimizer.load_state_dict({"state": state, "param_groups": own})


def trained_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the parameters that an optimizer has, as its state has them."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [_WRAPPED.sub("", name) for name, p in model.named_parameters() if id(p) in trained]


def _settings(names: Sequence[str], of_name: StateView, groups: Sequence[StateView]) -> StateView:
    """Return the saved group of some parameters; of none: the saved one that has none."""
    if not names:
        return next((group for group in groups if not group["params"]), {})
    return next((of_name[name] for name in names if name in of_name), {})


def _names_by_id(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter by its id: tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(_WRAPPED.sub("", name))
    return names


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer without state make it: by a step of zero gradients at rate 0, as torch does."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or any(p.grad is not None for p in parameters):
        return
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], torch.Tensor) else 0.0
    optimizer.step(closure=None)
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = rates.pop(0)
    optimizer.zero_grad(set_to_none=True)
