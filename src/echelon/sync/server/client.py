"""A worker's side: one thread holds all sockets; the training thread hands it gradients and waits for values.

Pushes leave in the order in which the next forward pass needs them, not in that in which backward makes them: they
wait in a heap, and only `WINDOW_BYTES` per server are on their way at a time, so that a first layer's gradient passes
the later ones that came before it. After each push the key's next value is asked for at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq
from torch import Tensor

from echelon.sync.server.blob import unpack_state
from echelon.sync.server.coding import downward, upward
from echelon.sync.server.endpoint import Line, Voice
from echelon.sync.server.identity import RunKeys
from echelon.sync.server.keystore import Fate
from echelon.sync.server.protocol import Kind, Malformed, Message
from echelon.sync.server.pushes import Outgoing, ServerLink
from echelon.sync.server.sockets import Limits
from echelon.sync.server.table import Key, Table

BEAT_S = 0.1


class ClientFailed(RuntimeError):
    """The conversation with servers or scheduler cannot go on; says why."""


class TagLost(RuntimeError):
    """A server that held a copy died before the copy was read."""


@dataclass(frozen=True)
class ClientConfig:
    """What a worker is told when it starts. `stream` is a number of its own, for codecs that draw."""

    name: str
    keys: RunKeys
    scheduler: str
    compression: str
    seed: int
    stream: int
    timeout_s: float
    keeps: bool = True
    aggregates: bool = False


@dataclass(frozen=True)
class PushInfo:
    """The task that a gradient belongs to, and what its server must know of it."""

    task: int
    step: int
    share: int
    shares: int
    samples: int
    batch: int
    lr: float


@dataclass
class _Slot:
    """A key's newest value in this worker, which version it is, and the pull that is on its way."""

    value: Tensor
    version: int = -1
    valid: bool = False
    pull: dict[str, Any] | None = None


@dataclass
class _Open:
    """A task whose pushes are not all acknowledged."""

    unacked: int = 0
    info: dict[str, Any] | None = None
    late: bool = False


@dataclass
class ClientStats:
    """Seconds that the training thread waited, by cause, and pushes by what became of them."""

    waited_s: dict[str, float] = field(default_factory=lambda: {"parameters": 0.0, "task": 0.0})
    late: int = 0
    duplicates: int = 0


