"""threshold: the elements whose magnitude is above a threshold.

Helps: The same links as topk, with less computation: nothing is sorted.
Costs: memory for error feedback (`--dry-run` counts it). Messages vary in size.
Needs: SGD, and a learning rate that tolerates late gradients (a warm-up, or nesterov=true).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from torch import Tensor

from echelon.compression.base import Codec, State
from echelon.compression.eased import CorrectsMomentum, Eased
from echelon.compression.selection import Ask, Search, above, by_length, largest, sampled, search, search_together
from echelon.compression.sparse import Sparse, count_for
from echelon.core.bounds import Bounds, OneOf, check_bounds

# Beyond this factor off target the threshold is the sample's quantile again: at the first step, or after a jump.
_LOST = 2.0
_CORRECTIONS = 3
_BAND = 1.15
_OFF = 1.2


@dataclass(frozen=True, kw_only=True)
class Threshold(CorrectsMomentum, Eased, Sparse):
    """Send all elements above a threshold t in magnitude; error feedback sends the rest later.

    `threshold(tau=0.01)` has a fixed t. `threshold(density=0.01)` adjusts t before each step so that about 1% of the
    elements is sent. For this it tries the last t on at most 262,144 evenly spaced elements (small tensors: all) and
    corrects it, t <- t (above / wanted)^(1 / slope), at most three times, and once more if the count is still off. The
    slope, -d log(count) / d log(t), is estimated on the way. If so many elements are equal that no t gives the right
    number, the largest are sorted out, equal ones in turn.

    Bits per element as with topk at the density that is reached. Biased.

    Attributes:
        tau: the fixed threshold, in gradient units.
        density: target share of the elements; give exactly one of `tau` and `density`.
        momentum: applied in the worker, before encoding; left out: the optimizer's momentum.
        nesterov: Nesterov momentum in the worker (see topk); left out: as the optimizer has it.
        values: how values are sent: bf16, fp32, or sign (one magnitude for all).
        warmup_steps: how many first steps send int8 instead; 0: none; left out: 5% of the run's steps, and
            none of averages.
        finish_steps: how many last steps send int8 instead; 0: none; left out: 2% of the run's steps.

    Papers: Strom 2015 (fixed threshold); Aji and Heafield 2017, arXiv:1704.05021.
    """

    name: ClassVar[str] = "threshold"
    examples: ClassVar[tuple[str, ...]] = (
        "threshold(density=0.01)",
        "threshold(tau=1.5)",
        "threshold(density=0.02, values=fp32)",
        "threshold(density=0.01)+huffman",
    )
    tau: Annotated[float | None, Bounds(above=0, hint="such as 0.001")] = None
    density: Annotated[float | None, Bounds(above=0, most=1)] = None
    momentum: Annotated[float | None, Bounds(least=0, below=1)] = None
    values: Annotated[str, OneOf(("bf16", "fp32", "sign"))] = "bf16"
    nesterov: bool | None = None
    warmup_steps: Annotated[int | None, Bounds(least=0)] = None
    finish_steps: Annotated[int | None, Bounds(least=0)] = None

    @property
    def in_gradient_units(self) -> bool:
        """Whether the threshold is fixed."""
        return self.tau is not None

    def __post_init__(self) -> None:
        if (self.tau is None) == (self.density is None):
            raise ValueError("give either tau (fixed) or density (adaptive), such as threshold(density=0.01)")
        check_bounds(self)

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        """Return a state (`like`: any shape) with the last "threshold" and "slope" d log(count) / d log(threshold)."""
        state = super().init_state(name, like, seed, stream)
        state.numbers |= {"threshold": 0.0, "slope": 1.0}
        return state

    def relay(self) -> Codec:
        """Return the codec without momentum."""
        return replace(self, momentum=0.0)

    def count(self, numel: int) -> int | None:
        """Return None: it depends on the values."""
        return None

    def share_sent(self, state: State) -> float:
        """Return `density`, or with a fixed threshold the last message's."""
        return self.density if self.density is not None else max(state.numbers["sent"], 0.0)

    def choose(self, x: Tensor, state: State) -> Tensor:
        """Return the indices of the elements of x [numel] above the threshold in magnitude."""
        if self.tau is not None or not x.numel():
            return above(x, self.tau or 0.0, state)
        count = self._count(x)
        sample = sampled(x, count)
        found = search(self._follow(x.numel(), sample.numel(), state), x, sample, state)
        return largest(x, count, state) if found is None else found

    def choose_together(self, tensors: Sequence[Tensor], states: Sequence[State]) -> list[Tensor]:
        """Do what `choose` does to each of several tensors [numel]; those as long are searched in few launches."""
        chosen: dict[int, Tensor] = {}
        for places in by_length(tensors):
            some, theirs = [tensors[i] for i in places], [states[i] for i in places]
            if self.tau is not None or not some[0].numel():
                chosen |= {i: self.choose(tensors[i], states[i]) for i in places}
                continue
            samples = [sampled(x, self._count(x)) for x in some]
            searches = [self._follow(x.numel(), samples[0].numel(), s) for x, s in zip(some, theirs, strict=True)]
            for i, found in zip(places, search_together(searches, some, samples, theirs), strict=True):
                whole = tensors[i]
                chosen[i] = largest(whole, self._count(whole), states[i]) if found is None else found
        return [chosen[i] for i in range(len(tensors))]

    def _count(self, x: Tensor) -> int:
        assert self.density is not None
        return count_for(self.density, x.numel())

    def _follow(self, numel: int, sample: int, state: State) -> Search:
        """Choose by the last threshold, corrected until it fits; where many elements are equal, none does.

        Args:
            numel: elements of the tensor.
            sample: and of its sample.
        """
        assert self.density is not None
        count = count_for(self.density, numel)
        small = sample == numel  # its count would jump from step to step: it is not followed
        if small:
            threshold = yield Ask("quantile", count)
        else:
            threshold = yield from self._corrected(count / numel * sample, state)
        n = yield Ask("above", threshold)
        ratio = max(n, 1) / count
        if not small and n and not 1 / _BAND < ratio < _BAND:  # the sample misled
            threshold *= math.exp(math.log(ratio) / state.numbers["slope"])
            n = yield Ask("above", threshold)
        state.numbers["threshold"] = threshold
        return count / _OFF <= n <= count * _OFF or (threshold <= 0 and n < count)

    def _corrected(self, wanted: float, state: State) -> Generator[Ask, float, float]:
        """Return the last threshold, corrected until some `wanted` of the sample exceed it; notes the slope."""
        threshold, slope = state.numbers["threshold"], state.numbers["slope"]
        before, moved = 1.0, 0.0
        for _ in range(_CORRECTIONS):
            ratio = (yield Ask("sampled", threshold)) / wanted if threshold > 0 else 0.0
            if not 1 / _LOST <= ratio <= _LOST:
                threshold, slope = yield from _restart(wanted)
                break
            if abs(moved) > 1e-3:
                slope = min(max(math.log(before / ratio) / moved, 0.5), 100.0)
            before, moved = ratio, math.log(ratio) / slope
            threshold *= math.exp(moved)
        state.numbers["slope"] = slope
        return threshold

    def bits_per_element(self, numel: int, state: State | None = None) -> float:
        """By the share that the last message carried, else by `density`; NaN where neither is known."""
        density = state.numbers["sent"] if state and state.numbers["sent"] >= 0 else self.density
        if density is None:
            return math.nan
        count = round(density * numel) if state else count_for(density, numel)
        return self.bits_for(numel, count)


def _restart(wanted: float) -> Generator[Ask, float, tuple[float, float]]:
    """Return the sample's quantile and how steeply log(count) falls over log(threshold) there."""
    threshold, lower = (yield Ask("quantile", wanted)), (yield Ask("quantile", 1.5 * wanted))
    slope = math.log(1.5) / math.log(threshold / lower) if threshold > lower > 0 else 1.0
    return threshold, min(max(slope, 0.5), 100.0)


CODEC = Threshold
