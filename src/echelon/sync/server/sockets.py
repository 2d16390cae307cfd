"""Sockets of a run: encrypted, bounded, and never waiting at the end."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

from echelon.sync.server.identity import RunKeys

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]
LOCAL = "ipc://"
SLACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Largest frame that is taken from the network, in bytes, and messages queued per peer."""

    frame_bytes: int
    queued: int = 20_000


def listen(context: Context, keys: RunKeys, address: str, limits: Limits) -> tuple[Socket, str]:
    """Bind a ROUTER; returns it and the address that peers connect to.

    At `tcp://HOST:PORT` (port 0: any) peers are known by the run's CURVE keys, and all is encrypted. At `ipc://PATH`,
    a Unix socket, whoever may enter the folder is a peer: keep it where the run's secret lies, with the same rights.

    Raises:
        zmq.ZMQError: the address is taken or not this machine's.
    """
    socket = context.socket(zmq.ROUTER)
    _common(socket, limits)
    if not address.startswith(LOCAL):
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret
        socket.curve_publickey = keys.server_public
        socket.zap_domain = b"echelon"
    socket.router_mandatory = True
    socket.router_handover = True  # a peer that connects again takes its old place
    socket.bind(address)
    if address.startswith(LOCAL):
        return socket, address
    port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return socket, f"tcp://{host}:{port}"


def connect(context: Context, keys: RunKeys, address: str, limits: Limits, identity: bytes) -> Socket:
    """Connect a DEALER to an address; ZeroMQ connects again by itself when the peer comes back there."""
    socket = context.socket(zmq.DEALER)
    _common(socket, limits)
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
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _common(socket: Socket, limits: Limits) -> None:
    socket.linger = 0
    socket.sndhwm = limits.queued
    socket.rcvhwm = limits.queued
    socket.maxmsgsize = limits.frame_bytes + SLACK_BYTES
    socket.tcp_keepalive = 1
    socket.immediate = 0
