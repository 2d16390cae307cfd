"""A worker's side for the training thread: it hands over gradients, and waits for values and tasks.

Pushes leave in the order in which the next forward pass needs them, not in that in which backward makes them: they
wait in a heap, and only so many bytes per server are on their way at a time, so that a first layer's gradient passes
the later ones that came before it. After each push the key's next value is asked for at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from echelon.compression.base import State
from echelon.messages.protocol import Kind, Message
from echelon.ps.blob import as_frame, pack_state, unpack_state
from echelon.ps.coding import upward
from echelon.ps.connection import Connection
from echelon.ps.table import KeyRange, KeyTable
from echelon.ps.worker_state import ClientConfig, ClientStats, OpenTask, PushInfo, RunOver, TagLost

__all__ = ["Client", "ClientConfig", "ClientStats", "PushInfo", "RunOver", "TagLost"]


class Client:
    """Start with `join`, then `set_table`; the training thread calls these methods, one at a time."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.talk = Connection(config)

    @property
    def stats(self) -> ClientStats:
        """Seconds waited by cause, and pushes by what became of them."""
        return self.talk.stats

    def while_waiting(self, call: Callable[[], None], every_s: float) -> None:
        """Let the training thread call something now and then while it waits for scheduler or servers."""
        self.talk.while_waiting, self.talk.while_waiting_s, self.talk.next_call_s = call, every_s, 0.0

    def join(self, info: dict[str, Any]) -> dict[str, Any]:
        """Join the run with what the scheduler should know of this worker; returns its welcome."""
        self.talk.join_info = info
        self.talk.thread.start()
        self.talk.do(self.talk.send_join)
        self.talk.wait_until(lambda: self.talk.welcome is not None, "the scheduler's welcome")
        assert self.talk.welcome is not None
        return self.talk.welcome

    def set_table(self, table: KeyTable) -> None:
        """Take the table of keys; values are pulled when first asked for."""
        self.talk.set_table(table)

    @property
    def sends_shapes(self) -> bool:
        """Whether the codec looks at parameters as matrices, so that the table must keep them whole."""
        codec = upward(self.config.compression, torch.float32).codec
        return codec is not None and codec.shaped

    def next_task(self) -> dict[str, Any] | None:
        """Wait for a task; None at the end of the run (see `status`)."""
        began = time.perf_counter()
        self.talk.do(self.talk.ask)
        self.talk.wait_until(lambda: bool(self.talk.tasks or self.talk.status), "a task", idle=True)
        self.talk.stats.waited_s["task"] += time.perf_counter() - began
        if self.talk.tasks:
            task = self.talk.tasks.popleft()
            self.talk.do(self.talk.ask)  # the next one travels while this one is worked on
            return task
        return None

    @property
    def status(self) -> str:
        """How the run ended; empty while it goes."""
        return self.talk.status

    def push(self, key: KeyRange, gradient: Tensor, info: PushInfo) -> None:
        """Send a key's gradient, 1-D; it must not change any more. The key's next value is asked for behind it."""
        slot = self.talk.slots[key.index]
        slot.valid = slot.valid and self.config.aggregates  # at once: `value` must not give what was before
        start = self.talk.do if self.talk.up.codec is None else self.talk.later
        start(lambda: self.talk.queue_push(key, gradient, info))

    def open_task(self, task: int, pushes: int) -> None:
        """Announce how many pushes a task will have."""
        self.talk.open[task] = OpenTask(pushes)

    def finish_task(self, task: int, info: dict[str, Any]) -> None:
        """Report a task once all its pushes are acknowledged."""
        self.talk.do(lambda: self.talk.finish(task, info))

    def result(self, task: int, info: dict[str, Any]) -> None:
        """Report the result of a task that pushes nothing."""
        self.talk.do(lambda: self.talk.report(task, Kind.RESULT, info))

    def send_buffers(self, task: int, values: Tensor) -> None:
        """Send statistics that are no parameters, 1-D float32, to the first server."""
        frame = as_frame(values.contiguous())
        self.talk.do(
            lambda: (
                self.talk.links[0].line.send(Kind.BUFFERS, {"task": task}, [frame]) if 0 in self.talk.links else None
            )
        )

    def value(self, key: KeyRange, version: int) -> Tensor:
        """Wait for a key's value: of exactly a version where gradients are aggregated, else the newest asked for.

        Raises:
            RunOver: the run ended without this worker's task (backup workers, a stop).
        """
        slot = self.talk.slots[key.index]

        def there() -> bool:
            return self.talk.is_there(slot, version)

        if not there():
            began = time.perf_counter()
            self.talk.do(lambda: self.talk.want(key, version))
            self.talk.wait_until(lambda: there() or bool(self.talk.status), f"key {key.index}")
            if not there():
                raise RunOver(self.talk.status)
            self.talk.stats.waited_s["parameters"] += time.perf_counter() - began
        return slot.value

    def version_of(self, key: KeyRange) -> int:
        """Return the version of the value that this worker has."""
        return self.talk.slots[key.index].version

    def put(self, table: KeyTable, states: dict[int, dict[str, Any]], deadline_s: float) -> None:
        """Give the servers their keys' states (by key number): the start of a run."""

        def send() -> None:
            for link in self.talk.links.values():
                link.line.send(Kind.SETUP, {}, [table.to_bytes()])
            for index, state in states.items():
                meta, frames = pack_state(state)
                server = table.keys[index].server if index < len(table.keys) else 0
                self.talk.links[server].line.send(Kind.PUT, {"key": index, "meta": meta}, frames)

        self._fetch(send, set(states), "the servers to take their keys", deadline_s)

    def fetch(self, table: KeyTable, indices: list[int], tag: int, full: bool) -> dict[int, dict[str, Any]]:
        """Read keys from the servers' copy `tag`: values, or with `full` whole states.

        Raises:
            TagLost: a server died meanwhile.
        """

        def send() -> None:
            for index in indices:
                server = table.keys[index].server if index < len(table.keys) else 0
                if full:
                    self.talk.links[server].line.send(Kind.STATE, {"key": index, "tag": tag})
                else:
                    body = {"key": index, "version": 0, "exact": False, "full": True, "tag": tag}
                    self.talk.links[server].line.send(Kind.PULL, body)

        messages = self._fetch(send, set(indices), f"the copy {tag}", self.config.timeout_s)
        if full:
            return {i: unpack_state(m.body["meta"], m.frames) for i, m in messages.items()}
        types = {i: table.torch_dtype if i < len(table.keys) else torch.float32 for i in messages}
        return {  # of statistics there are none before the first worker has sent its own
            i: {"value": torch.frombuffer(m.frames[0], dtype=types[i]) if len(m.frames[0]) else torch.empty(0)}
            for i, m in messages.items()
        }

    def _fetch(self, send: Callable[[], None], wanted: set[int], what: str, deadline_s: float) -> dict[int, Message]:
        changes = self.talk.changes
        self.talk.fetched = {}
        self.talk.do(lambda: self.talk.send_apart(send))
        self.talk.wait_until(
            lambda: wanted <= self.talk.fetched.keys() or self.talk.changes != changes, what, deadline_s
        )
        if not wanted <= self.talk.fetched.keys():
            raise TagLost(what)
        return self.talk.fetched

    def wait_for_servers(self, count: int) -> None:
        """Wait until every server is known."""
        self.talk.wait_until(lambda: len(self.talk.links) == count, f"{count} servers")

    def sent_bytes(self) -> int:
        """Return the bytes that this worker has sent."""
        return self.talk.voice.traffic.sent_bytes

    def sent_states(self) -> list[tuple[State, int]]:
        """Return the codec's states of what is pushed, each with its number of elements."""
        talk = self.talk
        found: list[tuple[State, int]] = []
        for key in talk.table.keys if talk.table and talk.up.codec else ():
            sizes = [stop - start for start, stop, _ in talk.up.pieces(key)]
            found += zip(talk.states[key.index], sizes, strict=True)
        return found

    def close(self) -> None:
        """Leave, and end the thread."""
        if self.talk.thread.is_alive():
            self.talk.later(lambda: self.talk.scheduler.send(Kind.LEAVE, {"bytes": self.talk.bytes_since()}))
            self.talk.later(self.talk.stop)
            self.talk.thread.join(5)
        self.talk.watch.close()
