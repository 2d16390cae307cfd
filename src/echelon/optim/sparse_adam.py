"""Adam for a model with sparse tables: torch's SparseAdam for the rows that a batch touched, Adam for all else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


class TableAdam(torch.optim.Optimizer):
    """Adam whose moments of a table's row move when that row is touched (torch's SparseAdam).

    Dense parameters follow torch's Adam. Groups carry `sparse`, which says whose rule is theirs.
    """

    def __init__(self, groups: list[dict[str, Any]], tables: Mapping[str, nn.Parameter], lr: float) -> None:
        """Divide each group in its tables and its other parameters, and build both optimizers."""
        ids = {id(table) for table in tables.values()}
        divided = []
        for group in groups:
            for sparse in (False, True):
                params = [p for p in group["params"] if (id(p) in ids) is sparse]
                if params:
                    divided.append({**group, "params": params, "sparse": sparse})
        dense = [group for group in divided if not group["sparse"]]
        rows = [group for group in divided if group["sparse"]]
        idle = nn.Parameter(torch.empty(0))
        # They compute; groups and state are this object's, which both are given at each step.
        self._rules = {
            False: torch.optim.Adam(dense or [{"params": [idle]}], lr=lr, weight_decay=0.0),
            True: torch.optim.SparseAdam([{k: v for k, v in g.items() if k != "weight_decay"} for g in rows], lr=lr),
        }
        super().__init__(divided, {"lr": lr})
        defaults = {sparse: rule.defaults for sparse, rule in self._rules.items()}
        for group in self.param_groups:
            for key, value in defaults[group["sparse"]].items():
                group.setdefault(key, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update rows that have a gradient by SparseAdam, and all else by Adam; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for sparse, rule in self._rules.items():
            rule.param_groups = [group for group in self.param_groups if group["sparse"] is sparse]
            rule.state = self.state
            if sparse:
                _as_rows(rule)
            rule.step()
        return loss


def _as_rows(rule: torch.optim.Optimizer) -> None:
    """Turn gradients of zeros, which stand for a step that is left out, into none of any row."""
    for group in rule.param_groups:
        for table in group["params"]:
            if table.grad is not None and not table.grad.is_sparse:
                table.grad = table.grad.to_sparse(1)
