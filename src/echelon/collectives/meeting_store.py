"""The store in which ranks of several machines find each other: a table of the first one, asked under the run's keys.

torch's `TCPStore` knows no authentication: whoever reaches its port reads and writes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
import zmq

from echelon.messages.endpoint import Channel, Sender
from echelon.messages.framing import Message, vocabulary
from echelon.messages.identity import RunKeys
from echelon.messages.key_values import KeyAnswer, KeyRequest, Operation
from echelon.messages.sockets import Limits

_LIMITS = Limits(1 << 20, queued=1000)
_AGAIN_S = 2.0  # a question or its answer was lost with a connection
_LOOK_S = 0.01
_LOOK_MOST_S = 0.2
_POLL_MS = 50


class MeetingStore(dist.Store):
    """A `torch.distributed` store whose values lie with the first machine; any thread may use it.

    Keep a reference to it for as long as a process group uses it: torch holds the C++ half alone.

    Attributes:
        address: `HOST:PORT` of the first machine.
        keys: of the run, which its messages are encrypted with.
    """

    def __init__(
        self,
        address: str,
        keys: RunKeys,
        table: str,
        timeout: timedelta,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Connect to `HOST:PORT`; nothing is sent yet.

        Args:
            table: the name that the ranks of one start have, so that they read nothing of an earlier one.
            timeout: how long `get` and `wait` wait.
            check: raises an error once no answer is to be waited for.
        """
        super().__init__()
        self.address, self.keys, self._check = address, keys, check
        self._timeout_s = timeout.total_seconds()
        self._table, self._number = table, 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._channel = Channel(
            self._context, Sender(keys, "rank"), f"tcp://{address}", _LIMITS, vocabulary(KeyAnswer)
        )  # fmt: skip
        self._answer: KeyAnswer | None = None
        self._lock = threading.Lock()

    def elsewhere(self, address: str, check: Callable[[], None]) -> MeetingStore:
        """Return the store of the same ranks with another machine, which leads instead of the one before."""
        timeout = timedelta(seconds=self._timeout_s)
        return MeetingStore(address, self.keys, self._table, timeout, check)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask(Operation.SET, [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        """Return a key's value, once it is there.

        Raises:
            TimeoutError: it was not, in time.
        """
        self.wait([key])
        return self._ask(Operation.GET, [key]).value

    def add(self, key: str, value: int) -> int:
        """Add to a key's number, 0 if it has none; returns the sum."""
        return int(self._ask(Operation.ADD, [key], [b"%d" % value]).value)

    def append(self, key: str, value: str | bytes) -> None:
        """Put bytes at the end of a key's value."""
        self._ask(Operation.APPEND, [key], [_bytes(value)])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it has the expected value, or that is empty and it has none; returns what it has then."""
        return self._ask(Operation.COMPARE_SET, [key], [_bytes(expected_value), _bytes(desired_value)]).value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._ask(Operation.CHECK, list(keys)).is_there

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            TimeoutError: they were not, in time.
        """
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        ends, pause_s = time.monotonic() + limit_s, _LOOK_S
        while not self._ask(Operation.CHECK, list(keys), limit_s=limit_s).is_there:
            if time.monotonic() > ends:
                raise TimeoutError(f"no rank has set {', '.join(keys)} within {limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LOOK_MOST_S)

    def delete_key(self, key: str) -> bool:
        """Remove a key; returns whether it was there."""
        return self._ask(Operation.DELETE, [key]).is_there

    def num_keys(self) -> int:
        """Count the keys."""
        return int(self._ask(Operation.COUNT, []).value)

    deleteKey, getNumKeys = delete_key, num_keys

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long `get` and `wait` wait."""
        self._timeout_s = timeout.total_seconds()

    def clone(self) -> MeetingStore:
        """Return this store: any thread may use it."""
        return self

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            self._channel.close()
            self._context.term()

    def _ask(
        self, operation: Operation, keys: list[str], values: Sequence[bytes] = (), limit_s: float | None = None
    ) -> KeyAnswer:
        """Ask, again while no answer comes; the table does it once.

        Raises:
            TimeoutError: the first machine did not answer in time.
        """
        limit_s = self._timeout_s if limit_s is None else limit_s
        with self._lock:
            self._number += 1
            self._answer = None
            request = KeyRequest(self._table, self._number, operation, keys, list(values))
            ends = time.monotonic() + max(limit_s, _AGAIN_S)
            while self._answer is None:
                if time.monotonic() > ends:
                    raise TimeoutError(f"the first machine ({self._channel.address}) gave no answer for {limit_s:g} s")
                self._channel.send(request)
                again = time.monotonic() + _AGAIN_S
                while self._answer is None and time.monotonic() < again:
                    wait_ms = max(1, int(1000 * (again - time.monotonic())))
                    self._channel.socket.poll(wait_ms if self._check is None else min(wait_ms, _POLL_MS))
                    self._channel.pump(self._take)
                    if self._answer is None and self._check is not None:
                        self._check()
            return self._answer

    def _take(self, message: Message) -> None:
        content = message.content
        if isinstance(content, KeyAnswer) and content.number == self._number:
            self._answer = content


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
