"""Embedding tables with sparse gradients: which ones a model has, and what they cannot be.

The gradient of a table has values in the rows that a batch looked up. With `sparse=True` torch keeps just those rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError

_KINDS = (nn.Embedding, nn.EmbeddingBag)


@runtime_checkable
class SendsRows(Protocol):
    """A table whose gradients go to the ranks that have its rows inside of backward.

    Attributes:
        touches_rows: False: what is looked up now is of a sample that counts nothing, and touches none.
    """

    touches_rows: bool


def sparse_tables(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable weights whose gradients are sparse, by name, in the model's order."""
    sparse = {
        f"{path}.weight" if path else "weight"
        for path, module in model.named_modules()
        if isinstance(module, _KINDS) and module.sparse
    }
    return {name: p for name, p in model.named_parameters() if name in sparse and p.requires_grad}


def make_sparse(model: nn.Module, label: str) -> None:
    """Let all embedding tables of a model have sparse gradients.

    Raises:
        UserError: there is no table.
    """
    tables = [module for module in model.modules() if isinstance(module, _KINDS)]
    if not tables:
        raise UserError(f"--sparse-tables: {label} has no nn.Embedding or nn.EmbeddingBag: leave it out")
    for table in tables:
        table.sparse = True


def make_dense(model: nn.Module) -> None:
    """Let all embedding tables of a model have dense gradients."""
    for module in model.modules():
        if isinstance(module, _KINDS):
            module.sparse = False


def shrink_tables(model: nn.Module, cut_over: int, all_tables: bool, most_rows: int | None = None) -> None:
    """Leave each table the rows of the largest of `cut_over` equal parts, to see how much memory one takes.

    Args:
        all_tables: not only those that make sparse gradients.
        most_rows: that are here at a time, where the others are fetched when they are looked up; None: all.
    """
    for module in model.modules():
        if isinstance(module, _KINDS) and (all_tables or module.sparse):
            rows = -(-len(module.weight) // cut_over)
            rows = rows if most_rows is None else min(rows, most_rows)
            module.weight = nn.Parameter(module.weight.detach()[:rows].clone(), module.weight.requires_grad)


def check_tables(model: nn.Module, label: str) -> None:
    """Refuse sparse gradients of what is no table, and of tables whose gradients cannot be rows.

    Raises:
        UserError: names the module, the reason and the fix.
    """
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) is not True:
            continue
        reason = _reason(module)
        if not reason and len(shared := users[id(module.weight)]) > 1:
            others = [name for name in shared if name != f"{path}.weight"]
            reason = f"its weight is {others[0]}, too, and the gradients of both are one"
        if reason:
            raise UserError(f"{label}: {path} makes sparse gradients, and {reason}: build it with sparse=False")


def _reason(module: nn.Module) -> str:
    """Return why a module's gradients cannot be rows; empty: they can."""
    if not isinstance(module, _KINDS):
        return "only nn.Embedding and nn.EmbeddingBag may"
    if module.max_norm is not None:
        return "max_norm changes rows in forward, on each worker others"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq counts a worker's own part of the batch"
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return "torch has none for mode='max'"
    return ""


@contextmanager
def counting_nothing(model: nn.Module, gathered: Iterable[Tensor] = ()) -> Iterator[None]:
    """Let a backward pass inside the block give gradients of zeros, of tables of no rows: its samples count nothing.

    A loss times zero is not enough: where a derivative is infinite, or an output NaN, its gradients would be NaN.

    Args:
        gathered: more tensors, of any shape, that gradients are made of.
    """
    sending = [module for module in model.modules() if isinstance(module, SendsRows)]
    elsewhere = {id(parameter) for module in sending for parameter in module.parameters()}
    own = [each for each in (*model.parameters(), *gathered) if each.requires_grad and id(each) not in elsewhere]
    hooks = [each.register_hook(_zeros) for each in own]
    for module in sending:
        module.touches_rows = False
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in sending:
            module.touches_rows = True


def _zeros(gradient: Tensor) -> Tensor:
    if not gradient.is_sparse:
        return torch.zeros_like(gradient)
    rows = torch.zeros((1, 0), dtype=torch.int64, device=gradient.device)
    values = gradient.new_zeros((0, *gradient.shape[1:]), layout=torch.strided)
    return torch.sparse_coo_tensor(rows, values, gradient.shape, check_invariants=False)
