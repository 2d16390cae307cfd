"""A server and its standby: the primary sends each operation on, and acknowledges a push when the standby holds it.

The standby applies the same operations in the same order, so it is the same server. When the primary dies, the
scheduler promotes it; workers push again what was not acknowledged, and what was counted already is known as such.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgpack
import zmq

from echelon.messages.endpoint import Channel
from echelon.messages.protocol import UNSOUND, Kind, Malformed, Message
from echelon.ps.blob import pack_state, unpack_state

if TYPE_CHECKING:
    from echelon.ps.server import Server


class Replication:
    """The part of a server that talks to its standby, or to its primary."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.is_standby = server.config.name.startswith("standby")
        self._primary: Channel | None = None
        self._standby: bytes | None = None
        self._standby_name = ""
        self._number = 0
        self._owed: deque[tuple[int, bytes, dict[str, Any]]] = deque()

    @property
    def attached(self) -> bool:
        """Whether a standby takes this server's operations."""
        return self._standby is not None

    # Primary

    def attach(self, peer: bytes, message: Message) -> None:
        """Give a new standby everything, then every operation."""
        server = self._server
        if self.is_standby or server.table is None or not server.ready:
            server.voice.traffic.dropped["not ready"] += 1
            return
        self._release()
        self._standby, self._standby_name = peer, message.sender
        server.voice.reply(server.listener.socket, peer, Kind.SETUP, {}, [server.table.to_bytes()])
        for index, store in server.stores.items():
            meta, frames = pack_state(store.whole_state())
            server.voice.reply(server.listener.socket, peer, Kind.PUT, {"key": index, "meta": meta}, frames)

    def forward_push(self, message: Message, scale: float, peer: bytes, ack: dict[str, Any]) -> None:
        """Send a counted gradient on; its acknowledgement is owed until the standby holds it."""
        op = {"kind": int(message.kind), "sender": message.sender, "body": message.body, "scale": scale}
        self._forward(op, list(message.frames))
        self._owed.append((self._number, peer, ack))

    def forward_pull(self, worker: str, key: int, full: bool) -> None:
        """Send on that a worker pulled, where later updates depend on it."""
        if self._standby is not None and self._server.settings.compensation != "none":
            self._forward({"kind": int(Kind.PULL), "sender": worker, "body": {"key": key, "full": full}, "scale": 1.0})

    def forward_buffers(self, message: Message) -> None:
        """Send a worker's statistics on."""
        if self._standby is not None:
            op = {"kind": int(message.kind), "sender": message.sender, "body": message.body, "scale": 1.0}
            self._forward(op, list(message.frames))

    def _forward(self, op: dict[str, Any], frames: list[Any] | None = None) -> None:
        assert self._standby is not None
        server = self._server
        self._number += 1
        body = {"number": self._number, "op": msgpack.packb(op)}
        server.voice.reply(server.listener.socket, self._standby, Kind.OP, body, frames or [])

    def op_done(self, peer: bytes, message: Message) -> None:
        """Send the acknowledgements that waited for the standby."""
        if peer == self._standby:
            self._release(message.body["number"])

    def _release(self, number: int | None = None) -> None:
        server = self._server
        while self._owed and (number is None or self._owed[0][0] <= number):
            _, peer, ack = self._owed.popleft()
            server.voice.reply(server.listener.socket, peer, Kind.ACK, ack)
            durable = {"number": ack["number"], "life": server.voice.session}
            if number is not None:
                server.voice.reply(server.listener.socket, peer, Kind.DURABLE, durable)

    # Standby

    def members(self, servers: dict[str, Any]) -> None:
        """Follow the scheduler's view: a standby finds its primary, a primary learns that its standby is gone."""
        server = self._server
        entry = servers.get(str(server.config.index), {})
        if not self.is_standby:
            if self._standby is not None and entry.get("standby") != self._standby_name:
                self._standby = None
                self._release()
            return
        address = entry.get("address", "")
        if not address or not entry.get("ready") or address == server.listener.address:
            return
        if self._primary is None or self._primary.address != address:
            if self._primary is not None:
                self._leave_primary()
                server.stores.clear()  # of a primary that is gone, and that another standby has followed
            self._primary = Channel(server.context, server.voice, address, server.limits)
            server.poller.register(self._primary.socket, zmq.POLLIN)  # a push waits for this standby's word
            self._primary.send(Kind.ATTACH, {})

    def _leave_primary(self) -> None:
        if self._primary is not None:
            self._server.poller.unregister(self._primary.socket)
            self._primary.close()
            self._primary = None

    def pump(self) -> None:
        """Take the primary's operations."""
        if self._primary is not None:
            self._primary.pump(self._from_primary)

    def _from_primary(self, message: Message) -> None:
        server = self._server
        try:
            match message.kind:
                case Kind.SETUP:
                    server._setup(b"", message)
                case Kind.PUT:
                    server.put(message.body["key"], unpack_state(message.body["meta"], message.frames))
                    if server.ready:
                        server._join()
                case Kind.OP:
                    self._replay(message)
                    self._tell_done(message.body["number"])
                case _:
                    raise Malformed("unexpected")
        except (*UNSOUND, msgpack.UnpackException) as error:
            if isinstance(error, Malformed):
                raise
            raise Malformed("content") from error

    def _tell_done(self, number: int) -> None:
        if self._primary is not None:
            self._primary.send(Kind.OP_DONE, {"number": number})

    def _replay(self, message: Message) -> None:
        server = self._server
        op = msgpack.unpackb(message.body["op"])
        inner = Message(Kind(op["kind"]), op["sender"], 0, 0, op["body"], message.frames)
        match inner.kind:
            case Kind.PUSH:
                server.replay_push(inner, float(op["scale"]))
            case Kind.PULL:
                server.giving.note_pull(inner.sender, server.stores[inner.body["key"]])
            case Kind.BUFFERS:
                server._buffers(b"", inner)
            case _:
                raise Malformed("unexpected")

    def promote(self) -> None:
        """Become the primary."""
        if not self.is_standby:
            return
        if self._primary is not None:
            self._primary.pump(self._from_primary, most=1_000_000)  # what had arrived still counts
            self._leave_primary()
        self.is_standby = False
        self._server._join()

    def demote(self) -> None:
        """Become a standby: another server has taken over, and what this one holds may differ from it."""
        if not self.is_standby:
            self.is_standby = True
            self._owed.clear()
            self._standby = None
            self._server.stores.clear()

    def close(self) -> None:
        """Close what is open."""
        self._leave_primary()
