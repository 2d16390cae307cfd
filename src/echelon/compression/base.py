"""The interface of a codec: what travels instead of a tensor.

A codec is a frozen dataclass of settings with functions on tensors; what changes from step to step is a `State`, one
per tensor that is encoded. Codecs know no process group. A message goes

    payload = codec.compress(tensor, state)      sender; counts the step, updates memories
    buffer = codec.to_bytes(payload)             one flat uint8 buffer
    payload = codec.from_bytes(buffer, meta)     receiver; meta = Meta(shape, dtype) is known to both
    tensor = codec.extract(payload)              or codec.add_to(total, payload)

In the compressed all-reduce the owner of a chunk encodes the sum again with `codec.relay()` and a state of its own
(the second error feedback). A linear codec can be reduced directly: see `Codec.reduce_rounds`.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from echelon.compression.wire import Layout, pack, packed_bytes, unpack

Rounds = Generator[Tensor, Tensor, Tensor]
"""Yields what is to be reduced, is sent its mean over the workers, returns the mean of the workers' tensors."""


class NonFiniteError(ValueError):
    """A tensor to be encoded holds NaN or infinity; `name` is its parameter. No state was changed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"gradient of {name!r} holds NaN or infinity: it cannot be compressed")
        self.name = name


@dataclass(frozen=True)
class Meta:
    """What sender and receiver both know about a tensor without sending it."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @staticmethod
    def of(tensor: Tensor) -> Meta:
        return Meta(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True)
class Payload:
    """One encoded tensor.

    Attributes:
        tensors: what travels: contiguous 1-D tensors on the input's device, of the codec's `layout`.
        meta: shape and dtype of the tensor it stands for.
        n_bytes: length of `to_bytes(payload)`: what goes over the wire.
    """

    tensors: tuple[Tensor, ...]
    meta: Meta
    n_bytes: int


@dataclass
class State:
    """What a codec remembers of one tensor between steps. Everything here belongs into a checkpoint.

    Attributes:
        name: the parameter's name, the same on all workers; errors say it and seeds depend on it.
        seed: the same on all workers (shared draws: randomk's indices, PowerSGD's first factor).
        stream: the sender's number (its rank): dithers of different senders are independent.
        memory: tensors with one value per element of the encoded tensor (1-D, in element order), such as "error" and
            "velocity". Codecs change them in place, so they may be views of a larger tensor, may be cut and
            concatenated by element, and are summed when the number of workers changes (`feedback.resize`).
        factors: tensors of other sizes (PowerSGD's "q").
        numbers: scalars: "step" (messages encoded so far), thresholds, counters of the entropy coder.
    """

    name: str
    seed: int = 0
    stream: int = 0
    memory: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=lambda: {"step": 0})

    @property
    def step(self) -> int:
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
        flat |= {f"memory.{k}": v for k, v in self.memory.items()}
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


