"""A module that computes in a narrower type than its parameters are kept in: these are the master copies.

Micikevicius et al. 2018, arXiv:1710.03740, section 3.1. Optimizer, gradients, averages, strategies and checkpoints see
the float32 parameters alone; a forward pass uses copies in the narrow type, which live until its backward is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.torch_compat import BatchNormBase, reparametrized, tree_map_only


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Make a module's forward pass compute in a type while it trains, in place; its parameters stay what they are.

    Floating inputs are cast too. BatchNorm keeps its parameters and statistics wide: narrow ones would not move.
    """
    module.forward = partial(_forward, module, module.forward, dtype)


def cast_blocks(blocks: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
    """Do so for blocks that are computed again in backward, where the whole module's copies are gone.

    Inside the module's own forward pass they find the parameters cast already.
    """
    for block in blocks.values():
        cast_parameters(block, dtype)


@contextmanager
def computing_in(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Give a module narrow copies of its parameters inside the block; gradients go to the parameters themselves."""
    wide = narrow_names(module, dtype) if dtype is not None else {}
    if not wide:
        yield
        return
    with reparametrized(module, {name: p.to(dtype) for name, p in wide.items()}):
        yield


def narrow_names(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters that are cast, by name: floating, of another type, not BatchNorm's."""
    kept = {id(p) for owner in module.modules() if isinstance(owner, BatchNormBase) for p in owner.parameters()}
    return {
        name: p
        for name, p in module.named_parameters(remove_duplicate=False)
        if p.is_floating_point() and p.dtype != dtype and id(p) not in kept
    }


def _forward(module: nn.Module, forward: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    if not module.training:
        return forward(*args, **kwargs)

    def cast(tensor: Tensor) -> Tensor:
        """Return a floating-point tensor in the dtype of the computation."""
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
    with computing_in(module, dtype):
        return forward(*args, **kwargs)
