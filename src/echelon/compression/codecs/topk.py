"""topk: the largest elements, with momentum correction and a warm-up of the density.

Helps: Links that are ten times too slow or slower, and large models: at density 0.01, 1% of the elements is sent.
Costs: computation to find the largest elements, and memory for error feedback (`--dry-run` counts it).
Needs: SGD, and a learning rate that tolerates late gradients (warmup_steps, or nesterov=true).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar

from torch import Tensor

from echelon.compression.base import Codec, State, WholeSteps
from echelon.compression.eased import CorrectsMomentum, Eased, share_of
from echelon.compression.selection import by_length, largest, largest_together
from echelon.compression.sparse import Sparse, count_for
from echelon.core.bounds import Bounds, OneOf, check_bounds

_STAGES = 4
_TURNS = 5
_WARMUP_SHARE = 0.2


@dataclass(frozen=True)
class TopK(CorrectsMomentum, Eased, Sparse):
    """Send the k = density * n elements of largest magnitude with their indices; error feedback sends the rest later.

    Deep Gradient Compression, with momentum m: u = m u + g; v = v + u; send the k largest of v, and set v to zero where
    sent. v is what error feedback holds. u is set to zero there, too, if `density` is below 5%; above, that would
    remove too much of the momentum. With momentum 0 it is plain error feedback.

    The density falls in stages, density^(1/4), ^(2/4), ^(3/4), each for a third of `warmup_steps` (for 1%: 31.6%, 10%,
    3.2%), and then stays at `density`. The last steps send everything, as int8.

    Bits per element: density * (16 + about 2 + log2(1 / density)) with bf16 values, 0.25 at 1%. Biased.

    Attributes:
        density: share of the elements that is sent.
        momentum: applied in the worker, before choosing; 0: the optimizer keeps its own. Left out: the optimizer's
            momentum, which Echelon moves here.
        nesterov: Nesterov momentum in the worker, v = v + g + m u (the paper's appendix B); left out: as the optimizer
            has it.
        clip: largest Euclidean norm of a vector that a worker encodes, in gradient units; longer ones are scaled down.
            In an all-reduce that vector is a chunk of a bucket, so a global limit L is about L / (workers
            sqrt(buckets)). 0: no limit.
        warmup_steps: how many first steps send more than `density`; 0: none; left out: 20% of the run's steps.
        finish_steps: how many last steps send int8 instead; 0: none; left out: 2% of the run's steps.
        values: how values are sent: bf16, fp32, or sign (one magnitude for all).

    Paper: Lin et al. 2018, "Deep Gradient Compression", arXiv:1712.01887.
    """

    name: ClassVar[str] = "topk"
    examples: ClassVar[tuple[str, ...]] = (
        "topk(0.01)",
        "topk(0.01, momentum=0.9, clip=100.0, warmup_steps=9)",
        "topk(0.03, values=sign)",
        "topk(0.5, values=fp32)",
        "topk(0.01)+huffman",
    )
    density: Annotated[float, Bounds(above=0, most=1)]
    momentum: Annotated[float | None, Bounds(least=0, below=1)] = None
    clip: Annotated[float, Bounds(least=0)] = 0.0
    warmup_steps: Annotated[int | None, Bounds(least=0)] = None
    values: Annotated[str, OneOf(("bf16", "fp32", "sign"))] = "bf16"
    nesterov: bool | None = None
    finish_steps: Annotated[int | None, Bounds(least=0)] = None

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def local_clip(self) -> float:
        """Euclidean norm of clipping: `clip`."""
        return self.clip

    def relay(self) -> Codec:
        """Return the codec without momentum and clipping."""
        return replace(self, momentum=0.0, clip=0.0)

    def share_sent(self, state: State) -> float:
        """Return `density`, or within the warm-up its stage: density^(1/stages), density^(2/stages), ..."""
        return self._density_at(state.step)

    def _density_at(self, step: int) -> float:
        warmup_steps = self.warmup_steps or 0
        if step >= warmup_steps:
            return self.density
        stage = step * (_STAGES - 1) // warmup_steps
        return float(self.density ** ((stage + 1) / _STAGES))

    def for_run(self, messages: int) -> Codec:
        """Return the codec with a longer warm-up than others have: its stages send less."""
        warmup_steps = share_of(messages, _WARMUP_SHARE) if self.warmup_steps is None else self.warmup_steps
        return super(TopK, replace(self, warmup_steps=warmup_steps)).for_run(messages)

    def without_whole_start(self) -> Codec:
        """Return it: its first messages are stages, not whole."""
        return self

    @property
    def fewest_messages(self) -> int:
        """Return after how many an element of the usual size was sent a few times."""
        return round(_TURNS / self.density)

    def length_notes(self, messages: int) -> list[str]:
        """Say when the density is reached, too."""
        stages = f"density {self.density:g} is reached after {self.warmup_steps} of {messages} messages"
        return [*([stages] if self.warmup_steps else []), *super().length_notes(messages)]

    def whole_steps(self, messages: int) -> WholeSteps:
        """Return the last messages: at the start densities are stages."""
        return replace(super().whole_steps(messages), first=0)

    def at(self, step: int) -> Codec:
        """Return the codec of a step's density, whose messages have a size that is known."""
        if not self.warmup_steps:
            return self
        settings = {each.name: getattr(self, each.name) for each in fields(self)}
        stage = step < self.warmup_steps and self.density < self.mask_below
        return (_Stage if stage else TopK)(**settings | {"density": self._density_at(step), "warmup_steps": 0})

    def count(self, numel: int) -> int | None:
        """Return the number of elements sent; None with a warm-up."""
        return None if self.warmup_steps else count_for(self.density, numel)

    def choose(self, x: Tensor, state: State) -> Tensor:
        """Return the indices of the largest elements of x [numel] in magnitude."""
        return largest(x, count_for(self.share_sent(state), x.numel()), state)

    def choose_together(self, tensors: Sequence[Tensor], states: Sequence[State]) -> list[Tensor]:
        """Do what `choose` does to several tensors [numel] each, whose states have counted alike, in few launches."""
        chosen: dict[int, Tensor] = {}
        for places in by_length(tensors):
            count = count_for(self.share_sent(states[places[0]]), tensors[places[0]].numel())
            found = largest_together([tensors[i] for i in places], count, [states[i] for i in places])
            chosen |= dict(zip(places, found, strict=True))
        return [chosen[i] for i in range(len(tensors))]

    def bits_per_element(self, numel: int, state: State | None = None) -> float:
        """By the next message's density; without a state by `density`."""
        density = self.share_sent(state) if state else self.density
        return self.bits_for(numel, count_for(density, numel))


class _Stage(TopK):
    """A stage of the warm-up: momentum is zeroed where values were sent, however many these are.

    What is sent late has been multiplied by the momentum already: with the velocity kept, early steps overshoot.
    """

    mask_below: ClassVar[float] = math.inf


CODEC = TopK
