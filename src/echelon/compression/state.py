"""What stands around a codec: a tensor's description, its encoded form, what is remembered of it, common checks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.compression.native import streaming_kernels_for
from echelon.torch_compat import foreach_norm


class NonFiniteError(ValueError):
    """A tensor to be encoded holds NaN or infinity; `name` is its parameter. No state was changed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"gradient of {name!r} holds NaN, infinity or what its codec cannot hold")
        self.name = name


@dataclass(frozen=True)
class Meta:
    """What sender and receiver both know about a tensor without sending it."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @staticmethod
    def of(tensor: Tensor) -> Meta:
        """Return shape and dtype of a tensor of any shape."""
        return Meta(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True)
class Payload:
    """One encoded tensor.

    Attributes:
        tensors: what travels: contiguous 1-D tensors on the input's device, of the codec's `layout`.
        meta: shape and dtype of the tensor it stands for.
        n_bytes: length of `to_bytes(payload)`: what goes over the wire.
        chosen: at the sender of a sparse message, its indices and decoded values, so that they need no unpacking there.
    """

    tensors: tuple[Tensor, ...]
    meta: Meta
    n_bytes: int
    chosen: tuple[Tensor, Tensor] | None = None


@dataclass
class State:
    """What a codec remembers of one tensor between steps. Everything here belongs into a checkpoint.

    Attributes:
        name: the parameter's name, the same on all workers; errors say it and seeds depend on it.
        seed: the same on all workers (shared draws: randomk's indices, PowerSGD's first factor).
        stream: the sender's number (its rank): dithers of different senders are independent.
        elementwise: tensors with one value per element of the encoded tensor (1-D, in element order), such as "error"
            and "velocity". Codecs change them in place, so they may be views of a larger tensor, may be cut and
            concatenated by element, and are summed when the number of workers changes (`feedback.resize`).
        factors: tensors of other sizes (PowerSGD's "q").
        numbers: scalars: "step" (messages encoded so far), thresholds, counters of the entropy coder.
    """

    name: str
    seed: int = 0
    stream: int = 0
    elementwise: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=lambda: {"step": 0})

    @property
    def step(self) -> int:
        """Messages encoded so far."""
        return int(self.numbers["step"])

    def shared_key(self) -> int:
        """A number that all workers share for this tensor and step."""
        return _mix(self.seed, zlib.crc32(self.name.encode()), self.step)

    def own_key(self) -> int:
        """A number for this tensor, step and sender."""
        return _mix(self.shared_key(), self.stream, 0x9E3779B9)

    def state_dict(self) -> dict[str, Tensor | float]:
        """Return the state as tensors and scalars under flat keys such as `memory.error` (tensors are not copied)."""
        flat: dict[str, Tensor | float] = {f"numbers.{k}": v for k, v in self.numbers.items()}
        flat |= {f"memory.{k}": v for k, v in self.elementwise.items()}
        return flat | {f"factors.{k}": v for k, v in self.factors.items()}

    def load_state_dict(self, flat: dict[str, Tensor | float]) -> None:
        """Take over what `state_dict` returned, in place.

        Raises:
            ValueError: keys or shapes are not those of this state (another codec, another tensor).
        """
        numbers = {k.removeprefix("numbers."): float(v) for k, v in flat.items() if k.startswith("numbers.")}
        tensors = {k: v for k, v in flat.items() if isinstance(v, Tensor)}
        own = {k: v for k, v in self.state_dict().items() if isinstance(v, Tensor)}
        shapes = {k: tuple(v.shape) for k, v in tensors.items()}
        wanted = {k: tuple(v.shape) for k, v in own.items()}
        if shapes != wanted:
            raise ValueError(f"compression state of {self.name!r} does not fit: it has {shapes}, needs {wanted}")
        for key, tensor in own.items():
            tensor.copy_(tensors[key])
        self.numbers = {k: int(v) if v.is_integer() else v for k, v in numbers.items()}


def empty(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised 1-D tensor; on a CPU from numpy, which asks for huge pages: far fewer page faults."""
    if device.type != "cpu" or n == 0:
        return torch.empty(n, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(n * dtype.itemsize, np.uint8)).view(dtype)


def on_gpu(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of any shape should be handled in one go.

    Launches set a GPU's pace; on a CPU what fits the cache does.
    """
    return bool(tensors) and tensors[0].device.type != "cpu"


def moved(numbers: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return numbers, of any shape, as a tensor on a device, which is not waited for."""
    host = torch.from_numpy(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that codecs compute and remember in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def flat(tensor: Tensor) -> Tensor:
    """Return the tensor as a contiguous 1-D tensor of the working dtype (no copy where it is one already)."""
    return tensor.detach().reshape(-1).to(working_dtype(tensor.dtype)).contiguous()


def flat32(tensor: Tensor) -> Tensor:
    """Return the tensor as a contiguous 1-D float32 tensor (no copy where it is one already)."""
    return tensor.detach().reshape(-1).to(torch.float32).contiguous()


def refuse_nonfinite(statistic: Tensor | float, state: State) -> None:
    """Raise NonFiniteError unless a scalar, the sum or maximum over a tensor, is finite (on CUDA: waits for it)."""
    if not math.isfinite(float(statistic)):
        raise NonFiniteError(state.name)


def refuse_nonfinite_elements(values: Tensor, state: State, limit: float = math.inf) -> None:
    """Raise NonFiniteError if any element, any shape, is NaN, infinite or beyond `limit` (one pass; waits for CUDA)."""
    worst = largest_magnitude(values)
    refuse_nonfinite(worst if worst <= limit else math.inf, state)


def largest_magnitude(values: Tensor) -> float:
    """Return max |x| of values, any shape: 0 of none, and NaN if any element is (one pass; waits for CUDA)."""
    if not values.numel():
        return 0.0
    if (kernels := streaming_kernels_for(values)) is not None:
        return kernels.peak(values)
    low, high = torch.aminmax(values)
    return float(torch.maximum(high, -low))


def refuse_nonfinite_together(tensors: Sequence[Tensor], states: Sequence[State]) -> None:
    """Raise NonFiniteError, by the first name, if an element of tensors of any shape is not finite."""
    filled = [(tensor, state) for tensor, state in zip(tensors, states, strict=True) if tensor.numel()]
    if not filled:
        return
    peaks = torch.stack(foreach_norm([tensor for tensor, _ in filled], math.inf)).tolist()
    for peak, (_, state) in zip(peaks, filled, strict=True):
        refuse_nonfinite(peak, state)


def _mix(*words: int) -> int:
    """Hash integers to 63 bits (splitmix64), the same on every machine."""
    x = 0
    for word in words:
        x = (x + word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        x ^= x >> 31
    return x >> 1
