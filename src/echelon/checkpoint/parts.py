"""Tensors that no rank holds whole: each rank writes its part of them, and any rank reads any part back.

A rank's parts are one plain safetensors file. Where a part lies in its whole tensor stands in the checkpoint's tree, so
that another layout reads exactly the rows and columns that it needs, bit for bit.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint.tensors import stage
from echelon.core.errors import UserError

Run = tuple[int, int]
Runs = tuple[tuple[Run, ...], ...]
_KEY = "__parts__"
_POLL_S = 0.02
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor of `shape`: for each dim the ranges of the whole that its rows come from."""

    tensor: Tensor
    shape: tuple[int, ...]
    runs: Runs


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint that lies in parts; nothing is read before `read`."""

    folder: Path
    shape: tuple[int, ...]
    parts: tuple[Mapping[str, Any], ...]

    def read(self, runs: Runs | None = None) -> Tensor:
        """Read the whole tensor, or what lies in some ranges of each dim.

        Raises:
            ValueError: the parts do not cover it.
        """
        from safetensors import safe_open

        wanted = runs if runs is not None else tuple(((0, size),) for size in self.shape)
        result: Tensor | None = None
        filled = 0
        for part in self.parts:
            with safe_open(self.folder / part["file"], "pt") as file:
                stored = file.get_slice(part["name"])
                for source, target in _overlaps(part["runs"], wanted):
                    piece = stored[source] if source else file.get_tensor(part["name"])
                    if result is None:
                        result = torch.empty([_length(dim) for dim in wanted], dtype=piece.dtype)
                    result[target] = piece
                    filled += piece.numel()
        if result is None or filled < result.numel():
            raise ValueError(f"parts of a tensor of shape {self.shape} are missing")
        return result


def take_parts(state: Any, file: str) -> tuple[Any, dict[str, Tensor]]:
    """Replace every Part in a state by where it will lie in `file`; returns the state and the tensors for the file."""
    tensors: dict[str, Tensor] = {}

    def replaced(value: Any, where: str) -> Any:
        if isinstance(value, Part):
            tensors[where] = value.tensor
            runs = [[list(run) for run in dim] for dim in value.runs]
            return {_KEY: {"shape": list(value.shape), "parts": [{"file": file, "name": where, "runs": runs}]}}
        if isinstance(value, Mapping):
            return {key: replaced(item, f"{where}.{key}") for key, item in value.items()}
        return value

    return replaced(state, "state"), tensors


def merge(states: list[Any]) -> Any:
    """Join the states of several ranks: dicts key by key, parts of the same tensor, of all else the first."""
    first = states[0]
    if not isinstance(first, Mapping):
        return first
    if _KEY in first:
        return {_KEY: {**first[_KEY], "parts": [part for state in states for part in state[_KEY]["parts"]]}}
    keys = dict.fromkeys(key for state in states for key in state)
    return {key: merge([state[key] for state in states if key in state]) for key in keys}


def join_parts(state: Any, folder: Path) -> Any:
    """Replace what `take_parts` left by `Stored` tensors of a checkpoint's folder."""
    if isinstance(state, Mapping):
        if _KEY in state:
            return Stored(folder, tuple(state[_KEY]["shape"]), tuple(state[_KEY]["parts"]))
        return {key: join_parts(value, folder) for key, value in state.items()}
    return state


def whole(state: Any) -> Any:
    """Read every `Stored` tensor of a state in full."""
    if isinstance(state, Stored):
        return state.read()
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    return state


class PartWriter:
    """Writes a rank's parts behind the training, one file after the other."""

    def __init__(self, deadline_s: float = 600.0) -> None:
        self._deadline_s = deadline_s
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None

    def write(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors, then write them to `file` in the background; the file appears when it is whole.

        Raises:
            UserError: the one before could not be written.
        """
        self.wait()
        staged = stage(tensors)
        self._thread = threading.Thread(target=self._run, args=(file, staged), name="echelon-parts")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the file under way.

        Raises:
            UserError: it could not be written.
            TimeoutError: the disk is stuck.
        """
        if self._thread is not None:
            self._thread.join(self._deadline_s)
            if self._thread.is_alive():
                raise TimeoutError(f"a part of a checkpoint is not written after {self._deadline_s:g} s: a stuck disk?")
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise UserError(f"cannot write a part of a checkpoint: {failure.strerror or failure}") from failure

    def _run(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        unfinished = file.with_suffix(".unfinished")
        try:
            write_file(unfinished, tensors)
            unfinished.rename(file)
        except OSError as error:  # raised by `wait`, where it can be handled
            self._failure = error


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write CPU tensors as one durable safetensors file, tensor by tensor. Raises OSError."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def collect(source: Path, names: list[str], target: Path, deadline_s: float) -> None:
    """Move the ranks' files from one folder into another as they become whole.

    Raises:
        UserError: some did not come in time.
    """
    end = time.monotonic() + deadline_s
    missing = list(names)
    while missing:
        here = [name for name in missing if (source / name).exists()]
        for name in here:
            (source / name).rename(target / name)
        missing = [name for name in missing if name not in here]
        if missing and time.monotonic() > end:
            raise UserError(
                f"{len(missing)} ranks did not write their parts of a checkpoint to {source} within {deadline_s:g} s: "
                "put --run on storage that all machines share"
            )
        if missing:
            time.sleep(_POLL_S)
    source.rmdir()


def _overlaps(stored: Any, wanted: Runs) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield slices of the stored part and of the wanted tensor that hold the same elements."""
    by_dim = [list(_common(dim, want)) for dim, want in zip(stored, wanted, strict=True)]
    for combination in product(*by_dim):
        yield (
            tuple(slice(source, source + length) for source, _, length in combination),
            tuple(slice(target, target + length) for _, target, length in combination),
        )


def _common(stored: Any, wanted: tuple[Run, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield (start in the stored order, start in the wanted order, length) of the ranges that both hold."""
    before = 0
    for start, stop in stored:
        at = 0
        for low, high in wanted:
            first, last = max(start, low), min(stop, high)
            if first < last:
                yield before + first - start, at + first - low, last - first
            at += high - low
        before += stop - start


def _length(runs: tuple[Run, ...]) -> int:
    return sum(stop - start for start, stop in runs)
