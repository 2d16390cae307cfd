"""topk: the largest elements, with momentum correction, clipping and a warm-up of the density.

Helps: Links 10 times too slow and more, and large models: 1% of the elements travel.
Needs: SGD; a learning rate that suits late gradients (warmup_steps, or nesterov=true).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from echelon.compression.base import Codec, CorrectsMomentum, State, check_momentum
from echelon.compression.selection import largest
from echelon.compression.sparse import Sparse, check_density, check_values, count_for

_STAGES = 4


@dataclass(frozen=True)
class TopK(CorrectsMomentum, Sparse):
    """The k = density * n elements of largest magnitude, indices packed; the rest waits in the error memory.

    Deep Gradient Compression: u = m u + g; v = v + u; send the k largest of v; zero v and u where sent (u only once the
    density is below 5%: while much is sent, that would remove the momentum). u is the wrapper's "velocity", v its
    "error". With momentum 0 it is plain error feedback. Density warm-up: density^(1/4), ^(2/4), ^(3/4) for a third of
    `warmup_steps` each (1%: 31.6%, 10%, 3.2%), then `density`.

    Bits per element: density * (16 + about 2 + log2(1 / density)) with bf16 values: 0.25 at 1%. Biased.

    Attributes:
        density: share of elements sent, above 0 and at most 1.
        momentum: applied in the worker, before choosing; the optimizer's must be 0. 0: the optimizer keeps its own.
            Left out: `Compression.with_momentum` fills in the optimizer's.
        nesterov: u looks ahead, v = v + g + m u (the paper's appendix B); left out: as the optimizer's momentum does.
        clip: Euclidean norm that each vector which a worker encodes is scaled down to: in an all-reduce the chunk of a
            cell that goes to one owner, so that a global limit L is about L / (workers sqrt(cells)); 0: none.
        warmup_steps: steps until the density is reached; 0: at once.
        values: how values travel: bf16, fp32 or sign.

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
    density: float
    momentum: float | None = None
    clip: float = 0.0
    warmup_steps: int = 0
    values: str = "bf16"
    nesterov: bool | None = None

    def __post_init__(self) -> None:
        check_density(self.density)
        check_momentum(self.momentum)
        check_values(self.values)
        if self.clip < 0:
            raise ValueError("clip must be positive, or 0 for none")
        if self.warmup_steps < 0:
            raise ValueError("warmup_steps must be positive, or 0 for none")

    @property
    def local_clip(self) -> float:
        """Euclidean norm of clipping: `clip`."""
        return self.clip

    def relay(self) -> Codec:
        """Return the codec without momentum and clipping."""
        return replace(self, momentum=0.0, clip=0.0)

    def share_sent(self, state: State) -> float:
        """Return `density`, or within the warm-up its stage: density^(1/stages), density^(2/stages), ..."""
        if state.step >= self.warmup_steps:
            return self.density
        stage = state.step * (_STAGES - 1) // self.warmup_steps
        return float(self.density ** ((stage + 1) / _STAGES))

    def count(self, numel: int) -> int | None:
        """Return the number of elements sent; None with a warm-up."""
        return None if self.warmup_steps else count_for(self.density, numel)

    def choose(self, x: Tensor, state: State) -> Tensor:
        """Return the indices of the largest elements in magnitude."""
        return largest(x, count_for(self.share_sent(state), x.numel()), state)

    def bits_per_element(self, numel: int, state: State | None = None) -> float:
        """By the next message's density; without a state by `density`."""
        density = self.share_sent(state) if state else self.density
        return self.bits_for(numel, count_for(density, numel))


CODEC = TopK
