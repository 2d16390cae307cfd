"""TCP connections of a process that get no answer, as the kernel tells of them (Linux; none elsewhere)."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

_ESTABLISHED = "01"
_TIMERS = ("01", "04")  # to send again; to ask whether there is room, which is also how one waits without a route
UNCHANGED_S = 0.3
LEAST_TRIES = 3  # by then a packet has been sent again over more than a second


@dataclass(frozen=True)
class TcpState:
    """What a process's connections look like.

    Attributes:
        own: addresses that it has connections at, without loopback.
        silent: addresses that have not acknowledged what was sent to them again and again.
    """

    own: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


def tcp_state(pid: int) -> TcpState:
    """Look at the connections of a process, twice where something may be on its way; nothing is seen of the dead.

    An address is silent when packets to it have been sent again several times, or when what waits for its word stays
    the same for a while: without a route packets are not even sent again.
    """
    first = _connections(pid)
    waiting = {c for c in first if c.is_waiting}
    silent = {c.there for c in waiting if c.tries >= LEAST_TRIES}
    if any(c.there not in silent for c in waiting):
        time.sleep(UNCHANGED_S)
        unchanged = {(c.inode, c.unacknowledged) for c in _connections(pid) if c.is_waiting}
        silent |= {c.there for c in waiting if (c.inode, c.unacknowledged) in unchanged}
    own = {c.here for c in first if not ipaddress.ip_address(c.here).is_loopback}
    return TcpState(tuple(sorted(own)), tuple(sorted(silent)))


@dataclass(frozen=True)
class _Connection:
    """A connection: its addresses, bytes that are not acknowledged, and how often they were sent again."""

    inode: str
    here: str
    there: str
    unacknowledged: int
    is_waiting: bool
    tries: int


def _connections(pid: int) -> list[_Connection]:
    try:
        inodes = _sockets(pid)
    except OSError:
        return []
    connections = []
    for line in (*_table(pid, "tcp"), *_table(pid, "tcp6")):
        _, here, there, state, queues, timer, tries, _, _, inode, *_ = line.split()
        if inode in inodes and state == _ESTABLISHED:
            queued = int(queues.partition(":")[0], 16)
            is_waiting = queued > 0 and timer[:2] in _TIMERS
            connections.append(_Connection(inode, _address(here), _address(there), queued, is_waiting, int(tries, 16)))
    return connections


def _table(pid: int, name: str) -> list[str]:
    """Return the lines of a process's table; none where it is gone, or the kernel has none (`tcp6` without IPv6)."""
    try:
        return Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    except OSError:
        return []


def _sockets(pid: int) -> set[str]:
    """Return the inodes of the sockets that a process has open.

    Raises:
        OSError: it is gone.
    """
    inodes = set[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)  # noqa: PTH115 - it names no file
        except FileNotFoundError:  # closed meanwhile
            continue
        if match := re.match(r"socket:\[(\d+)\]", target):
            inodes.add(match[1])
    return inodes


def _address(field: str) -> str:
    """Return the address of a field such as `0100007F:1F90`.

    >>> _address("0100007F:1F90")
    '127.0.0.1'
    """
    digits = bytes.fromhex(field.partition(":")[0])
    in_order = b"".join(digits[i : i + 4][::-1] for i in range(0, len(digits), 4))
    if len(in_order) == 16 and in_order.startswith(b"\0" * 10 + b"\xff\xff"):
        in_order = in_order[12:]
    return socket.inet_ntop(socket.AF_INET if len(in_order) == 4 else socket.AF_INET6, in_order)
