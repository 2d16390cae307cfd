"""Outputs and targets of an evaluation, of all ranks, for metrics that need them all at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RowMessages:
    """How rows travel to all ranks while more of them are made: in messages of one size, as many from each rank.

    Attributes:
        group: the ranks, whose backend is gloo.
        rows: of one message.
        count: messages of each rank, enough for the one that has most rows.
    """

    group: dist.ProcessGroup
    rows: int
    count: int


class RowStream:
    """Sends rows `(B, columns)` to all ranks of a group beside what makes more of them.

    No rank waits before `all`. Every rank calls `flush` before any other collective of the group, so that all of them
    begin the same messages in the same order.
    """

    def __init__(self, columns: int, messages: RowMessages, dtype: torch.dtype = torch.float32) -> None:
        self._columns, self._messages, self._dtype = columns, messages, dtype
        self._waiting: list[Tensor] = []
        self._begun: list[tuple[list[Tensor], dist.Work]] = []

    def add(self, rows: Tensor) -> None:
        """Take rows `(B, columns)` of this rank; each message that is full sets out."""
        self._waiting.append(rows.detach().to(self._dtype).cpu())
        while sum(map(len, self._waiting)) >= self._messages.rows:
            self._send()

    def flush(self) -> None:
        """Send what waits, and messages of nothing for those that other ranks have more."""
        while len(self._begun) < self._messages.count:
            self._send()

    def _send(self) -> None:
        rows = torch.cat([torch.zeros(0, self._columns, dtype=self._dtype), *self._waiting])
        now, self._waiting = rows[: self._messages.rows], [rows[self._messages.rows :]]
        # the last column: whether a row is there
        message = torch.zeros(self._messages.rows, self._columns + 1, dtype=self._dtype)
        message[: len(now), :-1], message[: len(now), -1] = now, 1.0
        copies = [torch.empty_like(message) for _ in range(dist.get_world_size(self._messages.group))]
        work = dist.all_gather(copies, message, group=self._messages.group, async_op=True)
        assert work is not None
        self._begun.append((copies, work))

    def all(self) -> Tensor:
        """Wait for the rows of all ranks and return them, in rank order."""
        for _, work in self._begun:
            work.wait()
        ranks = [torch.cat(copies) for copies in zip(*(copies for copies, _ in self._begun), strict=True)]
        rows = torch.cat([torch.zeros(0, self._columns + 1, dtype=self._dtype), *ranks])
        return rows[rows[:, -1] > 0, :-1]


class RowMetrics:
    """Metrics of rows: collects rows `(B, columns)` of outputs and of targets, and gives those of all ranks.

    They travel as those of `StreamedMetrics`, and stand in rank order.
    """

    def __init__(self, columns: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Begin with none; outputs and targets are collected in `dtype`, the same on all ranks."""
        self._rows: list[Tensor] = [torch.zeros(0, 2 * columns, dtype=dtype, device=device)]
        self._columns, self._dtype = columns, dtype
        self._stream: RowStream | None = None

    def stream(self, messages: RowMessages, samples: int) -> None:
        """Let rows travel while more of them are made; all ranks call it before the first ones."""
        self._stream = RowStream(2 * self._columns, messages, self._dtype)

    def flush(self) -> None:
        """See `RowStream`."""
        if self._stream is not None:
            self._stream.flush()

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch of outputs and targets, `(B, columns)` each, or `(B,)` for one column; B may be 0."""
        both = [tensor.detach().to(self._dtype).reshape(-1, self._columns) for tensor in (outputs, targets)]
        rows = torch.cat(both, dim=1)
        if self._stream is not None:
            self._stream.add(rows)
        else:
            self._rows.append(rows)

    def all(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Return outputs and targets of all ranks `(n, columns)` in float64 on the CPU; all ranks call it."""
        rows = (self._stream.all() if self._stream else gather_rows(torch.cat(self._rows), group)).double()
        return rows[:, : self._columns].contiguous(), rows[:, self._columns :].contiguous()


def gather_rows(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the ranks' tensors `(B, ...)` one after another along dim 0, on the CPU; B may differ."""
    from torchmetrics.utilities.distributed import gather_all_tensors

    if group is None:
        return tensor.cpu()
    return torch.cat(gather_all_tensors(tensor.to(meeting_device(tensor, group)), group)).cpu()


_MOST_DIMS = 8  # of a metric's state
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def gather_states(state: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return a state of a metric of torchmetrics of all ranks, in rank order, as its `dist_sync_fn`; all call it.

    Rows `(B, ...)` of a rank that has counted no sample are an empty vector of floats there, whatever those of the
    others are: they become `(0, ...)` of their type, as ranks can exchange only what has as many dims everywhere.
    """
    from torchmetrics.utilities.distributed import gather_all_tensors

    form = torch.tensor([_DTYPES.index(state.dtype), state.ndim, *state.shape], device=state.device)
    forms = [form.new_zeros(2 + _MOST_DIMS) for _ in range(dist.get_world_size(group))]
    dist.all_gather(forms, torch.nn.functional.pad(form, (0, len(forms[0]) - len(form))), group=group)
    full = [(kind, shape[:dims]) for kind, dims, *shape in (each.tolist() for each in forms) if all(shape[:dims])]
    if full and state.ndim == 1 and not len(state):
        kind, shape = full[0]
        state = state.new_zeros((0, *shape[1:]), dtype=_DTYPES[kind])
    return gather_all_tensors(state, group)


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
    """Return where the ranks of a group can exchange a tensor of any shape."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else tensor.device


def bins_by_prediction(predicted: Tensor, true: Tensor, count: int) -> tuple[Sequence[float], Sequence[float]]:
    """Return mean prediction and mean truth of `count` groups of `(n,)` values, of equal size, by rising prediction."""
    order = predicted.argsort()
    groups = [group for group in np.array_split(order.numpy(), count) if len(group)]
    return [float(predicted[g].mean()) for g in groups], [float(true[g].mean()) for g in groups]
