"""What all strategies declare whose replicas average what they have learnt by themselves."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from echelon.compression import Compression
from echelon.sync.averaging.plan import AveragingPlan, check_deltas, length_notes, stays
from echelon.sync.settings import SyncSettings
from echelon.sync.state_bytes import Piece, StateBytes, by_averaging


class AveragingSettings(SyncSettings):
    """Settings of a strategy whose replicas agree as a plan says."""

    encodes_gradients: ClassVar[bool] = False
    centred: ClassVar[bool] = False
    """Whether replicas stay apart, around a centre (`Rule.centred`)."""

    @abstractmethod
    def plan(self) -> AveragingPlan:
        """Return when what is averaged.

        Raises:
            ValueError: a setting is out of its range.
        """

    @property
    def replica_is_one_rank(self) -> bool:
        """Whether the period follows the link: ranks of one replica would follow different ones."""
        return self.plan().auto

    @property
    def regroups(self) -> bool:
        """Whether all replicas agree on all of the model at one step, from which they can begin a round again."""
        return self.plan().in_one_piece

    def messages(self, steps: int) -> int:
        """Return the agreements on a parameter in a run of so many steps."""
        return self.plan().for_run(steps).agreements(steps)

    def longest_period(self, steps: int) -> int:
        """Return the longest period that it may choose in a run of so many steps; 0: the period is fixed."""
        plan = self.plan().for_run(steps)
        return plan.control().most if plan.auto else 0

    def settled(self, compression: Compression, steps: int) -> Compression:
        """Return the compression as a run of so many steps has it: what stays in a replica is not late."""
        if stays(compression.codec, self.plan(), self.centred):
            compression = compression.without_whole_start()
        return compression.for_run(self.messages(steps))

    def length_notes(self, steps: int) -> list[str]:
        """Say how often replicas agree at first, and whether there are too few periods."""
        return length_notes(self.plan().for_run(steps), steps)

    def check(self, compression: Compression) -> None:
        """Refuse a codec that deltas cannot go through (UserError)."""
        check_deltas(compression)

    def state_bytes(self, compression: Compression, piece: Piece) -> StateBytes:
        """Return the memory of what was agreed on last, and of the codec."""
        return by_averaging(self.plan(), compression, piece)
