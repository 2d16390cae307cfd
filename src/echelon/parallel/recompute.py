"""Activation checkpointing: backward computes again what forward did not keep (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from echelon.torch_compat import ATTENTION_OPS

Recompute = Literal["none", "blocks", "selective"]
_ATEN = torch.ops.aten
# What costs most to compute again for what it takes to keep: products of matrices, convolutions, attention.
_PRODUCTS = (_ATEN.mm, _ATEN.bmm, _ATEN.addmm, _ATEN.baddbmm, _ATEN.convolution)
KEPT = frozenset((*(op.default for op in _PRODUCTS), *ATTENTION_OPS))


def recompute_blocks(blocks: Mapping[str, nn.Module], how: Recompute) -> None:
    """Make backward compute each block's activations again, in place; names of parameters stay.

    `blocks` keeps a block's inputs alone; `selective` also the results of matrix products, convolutions and attention.
    """
    for block in blocks.values() if how != "none" else ():
        block.forward = partial(_recomputed, block, block.forward, how == "selective")


def _recomputed(block: nn.Module, forward: Callable[..., Any], selective: bool, *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    contexts = partial(_contexts, block, selective)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(block: nn.Module, selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if selective:
        first, again = create_selective_checkpoint_contexts(_policy)
    return first, _both(_keeping_buffers(block), again)


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def _keeping_buffers(block: nn.Module) -> Iterator[None]:
    """Give buffers the values back that they have now: a second pass must not enter BatchNorm's statistics."""
    own = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in own:
                buffer.copy_(value)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
