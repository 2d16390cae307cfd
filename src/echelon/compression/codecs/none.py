"""none: no compression.

Helps: Links that keep up with the computation, and every first run: compare other codecs with it.
Costs: 4 bytes per element.
Needs: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from echelon.compression.base import Codec, Meta, Payload, Rounds, State
from echelon.compression.wire import Layout


@dataclass(frozen=True)
class Uncompressed(Codec):
    """Send every element as float32 (float64 tensors are rounded to it, except in sums): 32 bits per element.

    Linear and unbiased. NaN and infinity are sent, too.
    """

    name: ClassVar[str] = "none"
    linear: ClassVar[bool] = True

    def layout(self, numel: int) -> Layout:
        """Return one float32 tensor [numel]."""
        return ((torch.float32, numel),)

    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Copy the elements of a tensor, any shape, as float32."""
        state.numbers["step"] += 1
        return self.payload((tensor.detach().reshape(-1).to(torch.float32, copy=True),), Meta.of(tensor))

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the elements in the dtype and shape that the payload stands for."""
        (values,) = payload.tensors
        if out is None:
            return values.to(payload.meta.dtype, copy=True).view(payload.meta.shape)
        out.view(-1).copy_(values)
        return out

    def reduce_rounds(self, tensor: Tensor, state: State) -> Rounds:
        """Yield the tensor [numel] in its own dtype once."""
        state.numbers["step"] += 1
        mean = yield tensor.detach().reshape(-1)
        return mean.view(tensor.shape)


CODEC = Uncompressed
