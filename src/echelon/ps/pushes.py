"""A worker's traffic to one server: what waits, what is on its way, what must be kept until it is durable."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field, replace
from typing import Any

from echelon.messages.endpoint import Channel
from echelon.ps.flight import FlightWindow
from echelon.ps.messages import PullRows, PushGradient, Repushed

KEPT_BYTES = 256 << 20


@dataclass
class Outgoing:
    """A push and its frames; numbered when it leaves."""

    content: PushGradient
    frames: list[Any]

    @property
    def n_bytes(self) -> int:
        """Bytes of the frames."""
        return sum(map(len, self.frames))


@dataclass
class ServerTraffic:
    """One server as a worker sees it. Pushes are numbered as they leave; numbers survive the server's restart."""

    channel: Channel
    life: int = 0
    keeps: bool = True
    by_priority: bool = False
    _heap: list[tuple[int, int, Outgoing]] = field(default_factory=list)
    _unacked: dict[int, Outgoing] = field(default_factory=dict)
    _kept: dict[int, Outgoing] = field(default_factory=dict)
    _kept_bytes: int = 0
    _queued: int = 0
    _number: int = 0
    _repushing: set[int] = field(default_factory=set)
    _row_pulls: list[tuple[PullRows, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._window = FlightWindow(measures=self.by_priority)

    def queue(self, priority: int, push: Outgoing) -> None:
        """Let a push wait for its turn; the lowest priority number leaves first."""
        self._queued += 1
        heapq.heappush(self._heap, (priority, self._queued, push))

    def queue_rows(self, pull: PullRows, frame: Any) -> None:
        """Let a request for rows leave behind the pushes of their key: it must not see a table without them."""
        self._row_pulls.append((pull, frame))

    def flush(self) -> None:
        """Send what the window has room for."""
        while self._heap and self._window.has_room:
            push = heapq.heappop(self._heap)[2]
            if not push.content.number:
                self._number += 1
                push.content = replace(push.content, number=self._number)
            self._unacked[push.content.number] = push
            self._window.leaves(push.content.number, push.n_bytes, time.monotonic())
            self.channel.send(push.content, push.frames)
        waiting = {push.content.key for _, _, push in self._heap} if self._row_pulls else set[int]()
        for pull, frame in self._row_pulls:
            if pull.key not in waiting:
                self.channel.send(pull, [frame])
        self._row_pulls = [(pull, frame) for pull, frame in self._row_pulls if pull.key in waiting]

    def acknowledged(self, number: int) -> Outgoing | None:
        """Note that a push was counted; returns it, or None when that was known."""
        push = self._unacked.pop(number, None)
        if push is None:
            return None
        self._window.arrived(number, time.monotonic())
        if self.keeps:
            self._kept[number] = push
            self._kept_bytes += push.n_bytes
            while self._kept_bytes > KEPT_BYTES:
                self._drop(next(iter(self._kept)))
        if number in self._repushing:
            self._repushing.discard(number)
            if not self._repushing:
                self.channel.send(Repushed(self.life))
        return push

    def durable(self, number: int) -> None:
        """Forget pushes up to a number: they survive the server's death."""
        for done in [n for n in self._kept if n <= number]:
            self._drop(done)

    def _drop(self, number: int) -> None:
        self._kept_bytes -= self._kept.pop(number).n_bytes

    def restart(self, channel: Channel, life: int) -> None:
        """Turn to the server's next life: push again what was not durable, in the order of before."""
        if channel is not self.channel:
            self.channel.close()
        self.channel, self.life = channel, life
        again = {**self._kept, **self._unacked}
        self._kept, self._unacked = {}, {}
        self._row_pulls.clear()  # whoever waits for rows asks again
        self._kept_bytes, self._window = 0, FlightWindow(measures=self.by_priority)
        self._repushing = set(again)
        for number in sorted(again):
            again[number].content = replace(again[number].content, pull=False)  # what is wanted is asked for apart
            self.queue(-1, again[number])
        if not again:
            self.channel.send(Repushed(life))
        self.flush()
