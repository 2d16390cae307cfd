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
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from echelon.compression.rungs import RungControl
from echelon.compression.state import (
    Meta,
    NonFiniteError,
    Payload,
    State,
    empty,
    flat,
    flat32,
    refuse_nonfinite,
    refuse_nonfinite_elements,
    working_dtype,
)
from echelon.compression.wire import Layout, pack, packed_bytes, unpack

__all__ = [
    "Codec",
    "Meta",
    "NonFiniteError",
    "Payload",
    "Rounds",
    "State",
    "empty",
    "flat",
    "flat32",
    "fuse_rounds",
    "refuse_nonfinite",
    "refuse_nonfinite_elements",
    "working_dtype",
]

Rounds = Generator[Tensor, Tensor, Tensor]
"""Yields what is to be reduced, is sent its mean over the workers, returns the mean of the workers' tensors."""


WARMUP_SHARE = 0.05
FINISH_SHARE = 0.02
"""Of a run's messages, at its start and at its end: what `Eased` codecs leave out unless told otherwise."""


def share_of(messages: int, share: float) -> int:
    """Return a share of so many messages, at least one of them; 0 of none."""
    return max(1, round(share * messages)) if messages else 0


@dataclass(frozen=True)
class WholeSteps:
    """Which of a tensor's messages carry it (nearly) whole, counted from 0.

    Attributes:
        first: so many at the start.
        last: so many at the end.
        messages: of the run; 0: not known, and then no end is.
    """

    first: int = 0
    last: int = 0
    messages: int = 0

    def __contains__(self, step: int) -> bool:
        return step < self.first or (self.messages > 0 and step >= self.messages - self.last)


NEVER = WholeSteps()


