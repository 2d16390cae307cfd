"""What the casts share: a shorter float instead of float32."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from echelon.compression.base import Codec, Meta, Payload, Rounds, State, empty, refuse_nonfinite_elements
from echelon.compression.chunks import spans
from echelon.compression.wire import Layout


class Cast(Codec):
    """A codec that sends every element in a shorter float, rounded to nearest; sums may be reduced directly."""

    linear: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype]

    @property
    def largest(self) -> float:
        """The largest finite value of the dtype on the wire."""
        return float(torch.finfo(self.wire_dtype).max)

    def layout(self, numel: int) -> Layout:
        """Return one tensor of the wire dtype [numel]."""
        return ((self.wire_dtype, numel),)

    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Round every element of a tensor, any shape, to the wire dtype."""
        payload = self.payload((self._cast(tensor, state),), Meta.of(tensor))
        state.numbers["step"] += 1
        return payload

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the elements in the dtype and shape that the payload stands for."""
        (short,) = payload.tensors
        if out is None:
            return short.to(payload.meta.dtype, copy=True).view(payload.meta.shape)
        out.view(-1).copy_(short)
        return out

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Add `alpha` times the elements to `target`, any shape, in place."""
        target.view(-1).add_(payload.tensors[0], alpha=alpha)

    def reduce_rounds(self, tensor: Tensor, state: State) -> Rounds:
        """Yield the rounded elements [numel] once; the mean over workers is taken in the wire dtype."""
        short = self._cast(tensor, state)
        state.numbers["step"] += 1
        mean = yield short
        return mean.to(tensor.dtype).view(tensor.shape)

    def _cast(self, tensor: Tensor, state: State) -> Tensor:
        source = tensor.detach().reshape(-1)
        short = empty(source.numel(), self.wire_dtype, source.device)
        for start, end in spans(source.numel(), 1, source.device):
            refuse_nonfinite_elements(source[start:end], state, self.largest)
            short[start:end] = source[start:end]
        return short
