"""threshold: the elements above a threshold, fixed or following the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from echelon.compression.base import Codec, State, check_momentum
from echelon.compression.selection import above, sampled_threshold
from echelon.compression.sparse import Sparse, check_density, check_values, count_for

# The threshold is corrected by ratio**gain; a normal distribution's tail at 1% loses 7% of its count per 1% of
# threshold, heavier tails 2 to 3%: this gain converges for all of them without overshooting.
_GAIN = 0.15
# Beyond this factor off target the threshold is taken from a sample again: first step, or a jump of the gradient.
_LOST = 3.0


@dataclass(frozen=True)
class Threshold(Sparse):
    """All elements of magnitude above a threshold t; the rest waits in the error memory.

    `threshold(tau=0.01)`: t = tau. `threshold(density=0.01)`: t starts at a sample's quantile and follows the
    gradient by t <- t (sent / wanted)^0.15 after each step, so that the density stays at its target without sorting.

    Bits per element as topk's, with the density that t lets through. Biased. The number sent varies.

    Attributes:
        tau: the fixed threshold, in gradient units.
        density: target share of elements; give exactly one of the two.
        momentum: applied in the worker, as in topk; left out: `registry.place_momentum` fills it in.
        values: how values travel: bf16, fp32 or sign.

    Papers: Strom 2015 (fixed threshold); Aji and Heafield 2017, arXiv:1704.05021.
    """

    name: ClassVar[str] = "threshold"
    tau: float | None = None
    density: float | None = None
    momentum: float | None = None
    values: str = "bf16"

    def __post_init__(self) -> None:
        if (self.tau is None) == (self.density is None):
            raise ValueError("give either tau (fixed) or density (adaptive), such as threshold(density=0.01)")
        if self.tau is not None and self.tau <= 0:
            raise ValueError("tau must be positive, such as 0.001")
        if self.density is not None:
            check_density(self.density)
        check_momentum(self.momentum)
        check_values(self.values)

    @property
    def absorbs_momentum(self) -> float | None:
        return self.momentum or None

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        state = super().init_state(name, like, seed, stream)
        return State(name, seed, stream, numbers={**state.numbers, "threshold": -1.0, "sent": -1.0})

    def relay(self) -> Codec:
        return Threshold(self.tau, self.density, 0.0, self.values)

    def count(self, numel: int) -> int | None:
        return None

    def share_sent(self, state: State) -> float:
        return self.density if self.density is not None else max(state.numbers["sent"], 0.0)

    def choose(self, x: Tensor, state: State) -> Tensor:
        if self.tau is not None or not x.numel():
            indices = above(x, self.tau or 0.0, state)
        else:
            indices = self._follow(x, state)
        state.numbers["sent"] = indices.numel() / max(x.numel(), 1)
        return indices

    def _follow(self, x: Tensor, state: State) -> Tensor:
        assert self.density is not None
        wanted = count_for(self.density, x.numel())
        threshold = state.numbers["threshold"]
        indices = above(x, threshold, state) if threshold >= 0 else None
        if indices is None or not wanted / _LOST <= indices.numel() <= wanted * _LOST:
            threshold = sampled_threshold(x, wanted)
            indices = above(x, threshold, state)
        ratio = max(indices.numel(), 0.5) / wanted
        state.numbers["threshold"] = threshold * min(max(ratio**_GAIN, 0.5), 2.0)
        return indices

    def bits_per_element(self, numel: int, state: State | None = None) -> float:
        density = state.numbers["sent"] if state and state.numbers["sent"] >= 0 else self.density
        if density is None:
            return math.nan
        count = round(density * numel) if state else count_for(density, numel)
        return self.bits_for(numel, count)


CODEC = Threshold
