"""The C loops as functions on tensors; each gives the bits of its caller's numpy loop.

Tensors are contiguous, 1-D, on a CPU, and float32 unless said; all others, and lengths that do not fit, are refused:
C would read whatever lies there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from echelon.compression.native.library import load

_SIGNATURES: dict[str, tuple[type | None, str]] = {  # the type of the result, and those of the arguments
    "peak": (c_uint32, "pn"),
    "above": (c_int64, "pnfpp"),
    "encode_signs": (None, "pnnpp"),
    "encode_signs_with_memory": (None, "ppnnpp"),
    "decode_signs": (None, "ppfnnfp"),
    "quantise": (c_int32, "pnniffppninpp"),
    "dequantise": (None, "ppnniinfp"),
    "move_velocity": (None, "ppnf"),
    "add_at": (c_int64, "pnppnf"),
    "pack_indices": (c_int64, "pniippn"),
    "unpack_indices": (c_int64, "ppnniip"),
}
_TYPES = {"p": c_void_p, "n": c_int64, "i": c_int32, "f": c_float}

_SCANNED = 1 << 20  # elements whose indices wait in the cache to be copied
_SPARE = 3  # of kernels.c: so many may be written beyond the last index

_FEW_THREADS = 2  # each walks memory as fast as the C loops: more of them, all with a part of it, are faster

_is_off: ContextVar[bool] = ContextVar("numpy_alone", default=False)


@dataclass(frozen=True)
class Packing:
    """How codes lie in bytes.

    Attributes:
        width: planes of one bit of each code; 8: a byte each; 0: base-3 digits, five a byte.
        stride: bytes of a plane, or of all digits.
    """

    width: int
    stride: int

    def holds(self, numel: int, n_bytes: int) -> bool:
        """Whether so many packed bytes hold so many codes."""
        planes, codes = {0: (1, 5), 8: (1, 1)}.get(self.width, (self.width, 8))
        return self.stride * codes >= numel and self.stride * planes <= n_bytes


@dataclass(frozen=True)
class Rounding:
    """How elements become codes: the numbers that `blocks.quantise` computes with.

    Attributes:
        block: elements that share a scale.
        levels: positive levels.
        limit: largest magnitude, in levels, of what is rounded.
        clip: root mean squares beyond which values are cut off; 0: none are.
    """

    block: int
    levels: int
    limit: float
    clip: float


@dataclass(frozen=True)
class Dither:
    """What is added before rounding down.

    Attributes:
        table: its values, twice over.
        starts: where each stretch of elements begins to read them, int64 [stretches].
        stretch: elements of one.
    """

    table: Tensor
    starts: Tensor
    stretch: int


class Kernels:
    """The functions of the library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"echelon_{name}")
            function.restype, function.argtypes = result, [_TYPES[letter] for letter in arguments]
        self._library = library

    def peak(self, x: Tensor) -> float:
        """Return max |x| of x [n]: 0 of none, and NaN if any element is."""
        return _float(self._library.echelon_peak(_address(x), x.numel()))

    def above(self, x: Tensor, threshold: float) -> tuple[Tensor, float]:
        """Return the indices where |x| > threshold, ascending, int64, of x [n], and max |x|."""
        room, highest = np.empty(min(x.numel(), _SCANNED) + _SPARE, np.int64), c_uint32()
        address, at, peak = room.ctypes.data, ctypes.addressof(highest), 0
        pieces = [np.empty(0, np.int64)]
        for start in range(0, x.numel(), _SCANNED):
            size = min(_SCANNED, x.numel() - start)
            count = self._library.echelon_above(_address(x) + 4 * start, size, threshold, address, at)
            pieces.append(room[:count] + start)
            peak = max(peak, highest.value)
        return torch.from_numpy(np.concatenate(pieces)), _float(peak)

    def encode_signs(self, x: Tensor, block: int, scales: Tensor, signs: Tensor) -> None:
        """Write mean |x| of each block of x [n] to scales [blocks], and x >= 0 to signs, uint8 [ceil(n / 8)]."""
        self._library.echelon_encode_signs(
            _address(x), x.numel(), block, _address(scales), _address(signs, torch.uint8)
        )

    def encode_signs_with_memory(
        self, added: Tensor | None, memory: Tensor, block: int, scales: Tensor, signs: Tensor
    ) -> None:
        """Add to the memory [n], encode it as `encode_signs` does, and subtract what was sent; nothing may overflow.

        Raises:
            ValueError: what is added has another length.
        """
        _check_lengths(memory, added)
        self._library.echelon_encode_signs_with_memory(
            None if added is None else _address(added),
            _address(memory),
            memory.numel(),
            block,
            _address(scales),
            _address(signs, torch.uint8),
        )

    def decode_signs(self, signs: Tensor, scales: Tensor | float, block: int, out: Tensor, alpha: float = 0.0) -> None:
        """Write the signs times their blocks' scales, or times one number, to out [n].

        Args:
            signs: uint8 [ceil(n / 8)].
            scales: [blocks], or a number.
            block: elements that share a scale.
            alpha: 1: add to `out`, -1: subtract from it, 0: overwrite it.

        Raises:
            ValueError: `out` has more elements than these.
        """
        blocks = -(-out.numel() // block)
        _check_length(8 * signs.numel() >= out.numel(), out)
        _check_length(not isinstance(scales, Tensor) or scales.numel() >= blocks, out)
        per_block, unit = (_address(scales), 0.0) if isinstance(scales, Tensor) else (None, scales)
        self._library.echelon_decode_signs(
            _address(signs, torch.uint8), per_block, unit, out.numel(), block, alpha, _address(out)
        )

    def quantise(
        self, x: Tensor, rounding: Rounding, dither: Dither, packing: Packing, steps: Tensor, packed: Tensor
    ) -> bool:
        """Round x [n] to steps [blocks] and packed codes, uint8; returns whether all elements are finite."""
        finite: int = self._library.echelon_quantise(
            _address(x),
            x.numel(),
            rounding.block,
            rounding.levels,
            rounding.limit,
            rounding.clip,
            _address(dither.table),
            _address(dither.starts, torch.int64),
            dither.stretch,
            packing.width,
            packing.stride,
            _address(steps),
            _address(packed, torch.uint8),
        )
        return bool(finite)

    def dequantise(
        self, steps: Tensor, packed: Tensor, rounding: Rounding, packing: Packing, out: Tensor, alpha: float = 0.0
    ) -> None:
        """Write packed codes times their blocks' steps to out [n]; `alpha` as in `decode_signs`.

        Raises:
            ValueError: `out` has more elements than these.
        """
        _check_length(packing.holds(out.numel(), packed.numel()), out)
        _check_length(steps.numel() * rounding.block >= out.numel(), out)
        self._library.echelon_dequantise(
            _address(steps),
            _address(packed, torch.uint8),
            out.numel(),
            rounding.block,
            rounding.levels,
            packing.width,
            packing.stride,
            alpha,
            _address(out),
        )

    def move_velocity(self, velocity: Tensor, gradient: Tensor, momentum: float) -> None:
        """Multiply a velocity [n] by the momentum and add a gradient [n]; the product is rounded before.

        Raises:
            ValueError: the gradient has another length.
        """
        _check_lengths(velocity, gradient)
        self._library.echelon_move_velocity(_address(velocity), _address(gradient), velocity.numel(), momentum)

    def add_at(self, target: Tensor, indices: Tensor, values: Tensor, alpha: float) -> None:
        """Add `alpha`, 1 or -1, times values [k] at distinct indices, int64 [k], of a target [n].

        Raises:
            ValueError: there are not as many values.
            IndexError: an index is not below n (a damaged message); those before it are added.
        """
        _check_lengths(indices, values)
        count, n = indices.numel(), target.numel()
        added = self._library.echelon_add_at(
            _address(target), n, _address(indices, torch.int64), _address(values), count, alpha
        )
        if added < count:
            raise IndexError(f"index {int(indices[added])} is out of range of {n} elements")

    def pack_indices(self, indices: Tensor, low: int | None, lows: Tensor, marks: Tensor, n_marks: int) -> None:
        """Write ascending indices, int64 [k], as `bits.pack_indices` describes it.

        Args:
            indices: contiguous.
            low: bits of each that go to `lows`; None: there is a bitmap alone.
            lows: uint8, planes of bits.
            marks: uint8 [ceil(n_marks / 8)], the bitmap.
            n_marks: its bits.

        Raises:
            IndexError: an index is negative, or the bitmap has no place for it.
        """
        count, is_coded = indices.numel(), low is not None
        places = _address(lows, torch.uint8), _address(marks, torch.uint8), n_marks
        done = self._library.echelon_pack_indices(_address(indices, torch.int64), count, low or 0, is_coded, *places)
        if done < count:
            raise IndexError(
                f"index {int(indices[done])} cannot be packed: indices ascend, from 0 to less than the size"
            )

    def unpack_indices(self, lows: Tensor, marks: Tensor, n_marks: int, k: int, low: int | None) -> tuple[Tensor, int]:
        """Undo `pack_indices`; returns int64 [k], and how many there are, which of a damaged message is not k."""
        indices = np.empty(k, np.int64)
        count: int = self._library.echelon_unpack_indices(
            _address(lows, torch.uint8),
            _address(marks, torch.uint8),
            n_marks,
            k,
            low or 0,
            low is not None,
            indices.ctypes.data,
        )
        return torch.from_numpy(indices), count


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """Return what computes with contiguous float32 tensors on a CPU; None: numpy does, with the same bits."""
    fit = all(tensor.is_cpu and tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
    return kernels_on(tensors[0].device) if fit else None


def streaming_kernels_for(*tensors: Tensor) -> Kernels | None:
    """Do what `kernels_for` does, for loops that torch runs on several threads: None where it has more than a few."""
    return kernels_for(*tensors) if torch.get_num_threads() <= _FEW_THREADS else None


def kernels_on(device: torch.device) -> Kernels | None:
    """Return what computes on a CPU, with tensors that the caller has made for it; None: numpy or torch does."""
    return _kernels() if device.type == "cpu" and not _is_off.get() else None


def why_numpy() -> str:
    """Return why numpy computes what could be compiled; empty where it is. Compiles it where that has not been done."""
    return load().reason


@contextmanager
def switched_off() -> Iterator[None]:
    """Let numpy compute in this context: what measures or tests both does."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


@lru_cache(maxsize=1)
def _kernels() -> Kernels | None:
    library = load().library
    return None if library is None else Kernels(library)


def _address(tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Return where the elements of a tensor are for C."""
    if tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous():
        return tensor.data_ptr()
    order = "" if tensor.is_contiguous() else ", not contiguous"
    raise ValueError(f"compiled loops need a contiguous {dtype} on a CPU: {tensor.dtype} on {tensor.device}{order}")


def _check_lengths(tensor: Tensor, other: Tensor | None) -> None:
    if other is not None and other.numel() != tensor.numel():
        raise ValueError(f"a tensor of {other.numel()} elements does not go with one of {tensor.numel()}")


def _check_length(is_long_enough: bool, out: Tensor) -> None:
    if not is_long_enough:
        raise ValueError(f"message is too short for a tensor of {out.numel()} elements")


def _float(bits: int) -> float:
    """Return the float32 of these bits."""
    return float(np.uint32(bits).view(np.float32))
