"""What replicas average: trainable parameters, buffers (BatchNorm statistics and counters), optimizer moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from echelon.collectives.wire import is_small
from echelon.compression.base import working_dtype
from echelon.models.still_buffers import still_buffers
from echelon.models.tables import sparse_tables
from echelon.sync.buffers import as_real
from echelon.torch_compat import COMPILED

Kind = Literal["parameter", "buffer", "moment"]


@dataclass(frozen=True)
class Value:
    """One tensor that is averaged, in place.

    Attributes:
        name: the same on all ranks.
        tensor: the live tensor, any shape; of complex numbers, their parts.
        owner: what the optimizer's state is kept under: the parameter; of a buffer itself.
        is_table: it is a table with sparse gradients, or a moment of one: rows that have changed travel alone.
    """

    name: str
    tensor: Tensor
    kind: Kind
    owner: Tensor
    is_table: bool = False

    @property
    def encoded(self) -> bool:
        """Whether it goes through the codec's buckets; small parameters, buffers and moments travel whole, and rows of
        tables by themselves.

        A lossy second moment could turn negative, and BatchNorm's variance too.
        """
        return self.kind == "parameter" and not self.is_table and not is_small(self.tensor)

    @property
    def group(self) -> str:
        """Under which name its bytes are counted."""
        of_parameters = "weights" if self.encoded or self.is_table else "small"
        return {"buffer": "buffers", "moment": "moments"}.get(self.kind, of_parameters)

    def read(self) -> Tensor:
        """Return a copy in the type that is computed with: float64 for float64 and counters, else float32."""
        exact = not self.tensor.is_floating_point()
        dtype = torch.float64 if exact else working_dtype(self.tensor.dtype)
        return self.tensor.detach().to(dtype, copy=True)

    def write(self, values: Tensor) -> None:
        """Set the tensor in place, to values of its shape; counters are rounded to whole numbers."""
        with torch.no_grad():
            self.tensor.copy_(values if self.tensor.is_floating_point() else values.round())


def model_values(model: nn.Module) -> list[Value]:
    """Return trainable parameters and buffers that move, module by module; what several modules share stands once."""
    values: list[Value] = []
    seen: set[int] = set()
    tables = {id(table) for table in sparse_tables(model).values()}
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        own: list[tuple[str, Tensor, Kind]] = [
            (n, p, "parameter") for n, p in module.named_parameters(recurse=False) if p.requires_grad
        ]
        still = still_buffers(module)
        own += [
            (n, b, "buffer")
            for n, b in module.named_buffers(recurse=False)
            if b.dtype is not torch.bool and n not in still
        ]
        for name, tensor, kind in own:
            if id(tensor) not in seen and tensor.numel():
                seen.add(id(tensor))
                values.append(Value(start + name, as_real(tensor), kind, tensor, id(tensor) in tables))
    return values


def plain_name(value: Value) -> str:
    """Return a value's name in the model's `state_dict()`, compiled or not."""
    return value.name.removeprefix(COMPILED)


def moments(optimizer: torch.optim.Optimizer, parameters: Sequence[Value]) -> list[Value]:
    """Return the optimizer's tensors that have one element per element of a parameter, for these parameters."""
    found: list[Value] = []
    for value in parameters:
        state = optimizer.state.get(value.owner, {}) if value.kind == "parameter" else {}
        for key in sorted(state):
            tensor = as_real(state[key]) if isinstance(state[key], Tensor) else None
            fits = tensor is not None and tensor.is_floating_point() and tensor.shape == value.tensor.shape
            if tensor is not None and fits and key != "step":
                found.append(Value(f"{value.name}:{key}", tensor, "moment", value.owner, value.is_table))
    return found


def cut(values: Sequence[Value], count: int) -> list[list[Value]]:
    """Cut values, kept in order, into runs of about as many elements; each has one value at least.

    Where there are none at all (a part of a pipeline that has nothing to train), all runs are empty.

    Raises:
        ValueError: there are fewer values than parts.
    """
    if values and len(values) < count:
        raise ValueError(f"{count} fragments, but the model has {len(values)} tensors to share among them")
    runs: list[list[Value]] = [[] for _ in range(count)]
    total, before = sum(v.tensor.numel() for v in values), 0
    for i, value in enumerate(values):
        middle = before + value.tensor.numel() / 2
        wanted = int(middle * count / total)
        # never so late that a run ahead stays empty, never so early that one behind does
        latest, earliest = i, count - (len(values) - i)
        filled = next((p for p in range(count) if not runs[p]), count)
        runs[max(min(wanted, latest, filled), earliest, 0)].append(value)
        before += value.tensor.numel()
    return runs
