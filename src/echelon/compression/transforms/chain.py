"""Transforms around a codec, one after another: what a spec's codec needs, in the one order that works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from echelon.compression.base import (
    NEVER,
    Codec,
    FusedRounds,
    Meta,
    Payload,
    Rounds,
    State,
    Terms,
    WholeSteps,
    flat,
    refuse_nonfinite_elements,
    refuse_nonfinite_together,
)
from echelon.compression.transforms.base import (
    SentMean,
    SentPayload,
    SentTogether,
    Transform,
    Wrapper,
    weighted_sum,
)
from echelon.compression.transforms.error_feedback import ErrorFeedback, ForgetError
from echelon.compression.transforms.huffman import Huffman
from echelon.compression.transforms.momentum import LocalClip, momentum_of


@dataclass(frozen=True)
class Transformed(Wrapper):
    """A codec behind transforms: the first one sees the gradient, the codec encodes what the last one gives.

    Attributes:
        inner: the codec.
        transforms: in the order in which they see the gradient.
        whole: which messages `stand_in` encodes, without error feedback.
        stand_in: a codec that loses next to nothing.
        forgets: such a message drops what waits to be sent; else it brings that, too.
    """

    inner: Codec
    transforms: tuple[Transform, ...]
    whole: WholeSteps = NEVER
    stand_in: Codec | None = None
    forgets: bool = True

    def relay(self) -> Codec:
        """Return the codec for a sum on its way back, with what it needs of error feedback."""
        codec = with_transforms(self.inner.relay(), whole_steps=self.whole, stand_in=self.stand_in)
        return codec if self.forgets else forgetting_nothing(codec)

    def at(self, step: int) -> Codec:
        """Return the codec of a step's message: another one inside where the message is (nearly) whole."""
        if self.stand_in is not None and step in self.whole:
            drops = ForgetError() if self.forgets else ErrorFeedback()
            around = tuple(drops if isinstance(t, ErrorFeedback) else t for t in self.transforms)
            return replace(self, inner=self.stand_in, transforms=around)
        inner = self.inner.at(step)
        return self if inner is self.inner else replace(self, inner=inner)

    def pinned(self, rung: int) -> Codec:
        """Pin the codec inside."""
        return replace(self, inner=self.inner.pinned(rung))

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        """Return the codec's state with the transforms' memories, zero, [numel] each; `like`: any shape."""
        state = self.inner.init_state(name, like, seed, stream)
        for transform in reversed(self.transforms):
            transform.init_memory(state, like)
        return state

    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Encode what the transforms make of a tensor of any shape, and tell them what was sent."""
        *others, last = self.transforms
        sparse = self._is_sparse(state)
        if isinstance(last, ErrorFeedback):  # what it does goes together with encoding
            pending, terms = state.elementwise[last.keeps], self._terms(tensor, others, state)
            payload = self.inner.compress_with_memory(terms, pending, tensor.shape, state)
        else:
            others, pending = [*others, last], self._pending(tensor, state)
            payload = self.inner.compress(pending.view(tensor.shape), state)
        for transform in reversed(others):
            transform.after(pending, SentPayload(self.inner, payload, sparse), state)
        return replace(payload, meta=Meta.of(tensor), chosen=None)

    def reduce_rounds(self, tensor: Tensor, state: State) -> Rounds:
        """Reduce what the transforms make of a tensor, any shape, and tell them what was summed."""
        sparse = self._is_sparse(state)
        pending = self._pending(tensor, state)
        mean = yield from self.inner.reduce_rounds(pending.view(tensor.shape), state)
        for transform in reversed(self.transforms):
            transform.after(pending, SentMean(self.inner, mean, state, sparse), state)
        return mean.to(tensor.dtype)

    def compress_together(self, tensors: Sequence[Tensor], states: Sequence[State]) -> list[Payload]:
        """Do what `compress` does to each of several tensors, of any shape, in one go."""
        pending, shapes = self._pending_together(tensors, states), [tensor.shape for tensor in tensors]
        sparse = [self._is_sparse(state) for state in states]
        views = [one.view(shape) for one, shape in zip(pending, shapes, strict=True)]
        payloads = self.inner.compress_together(views, states)
        sent = SentTogether(
            [SentPayload(self.inner, payload, few) for payload, few in zip(payloads, sparse, strict=True)],
            lambda targets: self.inner.subtract_together(targets, payloads),
        )
        for transform in reversed(self.transforms):
            transform.after_together(pending, sent, states)
        pairs = zip(payloads, tensors, strict=True)
        return [replace(payload, meta=Meta.of(tensor), chosen=None) for payload, tensor in pairs]

    def from_bytes_together(self, buffers: Sequence[Tensor], metas: Sequence[Meta]) -> list[Payload]:
        """Read payloads as the codec inside does."""
        return self.inner.from_bytes_together(buffers, metas)

    def reduce_together(self, tensors: Sequence[Tensor], states: Sequence[State]) -> FusedRounds:
        """Do what `reduce_rounds` does to each of several tensors, of any shape, in one go."""
        sparse = [self._is_sparse(state) for state in states]
        pending = self._pending_together(tensors, states)
        views = [one.view(tensor.shape) for one, tensor in zip(pending, tensors, strict=True)]
        means = yield from self.inner.reduce_together(views, states)
        sent = SentTogether(
            [SentMean(self.inner, *each) for each in zip(means, states, sparse, strict=True)],
            lambda targets: self.inner.subtract_means_together(targets, means, states),
        )
        for transform in reversed(self.transforms):
            transform.after_together(pending, sent, states)
        return [mean.to(tensor.dtype) for mean, tensor in zip(means, tensors, strict=True)]

    def _pending_together(self, tensors: Sequence[Tensor], states: Sequence[State]) -> list[Tensor]:
        gradients = [flat(tensor) for tensor in tensors]
        refuse_nonfinite_together(gradients, states)
        terms: list[Terms] = [[(gradient, 1.0)] for gradient in gradients]
        for transform in self.transforms:
            terms = transform.before_together(terms, states)
        return [weighted_sum(each) for each in terms]

    def _is_sparse(self, state: State) -> bool:
        return self.inner.share_sent(state) < self.inner.mask_below

    def _pending(self, tensor: Tensor, state: State) -> Tensor:
        """Return what to encode, [numel]: the error memory itself where there is one."""
        return weighted_sum(self._terms(tensor, self.transforms, state))

    def _terms(self, tensor: Tensor, transforms: Sequence[Transform], state: State) -> Terms:
        """Return what transforms make of a tensor of any shape; checks before they write."""
        gradient = flat(tensor)
        refuse_nonfinite_elements(gradient, state)
        terms: Terms = [(gradient, 1.0)]
        for transform in transforms:
            terms = transform.before(terms, state)
        return terms


def with_transforms(
    codec: Codec, entropy_coding: bool = False, whole_steps: WholeSteps = NEVER, stand_in: Codec | None = None
) -> Codec:
    """Put around a codec what its settings ask for: clipping, momentum, error feedback, and entropy coding outside.

    Args:
        whole_steps: which messages `stand_in` encodes.

    Example: `with_transforms(TopK(0.01, momentum=0.9), entropy_coding=True)`.
    """
    transforms: list[Transform] = []
    if codec.local_clip:
        transforms.append(LocalClip(codec.local_clip))
    if (momentum := momentum_of(codec)) is not None:
        transforms.append(momentum)
    if codec.biased:
        transforms.append(ErrorFeedback())
    combined: Codec = Transformed(codec, tuple(transforms), whole_steps, stand_in) if transforms else codec
    return Huffman(combined) if entropy_coding else combined


def forgetting_nothing(codec: Codec) -> Codec:
    """Return a codec whose (nearly) whole messages bring what others have left out."""
    if isinstance(codec, Huffman):
        return replace(codec, inner=forgetting_nothing(codec.inner))
    return replace(codec, forgets=False) if isinstance(codec, Transformed) else codec


def without_transforms(codec: Codec) -> Codec:
    """Return a codec that remembers nothing of what it has left out; entropy coding stays."""
    if isinstance(codec, Huffman):
        return replace(codec, inner=without_transforms(codec.inner))
    return codec.inner if isinstance(codec, Transformed) else codec
