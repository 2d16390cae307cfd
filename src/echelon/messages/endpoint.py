"""Sending and taking messages on sockets: headers, counters of what was dropped, bytes by direction."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from echelon.messages.identity import PeerCheck, RunKeys
from echelon.messages.protocol import Kind, Malformed, Message, ReplayGuard, decode, encode_header
from echelon.messages.sockets import Context, Limits, Socket, connect, give, has_message, listen, take


@dataclass
class SocketTraffic:
    """What went over this process's sockets: bytes by direction, and messages dropped by reason."""

    sent_bytes: int = 0
    received_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class Sender:
    """Writes messages in one process's name: session drawn at its start, sequence rising."""

    def __init__(self, keys: RunKeys, name: str) -> None:
        self.keys, self.name = keys, name
        self.session = secrets.randbits(61)
        self._lines = 0
        self._sequence = 0
        self.traffic = SocketTraffic()

    def new_identity(self) -> bytes:
        """Return a line's own name: a line to a peer's next life must not be taken for the one to its last life.

        With one name for both, the old one, connecting again just before it is closed, would take the new one's place,
        and what had been sent on the new one would be lost.
        """
        self._lines += 1
        return f"{self.name}:{self.session:x}:{self._lines}".encode()

    def frames(self, kind: Kind, body: dict[str, Any], frames: Sequence[Any] = ()) -> list[Any]:
        """Return a message's frames."""
        self._sequence += 1
        message = Message(kind, self.name, self.session, self._sequence, body)
        return [encode_header(self.keys.run_id, message), *frames]

    def send(self, socket: Socket, kind: Kind, body: dict[str, Any], frames: Sequence[Any] = ()) -> None:
        """Send on a DEALER without waiting; a full queue means that the peer is gone, and drops it."""
        self._send(socket, self.frames(kind, body, frames))

    def reply(self, socket: Socket, to: bytes, kind: Kind, body: dict[str, Any], frames: Sequence[Any] = ()) -> None:
        """Send on a ROUTER to a peer without waiting; a peer that is gone, or does not read, loses it."""
        self._send(socket, [to, *self.frames(kind, body, frames)])

    def _send(self, socket: Socket, frames: list[Any]) -> None:
        try:
            give(socket, frames)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.traffic.dropped["unsent"] += 1
            return
        self.traffic.sent_bytes += sum(map(len, frames))


def _drop(traffic: SocketTraffic, error: Malformed) -> None:
    traffic.dropped[error.reason] += 1
    logging.getLogger(__name__).debug("a message was dropped: %s", error.reason, exc_info=error)


Handler = Callable[[bytes, Message], None]


class Listener:
    """A ROUTER with its checks: gives every sound message to a handler, counts the others."""

    def __init__(self, context: Context, voice: Sender, address: str, limits: Limits) -> None:
        self.voice = voice
        self.check = PeerCheck(context, voice.keys)
        self.socket, self.address = listen(context, voice.keys, address, limits)
        self._guard = ReplayGuard()
        self._limit = limits.frame_bytes
        self.messages = 0

    def register(self, poller: zmq.Poller) -> None:
        """Add this listener's sockets to a poller."""
        poller.register(self.check.socket, zmq.POLLIN)
        poller.register(self.socket, zmq.POLLIN)

    def pump(self, handle: Handler, most: int = 64) -> int:
        """Take at most so many waiting messages; returns how many there were."""
        self.check.answer()
        taken = 0
        while taken < most and has_message(self.socket):
            self._take(take(self.socket), handle)
            taken += 1
        return taken

    def _take(self, frames: list[zmq.Frame], handle: Handler) -> None:
        traffic = self.voice.traffic
        self.messages += 1
        sizes = [len(f) for f in frames]
        traffic.received_bytes += sum(sizes)
        try:
            if len(sizes) > 2 and max(sizes[2:]) > self._limit:
                raise Malformed("oversized")
            message = decode(self.voice.keys.run_id, frames[1:])
            self._guard.admit(message)
            handle(frames[0].bytes, message)
        except Malformed as error:
            _drop(traffic, error)

    def close(self) -> None:
        """Close the sockets."""
        self.socket.close()
        self.check.socket.close()


class Channel:
    """A DEALER to one address with its checks; `message_bytes` is the size of the message that was taken last."""

    def __init__(self, context: Context, voice: Sender, address: str, limits: Limits) -> None:
        self.voice, self.address = voice, address
        self.socket = connect(context, voice.keys, address, limits, voice.new_identity())
        self._guard = ReplayGuard()
        self.message_bytes = 0

    def send(self, kind: Kind, body: dict[str, Any], frames: Sequence[Any] = ()) -> None:
        """Send without waiting."""
        self.voice.send(self.socket, kind, body, frames)

    def pump(self, handle: Callable[[Message], None], most: int = 256) -> int:
        """Take the messages that wait; returns how many."""
        traffic = self.voice.traffic
        taken = 0
        while taken < most and has_message(self.socket):
            frames = take(self.socket)
            taken += 1
            self.message_bytes = sum(map(len, frames))
            traffic.received_bytes += self.message_bytes
            try:
                message = decode(self.voice.keys.run_id, frames)
                self._guard.admit(message)
                handle(message)
            except Malformed as error:
                _drop(traffic, error)
        return taken

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def ask_once(line: Channel, kind: Kind, body: dict[str, Any], answer: Kind, deadline_s: float) -> Message:
    """Send a request and wait for its answer.

    Raises:
        TimeoutError: none came.
    """
    found: list[Message] = []
    line.send(kind, body)
    ends = time.monotonic() + deadline_s
    while not found:
        if not line.socket.poll(max(0, int(1000 * (ends - time.monotonic())))):
            raise TimeoutError(f"{line.address} gave no answer to {kind.name} within {deadline_s:g} s")
        line.pump(lambda message: found.append(message) if message.kind is answer else None, most=1)
    return found[0]
