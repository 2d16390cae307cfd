"""When replicas agree, and by which rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from echelon.compression import Compression
from echelon.core.errors import UserError
from echelon.core.state_tree import StateTree, StateView

OPTIMIZER_STATES = ("keep", "average", "reset")


@dataclass(frozen=True)
class AveragingPlan:
    """When what is averaged. Steps count from 1.

    Attributes:
        period: steps from one agreement on a value to the next.
        start: steps of synchronous all-reduce before the first local one.
        fragments: parts of the model that agree at different steps of a period.
        overlap: steps that a fragment travels behind the computation; its mean is applied that much later.
        alpha: share of the replica's own value that is kept when a mean is applied.
        optimizer_state: `keep` moments as they are, `average` them too, or `reset` them at each agreement.
        keep_progress: with overlap, what the replica has learnt while a mean travelled is added to it.

    Raises:
        ValueError: a setting is out of its range.
    """

    period: int
    start: int = 0
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.0
    optimizer_state: str = "keep"
    keep_progress: bool = False

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period {self.period}: use at least 1 step")
        if self.start < 0:
            raise ValueError(f"start {self.start}: write how many synchronous steps come first, 0 for none")
        if not 1 <= self.fragments <= self.period:
            raise ValueError(f"fragments {self.fragments}: use 1 to {self.period}, for one agrees per step of a period")
        if not 0 <= self.overlap < self.period:
            raise ValueError(f"overlap {self.overlap}: use 0 to {self.period - 1}, less than the period {self.period}")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha {self.alpha:g}: use 0 (take the mean) to below 1 (keep what is one's own)")
        if self.optimizer_state not in OPTIMIZER_STATES:
            raise ValueError(f"optimizer_state {self.optimizer_state}: use {', '.join(OPTIMIZER_STATES)}")

    def is_due(self, fragment: int, step: int) -> bool:
        """Whether a fragment's deltas are taken after local step `step`: at its offset p * period / fragments."""
        return step % self.period == fragment * self.period // self.fragments


class Rule(Protocol):
    """What an agreement makes of a parameter's mean delta.

    Attributes:
        centred: replicas stay apart, around a centre that is the result; else they take the agreed value.
    """

    centred: bool

    def agree(self, name: str, current: Tensor, anchor: Tensor, mean: Tensor) -> Tensor:
        """Move the anchor, in place, and return the value that this replica goes on from.

        Args:
            current: this replica's value now.
            anchor: what was agreed on last, the same on all replicas; `mean` is of own - anchor.
        """

    def state_dict(self) -> StateTree:
        """Return what the rule remembers, the same on all replicas."""

    def load_state_dict(self, state: StateView) -> None:
        """Take back what `state_dict` gave."""


class MeanRule:
    """Replicas take the mean: anchor <- anchor + mean delta."""

    centred = False

    def agree(self, name: str, current: Tensor, anchor: Tensor, mean: Tensor) -> Tensor:
        """Move the anchor to the mean of the replicas."""
        return anchor.add_(mean)

    def state_dict(self) -> StateTree:
        """Return nothing: the anchor is all there is."""
        return {}

    def load_state_dict(self, state: StateView) -> None:
        """Take nothing back."""


def check_deltas(compression: Compression) -> None:
    """Refuse a codec that gradients can go through, but deltas of parameters cannot.

    Raises:
        UserError: names the nearest that works.
    """
    codec = compression.codec
    if codec.direction:
        raise UserError(
            f"--compression {compression} gives directions of a fixed size, but deltas of parameters have sizes: "
            "use sign (with scales), or --sync allreduce"
        )
    if codec.absorbs_momentum or codec.looks_ahead:
        raise UserError(
            f"--compression {compression} applies momentum to what it encodes, but the optimizer of each replica "
            "applies it before: leave momentum out of the compression, and nesterov with it, or use --sync allreduce"
        )
