"""Connections that have shown no credentials are few and short-lived: strangers cannot use up this process's files.

ZeroMQ takes in whoever connects and drops who does not finish the handshake in time, but has no limit on how many wait.
A thread hears of every connection that a socket takes in; beyond the limit it shuts those that have said least.
"""

from __future__ import annotations

import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import zmq

_MOST = 256
_SHARE = 8  # of the files that the process may open
_HANDSHAKE_BYTES = 500  # a peer has sent more once its handshake is done
_MOST_LATER = 3  # times as many may have sent that much, and no message
_POLL_MS = 200
_EVENT = struct.Struct("=hi")
_TCP_INFO_BYTES, _RECEIVED = 136, struct.Struct("=128xQ")  # of the kernel's `struct tcp_info`

T = TypeVar("T")


def most_unknown() -> int:
    """Return how many connections without credentials a listener keeps, given the files that may be open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(8, min(_MOST, soft // _SHARE))


class ConnectionCap:
    """Caps the connections of a listening TCP socket that have not sent a message with the run's keys yet.

    Attributes:
        most: how many may wait whose handshake is not done; of those beyond, the run's own connect again.
        shut: how many were shut.
    """

    def __init__(self, listener: zmq.Socket[bytes]) -> None:
        """Begin to watch a socket."""
        self._listener, self.most = listener, most_unknown()
        self._unknown: dict[int, object] = {}  # who is at the other end, by file descriptor; oldest first
        self._lock = threading.Lock()
        self.shut = 0
        self._monitor = listener.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="echelon-connections", daemon=True)
        self._thread.start()

    def note_message(self, frame: zmq.Frame) -> None:
        """Take note that a message has come, of which this is a frame: its sender has the run's keys."""
        if self._unknown:  # nearly always empty: then this costs nothing
            with self._lock:
                self._unknown.pop(int(frame.get(zmq.SRCFD)), None)

    def close(self) -> None:
        """Stop watching; called by the thread that uses the socket, before it closes it."""
        self._closed.set()
        self._thread.join()
        self._listener.disable_monitor()
        self._monitor.close(linger=0)

    def _watch(self) -> None:
        while not self._closed.is_set():
            if not self._monitor.poll(_POLL_MS):
                continue
            while self._monitor.poll(0):
                event, descriptor = _EVENT.unpack(self._monitor.recv_multipart()[0])
                self._note(event == zmq.EVENT_ACCEPTED, descriptor)
            self._shut_excess()

    def _note(self, accepted: bool, descriptor: int) -> None:
        peer = _ask(descriptor, socket.socket.getpeername) if accepted else None
        with self._lock:
            self._unknown.pop(descriptor, None)
            if peer is not None:
                self._unknown[descriptor] = peer

    def _shut_excess(self) -> None:
        with self._lock:
            if len(self._unknown) <= self.most:
                return
            received = {descriptor: _received_bytes(descriptor) for descriptor in self._unknown}
            silent = sorted((d for d in received if received[d] < _HANDSHAKE_BYTES), key=received.__getitem__)
            others = [d for d in received if received[d] >= _HANDSHAKE_BYTES]
            for descriptor in [*_beyond(silent, self.most), *_beyond(others, _MOST_LATER * self.most)]:
                peer = self._unknown.pop(descriptor)
                if _ask(descriptor, socket.socket.getpeername) == peer:  # not one that has its number meanwhile
                    _ask(descriptor, lambda connection: connection.shutdown(socket.SHUT_RDWR))
                    self.shut += 1


def _beyond(descriptors: list[int], most: int) -> list[int]:
    """Return the first ones of those that are too many."""
    return descriptors[: max(0, len(descriptors) - most)]


def _received_bytes(descriptor: int) -> int:
    """Return what a connection's other end has sent."""
    info = _ask(descriptor, lambda c: c.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES))
    return int(_RECEIVED.unpack(info)[0]) if info is not None and len(info) == _TCP_INFO_BYTES else 0


def _ask(descriptor: int, question: Callable[[socket.socket], T]) -> T | None:
    """Ask the kernel about a connection that ZeroMQ owns; None: it is gone."""
    try:
        with _borrowed(descriptor) as connection:
            return question(connection)
    except OSError:  # closed meanwhile: by its other end, or after its time
        return None


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Give a socket's object, without owning or copying it: there may be no room for one more file."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
