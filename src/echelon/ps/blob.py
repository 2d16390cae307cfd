"""States as messages: a JSON tree and one raw frame per tensor; nothing is unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import zmq
from torch import Tensor

from echelon.checkpoint.tree import flatten, slots, unflatten
from echelon.core.state_tree import StateTree

COPIED_BYTES = 256 * 1024
COPIES_FOLDER = "copies"
"""Below what a run's roles share: places where servers put a copy for a worker that sees them, each for one reading."""


def as_frame(tensor: Tensor) -> Any:
    """Return a contiguous CPU tensor's memory, any shape, not copied; it must not change until it was sent."""
    flat = tensor.detach() if tensor.requires_grad else tensor
    array: Any = (flat if flat.dim() == 1 else flat.reshape(-1)).view(torch.uint8).numpy()
    return memoryview(array)


def sent_frame(tensor: Tensor) -> Any:
    """Return a contiguous CPU tensor, any shape, as a frame: lent where it is large, copied where that costs less.

    When ZeroMQ gives lent memory back, a thread of Python's wakes, which costs as much as to copy some 256 KiB.
    """
    return copied_frame(tensor) if tensor.nbytes <= COPIED_BYTES else as_frame(tensor)


def copied_frame(tensor: Tensor) -> zmq.Frame:
    """Return a copy of a contiguous CPU tensor, any shape, that ZeroMQ frees by itself: no thread of Python's wakes."""
    with as_frame(tensor) as view:  # a frame holds what it copied for as long as it lives, unless that is released
        return zmq.Frame(view, copy=True)


def pack_state(state: StateTree) -> tuple[bytes, list[Any]]:
    """Write a tree of tensors and plain values as a description and frames (not copied where contiguous)."""
    tree, tensors = flatten(state)
    return json.dumps(tree).encode(), [as_frame(t.detach().contiguous()) for t in tensors.values()]


def unpack_state(meta: bytes, frames: Sequence[Any]) -> StateTree:
    """Undo `pack_state`; tensors are copies of the frames.

    Raises:
        ValueError: description and frames do not fit each other.
    """
    try:
        tree = json.loads(meta)
        wanted = list(slots(tree))
        sizes = [math.prod(slot.shape) * slot.dtype.itemsize for slot in wanted]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a state: {error}") from None
    if sizes != [len(frame) for frame in frames] or any(d < 0 for slot in wanted for d in slot.shape):
        raise ValueError("a state's frames are not of the sizes that it describes")
    tensors = {}
    for slot, frame in zip(wanted, frames, strict=True):
        tensors[slot.name] = read_frame(frame, slot.dtype).view(slot.shape).clone()
    try:
        state = unflatten(tree, tensors)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a state: {error}") from None
    if not isinstance(state, dict):
        raise ValueError("a state is a dict")
    return state


def write_frames(path: Path, frames: Sequence[Any]) -> None:
    """Write a state's frames one after another. Raises OSError."""
    with path.open("wb") as file:
        for frame in frames:
            file.write(frame)


def read_frames(path: Path, meta: bytes) -> list[Any]:
    """Return the frames of `write_frames`, of the state that `meta` describes.

    Raises:
        ValueError: the file has another size.
    """
    data = memoryview(bytearray(path.read_bytes()))
    frames, start = [], 0
    for slot in slots(json.loads(meta)):
        end = start + math.prod(slot.shape) * slot.dtype.itemsize
        frames.append(data[start:end])
        start = end
    if start != len(data):
        raise ValueError(f"{path} has {len(data)} bytes, not {start}")
    return frames


def message_of(frame: Any, tensor: Tensor) -> Any:
    """Return the message of a frame, to be sent again, where the tensor, any shape, is its memory; else None."""
    there = isinstance(frame.obj, zmq.Frame) and torch.frombuffer(frame, dtype=torch.uint8).data_ptr()
    return frame.obj if there and there == tensor.data_ptr() else None


def read_frame(frame: Any, dtype: torch.dtype) -> Tensor:
    """View a received frame as a 1-D tensor, not copied.

    Raises:
        ValueError: its size is no multiple of the element's.
    """
    if len(frame) % dtype.itemsize:
        raise ValueError(f"a frame of {len(frame)} bytes holds no whole number of {dtype}")
    if not len(frame):
        return torch.empty(0, dtype=dtype)
    if dtype is torch.uint8:
        return torch.frombuffer(frame, dtype=dtype)
    flat = torch.frombuffer(frame, dtype=dtype)
    if flat.data_ptr() % dtype.itemsize == 0:
        return flat
    return torch.frombuffer(frame, dtype=torch.uint8).clone().view(dtype)  # not aligned to the element's size
