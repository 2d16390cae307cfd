"""Sending and taking messages on sockets: headers, counters of what was dropped, bytes by direction."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq

from echelon.messages.connection_cap import ConnectionCap
from echelon.messages.framing import Content, Message, ReplayGuard, Vocabulary, decode, encode_header
from echelon.messages.identity import PeerCheck, RunKeys
from echelon.messages.plain import Malformed
from echelon.messages.sockets import LOCAL, Context, Limits, Socket, connect, give, has_message, listen, take

T = TypeVar("T")


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
        self._connections = 0
        self.sequence = 0
        self.traffic = SocketTraffic()

    def new_identity(self) -> bytes:
        """Return a connection's own name: one to a peer's next life must not be taken for that to its last.

        With one name for both, the old one, connecting again just before it is closed, would take the new one's place,
        and what had been sent on the new one would be lost.
        """
        self._connections += 1
        return f"{self.name}:{self.session:x}:{self._connections}".encode()

    def frames(self, content: Content, frames: Sequence[Any] = ()) -> list[Any]:
        """Return a message's frames."""
        self.sequence += 1
        message = Message(content, self.name, self.session, self.sequence)
        return [encode_header(self.keys.run_id, message), *frames]

    def send(self, socket: Socket, content: Content, frames: Sequence[Any] = ()) -> None:
        """Send on a DEALER without waiting; a full queue means that the peer is gone, and drops it."""
        self._send(socket, self.frames(content, frames))

    def reply(self, socket: Socket, to: bytes, content: Content, frames: Sequence[Any] = ()) -> None:
        """Send on a ROUTER to a peer without waiting; a peer that is gone, or does not read, loses it."""
        self._send(socket, [to, *self.frames(content, frames)])

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
    """A ROUTER with its checks: gives every sound message to a handler, counts the others.

    Attributes:
        cap: of strangers' connections; None: a Unix socket, which strangers cannot reach.
    """

    def __init__(self, context: Context, sender: Sender, address: str, limits: Limits, known: Vocabulary) -> None:
        self.sender = sender
        self.check = PeerCheck(context, sender.keys)
        try:
            self.socket, self.address = listen(context, sender.keys, address, limits)
        except zmq.ZMQError:
            self.check.socket.close()
            raise
        self.cap = None if address.startswith(LOCAL) else ConnectionCap(self.socket)
        self._guard, self._known = ReplayGuard(), known
        self._limit = limits.frame_bytes
        self.messages = 0

    def listen_also(self, addresses: Sequence[str]) -> None:
        """Listen at more addresses of this machine.

        Raises:
            zmq.ZMQError: one is taken; then the listener is closed.
        """
        try:
            for address in addresses:
                self.socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise

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
        traffic = self.sender.traffic
        self.messages += 1
        if self.cap is not None:
            self.cap.note_message(frames[-1])
        sizes = [len(f) for f in frames]
        traffic.received_bytes += sum(sizes)
        try:
            if len(sizes) > 2 and max(sizes[2:]) > self._limit:
                raise Malformed("oversized")
            message = decode(self.sender.keys.run_id, frames[1:], self._known)
            self._guard.admit(message)
            handle(frames[0].bytes, message)
        except Malformed as error:
            _drop(traffic, error)

    def close(self, linger_ms: int = 0) -> None:
        """Close the sockets; what was sent last has so long to leave."""
        if self.cap is not None:
            self.cap.close()
        self.socket.close(linger=linger_ms)
        self.check.socket.close()


class Channel:
    """A DEALER to one address with its checks; `message_bytes` is the size of the message that was taken last."""

    def __init__(self, context: Context, sender: Sender, address: str, limits: Limits, known: Vocabulary) -> None:
        self.sender, self.address = sender, address
        self.socket = connect(context, sender.keys, address, limits, sender.new_identity())
        self._guard, self._known = ReplayGuard(), known
        self.message_bytes = 0

    def send(self, content: Content, frames: Sequence[Any] = ()) -> None:
        """Send without waiting."""
        self.sender.send(self.socket, content, frames)

    def pump(self, handle: Callable[[Message], None], most: int = 256) -> int:
        """Take the messages that wait; returns how many."""
        traffic = self.sender.traffic
        taken = 0
        while taken < most and has_message(self.socket):
            frames = take(self.socket)
            taken += 1
            self.message_bytes = sum(map(len, frames))
            traffic.received_bytes += self.message_bytes
            try:
                message = decode(self.sender.keys.run_id, frames, self._known)
                self._guard.admit(message)
                handle(message)
            except Malformed as error:
                _drop(traffic, error)
        return taken

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what was sent last has so long to leave."""
        self.socket.close(linger=linger_ms)


def ask_once(channel: Channel, request: Content, answer: type[T], deadline_s: float) -> T:
    """Send a request and wait for the content that answers it.

    Raises:
        TimeoutError: none came.
    """
    answers: list[T] = []

    def take_answer(message: Message) -> None:
        """Keep a content that answers the request; pass over the others."""
        if isinstance(message.content, answer):
            answers.append(message.content)

    channel.send(request)
    ends = time.monotonic() + deadline_s
    while not answers:
        if not channel.socket.poll(max(0, int(1000 * (ends - time.monotonic())))):
            name = type(request).__name__
            raise TimeoutError(f"{channel.address} gave no answer to {name} within {deadline_s:g} s")
        channel.pump(take_answer, most=1)
    return answers[0]
