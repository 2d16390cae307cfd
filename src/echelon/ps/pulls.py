"""What a server gives out: values, differences, copies of a moment; pulls that wait for their version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from echelon.messages.protocol import Kind, Message
from echelon.ps.blob import as_frame, pack_state
from echelon.ps.keystore import KeyStore

if TYPE_CHECKING:
    from echelon.ps.server import Server

BUFFERS_KEY = 2**31
"""The key number under which statistics that are no parameters (BatchNorm) are put, pulled and saved."""


class PullHandler:
    """The part of a server that answers pulls and keeps copies."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.tags: dict[int, dict[int, dict[str, Any]]] = {}
        self._parked: dict[int, list[tuple[bytes, str, dict[str, Any]]]] = {}

    def tag(self, tag: int, full: bool) -> None:
        if tag not in self.tags:
            self.tags[tag] = {index: store.state(full) for index, store in self._server.stores.items()}
            self.tags[tag][BUFFERS_KEY] = {"value": self._mean_buffers(), "version": 0}
        info = {"index": self._server.config.index}
        self._server.scheduler.send(Kind.TAGGED, {"tag": tag, "info": info})

    def _mean_buffers(self) -> torch.Tensor:
        """Return the mean over workers of their statistics; empty where there are none."""
        return torch.stack(list(self._server.buffers.values())).mean(0) if self._server.buffers else torch.empty(0)

    def pull(self, peer: bytes, message: Message) -> None:
        body = message.body
        if body["key"] == BUFFERS_KEY and not body["tag"]:
            self._reply(peer, {"key": BUFFERS_KEY, "version": 0}, [as_frame(self._mean_buffers())])
            return
        if body["tag"]:
            state = self.tags.get(body["tag"], {}).get(body["key"])
            if state is not None:
                fields = {"key": body["key"], "version": state["version"], "tag": body["tag"]}
                self._reply(peer, fields, [as_frame(state["value"])])
            return
        if self._server.replication.is_standby or not self._server.ready:
            self._server.voice.traffic.dropped["not ready"] += 1
            return
        self.give(peer, message.sender, self._server.store_of(body["key"]), body)

    def give(self, peer: bytes, worker: str, store: KeyStore, body: dict[str, Any]) -> None:
        """Answer a pull with a key's value, now or once its version is there."""
        if body["version"] > store.version and self._server.settings.aggregates:
            self._parked.setdefault(body["key"], []).append((peer, worker, body))
            return
        exact = body["exact"] and body["version"] == store.version - 1 and store.before is not None
        value = store.before if exact and store.before is not None else store.value
        version = store.version - exact
        memory = store.memory if value is store.value else None
        delta, frames = self._server.references.encode(worker, store.key, value, body["full"], memory)
        if not exact:
            self.note_pull(worker, store)
            self._server.replication.forward_pull(worker, store.key.index, body["full"])
        self._reply(peer, {"key": store.key.index, "version": version, "delta": delta}, frames)

    def _reply(self, peer: bytes, fields: dict[str, Any], frames: list[Any]) -> None:
        server = self._server
        body = {"delta": False, "tag": 0, "life": server.voice.session, "acks": server.take_acks(peer), **fields}
        server.voice.reply(server.listener.socket, peer, Kind.VALUE, body, frames)

    def note_pull(self, worker: str, store: KeyStore) -> None:
        """Remember what a worker has now."""
        if not self._server.settings.aggregates:
            store.note_pull(worker)

    def unpark(self, store: KeyStore) -> None:
        """Answer the pulls that waited for a key's version."""
        waiting = self._parked.pop(store.key.index, [])
        for peer, worker, body in waiting:
            self.give(peer, worker, store, body)

    def state(self, peer: bytes, message: Message) -> None:
        tag, index = message.body["tag"], message.body["key"]
        state = self.tags.get(tag, {}).get(index)
        if state is None:
            raise ValueError(f"no copy {tag} of key {index}")
        meta, frames = pack_state(state)
        self._server.voice.reply(
            self._server.listener.socket, peer, Kind.STATE_OF, {"key": index, "tag": tag, "meta": meta}, frames
        )
