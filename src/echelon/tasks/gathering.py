"""Outputs and targets of an evaluation, of all ranks, for metrics that need them all at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


class Gathered:
    """Collects float32 rows `(B, columns)` of outputs and of targets; then gives those of all ranks, in rank order."""

    def __init__(self, columns: int, device: torch.device) -> None:
        """Begin with none."""
        self._rows: list[Tensor] = [torch.zeros(0, 2 * columns, device=device)]
        self._columns = columns

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch of outputs and targets, `(B, columns)` each, or `(B,)` for one column; B may be 0."""
        both = [tensor.detach().float().reshape(-1, self._columns) for tensor in (outputs, targets)]
        self._rows.append(torch.cat(both, dim=1))

    def all(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Return outputs and targets of all ranks `(n, columns)` in float64 on the CPU; all ranks call it."""
        rows = gather_rows(torch.cat(self._rows), group).double()
        return rows[:, : self._columns].contiguous(), rows[:, self._columns :].contiguous()


def gather_rows(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the ranks' tensors one after another along dim 0, where they may differ in length, on the CPU."""
    from torchmetrics.utilities.distributed import gather_all_tensors

    if group is None:
        return tensor.cpu()
    return torch.cat(gather_all_tensors(tensor.to(meeting_device(tensor, group)), group)).cpu()


Row = TypeVar("Row", bound=tuple[Any, ...])


def gather_lines(rows: Sequence[Row], group: dist.ProcessGroup | None) -> list[Row]:
    """Return the ranks' rows of numbers and texts one after another; all ranks call it.

    They are sent as JSON: nothing that comes from others is unpickled.
    """
    if group is None:
        return list(rows)
    mine = torch.tensor(list(json.dumps(rows).encode() + b"\n"), dtype=torch.uint8)
    lines = bytes(gather_rows(mine, group).tolist()).splitlines()
    return [cast(Row, tuple(row)) for line in lines for row in json.loads(line)]


def meeting_device(tensor: Tensor, group: dist.ProcessGroup) -> torch.device:
    """Return where the ranks of a group can exchange a tensor."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else tensor.device


def bins_by_prediction(predicted: Tensor, true: Tensor, count: int) -> tuple[Sequence[float], Sequence[float]]:
    """Return mean prediction and mean truth of `count` groups of equal size, by rising prediction; `(n,)` each."""
    order = predicted.argsort()
    groups = [group for group in np.array_split(order.numpy(), count) if len(group)]
    return [float(predicted[g].mean()) for g in groups], [float(true[g].mean()) for g in groups]
