"""Low-rank adapters inside the layers of a model: made by peft, called by the layers themselves, added into weights.

peft wraps a layer, whose parameters then have other names. Here the layer stays where it is, with its class, its names
and its hooks, and gets the two layers that peft has made as children: what knows the model by its names (layouts,
hints, checkpoints, exports) knows it still.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.core.adapters import DOWN, UP, adapted_layer
from echelon.core.errors import UserError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def can_be_adapted(module: nn.Module, r: int) -> bool:
    """Whether a layer is one that adapters of rank r can be added to: linear, or a convolution of one group."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2 or r >= min(len(weight), math.prod(weight.shape[1:])):
        return False
    if isinstance(module, nn.Linear):
        # What attention of torch computes with is the weight of its output layer, not the layer.
        return type(module).forward is nn.Linear.forward and not type(module).__name__.startswith("NonDynamically")
    for kind in CONVOLUTIONS:
        if isinstance(module, kind):
            return type(module).forward is kind.forward and module.groups == 1 and module.padding_mode == "zeros"
    return _is_conv1d(module)


def never_called(model: nn.Module, layers: Sequence[str], call: Callable[[nn.Module], object]) -> set[str]:
    """Return those of some layers whose weights a call of the model uses without a call of the layer.

    An adapter beside such a layer would have no part in that. Of a layer that is not reached at all nothing is known.
    """
    called: set[nn.Module] = set()
    hooks = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in model.modules()]
    used = _UsedParameters()
    try:
        with used:
            call(model)
    except Exception:  # noqa: BLE001  the caller's code may raise any, of zeros: that says nothing of its layers
        return set()
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name
        for name in layers
        if (layer := model.get_submodule(name)) not in called and id(getattr(layer, "weight", None)) in used.ids
    }


class _UsedParameters(TorchFunctionMode):
    """Notes which parameters functions of torch are given."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note them, and do what was asked for."""
        if "__get__" not in getattr(func, "__name__", ""):  # which only looks at a tensor, such as at its shape
            self.ids |= {id(each) for each in [*args, *(kwargs or {}).values()] if isinstance(each, nn.Parameter)}
        return func(*args, **(kwargs or {}))


def add_adapters(model: nn.Module, layers: Sequence[str], r: int, alpha: float) -> None:
    """Add adapters of rank r to layers, in place; they add nothing until they are trained, for lora_B is 0.

    Which parameters are trained is left as it was; those of adapters are.

    Raises:
        UserError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("--tune lora needs peft: pip install 'echelon[lora]'") from None
    trained = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    config = LoraConfig(r=r, lora_alpha=alpha, target_modules=named_exactly(layers))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Conv1D, whose weight is transposed: it sees to that itself
        inject_adapter_in_model(config, model, adapter_name=_NAME)
    for name in layers:
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, leaf, _unwrapped(owner.get_submodule(leaf)))
    del model.peft_config
    for parameter in model.parameters():
        parameter.requires_grad_(trained.get(id(parameter), True))


def named_exactly(layers: Sequence[str]) -> str:
    """Return what peft takes for the layers of these names: in a list, names would stand for endings of others too."""
    return "|".join(map(re.escape, layers))


@torch.no_grad()
def merged(weights: Mapping[str, Tensor], model: nn.Module, scale: float) -> dict[str, Tensor]:
    """Return weights in which each adapter is added into its layer's own: weight + scale * lora_B @ lora_A.

    Args:
        weights: by name, any shape, those of adapters among them: `lora_A` `(r, in, ...)`, `lora_B` `(out, r, ...)`.
        model: without adapters, or with them; its layers say which weights lie transposed.
        scale: alpha / r.
    """
    plain = {name: tensor for name, tensor in weights.items() if not adapted_layer(name)}
    for layer in dict.fromkeys(filter(None, map(adapted_layer, weights))):
        down, up = (weights[f"{layer}.{side}.weight"].double() for side in (DOWN, UP))
        held = plain[f"{layer}.weight"]
        change = scale * torch.tensordot(up.flatten(1), down, 1)  # (out, in), or (out, in, *kernel)
        if held.ndim == 2 and _is_transposed(model, layer):
            change = change.T
        plain[f"{layer}.weight"] = (held.double() + change).to(held.dtype)
    return plain


_NAME = "default"


def _unwrapped(wrapped: Any) -> nn.Module:
    layer: nn.Module = wrapped.base_layer
    layer.add_module(DOWN, wrapped.lora_A[_NAME])
    layer.add_module(UP, wrapped.lora_B[_NAME])
    layer.register_forward_hook(partial(_add_adapter, wrapped.scaling[_NAME]), with_kwargs=True)
    return layer


def _add_adapter(
    scale: float, layer: Any, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], result: Tensor
) -> Tensor:
    x = args[0] if args else next(iter(kwargs.values()))
    change: Tensor = layer.lora_B(layer.lora_A(x))
    return result + scale * change


def _is_transposed(model: nn.Module, layer: str) -> bool:
    return layer in dict(model.named_modules()) and _is_conv1d(model.get_submodule(layer))


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is GPT-2's Conv1D: a linear layer with its weight transposed."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
