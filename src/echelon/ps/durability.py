"""What survives the death of a server. Pure; time comes in as an argument.

With a standby: it does the same operations in the same order, so it is the same server. When the primary dies, the
scheduler promotes it; workers push again what was not acknowledged, and what was counted already is known as such.

Without one: a push is durable when a snapshot that holds it is on the disk; workers keep what is not, and push it again
to the server's next life. What no living worker can push again is lost, and is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from echelon.coordinator.shares import MAX_SHARES
from echelon.ps.keystore import KeyStore
from echelon.ps.messages import PushAck

SETTLE_S = 20.0
TELL_AGAIN_S = 1.0


class ReplicationLog:
    """The standby, and what is owed while it follows: acknowledgements that wait until it holds a push too."""

    def __init__(self) -> None:
        self.standby = b""
        self._asked: dict[int, bytes] = {}  # by membership: who asked to follow
        self._membership = 0
        self._number = 0
        self._owed: deque[tuple[int, bytes, PushAck]] = deque()

    @property
    def attached(self) -> bool:
        """Whether a standby takes this server's operations."""
        return bool(self.standby)

    def ask(self, peer: bytes, membership: int) -> bool:
        """Note who asks to follow, and in which membership (see `ServerEntry`); returns whether it is the present one.

        Who asks in two may be heard in the other order, as each time it asks by another connection.
        """
        self._asked[membership] = peer
        return 0 < membership == self._membership

    @property
    def lets_in(self) -> bool:
        """Whether who asked to follow is the standby as the scheduler tells.

        Its word may come later than who asks, and older word between the two. Who was let in before would be let go by
        that, and would count as ready for good.
        """
        return self._membership > 0 and self._membership in self._asked

    def expect(self, membership: int) -> bool:
        """Learn which membership is the standby's, 0: nobody's; returns whether who follows is to be let go."""
        changed, self._membership = membership != self._membership, membership
        return changed and self.attached

    def attach(self) -> bytes:
        """Let follow who asked to in the present membership; returns who that is."""
        self._asked = {number: peer for number, peer in self._asked.items() if number >= self._membership}
        self.standby = self._asked[self._membership]
        return self.standby

    def detach(self) -> None:
        """Have no standby any more."""
        self.standby = b""

    def next_number(self) -> int:
        """Return the number of the next operation."""
        self._number += 1
        return self._number

    def owe(self, number: int, peer: bytes, ack: PushAck) -> None:
        """Hold an acknowledgement back until the standby has an operation."""
        self._owed.append((number, peer, ack))

    def release(self, number: int | None = None) -> list[tuple[bytes, PushAck]]:
        """Return the acknowledgements that need not wait: up to an operation, or all."""
        released = []
        while self._owed and (number is None or self._owed[0][0] <= number):
            _, peer, ack = self._owed.popleft()
            released.append((peer, ack))
        return released

    def forget(self) -> None:
        """Owe nothing, to nobody."""
        self._owed.clear()
        self._asked = {}
        self.detach()


class Durability:
    """Snapshots every `every` tasks' worth of updates; after a restart, who has yet to push again.

    Attributes:
        safe: what workers have put is on the disk, or need not be.
        restored: this server began with a snapshot.
        behind: versions wait for gradients that may not come again (where gradients are aggregated).
        delayed_copies: copies that are wanted and cannot be kept yet: tag, and whether they are to be whole.
    """

    def __init__(self, enabled: bool, every: int) -> None:
        self.enabled, self._every = enabled, every
        self.safe = not enabled
        self.restored = self.behind = False
        self.delayed_copies: dict[int, bool] = {}
        self._writing = False
        self._count = self._at_updates = 0
        self._settle_by = self._told_s = 0.0
        self._untold = False
        self._missing: set[str] | None = None
        self._repushed: set[str] = set()

    # Snapshots

    def due(self, updates: int, keys: int) -> bool:
        """Whether a snapshot is to be written, after so many updates of so many keys."""
        due = self._count == 0 or 0 < self._every * keys <= updates - self._at_updates
        return due and not self._writing and not self.settling and not self.behind

    def begin(self, updates: int) -> int:
        """Begin a snapshot; returns its number."""
        self._count += 1
        self._at_updates, self._writing = updates, True
        return self._count

    def written(self) -> bool:
        """Note that the snapshot is on the disk; whether it is the first."""
        self._writing = False
        first, self.safe = not self.safe, True
        return first

    # After a restart

    def restore(self, count: int, keys: int, aggregates: bool, now_s: float) -> None:
        """Begin with snapshot number `count`: workers have some time to push again what came after it to its keys."""
        self._count = count
        self.restored = self.safe = True
        if keys:
            self._untold, self.behind = True, aggregates
            self._settle_by = now_s + SETTLE_S

    @property
    def settling(self) -> bool:
        """Whether workers may still push again what the last life lost."""
        return self._settle_by > 0

    @property
    def delays_copies(self) -> bool:
        """Whether a copy would lack what can come again."""
        return self.settling or self.behind

    def members(self, workers: set[str]) -> None:
        """Learn who may push again; who vanishes may only have been silent on a busy machine, and is waited for too."""
        if self.settling:
            self._missing = ((self._missing or set()) | workers) - self._repushed

    def repushed(self, worker: str) -> None:
        """Note that a worker has pushed again all that it kept."""
        self._repushed.add(worker)
        if self._missing is not None:
            self._missing.discard(worker)

    def settles(self, now_s: float) -> bool:
        """Whether just now everything has come that can come again, or the time for it is over."""
        if not self.settling or (self._missing != set() and now_s <= self._settle_by):
            return False
        self._settle_by = 0.0
        return True

    def tells_again(self, now_s: float) -> bool:
        """Whether the scheduler has not answered: it was gone too, or did not know this life yet."""
        return self._untold and not self.settling and now_s > self._told_s + TELL_AGAIN_S

    def told(self, now_s: float) -> None:
        """Note when the scheduler was told what is held; 0: what it was told last may have been dropped."""
        self._told_s = now_s

    def heard(self) -> None:
        """The scheduler knows what is held."""
        self._untold = False


def held_by_all(stores: Sequence[KeyStore]) -> tuple[int, set[int]]:
    """Return what every one of some keys has counted: all tasks before a number, and these.

    Where gradients are aggregated the number is that of a step, and the tasks are shares of steps from there on.
    """
    if not stores[0].settings.aggregates:
        return min(s.applied.watermark for s in stores), set.intersection(*(s.applied.tasks for s in stores))
    waiting = [(store.version, store.gathered_tasks()) for store in stores]
    tasks = set().union(*(gathered for _, gathered in waiting))
    common = {t for t in tasks if all(t in gathered or t // MAX_SHARES < version for version, gathered in waiting)}
    return min(version for version, _ in waiting), common
