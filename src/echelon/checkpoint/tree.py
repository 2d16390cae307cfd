"""A state as two parts: a JSON tree of everything that is not a tensor, and a flat dict of named tensors.

The tree holds scalars and lists as JSON has them; all else is an object with one telling key:
`{"dict": [[key, value], ...]}` (keys are strings or integers), `{"tuple": [...]}`, `{"float": the 8 bytes of a nan or
inf in hex}` and `{"tensor": name, "dtype": ..., "shape": [...]}`, with `strides` where the memory order is not the
default one. Strides are kept because a sum over another memory order rounds differently, and a resumed run must be
bit-identical.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.core.state_tree import StateView

_ALLOWED = "dicts, lists and tuples of tensors, int, float, bool, str and None"

_DTYPES = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.complex32, torch.complex64, torch.complex128),
)
_DTYPE_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
_TAKEN_BY_SAFETENSORS = "__metadata__"


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes in the tree: its name among the flat tensors, and how to allocate it.

    `file`: in which file of its folder it lies; empty: in that of the state itself.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    file: str = ""

    def empty(self) -> Tensor:
        """Return an uninitialised CPU tensor of this dtype, shape and memory order."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


def flatten(state: StateView) -> tuple[Any, dict[str, Tensor]]:
    """Split a state into its JSON tree and its tensors by name (`model.conv.weight`); tensors are not copied.

    Raises TypeError, naming the place, for a value of any other kind, and for a sharded or sparse tensor.
    """
    tensors: dict[str, Tensor] = {}
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is a dict, not {type(state).__name__}")
    return _encode(state, "", tensors), tensors


def unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the state of `flatten`, with its tensors, any shape.

    Raises ValueError or KeyError for a tree that flatten does not make.
    """
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "tuple" in tree:
        return tuple(unflatten(item, tensors) for item in tree["tuple"])
    if "float" in tree:
        return struct.unpack(">d", bytes.fromhex(tree["float"]))[0]
    if "dict" in tree:
        return {key: unflatten(value, tensors) for key, value in tree["dict"]}
    raise ValueError(f"not a checkpoint tree: an object with the keys {sorted(tree)}")


def slots(tree: Any) -> Iterator[Slot]:
    """Yield the slot of every tensor in the tree, in order. Raises ValueError or KeyError as `unflatten` does."""
    if isinstance(tree, list):
        for item in tree:
            yield from slots(item)
    elif isinstance(tree, dict):
        if "tensor" in tree:
            strides = tree.get("strides")
            dtype = _DTYPE_BY_NAME[tree["dtype"]]
            shape, order = tuple(tree["shape"]), None if strides is None else tuple(strides)
            yield Slot(tree["tensor"], dtype, shape, order, tree.get("file", ""))
        for item in tree.get("tuple", ()):
            yield from slots(item)
        for _, item in tree.get("dict", ()):
            yield from slots(item)


def moved(tree: Any, place: Callable[[str], tuple[str, str] | None]) -> Any:
    """Return the tree with each tensor said to lie where `place` says of its name: a file, and its name there."""
    if isinstance(tree, list):
        return [moved(item, place) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        found = place(tree["tensor"])
        return tree if found is None else {**tree, "file": found[0], "tensor": found[1]}
    return {key: moved(item, place) for key, item in tree.items()}


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        # JSON has no nan or inf; Python writes every other float so that it reads back to the same bits.
        return float(value) if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, tensors)
    if isinstance(value, list):
        return [_encode(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"dict": [_encode_item(key, item, where, tensors) for key, item in value.items()]}
    raise TypeError(f"{where or 'the state'} is a {type(value).__name__}: a checkpoint holds only {_ALLOWED}")


def _encode_item(key: Any, item: Any, where: str, tensors: dict[str, Tensor]) -> list[Any]:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise TypeError(f"key {key!r} of {where or 'the state'}: a checkpoint's keys are strings or integers")
    return [key, _encode(item, f"{where}.{key}" if where else str(key), tensors)]


def _encode_tensor(value: Tensor, where: str, tensors: dict[str, Tensor]) -> dict[str, str | list[int]]:
    tensor = value.detach()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        raise TypeError(f"{where} is a {type(tensor).__name__} on {tensor.device}: only plain dense tensors are saved")
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"{where} has dtype {tensor.dtype}, which cannot be saved")
    name = _free_name(where, tensors)
    tensors[name] = tensor
    entry: dict[str, str | list[int]] = {
        "tensor": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }
    if is_permuted(tensor):
        entry["strides"] = list(tensor.stride())
    return entry


def is_permuted(tensor: Tensor) -> bool:
    """Tell whether the tensor, any shape, fills its memory without gaps, but in another order than the default one."""
    if tensor.is_contiguous():
        return False
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _free_name(where: str, tensors: Mapping[str, Tensor]) -> str:
    # "a.b" as one key and "a" holding "b" give the same name: the second gets a number.
    name = base = where.encode("utf-8", "backslashreplace").decode()
    count = 1
    while name in tensors or name == _TAKEN_BY_SAFETENSORS:
        count += 1
        name = f"{base}#{count}"
    return name
