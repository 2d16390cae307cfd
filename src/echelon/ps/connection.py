"""A worker's conversation with scheduler and servers: sockets that two threads use, one at a time.

Waking a thread costs more than a message. So the training thread sends by itself, and takes what comes while it waits;
while it computes, a thread of the conversation's own does. Whoever holds `turn` may use the sockets, and before letting
go takes all that waits there: a socket's descriptor tells of what is new only.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import zmq
from torch import Tensor

from echelon.messages.endpoint import Channel, Sender, SocketTraffic
from echelon.messages.protocol import Kind, Malformed, Message, pull_behind
from echelon.messages.sockets import Limits
from echelon.ps.coding import Coding, downward, upward
from echelon.ps.keystore import PushOutcome
from echelon.ps.pushes import Outgoing, ServerLink
from echelon.ps.table import KeyRange, KeyTable
from echelon.ps.wakeups import ThreadWakeups
from echelon.ps.worker_state import Bytes, CachedValue, ClientConfig, ClientFailed, ClientStats, OpenTask, PushInfo

BEAT_S = 0.1


class Connection:
    """State that both threads see, and what the thread with the sockets does; `do` hands it a command."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.stats = ClientStats()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.voice = Sender(config.keys, config.name)
        self.limits = Limits(1 << 30, queued=20_000)
        self.scheduler = Channel(self.context, self.voice, config.scheduler, self.limits)
        self.scheduler_session = 0
        self.links: dict[int, ServerLink] = {}
        self.slots: dict[int, CachedValue] = {}
        self.table: KeyTable | None = None
        self.open: dict[int, OpenTask] = {}
        self.unconfirmed: dict[int, tuple[Kind, dict[str, Any]]] = {}
        self.tasks: deque[dict[str, Any]] = deque()
        self.held: set[int] = set()
        self.asking = False
        self.fetched: dict[int, Message] = {}
        self.apart = SocketTraffic()
        self._told = Bytes()
        self.changes = 0
        self.welcome: dict[str, Any] | None = None
        self.join_info: dict[str, Any] = {}
        self.commands: deque[Callable[[], None]] = deque()
        self.turn = threading.RLock()
        self.watch = ThreadWakeups()
        self.watch.add(self.scheduler.socket)
        self.status = ""
        self.failure: BaseException | None = None
        self.closing = False
        self.over = False
        self._awaited: Callable[[], bool] | None = None
        self.while_waiting: Callable[[], None] | None = None
        self.while_waiting_s = self.next_call_s = math.inf
        self.thread = threading.Thread(target=self.run, name="echelon-client", daemon=True)

    def set_table(self, table: KeyTable) -> None:
        """Take the table of keys: their coding and their slots."""
        self.up = upward(self.config.compression, table.torch_dtype)
        self.down = downward(self.config.compression, table.torch_dtype)
        self.states = {k.index: self.up.states(k, self.config.seed, self.config.stream) for k in table.keys}
        self.slots = {k.index: CachedValue(torch.zeros(k.numel, dtype=table.torch_dtype)) for k in table.keys}
        self.table = table

    # Between the threads

    def stop(self) -> None:
        self.closing = True
        self.watch.rouse()

    def later(self, command: Callable[[], None]) -> None:
        """Hand a command to the other thread: what computes for long."""
        self.commands.append(command)
        self.watch.rouse()

    def do(self, command: Callable[[], None]) -> None:
        """Run a command now, behind those that wait, and take what came."""
        with self.turn:
            self.commands.append(command)
            self._take_turn()
        self._raise_failure()

    def _take_turn(self) -> None:
        if self.over:
            return
        try:
            self._turn()
        except Exception as error:  # noqa: BLE001 - raised at the training thread's next word
            self.failure = self.failure or error
            self.stop()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise ClientFailed(f"{self.config.name}: {self.failure}") from self.failure

    def wait_until(self, done: Callable[[], bool], what: str, deadline_s: float = 0.0, idle: bool = False) -> None:
        if done():
            return
        deadline_s = deadline_s or self.config.timeout_s
        ends = time.monotonic() + deadline_s
        self._awaited = lambda: done() or self.failure is not None
        with self.watch.by_training_thread():
            while not self._came():
                now_s = time.monotonic()
                if now_s >= ends:
                    raise ClientFailed(f"{self.config.name} waited {deadline_s:g} s for {what}; use a longer --timeout")
                if self.while_waiting is not None and now_s >= self.next_call_s:
                    self.while_waiting()
                    self.next_call_s = now_s + self.while_waiting_s
                self.watch.wait(min(ends, self.next_call_s) - now_s)
        self._awaited = None
        self._raise_failure()

    def _came(self) -> bool:
        with self.turn:
            self._take_turn()
            return self._awaited is None or self._awaited()

    def is_there(self, slot: CachedValue, version: int) -> bool:
        return slot.valid and (version in (slot.version, slot.serves) or not self.config.aggregates)

    # The thread's side

    def run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self.failure = self.failure or error
        finally:
            with self.turn:
                self.over = True
                self.watch.call()
                for link in self.links.values():
                    link.line.close()
                self.scheduler.socket.close(linger=1000)  # the farewell may leave
            self.context.term()

    def _loop(self) -> None:
        beat_s = 0.0
        while not self.closing or self.commands:
            with self.turn:
                if time.monotonic() >= beat_s:
                    self.scheduler.send(Kind.BEAT, {"info": self._beat()})
                    beat_s = time.monotonic() + BEAT_S
                self._turn()
                if self._awaited is not None and self._awaited():
                    self.watch.call()
            if not self.closing:
                self.watch.sleep(max(0.0, beat_s - time.monotonic()))

    def _turn(self) -> None:
        """Run commands, and take messages until none is left; with `turn` held."""
        while self.commands:
            self.commands.popleft()()
        heard = -1
        while heard:
            heard = self.scheduler.pump(self._from_scheduler)
            for link in list(self.links.values()):
                link.flush()  # before the look: a send swallows the descriptor's word on what came meanwhile
                heard += link.line.pump(partial(self._from_server, link))

    def _beat(self) -> dict[str, Any]:
        return {
            "held": sorted(self.held)[:64], "sent_bytes": self.voice.traffic.sent_bytes,
            "received_bytes": self.voice.traffic.received_bytes, "late": self.stats.late,
            "waited_s": dict(self.stats.waited_s), "forgotten": sum(s.forgotten for s in self.links.values()),
        }  # fmt: skip

    def send_join(self) -> None:
        info = {**self.join_info, "held": sorted(self.held)[:1024]}
        self.scheduler.send(Kind.JOIN, {"role": "worker", "address": "", "info": info})

    def ask(self) -> None:
        if not self.tasks and not self.status and not self.asking:
            self.asking = True
            self.scheduler.send(Kind.ASK, {"held": sorted(self.held)[:1024]})

    def send_apart(self, send: Callable[[], None]) -> None:
        """Send what is no training's: requests for a copy of the keys, or a copy."""
        before = self.voice.traffic.sent_bytes
        send()
        self.apart.sent_bytes += self.voice.traffic.sent_bytes - before

    def bytes_since(self) -> dict[str, int]:
        """Return what went over the sockets since the last call."""
        all_of_it, apart = self.voice.traffic, self.apart
        now = Bytes(
            all_of_it.sent_bytes - apart.sent_bytes, all_of_it.received_bytes - apart.received_bytes,
            apart.sent_bytes + apart.received_bytes,
        )  # fmt: skip
        before, self._told = self._told, now
        return now.since(before)

    def report(self, task: int, kind: Kind, info: dict[str, Any]) -> None:
        """Report a task, with the bytes since the report before: by now all of its own are among them."""
        body = {"task": task, "info": {**info, "bytes": self.bytes_since()}}
        self.unconfirmed[task] = (kind, body)
        self.scheduler.send(kind, body)

    def finish(self, task: int, info: dict[str, Any] | None) -> None:
        entry = self.open[task]
        entry.info = info if info is not None else entry.info
        if entry.unacked == 0 and entry.info is not None:
            del self.open[task]
            self.report(task, Kind.DONE, {**entry.info, "late": entry.late})

    def queue_push(self, key: KeyRange, gradient: Tensor, info: PushInfo) -> None:
        link, slot = self.links[key.server], self.slots[key.index]
        frames = self.up.encode(gradient, key, self.states[key.index])
        body = {
            "key": key.index, "task": info.task, "step": info.step, "share": info.share, "shares": info.shares,
            "samples": info.samples, "batch": info.batch, "base": max(0, slot.version), "lr": info.lr, "number": 0,
            "pull": True,
        }  # fmt: skip
        slot.pull = pull_behind(body, self.config.aggregates)
        link.queue(key.index, Outgoing(body, frames))
        link.flush()

    def want(self, key: KeyRange, version: int) -> None:
        """Ask for a version, unless it is on its way."""
        slot = self.slots[key.index]
        if slot.pull is not None and (slot.pull["version"] == version or not self.config.aggregates):
            return
        if self.is_there(slot, version):
            return
        full = slot.version < 0
        slot.pull = {"key": key.index, "version": version, "exact": self.config.aggregates, "full": full, "tag": 0}
        if key.server in self.links:
            self.links[key.server].line.send(Kind.PULL, slot.pull)

    def _from_scheduler(self, message: Message) -> None:
        body = message.body
        match message.kind:
            case Kind.WELCOME:
                if body["info"].get("again"):
                    self._rejoin()
                else:
                    self.welcome = body["info"]
            case Kind.MEMBERS:
                self.members(body["servers"])
            case Kind.TASK:
                self.asking = False
                if body["info"]["task"] not in self.held:
                    self.held.add(body["info"]["task"])
                    self.tasks.append(body["info"])
            case Kind.DONE:
                self.unconfirmed.pop(body["task"], None)
                self.held.discard(body["task"])
            case Kind.END:
                self.status = body["status"]
            case _:
                raise Malformed("unexpected")

    def _rejoin(self) -> None:
        """The scheduler is new: tell it again what it may not know."""
        self.send_join()
        for kind, body in self.unconfirmed.values():
            self.scheduler.send(kind, body)
        if self.asking:
            self.scheduler.send(Kind.ASK, {"held": sorted(self.held)[:1024]})

    def members(self, servers: dict[str, Any]) -> None:
        for name, entry in servers.items():
            index, link = int(name), self.links.get(int(name))
            if not entry["address"] or (link is not None and link.life == entry["life"]):
                continue
            if link is None:
                line = self._line(entry["address"])
                self.links[index] = ServerLink(line, entry["life"], keeps=self.config.keeps)
            elif entry["ready"] or entry["empty"]:  # an empty one is to be set up
                self.watch.remove(link.line.socket)
                line = self._line(entry["address"])
                link.restart(line, entry["life"])
                self._pull_again(index)
            else:
                continue
            self.changes += 1

    def _line(self, address: str) -> Channel:
        line = Channel(self.context, self.voice, address, self.limits)
        self.watch.add(line.socket)
        return line

    def _pull_again(self, server: int) -> None:
        for index, slot in self.slots.items():
            assert self.table is not None
            if self.table.keys[index].server == server and slot.pull is not None:
                slot.pull = {**slot.pull, "full": True}
                self.links[server].line.send(Kind.PULL, slot.pull)

    def _from_server(self, link: ServerLink, message: Message) -> None:
        body = message.body
        if message.kind is Kind.VALUE:
            self._acknowledged_with(link, body["acks"])
        match message.kind:
            case Kind.ACK:
                self._acknowledged(link, body["number"], body["fate"])
            case Kind.DURABLE:
                link.durable(body["number"])
            case Kind.VALUE if body["tag"] or body["key"] not in self.slots:
                self._take_apart(link, message)
            case Kind.VALUE:
                self._take_value(message)
            case Kind.PUT_DONE | Kind.STATE_OF:
                self._take_apart(link, message)
            case _:
                raise Malformed("unexpected")

    def _take_apart(self, link: ServerLink, message: Message) -> None:
        self.apart.received_bytes += link.line.message_bytes
        self.fetched[message.body["key"]] = message

    def _acknowledged_with(self, link: ServerLink, acks: list[Any]) -> None:
        if len(acks) % 2 or any(type(number) is not int for number in acks):
            raise Malformed("content")
        for number, fate in zip(acks[::2], acks[1::2], strict=True):
            self._acknowledged(link, number, fate)

    def _acknowledged(self, link: ServerLink, number: int, fate: int) -> None:
        push = link.acknowledged(number)
        if push is None or push.body["task"] not in self.open:
            return
        entry = self.open[push.body["task"]]
        entry.unacked -= 1
        self.stats.duplicates += fate == PushOutcome.DUPLICATE
        if fate == PushOutcome.LATE:
            entry.late = True
            self.stats.late += 1
        self.finish(push.body["task"], None)

    def _take_value(self, message: Message) -> None:
        body = message.body
        if body["key"] not in self.slots or self.table is None:
            raise Malformed("content")
        key, slot = self.table.keys[body["key"]], self.slots[body["key"]]
        coding = self.down if body["delta"] else Coding(None, self.down.dtype)
        try:
            value = coding.decode(message.frames, key)
        except ValueError as error:
            raise Malformed("content") from error
        if body["delta"]:
            slot.value += value
        else:
            slot.value = value
        slot.serves = -1
        if slot.pull is not None and (not self.config.aggregates or body["version"] >= slot.pull["version"]):
            slot.serves, slot.pull = slot.pull["version"], None
        slot.version, slot.valid = body["version"], True
