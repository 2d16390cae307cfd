"""Named tensors to and from safetensors files.

They are written tensor by tensor: `safetensors.torch.save_file` hides a full disk inside an error of its own.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from echelon.checkpoint.files import sync, temporary, write_durable
from echelon.checkpoint.hashed_file import HashedFile
from echelon.checkpoint.staging import Staging
from echelon.checkpoint.tree import Slot
from echelon.core.errors import UserError

TENSORS = "model-00001-of-00001.safetensors"
"""The file of a checkpoint's tensors."""

# What safetensors and all who read it know; any other dtype is stored as its bytes.
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def stage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors of any shape to CPU memory of their own, keeping their memory order; done when it returns."""
    return Staging().copy(tensors)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write CPU tensors, any shape, into a file of `folder`; returns its SHA-256. Raises OSError, as on a full disk."""
    # A tensor without elements has no bytes: its slot in the tree says all there is.
    return write_file(folder / TENSORS, to_stored({name: tensor for name, tensor in tensors.items() if tensor.numel()}))


def to_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as files hold them: in their shapes, or as bytes, 1-D, where safetensors knows no such dtype."""
    return {name: tensor if tensor.dtype in _NAMES else as_bytes(tensor) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor that is never in memory whole: its type, its shape, and what gives its elements in pieces.

    Attributes:
        pieces: may be asked for more than once; each time all of it comes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(
    path: Path,
    tensors: Mapping[str, Tensor | StreamedTensor],
    about: Mapping[str, str] | None = None,
    is_read_soon: bool = False,
) -> str:
    """Write CPU tensors of any shape and safetensors' dtypes as one durable safetensors file, and words about it.

    Args:
        is_read_soon: see `HashedFile`.

    Returns its SHA-256, taken of what is written: to read it again for that takes as long as to write it.
    Raises OSError.
    """
    header: dict[str, Mapping[str, str | list[int]]] = {} if about is None else {"__metadata__": about}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path, is_read_soon) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            for piece in _pieces(tensor):
                file.write(as_bytes(piece).numpy().data)
        if file.n_bytes != 8 + len(text) + offset:
            raise ValueError(f"{path}: {file.n_bytes - 8 - len(text)} bytes of tensors that have {offset}")
        return file.finish()


def _pieces(tensor: Tensor | StreamedTensor) -> Iterable[Tensor]:
    return tensor.pieces() if isinstance(tensor, StreamedTensor) else (tensor,)


def read_tensors(folder: Path, slots: Iterable[Slot]) -> dict[str, Tensor]:
    """Read the tensors that `slots` name from their files of a folder, and no others, into memory of their own.

    Raises SafetensorError, ValueError or RuntimeError when the files do not hold them.
    """
    by_file: dict[str, list[Slot]] = {}
    for slot in slots:
        by_file.setdefault(slot.file or TENSORS, []).append(slot)
    read: dict[str, Tensor] = {}
    for name, wanted in by_file.items():
        with safe_open(folder / name, "pt") as file:
            for slot in wanted:
                read[slot.name] = slot.empty() if 0 in slot.shape else _from_stored(file.get_tensor(slot.name), slot)
    return read


def map_tensor(folder: Path, slot: Slot) -> Tensor:
    """Return a tensor of a file of a folder, as the file itself, mapped, where it can be. It is not to be changed."""
    if 0 in slot.shape:
        return slot.empty()
    with safe_open(folder / (slot.file or TENSORS), "pt") as file:
        stored = file.get_tensor(slot.name)
    plain = slot.dtype in _NAMES and slot.strides is None
    return stored.reshape(slot.shape) if plain else _from_stored(stored, slot)


def _from_stored(stored: Tensor, slot: Slot) -> Tensor:
    if slot.dtype not in _NAMES:
        return from_bytes(stored, slot)
    return slot.empty().copy_(stored.reshape(slot.shape))  # what was read is the file itself, mapped


def is_stored_plainly(dtype: torch.dtype) -> bool:
    """Whether files hold elements of a type as such."""
    return dtype in _NAMES


def bytes_in_place(tensor: Tensor) -> Tensor:
    """Return the bytes of each element of a tensor, any shape, along a dim more, as uint8."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.unsqueeze(-1)
    return plain.contiguous().view(torch.uint8)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's elements in the default order as a uint8 tensor of shape [n_bytes]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, slot: Slot) -> Tensor:
    """Return the tensor of `as_bytes`, of uint8 `(nbytes,)`, in memory of its own and in the memory order of `slot`.

    Raises RuntimeError when the number of bytes is another.
    """
    result = slot.empty()
    # A copy first: bytes cut out of a larger buffer need not be aligned for the wider dtype.
    plain = data.clone().view(slot.dtype).reshape(slot.shape)
    return plain if slot.strides is None else result.copy_(plain)


def export_weights(module_state: Mapping[str, Tensor], path: Path) -> None:
    """Write a module's `state_dict()`, tensors of any shape, to one safetensors file at `path`, whole or not at all.

    Tensors that share memory (tied weights) are written once per name. An older file at `path` is replaced.
    Raises UserError when it cannot be written.
    """
    from safetensors.torch import save

    unfinished = temporary(path)
    tensors = {name: tensor.contiguous() for name, tensor in stage(module_state).items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Not save_file: it hides a full disk inside an error of its own.
            write_durable(unfinished, save(tensors, metadata={"format": "pt"}))
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as error:
        raise UserError(f"cannot write the weights to {path}: {error.strerror or error}") from error
