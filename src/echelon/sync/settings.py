"""What every strategy declares: its settings, and what others may ask of it before it is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from echelon.core.errors import UserError
from echelon.core.spec import spec_of

if TYPE_CHECKING:
    from echelon.compression import Compression
    from echelon.sync.base import Sync, SyncContext
    from echelon.sync.state_bytes import Piece, StateBytes


class SyncSettings(ABC):
    """Settings of a strategy. Subclasses are frozen dataclasses; their file assigns them to `STRATEGY`.

    Attributes:
        name: the spec name (the file's name).
        uses_servers: servers hold the parameters, and workers train on leases.
        encodes_gradients: gradients go through the codec, which may then apply momentum; else deltas of parameters,
            which have had theirs.
        sums_in_backward: every step ends in one common update, of gradients that are summed during backward.
    """

    name: ClassVar[str]
    uses_servers: ClassVar[bool] = False
    encodes_gradients: ClassVar[bool] = True
    sums_in_backward: ClassVar[bool] = False

    @property
    def replica_is_one_rank(self) -> bool:
        """Whether it can only act between replicas that are one rank each."""
        return False

    @property
    def regroups(self) -> bool:
        """Whether the replicas can go on when some of them are gone (see `Regroupable`)."""
        return False

    @property
    def synchronous_steps(self) -> int:
        """For how many steps a strategy that averages parameters reduces gradients at first."""
        return 0

    def messages(self, steps: int) -> int:
        """Return how often a run of so many steps sends each parameter; 0: steps are not known."""
        return steps

    def longest_period(self, steps: int) -> int:
        """Return the longest period that it may choose in a run of so many steps; 0: it chooses none."""
        return 0

    def settled(self, compression: Compression, steps: int) -> Compression:
        """Return the compression as a run of so many steps (0: not known) has it."""
        return compression.for_run(self.messages(steps))

    def steady(self) -> SyncSettings:
        """Return the strategy as it is beyond a run's first steps, for runs that are too short to have others."""
        return self

    def length_notes(self, steps: int) -> list[str]:
        """Say what follows from a run's number of steps: what it begins with, and whether it is too short."""
        return []

    @property
    def warmup_share(self) -> float:
        """For which share of a run the learning rate of SGD rises at first, where nobody set it."""
        return 0.0

    @property
    def acts_alone(self) -> bool:
        """Whether it changes the training of a single replica."""
        return True

    def with_ema(self, decay: float) -> SyncSettings:
        """Return the settings of a run whose weights are averaged with this decay (0: not at all).

        Raises:
            UserError: the settings name another one.
        """
        return self

    def batch_parts(self, replicas: int) -> int:
        """Return how many parts a global batch is cut into."""
        return replicas

    def momentum_notes(self, momentum: float, workers: int) -> list[str]:
        """Say what becomes of the optimizer's momentum (0: it has none) with so many workers, where that changes it."""
        return []

    def optimizer_notes(self, optimizer: str, replicas: int) -> list[str]:
        """Say what the strategy does about an optimizer, by its name, with so many replicas."""
        return []

    def check_run(self, workers: int, clips: bool, has_momentum: bool) -> None:  # noqa: B027 (most have no servers)
        """Refuse what servers that hold the parameters cannot do.

        Args:
            workers: the least number of them.
            clips: gradients are clipped to a norm.
            has_momentum: the optimizer has one.

        Raises:
            UserError: names both settings and what works.
        """

    @abstractmethod
    def check(self, compression: Compression) -> None:
        """Refuse what the strategy cannot send through.

        Raises:
            UserError: names a combination that works.
        """

    def check_momentum(self, compression: Compression, has_momentum: bool) -> None:
        """Refuse the optimizer's momentum after decoding, in synchronous steps at the start, where it spoils training.

        Raises:
            UserError: names what to leave out, and codecs that work.
        """
        if self.synchronous_steps and has_momentum and compression.codec.momentum_inside:
            raise UserError(
                f"--sync {self} sends gradients through --compression {compression} at first, and the optimizer's "
                "momentum after decoding, together with error feedback, spoils training: leave out start, or use int8, "
                "topk or powersgd"
            )

    @abstractmethod
    def state_bytes(self, compression: Compression, piece: Piece) -> StateBytes:
        """Return the memory that the strategy and its codec keep on a rank from step to step."""

    @abstractmethod
    def build(self, context: SyncContext) -> Sync:
        """Build the strategy.

        Raises:
            UserError: it cannot work in this run.
        """

    def __str__(self) -> str:
        return str(spec_of(self.name, self))
