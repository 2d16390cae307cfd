"""TCP connections of a process that get no answer, as the kernel tells of them (Linux; none elsewhere)."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

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
    """Look at the connections of a process; nothing is seen of one that is gone."""
    own, silent = set[str](), set[str]()
    try:
        inodes = _sockets(pid)
        tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    except OSError:
        return TcpState()
    for line in (line for table in tables for line in table.splitlines()[1:]):
        fields = line.split()
        if fields[9] not in inodes:
            continue
        here, there = (_address(field) for field in fields[1:3])
        if not here.startswith("127.") and here not in ("::1", "0.0.0.0", "::"):
            own.add(here)
        is_sending_again = fields[5].startswith("01") and int(fields[6], 16) >= LEAST_TRIES
        if is_sending_again:
            silent.add(there)
    return TcpState(tuple(sorted(own)), tuple(sorted(silent)))


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
