"""A server: holds some keys, counts gradients into them, gives out their values. One thread, one poll loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import zmq

from echelon.messages.endpoint import Channel, Listener, Sender
from echelon.messages.protocol import UNSOUND, Kind, Malformed, Message, pull_behind
from echelon.messages.sockets import Limits
from echelon.ps.blob import message_of, read_frame, unpack_state
from echelon.ps.coding import References, downward, upward
from echelon.ps.keystore import KeyStore, Push, PushOutcome
from echelon.ps.pulls import BUFFERS_KEY, PullHandler
from echelon.ps.replication import Replication
from echelon.ps.serving import Load, ServerConfig
from echelon.ps.snapshots import Snapshots
from echelon.ps.table import KeyTable, table_from_bytes

__all__ = ["Load", "Server", "ServerConfig"]

BEAT_S = 0.2
ACKS = 4  # sent together, so that a worker's window of pushes never runs dry


class Server:
    """The keys of one server and its conversation; `run` returns when the scheduler says that the run is over."""

    def __init__(self, config: ServerConfig) -> None:
        self.config, self.settings = config, config.settings
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.voice = Sender(config.keys, config.name)
        limits = Limits(config.frame_bytes, queued=20_000)
        self.listener = Listener(self.context, self.voice, config.address, limits)
        self.scheduler = Channel(self.context, self.voice, config.scheduler, limits)
        self.limits = limits
        self.table: KeyTable | None = None
        self.stores: dict[int, KeyStore] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.load = Load()
        self.watermark = 0
        self.numbers: dict[bytes, int] = {}
        self.workers: set[str] = set()
        self.ended = False
        self._acks: list[tuple[bytes, dict[str, Any]]] = []
        self.giving = PullHandler(self)
        self.replication = Replication(self)
        self.snapshots = Snapshots(self)
        self._handlers: dict[Kind, Callable[[bytes, Message], None]] = {
            Kind.PUSH: self.push,
            Kind.PULL: self.giving.pull,
            Kind.SETUP: self._setup,
            Kind.PUT: self._put,
            Kind.STATE: self.giving.state,
            Kind.BUFFERS: self._buffers,
            Kind.REPUSHED: self.snapshots.repushed,
            Kind.ATTACH: self.replication.attach,
            Kind.OP_DONE: self.replication.op_done,
        }
        self._began_s = time.monotonic()
        self.poller = zmq.Poller()

    @property
    def ready(self) -> bool:
        """Whether every key is here."""
        return self.table is not None and len(self.stores) == self._own_keys

    def run(self) -> None:
        """Serve until the run is over."""
        self.listener.register(self.poller)
        self.poller.register(self.scheduler.socket, zmq.POLLIN)
        # The first optimizer of a process imports for seconds: before anyone waits for this server.
        self.config.make_optimizer([torch.nn.Parameter(torch.zeros(1, 1))], [True])
        self.snapshots.restore()
        self._join()
        beat_s = 0.0
        while not self.ended:
            ready = dict(self.poller.poll(max(1, int(1000 * (beat_s - time.monotonic())))))
            began = time.perf_counter()
            if self.scheduler.socket in ready:
                self.scheduler.pump(self._from_scheduler)
            self.replication.pump()
            taken = self.listener.pump(self._from_peer)
            self._acknowledge()
            self.snapshots.pump()
            if taken:
                self.load.busy_s += time.perf_counter() - began
            if time.monotonic() >= beat_s:
                self.scheduler.send(Kind.BEAT, {"info": self.report()})
                beat_s = time.monotonic() + BEAT_S
        self.close()

    def close(self) -> None:
        """Finish the snapshot that is being written, close all sockets."""
        self.snapshots.close()
        self.replication.close()
        self.listener.close()
        self.scheduler.close()
        self.context.term()

    def _join(self) -> None:
        ready = self.ready and (self.snapshots.safe or self.replication.is_standby)
        info = {"index": self.config.index, "pid": os.getpid(), "ready": ready, "standby": self.replication.is_standby,
                "life": self.voice.session, "restored": self.snapshots.restored, "empty": not self.stores}  # fmt: skip
        self.scheduler.send(Kind.JOIN, {"role": "server", "address": self.listener.address, "info": info})

    def report(self) -> dict[str, Any]:
        """Return what the run's record shows of this server."""
        traffic = self.voice.traffic
        return {
            "index": self.config.index, "updates": self.load.updates, "duplicates": self.load.duplicates,
            "late": self.load.late, "busy_s": self.load.busy_s, "seconds": time.monotonic() - self._began_s,
            "sent_bytes": traffic.sent_bytes, "received_bytes": traffic.received_bytes,
            "dropped": dict(traffic.dropped), "refused": self.listener.check.refused,
            "staleness": {str(k): v for k, v in sorted(self.load.staleness.items())[:512]},
            "ready": self.ready, "standby": self.replication.is_standby,
            "attached": self.replication.attached,
            "address": self.listener.address, "life": self.voice.session,
        }  # fmt: skip

    # From the scheduler

    def _from_scheduler(self, message: Message) -> None:
        body = message.body
        match message.kind:
            case Kind.MEMBERS:
                self._members(body)
            case Kind.TAG:
                self.snapshots.tag(body["tag"], body["full"])
            case Kind.UNTAG:
                self.snapshots.untag(body["tag"])
            case Kind.CATCH_UP:
                self.snapshots.caught_up(body["step"])
            case Kind.PROMOTE:
                self.replication.promote()
            case Kind.WELCOME:
                if body["info"].get("standby"):
                    self.replication.demote()
                elif body["info"].get("again"):
                    self._join()
                    self.snapshots.tell_again()
            case Kind.END:
                self.ended = True
            case _:
                raise Malformed("unexpected")

    def _members(self, body: dict[str, Any]) -> None:
        workers = {str(w) for w in body["workers"]}
        for gone in self.workers - workers:
            for store in self.stores.values():
                store.forget(gone)
            self.references.forget(gone) if self.table else None
            self.buffers.pop(gone, None)
        self.workers = workers
        for store in self.stores.values():
            store.set_workers(max(1, len(workers)))
        self.watermark = body["watermark"]
        if not self.snapshots.settling:
            for store in self.stores.values():
                store.applied.raise_to(self.watermark)
        self.replication.members(body["servers"])
        self.snapshots.members(workers)

    # From workers and servers

    def _from_peer(self, peer: bytes, message: Message) -> None:
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise Malformed("unexpected")
        try:
            handler(peer, message)
        except UNSOUND as error:
            if isinstance(error, Malformed):
                raise
            raise Malformed("content") from error

    def _setup(self, peer: bytes, message: Message) -> None:
        self.set_table(table_from_bytes(bytes(message.frames[0])))

    def set_table(self, table: KeyTable) -> None:
        """Take the table of keys; the first one stays.

        Raises:
            ValueError: it is another one than before.
        """
        if self.table is not None:
            if self.table.fingerprint != table.fingerprint:
                raise ValueError("another table of keys")
            return
        self.table = table
        self._own_keys = len(table.of_server(self.config.index))
        self._coding = upward(self.config.compression, table.torch_dtype)
        self.references = References(downward(self.config.compression, table.torch_dtype), self.config.seed)

    def _put(self, peer: bytes, message: Message) -> None:
        """Take a key's state; a key that is held already stays as it is: who sent it comes too late."""
        index = message.body["key"]
        self.put(index, unpack_state(message.body["meta"], message.frames))
        self.voice.reply(self.listener.socket, peer, Kind.PUT_DONE, {"key": index})
        if self.ready and self.snapshots.safe:
            self._join()  # otherwise once the first snapshot is written

    def put(self, index: int, state: dict[str, Any]) -> None:
        """Take a key's state where the key is not held yet.

        Raises:
            ValueError: not a key of this server, or not its state.
        """
        if index == BUFFERS_KEY:
            self.buffers.setdefault("", state["value"])
            return
        if self.table is None or index >= len(self.table.keys) or self.table.keys[index].server != self.config.index:
            raise ValueError(f"key {index} is not of this server")
        if index in self.stores:
            return
        key = self.table.keys[index]
        value = torch.zeros(key.numel, dtype=self.table.torch_dtype)
        store = KeyStore(key, value, self.settings, self.config.make_optimizer)
        store.load_state(state)
        self.stores[index] = store

    def push(self, peer: bytes, message: Message) -> None:
        """Count a gradient and tell its worker what became of it, once it is held safely."""
        body = message.body
        if self.replication.is_standby or not self.ready:
            self.voice.traffic.dropped["not ready"] += 1
            return
        store = self.store_of(body["key"])
        push = self._decoded(message)
        stale = store.staleness_of(push)
        push = push if self.settings.aggregates else _scaled(push, store.scale_of(push))
        fate = self.apply(store, push)
        if fate in (PushOutcome.APPLIED, PushOutcome.PENDING):
            self.load.staleness[stale] += 1
        self.numbers[peer] = max(self.numbers.get(peer, 0), body["number"])
        ack = {"key": body["key"], "task": body["task"], "number": body["number"], "fate": int(fate),
               "version": store.version, "life": self.voice.session}  # fmt: skip
        if fate in (PushOutcome.APPLIED, PushOutcome.PENDING) and self.replication.attached:
            self.replication.forward_push(message, push.scale, peer, ack)
        else:
            self._acks.append((peer, ack))
        if fate is PushOutcome.APPLIED:
            self.giving.unpark(store)
        if body["pull"]:
            self.giving.give(peer, message.sender, store, pull_behind(body, self.settings.aggregates))
        if len(self._acks) >= ACKS:
            self._acknowledge()

    def take_acks(self, peer: bytes) -> list[int]:
        """Return what a value's message tells its worker of its pushes; so most need no message of their own."""
        taken: list[int] = []
        others = []
        for to, ack in self._acks:
            if to == peer:
                taken += (ack["number"], ack["fate"])
            else:
                others.append((to, ack))
        self._acks = others
        return taken

    def _acknowledge(self) -> None:
        """Send the acknowledgements that wait and that no value took along."""
        for peer, ack in self._acks:
            self.voice.reply(self.listener.socket, peer, Kind.ACK, ack)
        self._acks.clear()

    def apply(self, store: KeyStore, push: Push) -> PushOutcome:
        """Count a gradient into a key."""
        fate = store.take(push)
        self.load.updates += fate is PushOutcome.APPLIED
        self.load.duplicates += fate is PushOutcome.DUPLICATE
        self.load.late += fate is PushOutcome.LATE
        return fate

    def _decoded(self, message: Message, scale: float = 1.0) -> Push:
        body = message.body
        key = self.store_of(body["key"]).key
        gradient = self._coding.decode(message.frames, key)
        lent = self._coding.codec is not None or self.replication.attached
        memory = None if lent else message_of(message.frames[0], gradient)
        return Push(
            message.sender, body["task"], body["step"], body["share"], body["shares"], body["samples"], body["base"],
            body["lr"], body["batch"], gradient, scale, memory,
        )  # fmt: skip

    def replay_push(self, message: Message, scale: float) -> None:
        """Count a gradient that the primary counted."""
        self.apply(self.store_of(message.body["key"]), self._decoded(message, scale))

    def store_of(self, index: int) -> KeyStore:
        if index not in self.stores:
            raise ValueError(f"key {index} is not held here")
        return self.stores[index]

    def _buffers(self, peer: bytes, message: Message) -> None:
        values = read_frame(message.frames[0], torch.float32).clone()
        if any(len(values) != len(other) for other in self.buffers.values()) or not bool(torch.isfinite(values).all()):
            raise ValueError("not this model's statistics")
        self.buffers.pop("", None)
        self.buffers[message.sender] = values
        self.replication.forward_buffers(message)


def _scaled(push: Push, scale: float) -> Push:
    return push if scale == 1.0 else push._replace(scale=scale)
