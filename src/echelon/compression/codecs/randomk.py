"""randomk: a random share of the elements, the same ones on all workers.

Helps: Links so slow, and processors so busy, that choosing the largest elements (topk) would take too long.
Costs: accuracy: most of the gradient arrives late. Memory for error feedback (`--dry-run` counts it).
Needs: a low learning rate, the lower the density.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from echelon.compression.base import Codec, Meta, Payload, Rounds, State, empty, flat, refuse_nonfinite_elements
from echelon.compression.eased import CorrectsMomentum, Eased
from echelon.compression.selection import gather, scatter
from echelon.compression.sparse import count_for
from echelon.compression.wire import Layout
from echelon.core.bounds import Bounds, check_bounds

_PRIME = (1 << 31) - 1


@dataclass(frozen=True)
class RandomK(CorrectsMomentum, Eased):
    """Draw one element at random from each of k = density * n equal stretches; error feedback sends the rest later.

    All workers draw with a shared seed, so no index is sent, and the backend sums messages as they are (linear).
    Momentum is applied in the worker, and set to zero where a value was sent: what has waited for several steps arrives
    at once, and momentum on top of it would overshoot.

    32 density bits per element. Biased: values are not scaled up by n / k.

    Attributes:
        density: share of the elements that is sent.
        momentum: applied in the worker, before encoding; left out: the optimizer's momentum.
        nesterov: Nesterov momentum in the worker (see topk); left out: as the optimizer has it.
        warmup_steps: how many first steps send bf16 instead; 0: none; left out: 5% of the run's steps.
        finish_steps: how many last steps send bf16 instead; 0: none; left out: 2% of the run's steps.

    Papers: Stich et al. 2018, "Sparsified SGD with Memory", arXiv:1809.07599 (random-k with memory).
    """

    name: ClassVar[str] = "randomk"
    examples: ClassVar[tuple[str, ...]] = ("randomk(0.01)",)
    linear: ClassVar[bool] = True
    momentum_inside: ClassVar[bool] = True
    mask_below: ClassVar[float] = math.inf
    density: Annotated[float, Bounds(above=0, most=1)]
    momentum: Annotated[float | None, Bounds(least=0, below=1)] = None
    nesterov: bool | None = None
    warmup_steps: Annotated[int | None, Bounds(least=0)] = None
    finish_steps: Annotated[int | None, Bounds(least=0)] = None

    def __post_init__(self) -> None:
        check_bounds(self)

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        """The state's "sent" is the share of `like` (any shape) that the last message carried; -1 before the first."""
        state = super().init_state(name, like, seed, stream)
        state.numbers["sent"] = -1.0
        return state

    def relay(self) -> Codec:
        """Return the codec without momentum."""
        return replace(self, momentum=0.0)

    @property
    def biased(self) -> bool:
        """True: values are not scaled up for those that stay behind."""
        return True

    def layout(self, numel: int) -> Layout:
        """Return the draw's key, so that a receiver needs no state, and one float32 value per stretch [k]."""
        # The draw's key travels with the message, so that a receiver needs no state.
        return ((torch.int64, 1), (torch.float32, count_for(self.density, numel)))

    def share_sent(self, state: State) -> float:
        """Return `density`."""
        return self.density

    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Gather the elements of a tensor, any shape, that this step draws."""
        x = flat(tensor)
        refuse_nonfinite_elements(x, state)
        key = state.shared_key()
        values = gather(x, self._drawn(x.numel(), key, x.device)).float()
        _count_sent(state, values.numel(), x.numel())
        return self.payload((torch.tensor([key], device=x.device), values), Meta.of(tensor))

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Write the values at the drawn indices of a tensor of zeros, of the payload's shape."""
        key, values = payload.tensors
        meta = payload.meta
        if out is None:
            out = empty(meta.numel, meta.dtype, values.device).view(meta.shape)
        out.zero_()
        scatter(out.view(-1), self._drawn(meta.numel, int(key), values.device), values)
        return out

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Add `alpha` times the values at the drawn indices of `target`, any shape, in place."""
        key, values = payload.tensors
        indices = self._drawn(payload.meta.numel, int(key), values.device)
        view = target.view(-1)
        scatter(view, indices, gather(view, indices).add_(values.to(view.dtype), alpha=alpha))

    def clear_sent(self, target: Tensor, payload: Payload) -> None:
        """Zero `target`, any shape, at the drawn indices."""
        key, values = payload.tensors
        target.view(-1)[self._drawn(payload.meta.numel, int(key), values.device)] = 0

    def reduce_rounds(self, tensor: Tensor, state: State) -> Rounds:
        """Yield the drawn values [k] once: all workers draw the same indices."""
        x = flat(tensor)
        refuse_nonfinite_elements(x, state)
        indices = self._drawn(x.numel(), state.shared_key(), x.device)
        _count_sent(state, indices.numel(), x.numel())
        mean = yield gather(x, indices)
        result = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        scatter(result.view(-1), indices, mean)
        return result

    def subtract_reduced(self, pending: Tensor, mean: Tensor, state: State) -> None:
        """Zero what was sent in `pending` [numel]: its values travelled exactly."""
        self.clear_reduced(pending, state)

    def clear_reduced(self, target: Tensor, state: State) -> None:
        """Zero `target` [numel] at the indices of the step that was just reduced."""
        before = State(state.name, state.seed, numbers={"step": state.step - 1})
        target[self._drawn(target.numel(), before.shared_key(), target.device)] = 0

    def _drawn(self, numel: int, key: int, device: torch.device) -> Tensor:
        """Return one index per stretch: ascending, int64 [k]; the same on every device."""
        count = count_for(self.density, numel)
        stretch = torch.arange(count + 1, device=device)
        edges = stretch * numel // max(count, 1)
        return edges[:-1] + _hash31(stretch[:-1], key) % (edges[1:] - edges[:-1])


def _count_sent(state: State, sent: int, numel: int) -> None:
    state.numbers |= {"step": state.step + 1, "sent": sent / max(numel, 1)}


def _hash31(numbers: Tensor, key: int) -> Tensor:
    """Hash int64 words below 2**31 to 31 bits: multiply and fold modulo the prime 2**31 - 1, three times."""
    x = (numbers + key % _PRIME) % _PRIME
    for factor in (1103515245, 950706376, 1343714438):
        x = (x ^ (x >> 15)) * (factor ^ (key >> 33)) % _PRIME
    return x


CODEC = RandomK
