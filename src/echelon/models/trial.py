"""A model is called once before anything starts, so that one that cannot be used is refused in a line."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.models.base import ModelInput
from echelon.tasks import nest

_SAMPLES = 2


def call_blank(model: nn.Module, data: ModelInput, dtype: torch.dtype | None = None) -> Any:
    """Return what a model gives for two blank inputs, in evaluation mode; what its forward raises is not caught.

    Args:
        dtype: of the inputs that are floating; None: as the data has them, or of images, as the parameters are.
    """
    example = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    inputs = nest.to_device(data.blank(_SAMPLES), example.device)
    if data.is_image:
        inputs = inputs.to(example.dtype)
    if dtype is not None:
        inputs = nest.map_leaves(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, inputs)
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        return nest.call(model, inputs)


def try_out(model: nn.Module, label: str, data: ModelInput) -> None:
    """Call a model on two blank inputs, in evaluation mode; what its forward raises is not caught.

    Args:
        label: what messages call the model.

    Raises:
        UserError: its outputs are not what the task learns from.
    """
    outputs = call_blank(model, data)
    if wrong := (data.wrong_outputs or _wrong_logits(data.classes))(outputs, _SAMPLES):
        raise UserError(f"{label} {wrong}")


def _wrong_logits(classes: int) -> Callable[[Any, int], str]:
    def wrong(outputs: Any, samples: int) -> str:
        """Say what is wrong with outputs for some samples; empty: nothing is."""
        if isinstance(outputs, torch.Tensor) and outputs.shape == (samples, classes):
            return ""
        got = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        wanted = f"must return logits of shape (batch, {classes}), one per class"
        return f"{wanted}; for a batch of {samples} it returned {got}"

    return wrong


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, then each of its parts back into the mode that it had."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def own_copy(model: nn.Module, still: Set[str] = frozenset()) -> nn.Module:
    """Return a copy of a caller's model, of the same class: training in this process leaves the caller's as it is.

    Args:
        still: names of parameters that nobody writes: their values are the caller's, in the same memory.

    Raises:
        UserError: it cannot be copied.
    """
    known: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in still and type(parameter) is nn.Parameter:
            known[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    return _copied(model, known)


def blank_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a caller's model that has no memory, to try out what becomes of it.

    Raises:
        UserError: it cannot be copied.
    """
    known: dict[int, Any] = {id(t): torch.empty_like(t, device="meta") for t in model.buffers()}
    for parameter in model.parameters():
        blank = torch.empty_like(parameter, device="meta")
        known[id(parameter)] = nn.Parameter(blank, requires_grad=parameter.requires_grad)
    return _copied(model, known)


def _copied(model: nn.Module, known: dict[int, Any]) -> nn.Module:
    computed = [v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf]
    known = {id(value): value.detach().clone() for value in computed} | known
    try:  # what a hook computes of parameters (weight_norm) is computed anew in each forward
        return copy.deepcopy(model, known)
    except Exception as error:
        raise UserError(f"model of your own cannot be copied: {' '.join(str(error).split())[:200]}") from error
