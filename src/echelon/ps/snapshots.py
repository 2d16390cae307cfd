"""Snapshots of a server without a standby: written beside the work, taken back after its death.

A push is durable when a snapshot that holds it is on the disk; workers keep what is not, and push it again to the
server's next life. What no living worker can push again is lost, and is told.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from echelon.checkpoint import CheckpointStore
from echelon.coordinator.shares import MAX_SHARES
from echelon.messages.protocol import Kind, Message
from echelon.ps.keystore import KeyStore
from echelon.ps.table import table_from_bytes

if TYPE_CHECKING:
    from echelon.ps.server import Server

KEEP = 2
SETTLE_S = 20.0
TELL_AGAIN_S = 1.0


class Snapshots:
    """Writes a server's state every `snapshot_every` tasks' worth of updates, and restores the newest."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._enabled = server.settings.replicas == 0
        name = f"server{server.config.index}"
        self._store = CheckpointStore(server.config.folder / "servers" / name, KEEP)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="echelon-snapshot")
        self._running: Future[dict[bytes, int]] | None = None
        self._count, self._at_updates = 0, 0
        self._settle_by = 0.0
        self._missing: set[str] | None = None
        self._repushed: set[str] = set()
        self._behind, self._untold, self._told_s = False, False, 0.0
        self._tags: dict[int, bool] = {}
        self.restored = False
        self.safe = not self._enabled

    @property
    def settling(self) -> bool:
        """Whether workers may still push again what the last life lost."""
        return self._settle_by > 0

    def restore(self) -> None:
        """Take back the newest whole snapshot, where there is one."""
        if not self._enabled:
            return
        found = self._store.newest()
        if found is None:
            return
        self._count, state = found
        self._server.set_table(table_from_bytes(state["table"].encode()))
        for index, key_state in state["keys"].items():
            self._server.put(index, key_state)
        self._server.buffers = dict(state["buffers"])
        self.restored = self.safe = self._untold = True
        self._behind = self._server.settings.aggregates
        self._settle_by = time.monotonic() + SETTLE_S

    def pump(self) -> None:
        """Begin a snapshot that is due; tell workers of one that is written."""
        if not self._enabled or not self._server.ready:
            return
        if self._running is not None and self._running.done():
            numbers, self._running = self._running.result(), None
            self._tell(numbers)
            if not self.safe:
                self.safe = True
                self._server._join()
        every = self._server.settings.snapshot_every * len(self._server.stores)
        due = self._count == 0 or self._server.load.updates - self._at_updates >= every
        if due and self._running is None and not self.settling and not self._behind:
            self._begin()
        if self.settling and (self._missing == set() or time.monotonic() > self._settle_by):
            self._settle_by = 0.0
            self._tell_held()
            if not self._behind:
                self._keep_copies()
        elif self._untold and not self.settling and time.monotonic() > self._told_s + TELL_AGAIN_S:
            self._tell_held()  # the scheduler was gone too, or did not know this life yet

    def _begin(self) -> None:
        server = self._server
        assert server.table is not None
        self._count += 1
        self._at_updates = server.load.updates
        state = {
            "table": server.table.to_bytes().decode(),
            "keys": {index: store.whole_state() for index, store in server.stores.items()},
            "buffers": dict(server.buffers),
        }
        self._running = self._pool.submit(self._write, self._count, state, dict(server.numbers))

    def _write(self, count: int, state: dict[str, Any], numbers: dict[bytes, int]) -> dict[bytes, int]:
        self._store.save(count, state, background=False)
        return numbers

    def _tell(self, numbers: dict[bytes, int]) -> None:
        server = self._server
        for peer, number in numbers.items():
            body = {"number": number, "life": server.voice.session}
            server.voice.reply(server.listener.socket, peer, Kind.DURABLE, body)

    # After a restart

    def members(self, workers: set[str]) -> None:
        """Learn who may push again; who vanishes may only have been silent on a busy machine, and is waited for too."""
        if self.settling:
            self._missing = ((self._missing or set()) | workers) - self._repushed

    def repushed(self, peer: bytes, message: Message) -> None:
        """Note that a worker has pushed again all that it kept."""
        self._repushed.add(message.sender)
        if self._missing is not None:
            self._missing.discard(message.sender)

    def tag(self, tag: int, full: bool) -> None:
        """Keep a copy of now; after a restart, once all that can come again has come."""
        if self.settling or self._behind:
            self._tags[tag] = full
        else:
            self._server.giving.tag(tag, full)

    def untag(self, tag: int) -> None:
        """Drop a copy."""
        self._tags.pop(tag, None)
        self._server.giving.tags.pop(tag, None)

    def _keep_copies(self) -> None:
        while self._tags:
            self._server.giving.tag(*self._tags.popitem())

    def _tell_held(self) -> None:
        """Everything that can come again has come: say what the keys hold, so that the scheduler knows what is lost."""
        server, self._told_s = self._server, time.monotonic()
        floor, common = held_by_all(list(server.stores.values()))
        life = server.voice.session
        info = {"index": server.config.index, "watermark": floor, "tasks": ranges(common), "life": life}
        server.scheduler.send(Kind.LOST, {"info": info})

    def tell_again(self) -> None:
        """The scheduler did not know this life: what it was told last may have been dropped."""
        self._told_s = 0.0

    def caught_up(self, step: int) -> None:
        """The scheduler knows what is held. Aggregating modes: complete what waits for gradients that nobody has any
        more, and say how much lacked.
        """
        self._untold = False
        if not self._behind:
            return
        server = self._server
        lacking = 0
        for store in server.stores.values():
            lacking = max(lacking, store.catch_up(step))
            server.giving.unpark(store)
        server.scheduler.send(Kind.LOST, {"info": {"index": server.config.index, "lacking": lacking}})
        self._behind = False
        self._keep_copies()

    def close(self) -> None:
        """Wait for the snapshot that is being written."""
        self._pool.shutdown(wait=True)
        if self._running is not None:
            self._running.result()
        self._store.close()


def held_by_all(stores: Sequence[KeyStore]) -> tuple[int, set[int]]:
    """Return what every key has counted: all tasks before a number, and these.

    Where gradients are aggregated the number is that of a step, and the tasks are shares of steps from there on.
    """
    if not stores:
        return 0, set()
    if not stores[0].settings.aggregates:
        return min(s.applied.watermark for s in stores), set.intersection(*(s.applied.tasks for s in stores))
    waiting = [(store.version, store.gathered_tasks()) for store in stores]
    tasks = set().union(*(own for _, own in waiting))
    held = {t for t in tasks if all(t in own or t // MAX_SHARES < version for version, own in waiting)}
    return min(version for version, _ in waiting), held


def ranges(numbers: set[int]) -> list[int]:
    """Write a set as first, last, first, last, ... of its runs.

    >>> ranges({1, 2, 3, 7})
    [1, 3, 7, 7]
    """
    runs: list[int] = []
    for number in sorted(numbers):
        if runs and runs[-1] == number - 1:
            runs[-1] = number
        else:
            runs += [number, number]
    return runs
