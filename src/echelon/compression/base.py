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
from dataclasses import dataclass
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
    largest_magnitude,
    moved,
    on_gpu,
    refuse_nonfinite,
    refuse_nonfinite_elements,
    refuse_nonfinite_together,
    working_dtype,
)
from echelon.compression.wire import Layout, pack, packed_bytes, unpack
from echelon.torch_compat import foreach_sub_

__all__ = [
    "Codec",
    "Meta",
    "NonFiniteError",
    "Payload",
    "Rounds",
    "State",
    "Terms",
    "empty",
    "flat",
    "flat32",
    "fuse_rounds",
    "largest_magnitude",
    "moved",
    "on_gpu",
    "refuse_nonfinite",
    "refuse_nonfinite_elements",
    "refuse_nonfinite_together",
    "working_dtype",
]

Terms = Sequence[tuple[Tensor, float]]
"""Tensors [numel] in the working dtype and their weights: their weighted sum is what is encoded."""


Rounds = Generator[Tensor, Tensor, Tensor]
"""Yields what is to be reduced, is sent its mean over the workers, returns the mean of the workers' tensors."""


FusedRounds = Generator[Tensor, Tensor, list[Tensor]]
"""The rounds of several tensors as one: returns the mean of each."""


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
        in_gradient_units: a setting is a size of gradients, which a scaled loss changes.
        local_clip: each worker's tensor is scaled down to this Euclidean norm before encoding; 0: never.
    """

    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]] = ()
    linear: ClassVar[bool] = False
    shaped: ClassVar[bool] = False
    takes_rows: ClassVar[bool] = False
    momentum_inside: ClassVar[bool] = False
    mask_below: ClassVar[float] = 0.05

    def changed_since(self, version: int) -> str:
        """Say what it does otherwise than in a run that an earlier version began (`records.kinds.VERSION`); empty:
        nothing.
        """
        return ""

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
    def in_gradient_units(self) -> bool:
        """Whether a setting is a size of gradients; see the class."""
        return self.direction or bool(self.local_clip)

    @property
    def local_clip(self) -> float:
        """Euclidean norm to which a worker's tensor is clipped before encoding; 0: it is not."""
        return 0.0

    @property
    def largest(self) -> float:
        """The magnitude beyond which values are refused, as NaN is."""
        return math.inf

    @property
    def fewest_messages(self) -> int:
        """Messages of a tensor in a run, from which on what a codec leaves out does not come too late."""
        return 0

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

    def compress_with_memory(self, terms: Terms, memory: Tensor, shape: Sequence[int], state: State) -> Payload:
        """Add terms to a memory [numel], encode it as a tensor of `shape`, and leave in it what was not sent.

        Raises:
            NonFiniteError: their sum is not finite (the terms are); the memory holds it.
        """
        for tensor, weight in terms:
            memory.add_(tensor, alpha=weight)
        payload = self.compress(memory.view(tuple(shape)), state)
        self.add_to(memory, payload, alpha=-1.0)
        return payload

    @abstractmethod
    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Decode into a tensor of the payload's shape and dtype: a new one, or `out` (contiguous, as many elements)."""

    def compress_parts(self, tensors: Sequence[Tensor], states: Sequence[State]) -> list[Payload]:
        """Encode several tensors of any shape, each with a state of its own, as `compress` does; on a GPU in one go.

        Raises:
            NonFiniteError: one holds NaN or infinity; states may have counted a step.
        """
        if on_gpu(tensors):
            return self.compress_together(tensors, states)
        return [self.compress(tensor, state) for tensor, state in zip(tensors, states, strict=True)]

    def from_bytes_parts(self, buffers: Sequence[Tensor], metas: Sequence[Meta]) -> list[Payload]:
        """Read several payloads, as `from_bytes` does; on a GPU in one go."""
        if on_gpu(buffers):
            return self.from_bytes_together(buffers, metas)
        return [self.from_bytes(buffer, meta) for buffer, meta in zip(buffers, metas, strict=True)]

    def extract_parts(self, payloads: Sequence[Payload], outs: Sequence[Tensor]) -> None:
        """Decode several payloads, each into a tensor of its own (any shape, as many elements); on a GPU in one go."""
        if on_gpu(outs):
            self.extract_together(payloads, outs)
            return
        for payload, out in zip(payloads, outs, strict=True):
            self.extract(payload, out)

    def add_parts(self, target: Tensor, payloads: Sequence[Payload]) -> None:
        """Add several payloads to `target`, any shape, one after the other; on a GPU they are decoded in one go."""
        if on_gpu([target]):
            self.add_together(target, payloads)
            return
        for payload in payloads:
            self.add_to(target, payload)

    def reduce_parts(self, tensors: Sequence[Tensor], states: Sequence[State]) -> FusedRounds:
        """Reduce several tensors, as `reduce_rounds` does, by reductions that they share; on a GPU in one go."""
        if on_gpu(tensors):
            return self.reduce_together(tensors, states)
        return fuse_rounds([self.reduce_rounds(tensor, state) for tensor, state in zip(tensors, states, strict=True)])

    # What the five above do on a GPU: a codec whose launches would take longer than its work does them in one go.

    def compress_together(self, tensors: Sequence[Tensor], states: Sequence[State]) -> list[Payload]:
        """Do what `compress` does to each of several tensors, of any shape."""
        return [self.compress(tensor, state) for tensor, state in zip(tensors, states, strict=True)]

    def from_bytes_together(self, buffers: Sequence[Tensor], metas: Sequence[Meta]) -> list[Payload]:
        """Do what `from_bytes` does to each of several buffers."""
        return [self.from_bytes(buffer, meta) for buffer, meta in zip(buffers, metas, strict=True)]

    def extract_together(self, payloads: Sequence[Payload], outs: Sequence[Tensor]) -> None:
        """Do what `extract` does to each of several payloads and tensors."""
        for payload, out in zip(payloads, outs, strict=True):
            self.extract(payload, out)

    def add_together(self, target: Tensor, payloads: Sequence[Payload]) -> None:
        """Do what `add_to` does with each of several payloads, to one `target` of any shape."""
        for payload in payloads:
            self.add_to(target, payload)

    def reduce_together(self, tensors: Sequence[Tensor], states: Sequence[State]) -> FusedRounds:
        """Do what `reduce_rounds` does to each of several tensors, of any shape."""
        return fuse_rounds([self.reduce_rounds(tensor, state) for tensor, state in zip(tensors, states, strict=True)])

    def subtract_together(self, targets: Sequence[Tensor], payloads: Sequence[Payload]) -> None:
        """Subtract each decoded payload from its own tensor [numel], in place."""
        decoded = [torch.empty_like(target) for target in targets]
        self.extract_together(payloads, decoded)
        foreach_sub_(list(targets), decoded)

    def subtract_means_together(
        self, pending: Sequence[Tensor], means: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        """Do what `subtract_reduced` does to each of several tensors [numel]."""
        for tensor, mean, state in zip(pending, means, states, strict=True):
            self.subtract_reduced(tensor, mean, state)

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        """Return the state of a tensor of that shape, dtype and device, before the first step."""
        return State(name, seed, stream)

    def relay(self) -> Codec:
        """Return the codec for a sum on its way back: without what belongs to a worker (momentum, clipping)."""
        return self

    def for_run(self, messages: int) -> Codec:
        """Return the codec with what its settings leave to how many messages of a tensor a run has."""
        return self

    def without_whole_start(self) -> Codec:
        """Return the codec for senders that keep what it leaves out: no first message has to be whole."""
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


def fuse_rounds(rounds: Sequence[Rounds]) -> FusedRounds:
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
