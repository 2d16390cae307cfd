"""Sockets of a run: encrypted, bounded, and never waiting at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from echelon.messages.identity import RunKeys

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]
LOCAL = "ipc://"
_POLLIN, _LAST, _MORE = int(zmq.POLLIN), int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
SLACK_BYTES = 1 << 20
BACKLOG = 1024  # connections that the kernel holds until they are taken in: many workers come at once
HANDSHAKE_MS = 10_000  # a connection that has not shown the run's keys by then is dropped
LOCAL_BUFFER_BYTES = 4 << 20  # room for a whole key: while a socket is full, two threads wake each other


@dataclass(frozen=True)
class Limits:
    """Largest frame that is taken from the network, in bytes, and messages queued per peer."""

    frame_bytes: int
    queued: int = 20_000


def new_context() -> Context:
    """Return a context of which no socket waits, when it is closed, for messages to leave, unless it is told to."""
    context = Context(io_threads=1)
    context.linger = 0
    return context


def listen(context: Context, keys: RunKeys, address: str, limits: Limits) -> tuple[Socket, str]:
    """Bind a ROUTER; returns it and the address that peers connect to.

    At `tcp://HOST:PORT` (port 0: any) peers are known by the run's CURVE keys, and all is encrypted. At `ipc://PATH`,
    a Unix socket, whoever may enter the folder is a peer: keep it where the run's secret lies, with the same rights.

    Raises:
        zmq.ZMQError: the address is taken or not this machine's.
    """
    socket = context.socket(zmq.ROUTER)
    try:
        return socket, _bind(socket, keys, address, limits)
    except zmq.ZMQError:
        socket.close()
        raise


def _bind(socket: Socket, keys: RunKeys, address: str, limits: Limits) -> str:
    _common(socket, limits, address)
    if not address.startswith(LOCAL):
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret
        socket.curve_publickey = keys.server_public
        socket.zap_domain = b"echelon"
        socket.handshake_ivl = HANDSHAKE_MS
        socket.backlog = BACKLOG
    socket.router_mandatory = True
    socket.router_handover = True  # a peer that connects again takes its old place
    socket.bind(address)
    if address.startswith(LOCAL):
        return address
    port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return f"tcp://{host}:{port}"


def connect(context: Context, keys: RunKeys, address: str, limits: Limits, identity: bytes) -> Socket:
    """Connect a DEALER to an address; ZeroMQ connects again by itself when the peer comes back there."""
    socket = context.socket(zmq.DEALER)
    _common(socket, limits, address)
    if not address.startswith(LOCAL):
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey = keys.peer_public
        socket.curve_secretkey = keys.peer_secret
    socket.routing_id = identity  # the same after a lost connection
    socket.reconnect_ivl = 20
    socket.reconnect_ivl_max = 500
    socket.connect(address)
    return socket


def has_message(socket: Socket) -> bool:
    """Whether a whole message waits; cheaper than trying, where an exception says that there is none."""
    return bool(socket.getsockopt(zmq.EVENTS) & _POLLIN)  # type: ignore[operator]


def take(socket: Socket) -> list[zmq.Frame]:
    """Return the message that waits, not copied; as `recv_multipart`, without asking an option for each frame."""
    frames = [socket.recv(zmq.DONTWAIT, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(zmq.DONTWAIT, copy=False))
    return frames


def give(socket: Socket, frames: Sequence[Any]) -> None:
    """Send a message without waiting: frames of ZeroMQ's as they are, bytes copied, other memory lent.

    Raises:
        zmq.ZMQError: the queue is full, or the peer is not known.
    """
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        flags = _MORE if i < last else _LAST
        socket.send(frame, flags, copy=type(frame) is bytes)


def _common(socket: Socket, limits: Limits, address: str) -> None:
    if address.startswith(LOCAL):
        socket.sndbuf = LOCAL_BUFFER_BYTES
    socket.sndhwm = limits.queued
    socket.rcvhwm = limits.queued
    socket.maxmsgsize = limits.frame_bytes + SLACK_BYTES
    socket.tcp_keepalive = 1
    socket.immediate = 0