class Codec(ABC):
    """A way to send a tensor in fewer bits. Subclasses are frozen dataclasses of their settings.

    Attributes:
        name: the spec name (the file's name).
        examples: specs that show its settings, the simplest first; every law is tried on each. Empty: the name alone.
        linear: `reduce_rounds` works: what is sent can be averaged over workers before it is decoded.
        biased: without error feedback training suffers; `registry.build` wraps such a codec in `ErrorFeedback`.
        shaped: works on a parameter's own matrix shape: encode parameters one by one, never a concatenated bucket.
        direction: the result of a compressed all-reduce is a direction of fixed size (majority vote), neither a sum
            nor a mean: do not divide it by the number of workers.
        absorbs_momentum: the momentum that the codec applies in the worker before encoding: the optimizer's must be
            0 (`Compression.with_momentum` sees to it). None: it leaves momentum to the optimizer.
        looks_ahead: that momentum is Nesterov's: g + m u is encoded, not u.
        momentum_inside: momentum after decoding spoils training, also where the codec itself applies none.
        takes_rows: encodes the touched rows of a sparse table as well: without memory of a step, to a size that the
            number of elements tells.
        mask_below: the density below which momentum is zeroed where values were sent (DGC's momentum factor masking);
            where much is sent it would remove most of the momentum and hurt accuracy.
        local_clip: each worker's tensor is scaled down to this Euclidean norm before encoding; 0: never.
    """

    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]] = ()
    linear: ClassVar[bool] = False
    shaped: ClassVar[bool] = False
    takes_rows: ClassVar[bool] = False
    momentum_inside: ClassVar[bool] = False
    mask_below: ClassVar[float] = 0.05

    @property
    def biased(self) -> bool:
        """Whether the decoded tensor differs from the encoded one on average; a codec says yes by overriding it."""
        return False

    @property
    def direction(self) -> bool:
        """Whether the sum over workers is a direction of fixed size, as that of a vote."""
        return False

    @property
    def absorbs_momentum(self) -> float | None:
        """Coefficient of the momentum that the worker applies before encoding; None: it applies none."""
        return None

    @property
    def looks_ahead(self) -> bool:
        """Whether that momentum has Nesterov's form."""
        return False

    @property
    def follows_link(self) -> bool:
        """Whether gradients go as they are while that makes faster steps."""
        return False

    @property
    def local_clip(self) -> float:
        """Euclidean norm to which a worker's tensor is clipped before encoding; 0: it is not."""
        return 0.0

    @property
    def largest(self) -> float:
        """The magnitude beyond which values are refused, as NaN is."""
        return math.inf

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

    def compress_parts(self, tensors: Sequence[Tensor], states: Sequence[State]) -> list[Payload]:
        """Encode several tensors of any shape, each with a state of its own, as `compress` does.

        Raises:
            NonFiniteError: one holds NaN or infinity; states may have counted a step.
        """
        return [self.compress(tensor, state) for tensor, state in zip(tensors, states, strict=True)]

    def extract_parts(self, payloads: Sequence[Payload], outs: Sequence[Tensor]) -> None:
        """Decode several payloads, each into a tensor of its own (any shape, as many elements), as `extract` does."""
        for payload, out in zip(payloads, outs, strict=True):
            self.extract(payload, out)

    def add_parts(self, target: Tensor, payloads: Sequence[Payload]) -> None:
        """Add several payloads to `target`, any shape, one after the other, as `add_to` does."""
        for payload in payloads:
            self.add_to(target, payload)

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        """Return the state of a tensor of that shape, dtype and device, before the first step."""
        return State(name, seed, stream)

    def relay(self) -> Codec:
        """Return the codec for a sum on its way back: without what belongs to a worker (momentum, clipping)."""
        return self

    def for_run(self, messages: int) -> Codec:
        """Return the codec with what its settings leave to how many messages of a tensor a run has."""
        return self

    def length_notes(self, messages: int) -> list[str]:
        """Say what follows from how many messages of a tensor a run has (`for_run` was called)."""
        return []

    def whole_steps(self, messages: int) -> WholeSteps:
        """Return which of a run's messages this codec leaves to `at`'s: none, but for codecs that are `Eased`."""
        return NEVER

    def at(self, step: int) -> Codec:
        """Return what encodes and decodes a tensor's message number `step` (from 0); it works on this codec's state."""
        return self

    def control(self, side: str = "") -> RungControl | None:
        """Return what decides, from what all ranks know, how lossy a vector's next messages are; None: nothing does.

        Args:
            side: of the controller: what its entries of `State.numbers` begin with.
        """
        return None

    def pinned(self, rung: int) -> Codec:
        """Return what encodes and decodes the messages of a rung of `control`, with this codec's state."""
        return self

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Add `alpha` times the decoded tensor to `target`, any shape, in place; sparse codecs touch what was sent."""
        target.add_(self.extract(payload).view_as(target), alpha=alpha)

    def clear_sent(self, target: Tensor, payload: Payload) -> None:  # noqa: B027 (most codecs have nothing to do)
        """Zero `target`, any shape, where the payload carries a value; dense codecs leave it as it is."""

    def n_bytes(self, numel: int) -> int | None:
        """Length of `to_bytes` for a tensor of `numel` elements; None where it depends on the values."""
        return packed_bytes(self.layout(numel))

    def bits_per_element(self, numel: int, state: State | None = None) -> float:
        """Predicted bits on the wire per element; with a state, from what it has seen. NaN: only values can tell."""
        size = self.n_bytes(numel)
        return math.nan if size is None else 8.0 * size / max(numel, 1)

    def share_sent(self, state: State) -> float:
        """Share of elements that the next message carries a value for."""
        return 1.0

    def planes(self, payload: Payload) -> tuple[Tensor, ...]:
        """Return the payload as uint8 symbol streams for entropy coding.

        Raises:
            TypeError: the codec sends no symbols (`takes_entropy_coding` is false).
        """
        raise TypeError(f"{self.name} sends no symbols that entropy coding could shorten")

    def from_planes(self, planes: tuple[Tensor, ...], meta: Meta) -> Payload:
        """Undo `planes`, uint8 1-D each."""
        raise TypeError(f"{self.name} sends no symbols that entropy coding could shorten")

    @property
    def takes_entropy_coding(self) -> bool:
        """Whether `+huffman` may follow: true for codecs that define `planes`."""
        return type(self).planes is not Codec.planes

    def transferred(self, n_bytes: int, seconds: float) -> None:  # noqa: B027 (most codecs do not ask)
        """Learn how long messages of this codec took to be exchanged; bytes sent, or received where that is more."""

    @property
    def asks_for_times(self) -> bool:
        """Whether it wants to hear what `transferred` tells."""
        return type(self).transferred is not Codec.transferred

    def payload(self, tensors: Sequence[Tensor], meta: Meta) -> Payload:
        """Build a payload of 1-D tensors in this codec's layout."""
        sizes = tuple((t.dtype, t.numel()) for t in tensors)
        header = 0 if self.fixed_size else 8 * len(sizes)
        size = packed_bytes(sizes)
        assert size is not None
        return Payload(tuple(tensors), meta, size + header)

    def to_bytes(self, payload: Payload) -> Tensor:
        """Write a payload into one uint8 buffer on its device; lengths go first where they vary."""
        return pack(payload.tensors, with_lengths=not self.fixed_size)

    def from_bytes(self, buffer: Tensor, meta: Meta) -> Payload:
        """Read a payload from a uint8 1-D buffer, which may be longer. The payload may share its memory.

        Raises:
            ValueError: the buffer does not hold such a payload.
        """
        return self.payload(unpack(buffer, self.layout(meta.numel)), meta)

    def reduce_rounds(self, tensor: Tensor, state: State) -> Rounds:
        """Reduce the workers' tensors directly, for linear codecs: yield, be sent the mean, return the mean.

        Each worker runs its generator, all-reduces what it yields (1-D, any float dtype, same length on all workers)
        and sends back the *mean* over the workers, in place or not. It returns the mean tensor, of the input's shape
        and dtype.

        Raises:
            NonFiniteError: before the first yield.
        """
        raise TypeError(f"{self.name} is not linear: use compress and extract")

    def subtract_reduced(self, pending: Tensor, mean: Tensor, state: State) -> None:
        """After `reduce_rounds`: leave in `pending` [numel], in place, what was not sent (summed over workers)."""
        pending.sub_(mean.view_as(pending))

    def clear_reduced(self, target: Tensor, state: State) -> None:  # noqa: B027 (dense codecs have nothing to do)
        """After `reduce_rounds`: zero `target` [numel] where values were sent, as `clear_sent` does for a payload."""