class Client:
    """Start with `join`, then `set_table`; the training thread calls the public methods, one at a time."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.stats = ClientStats()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.voice = Voice(config.keys, config.name)
        self._limits = Limits(1 << 30, queued=20_000)
        self._scheduler = Line(self.context, self.voice, config.scheduler, self._limits)
        self._scheduler_session = 0
        self._links: dict[int, ServerLink] = {}
        self._slots: dict[int, _Slot] = {}
        self._table: Table | None = None
        self._open: dict[int, _Open] = {}
        self._unconfirmed: dict[int, tuple[Kind, dict[str, Any]]] = {}
        self._tasks: deque[dict[str, Any]] = deque()
        self._held: set[int] = set()
        self._asking = False
        self._fetched: dict[int, Message] = {}
        self._changes = 0
        self._welcome: dict[str, Any] | None = None
        self._join_info: dict[str, Any] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._ready = threading.Condition()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._status = ""
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="echelon-client", daemon=True)

    # The training thread's side

    def join(self, info: dict[str, Any]) -> dict[str, Any]:
        """Join the run with what the scheduler should know of this worker; returns its welcome."""
        self._join_info = info
        self._thread.start()
        self._do(self._send_join)
        self._wait(lambda: self._welcome is not None, "the scheduler's welcome")
        assert self._welcome is not None
        return self._welcome

    def set_table(self, table: Table) -> None:
        """Take the table of keys; values are pulled when first asked for."""
        self._up = upward(self.config.compression, table.torch_dtype)
        self._down = downward(self.config.compression, table.torch_dtype)
        self._states = {k.index: self._up.states(k, self.config.seed, self.config.stream) for k in table.keys}
        self._slots = {k.index: _Slot(torch.zeros(k.numel, dtype=table.torch_dtype)) for k in table.keys}
        self._table = table

    @property
    def sends_shapes(self) -> bool:
        """Whether the codec looks at parameters as matrices, so that the table must keep them whole."""
        codec = upward(self.config.compression, torch.float32).codec
        return codec is not None and codec.shaped

    def next_task(self) -> dict[str, Any] | None:
        """Wait for a task; None at the end of the run (see `status`)."""
        began = time.perf_counter()
        self._do(self._ask)
        self._wait(lambda: bool(self._tasks or self._status), "a task", idle=True)
        self.stats.waited_s["task"] += time.perf_counter() - began
        if self._tasks:
            task = self._tasks.popleft()
            self._do(self._ask)  # the next one travels while this one is worked on
            return task
        return None

    @property
    def status(self) -> str:
        """How the run ended; empty while it goes."""
        return self._status

    def push(self, key: Key, gradient: Tensor, info: PushInfo) -> None:
        """Send a key's gradient, 1-D; it must not change any more. The key's next value is asked for behind it."""
        slot = self._slots[key.index]
        slot.valid = slot.valid and self.config.aggregates  # at once: `value` must not give what was before
        self._do(lambda: self._queue_push(key, gradient, info))

    def open_task(self, task: int, pushes: int) -> None:
        """Announce how many pushes a task will have."""
        self._open[task] = _Open(pushes)

    def finish_task(self, task: int, info: dict[str, Any]) -> None:
        """Report a task once all its pushes are acknowledged."""
        self._do(lambda: self._finish(task, info))

    def result(self, task: int, info: dict[str, Any]) -> None:
        """Report the result of a task that pushes nothing."""
        self._do(lambda: self._report(task, Kind.RESULT, {"task": task, "info": info}))

    def send_buffers(self, task: int, values: Tensor) -> None:
        """Send statistics that are no parameters, 1-D float32, to the first server."""
        frame = memoryview(values.contiguous().view(torch.uint8).numpy())
        self._do(lambda: self._links[0].line.send(Kind.BUFFERS, {"task": task}, [frame]) if 0 in self._links else None)

    def value(self, key: Key, version: int) -> Tensor:
        """Wait for a key's value: of exactly a version where gradients are aggregated, else the newest asked for."""
        slot = self._slots[key.index]
        if not self._is_there(slot, version):
            began = time.perf_counter()
            self._do(lambda: self._want(key, version))
            self._wait(lambda: self._is_there(slot, version), f"key {key.index}")
            self.stats.waited_s["parameters"] += time.perf_counter() - began
        return slot.value

    def version_of(self, key: Key) -> int:
        """Return the version of the value that this worker has."""
        return self._slots[key.index].version

    def put(self, table: Table, states: dict[int, dict[str, Any]], deadline_s: float) -> None:
        """Give the servers their keys' states (by key number): the start of a run."""
        from echelon.sync.server.blob import pack_state

        def send() -> None:
            for link in self._links.values():
                link.line.send(Kind.SETUP, {}, [table.to_bytes()])
            for index, state in states.items():
                meta, frames = pack_state(state)
                server = table.keys[index].server if index < len(table.keys) else 0
                self._links[server].line.send(Kind.PUT, {"key": index, "meta": meta}, frames)

        self._fetch(send, set(states), "the servers to take their keys", deadline_s)

    def fetch(self, table: Table, indices: list[int], tag: int, full: bool) -> dict[int, dict[str, Any]]:
        """Read keys from the servers' copy `tag`: values, or with `full` whole states.

        Raises:
            TagLost: a server died meanwhile.
        """

        def send() -> None:
            for index in indices:
                server = table.keys[index].server if index < len(table.keys) else 0
                if full:
                    self._links[server].line.send(Kind.STATE, {"key": index, "tag": tag})
                else:
                    body = {"key": index, "version": 0, "exact": False, "full": True, "tag": tag}
                    self._links[server].line.send(Kind.PULL, body)

        messages = self._fetch(send, set(indices), f"the copy {tag}", self.config.timeout_s)
        if full:
            return {i: unpack_state(m.body["meta"], m.frames) for i, m in messages.items()}
        return {
            i: {"value": torch.frombuffer(m.frames[0], dtype=table.torch_dtype if i < len(table.keys) else torch.float32)}
            for i, m in messages.items()
        }

    def _fetch(self, send: Callable[[], None], wanted: set[int], what: str, deadline_s: float) -> dict[int, Message]:
        changes = self._changes
        self._fetched = {}
        self._do(send)
        self._wait(lambda: wanted <= self._fetched.keys() or self._changes != changes, what, deadline_s)
        if not wanted <= self._fetched.keys():
            raise TagLost(what)
        return self._fetched

    def wait_for_servers(self, count: int) -> None:
        """Wait until every server is known."""
        self._wait(lambda: len(self._links) == count, f"{count} servers")

    def sent_bytes(self) -> int:
        """Return the bytes that this worker has sent."""
        return self.voice.traffic.sent_bytes

    def close(self) -> None:
        """Leave, and end the thread."""
        if self._thread.is_alive():
            self._do(lambda: self._scheduler.send(Kind.LEAVE, {}))
            self._do(self._stop)
            self._thread.join(5)
        os.close(self._wake)

    def _stop(self) -> None:
        self._closing = True

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)

    def _wait(self, done: Callable[[], bool], what: str, deadline_s: float = 0.0, idle: bool = False) -> None:
        deadline_s = deadline_s or self.config.timeout_s
        with self._ready:
            came = self._ready.wait_for(lambda: done() or self._failure is not None, deadline_s)
        if self._failure is not None:
            raise ClientFailed(f"{self.config.name}: {self._failure}") from self._failure
        if not came:
            raise ClientFailed(f"{self.config.name} waited {deadline_s:g} s for {what}; use a longer --timeout")

    def _is_there(self, slot: _Slot, version: int) -> bool:
        return slot.valid and (slot.version == version or not self.config.aggregates)

    # The thread's side

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            with self._ready:
                self._failure = error
                self._ready.notify_all()
        finally:
            for link in self._links.values():
                link.line.close()
            self._scheduler.socket.close(linger=1000)  # the farewell may leave
            self.context.term()

    def _loop(self) -> None:
        beat_s = 0.0
        while not self._closing or self._commands:
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            poller.register(self._scheduler.socket, zmq.POLLIN)
            for link in self._links.values():
                poller.register(link.line.socket, zmq.POLLIN)
            lines = self._changes
            while lines == self._changes and (not self._closing or self._commands):
                poller.poll(max(0, int(1000 * (beat_s - time.monotonic()))))
                self._turn()
                if time.monotonic() >= beat_s:
                    self._scheduler.send(Kind.BEAT, {"info": self._beat()})
                    beat_s = time.monotonic() + BEAT_S

    def _turn(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        while self._commands:
            self._commands.popleft()()
        with self._ready:
            heard = self._scheduler.pump(self._from_scheduler)
            for index, link in list(self._links.items()):
                heard += link.line.pump(lambda message, i=index: self._from_server(i, message))  # type: ignore[misc]
                link.flush()
            if heard:
                self._ready.notify_all()

    def _beat(self) -> dict[str, Any]:
        return {
            "held": sorted(self._held)[:64], "sent_bytes": self.voice.traffic.sent_bytes,
            "received_bytes": self.voice.traffic.received_bytes, "late": self.stats.late,
            "waited_s": dict(self.stats.waited_s), "forgotten": sum(s.forgotten for s in self._links.values()),
        }  # fmt: skip

    def _send_join(self) -> None:
        info = {**self._join_info, "held": sorted(self._held)[:1024]}
        self._scheduler.send(Kind.JOIN, {"role": "worker", "address": "", "info": info})

    def _ask(self) -> None:
        if not self._tasks and not self._status and not self._asking:
            self._asking = True
            self._scheduler.send(Kind.ASK, {"held": sorted(self._held)[:1024]})

    def _report(self, task: int, kind: Kind, body: dict[str, Any]) -> None:
        self._unconfirmed[task] = (kind, body)
        self._scheduler.send(kind, body)

    def _finish(self, task: int, info: dict[str, Any] | None) -> None:
        entry = self._open[task]
        entry.info = info if info is not None else entry.info
        if entry.unacked == 0 and entry.info is not None:
            del self._open[task]
            self._report(task, Kind.DONE, {"task": task, "info": {**entry.info, "late": entry.late}})

    def _queue_push(self, key: Key, gradient: Tensor, info: PushInfo) -> None:
        link, slot = self._links[key.server], self._slots[key.index]
        frames = self._up.encode(gradient, key, self._states[key.index])
        body = {
            "key": key.index, "task": info.task, "step": info.step, "share": info.share, "shares": info.shares,
            "samples": info.samples, "batch": info.batch, "base": max(0, slot.version), "lr": info.lr, "number": 0,
        }  # fmt: skip
        following = info.step + 1 if self.config.aggregates else 0
        pull = {"key": key.index, "version": following, "exact": self.config.aggregates, "full": False, "tag": 0}
        slot.pull = pull
        link.queue(key.index, Outgoing(body, frames, pull))
        link.flush()

    def _want(self, key: Key, version: int) -> None:
        """Ask for a version, unless it is on its way."""
        slot = self._slots[key.index]
        if slot.pull is not None and (slot.pull["version"] == version or not self.config.aggregates):
            return
        if self._is_there(slot, version):
            return
        full = slot.version < 0
        slot.pull = {"key": key.index, "version": version, "exact": self.config.aggregates, "full": full, "tag": 0}
        if key.server in self._links:
            self._links[key.server].line.send(Kind.PULL, slot.pull)

    def _from_scheduler(self, message: Message) -> None:
        body = message.body
        match message.kind:
            case Kind.WELCOME:
                if body["info"].get("again"):
                    self._rejoin()
                else:
                    self._welcome = body["info"]
            case Kind.MEMBERS:
                self._members(body["servers"])
            case Kind.TASK:
                self._asking = False
                if body["info"]["task"] not in self._held:
                    self._held.add(body["info"]["task"])
                    self._tasks.append(body["info"])
            case Kind.DONE:
                self._unconfirmed.pop(body["task"], None)
                self._held.discard(body["task"])
            case Kind.END:
                self._status = body["status"]
            case _:
                raise Malformed("unexpected")

    def _rejoin(self) -> None:
        """The scheduler is new: tell it again what it may not know."""
        self._send_join()
        for kind, body in self._unconfirmed.values():
            self._scheduler.send(kind, body)
        if self._asking:
            self._scheduler.send(Kind.ASK, {"held": sorted(self._held)[:1024]})

    def _members(self, servers: dict[str, Any]) -> None:
        for name, entry in servers.items():
            index, link = int(name), self._links.get(int(name))
            if not entry["address"] or (link is not None and link.life == entry["life"]):
                continue
            if link is None:
                line = Line(self.context, self.voice, entry["address"], self._limits)
                self._links[index] = ServerLink(line, entry["life"], keeps=self.config.keeps)
            elif entry["ready"]:
                line = Line(self.context, self.voice, entry["address"], self._limits)
                link.restart(line, entry["life"])
                self._pull_again(index)
            else:
                continue
            self._changes += 1

    def _pull_again(self, server: int) -> None:
        for index, slot in self._slots.items():
            assert self._table is not None
            if self._table.keys[index].server == server and slot.pull is not None:
                slot.pull = {**slot.pull, "full": True}
                self._links[server].line.send(Kind.PULL, slot.pull)

    def _from_server(self, index: int, message: Message) -> None:
        body, link = message.body, self._links[index]
        match message.kind:
            case Kind.ACK:
                self._acknowledged(link, body)
            case Kind.DURABLE:
                link.durable(body["number"])
            case Kind.VALUE if body["tag"] or body["key"] not in self._slots:
                self._fetched[body["key"]] = message
            case Kind.VALUE:
                self._take_value(message)
            case Kind.PUT_DONE | Kind.STATE_OF:
                self._fetched[body["key"]] = message
            case _:
                raise Malformed("unexpected")

    def _acknowledged(self, link: ServerLink, body: dict[str, Any]) -> None:
        push = link.acknowledged(body["number"])
        if push is None or push.body["task"] not in self._open:
            return
        entry = self._open[push.body["task"]]
        entry.unacked -= 1
        self.stats.duplicates += body["fate"] == Fate.DUPLICATE
        if body["fate"] == Fate.LATE:
            entry.late = True
            self.stats.late += 1
        self._finish(push.body["task"], None)

    def _take_value(self, message: Message) -> None:
        body = message.body
        if body["key"] not in self._slots or self._table is None:
            raise Malformed("content")
        key, slot = self._table.keys[body["key"]], self._slots[body["key"]]
        coding = self._down if body["delta"] else upward("none", self._down.dtype)
        try:
            value = coding.decode(message.frames, key)
        except ValueError as error:
            raise Malformed("content") from error
        if body["delta"]:
            slot.value += value
        else:
            slot.value = value
        if slot.pull is not None and (not self.config.aggregates or body["version"] == slot.pull["version"]):
            slot.pull = None
        slot.version, slot.valid = body["version"], True