class Codec(ABC):
    """A way to send a tensor in fewer bits. Subclasses are frozen dataclasses of their settings.

    Attributes:
        name: the spec name (the file's name).
        linear: `reduce_rounds` works: what is sent can be averaged over workers before it is decoded.
        biased: without error feedback training suffers; `registry.build` wraps such a codec in `ErrorFeedback`.
        shaped: works on a parameter's own matrix shape: encode parameters one by one, never a concatenated bucket.
        direction: the result of a compressed all-reduce is a direction of fixed size (majority vote), neither a sum
            nor a mean: do not divide it by the number of workers.
        absorbs_momentum: the momentum that the codec applies in the worker before encoding: the optimizer's must be
            0 (`momentum.optimizer_momentum` says so in words). None: it leaves momentum to the optimizer.
    """

    name: ClassVar[str]
    linear: ClassVar[bool] = False
    biased: ClassVar[bool] = False
    shaped: ClassVar[bool] = False

    @property
    def direction(self) -> bool:
        return False

    @property
    def absorbs_momentum(self) -> float | None:
        return None

    @property
    def fixed_size(self) -> bool:
        """The payload's size depends on the number of elements alone."""
        return all(count is not None for _, count in self.layout(1))

    @abstractmethod
    def layout(self, numel: int) -> Layout:
        """Return dtype and length of each of the payload's tensors; a length is None where it depends on the values."""

    @abstractmethod
    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Encode a float tensor of any shape and count one step.

        Raises:
            NonFiniteError: the tensor holds NaN or infinity; the state is unchanged.
        """

    @abstractmethod
    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Decode into a tensor of the payload's shape and dtype: a new one, or `out` (contiguous, as many elements)."""

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        """Return the state of a tensor of that shape, dtype and device, before the first step."""
        return State(name, seed, stream)

    def relay(self) -> Codec:
        """Return the codec for a sum on its way back: without what belongs to a worker (momentum, clipping)."""
        return self

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Add `alpha` times the decoded tensor to `target`, in place; sparse codecs touch only what was sent."""
        target.add_(self.extract(payload).view_as(target), alpha=alpha)

    def clear_sent(self, target: Tensor, payload: Payload) -> None:  # noqa: B027 (most codecs have nothing to do)
        """Zero `target` where the payload carries a value; dense codecs leave it as it is."""

    def n_bytes(self, numel: int) -> int | None:
        """Length of `to_bytes` for a tensor of `numel` elements; None where it depends on the values."""
        return packed_bytes(self.layout(numel))

    def bits_per_element(self, numel: int, state: State | None = None) -> float:
        """Predicted bits on the wire per element; with a state, from what it has seen. NaN: only values can tell."""
        size = self.n_bytes(numel)
        return math.nan if size is None else 8.0 * size / max(numel, 1)

    def density(self, state: State) -> float:
        """Share of elements that the next message carries a value for."""
        return 1.0

    def planes(self, payload: Payload) -> tuple[Tensor, ...]:
        """Return the payload as uint8 symbol streams for entropy coding.

        Raises:
            TypeError: the codec sends no symbols (`takes_entropy_coding` is false).
        """
        raise TypeError(f"{self.name} sends no symbols that entropy coding could shorten")

    def from_planes(self, planes: tuple[Tensor, ...], meta: Meta) -> Payload:
        """Undo `planes`."""
        raise TypeError(f"{self.name} sends no symbols that entropy coding could shorten")

    @property
    def takes_entropy_coding(self) -> bool:
        """Whether `+huffman` may follow: true for codecs that define `planes`."""
        return type(self).planes is not Codec.planes

    def payload(self, tensors: Sequence[Tensor], meta: Meta) -> Payload:
        """Build a payload of this codec's layout."""
        sizes = tuple((t.dtype, t.numel()) for t in tensors)
        header = 0 if self.fixed_size else 8 * len(sizes)
        size = packed_bytes(sizes)
        assert size is not None
        return Payload(tuple(tensors), meta, size + header)

    def to_bytes(self, payload: Payload) -> Tensor:
        """Write a payload into one uint8 buffer on its device; lengths go first where they vary."""
        return pack(payload.tensors, with_lengths=not self.fixed_size)

    def from_bytes(self, buffer: Tensor, meta: Meta) -> Payload:
        """Read a payload from a uint8 buffer, which may be longer. The payload may share its memory.

        Raises:
            ValueError: the buffer does not hold such a payload.
        """
        return self.payload(unpack(buffer, self.layout(meta.numel)), meta)

    def reduce_rounds(self, tensor: Tensor, state: State) -> Rounds:
        """Reduce the workers' tensors directly, for linear codecs: yield, be sent the mean, return the mean.

        Each worker runs its generator, all-reduces what it yields (1-D, any float dtype, same length on all workers)
        and sends back the *mean* over the workers. It returns the mean tensor, of the input's shape and dtype.

        Raises:
            NonFiniteError: before the first yield.
        """
        raise TypeError(f"{self.name} is not linear: use compress and extract")


def fuse_rounds(rounds: Sequence[Rounds]) -> Generator[Tensor, Tensor, list[Tensor]]:
    """Run the rounds of several tensors as one: each reduction carries all of them, concatenated.

    All must be of one codec, so that they yield equally often and equal dtypes; returns their results in order.
    """
    pieces = [next(r) for r in rounds]
    results: list[Tensor] = []
    while pieces:
        reduced = (yield torch.cat(pieces)).split([p.numel() for p in pieces])
        following: list[Tensor] = []
        for one, mean in zip(rounds, reduced, strict=True):
            try:
                following.append(one.send(mean))
            except StopIteration as stop:
                results.append(stop.value)
        if following and results:
            raise ValueError("tensors of one fused reduction must take equally many rounds")
        pieces = following
    return results


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that codecs compute and remember in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def flat(tensor: Tensor) -> Tensor:
    """Return the tensor as a contiguous 1-D tensor of the working dtype (no copy where it is one already)."""
    return tensor.detach().reshape(-1).to(working_dtype(tensor.dtype)).contiguous()


def refuse_nonfinite(statistic: Tensor | float, state: State) -> None:
    """Raise NonFiniteError unless a sum or maximum over the tensor is finite (on CUDA: waits for one number)."""
    if not math.isfinite(float(statistic)):
        raise NonFiniteError(state.name)


def _mix(*words: int) -> int:
    """Hash integers to 63 bits (splitmix64), the same on every machine."""
    x = 0
    for word in words:
        x = (x + word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        x ^= x >> 31
    return x >> 1