def fuse_rounds(rounds: Sequence[Rounds]) -> Generator[Tensor, Tensor, list[Tensor]]:
    """Run the rounds of several tensors as one: each reduction carries all that are not done, concatenated.

    Returns their results in order. They must stand in the same order on all workers.
    """
    results: dict[int, Tensor] = {}
    waiting = {i: next(one) for i, one in enumerate(rounds)}
    while waiting:
        means = (yield torch.cat(list(waiting.values()))).split([piece.numel() for piece in waiting.values()])
        following: dict[int, Tensor] = {}
        for i, mean in zip(waiting, means, strict=True):
            try:
                following[i] = rounds[i].send(mean)
            except StopIteration as stop:
                results[i] = stop.value
        waiting = following
    return [results[i] for i in range(len(rounds))]


class Eased(Codec):
    """A biased codec that a run begins and ends without; a frozen dataclass with these fields.

    In the first and the last messages of a run eight bits an element travel (bf16 where messages are summed), and the
    error memory stays empty: early gradients are large and late ones small, and neither should wait for others.

    Attributes:
        warmup_steps: messages of a tensor before the codec itself encodes; 0: none, None: a share of the run's.
        finish_steps: messages at the end that it leaves out; 0: none, None: a share of the run's.
    """

    warmup_steps: int | None
    finish_steps: int | None

    def for_run(self, messages: int) -> Codec:
        """Return the codec with shares of so many messages in place of what is left out."""
        if not self.biased:
            return self
        first = share_of(messages, WARMUP_SHARE) if self.warmup_steps is None else self.warmup_steps
        last = share_of(messages, FINISH_SHARE) if self.finish_steps is None else self.finish_steps
        eased: Codec = replace(self, warmup_steps=first, finish_steps=last)  # type: ignore[type-var]
        return eased

    def length_notes(self, messages: int) -> list[str]:
        """Say which messages are whole, and whether what is left out comes too late in so short a run."""
        whole = self.whole_steps(messages)
        parts = [f"the {name} {count}" for name, count in (("first", whole.first), ("last", whole.last)) if count]
        notes = []
        if parts and messages:
            form = "bf16" if self.linear else "int8"
            notes.append(
                f"{' and '.join(parts)} of {messages} messages are {form} (warmup_steps=0, finish_steps=0: none)"
            )
        if self.biased and 0 < messages < self.fewest_messages:
            notes.append(
                f"what it leaves out comes late: a run of {messages} messages, fewer than {self.fewest_messages}, may "
                "lose accuracy; int8 does not"
            )
        return notes

    @property
    def fewest_messages(self) -> int:
        """Messages of a tensor from which on error feedback has made up for what is left out."""
        return 20

    def whole_steps(self, messages: int) -> WholeSteps:
        """Return the first and last messages; none where the length of the run is not known."""
        return WholeSteps(self.warmup_steps or 0, self.finish_steps or 0, messages) if self.biased else NEVER


class CorrectsMomentum(Codec):
    """A codec whose worker applies momentum before it encodes; a frozen dataclass with these fields.

    Attributes:
        momentum: its coefficient; 0: none, None: not settled yet.
        nesterov: whether it has Nesterov's form; None: not settled yet.
    """

    momentum: float | None
    nesterov: bool | None

    @property
    def absorbs_momentum(self) -> float | None:
        """`momentum`, where it is above 0."""
        return self.momentum or None

    @property
    def looks_ahead(self) -> bool:
        """Whether momentum has Nesterov's form: `nesterov`."""
        return bool(self.nesterov)
