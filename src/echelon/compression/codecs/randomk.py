"""randomk: elements drawn at random, the same ones by all workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from echelon.compression.base import Codec, Meta, Payload, Rounds, State, empty, flat, refuse_nonfinite_elements
from echelon.compression.selection import gather, scatter
from echelon.compression.sparse import check_density, count_for
from echelon.compression.wire import Layout

_PRIME = (1 << 31) - 1


@dataclass(frozen=True)
class RandomK(Codec):
    """One element, drawn at random, of each of k = density * n equal stretches; the rest waits in the error memory.

    The draws come from the shared seed, so no index travels and the workers' values can be summed as they are (linear).
    32 density bits per element. Biased: the values are not scaled up by n / k; error feedback sends the rest later.

    Attributes:
        density: share of elements sent, above 0 and at most 1.

    Papers: Stich et al. 2018, "Sparsified SGD with Memory", arXiv:1809.07599 (random-k with memory).
    """

    name: ClassVar[str] = "randomk"
    linear: ClassVar[bool] = True
    density: float

    def __post_init__(self) -> None:
        check_density(self.density)

    @property
    def biased(self) -> bool:
        return True

    def layout(self, numel: int) -> Layout:
        # The draw's number travels with the message, so that a receiver needs no state.
        return ((torch.int64, 1), (torch.float32, count_for(self.density, numel)))

    def share_sent(self, state: State) -> float:
        return self.density

    def compress(self, tensor: Tensor, state: State) -> Payload:
        x = flat(tensor)
        refuse_nonfinite_elements(x, state)
        key = state.shared_key()
        values = gather(x, self._drawn(x.numel(), key, x.device)).float()
        state.numbers["step"] += 1
        return self.payload((torch.tensor([key], device=x.device), values), Meta.of(tensor))

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        key, values = payload.tensors
        meta = payload.meta
        if out is None:
            out = empty(meta.numel, meta.dtype, values.device).view(meta.shape)
        out.zero_()
        scatter(out.view(-1), self._drawn(meta.numel, int(key), values.device), values)
        return out

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        key, values = payload.tensors
        indices = self._drawn(payload.meta.numel, int(key), values.device)
        view = target.view(-1)
        scatter(view, indices, gather(view, indices).add_(values.to(view.dtype), alpha=alpha))

    def clear_sent(self, target: Tensor, payload: Payload) -> None:
        key, values = payload.tensors
        target.view(-1)[self._drawn(payload.meta.numel, int(key), values.device)] = 0

    def reduce_rounds(self, tensor: Tensor, state: State) -> Rounds:
        x = flat(tensor)
        refuse_nonfinite_elements(x, state)
        indices = self._drawn(x.numel(), state.shared_key(), x.device)
        state.numbers["step"] += 1
        mean = yield gather(x, indices)
        result = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        scatter(result.view(-1), indices, mean)
        return result

    def subtract_reduced(self, pending: Tensor, mean: Tensor, state: State) -> None:
        before = State(state.name, state.seed, numbers={"step": state.step - 1})
        pending[self._drawn(pending.numel(), before.shared_key(), pending.device)] = 0

    def _drawn(self, numel: int, key: int, device: torch.device) -> Tensor:
        """Return one index per stretch: ascending, int64 [k]; the same on every device."""
        count = count_for(self.density, numel)
        stretch = torch.arange(count + 1, device=device)
        edges = stretch * numel // max(count, 1)
        return edges[:-1] + _hash31(stretch[:-1], key) % (edges[1:] - edges[:-1])


def _hash31(words: Tensor, key: int) -> Tensor:
    """Hash int64 words below 2**31 to 31 bits: multiply and fold modulo the prime 2**31 - 1, three times."""
    x = (words + key % _PRIME) % _PRIME
    for factor in (1103515245, 950706376, 1343714438):
        x = (x ^ (x >> 15)) * (factor ^ (key >> 33)) % _PRIME
    return x


CODEC = RandomK
