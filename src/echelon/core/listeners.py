"""Ports that libraries open and leave open: once those who were meant have connected, nobody else does.

gloo accepts whoever connects, as long as its group lives, and aborts the process when that takes its last file.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_TCP_MD5SIG_EXT = 32  # of Linux, which Python does not name
_ANY_ADDRESS = 1, 0  # a prefix, of no bits


@contextmanager
def closed_afterwards(*, with_nccl: bool = False) -> Iterator[None]:
    """Close the TCP ports that the block opens to those who have not connected by its end; only Linux can.

    What is connected stays so. A newcomer gets no answer. Where the kernel cannot, the log says so.

    Args:
        with_nccl: NCCL may open some of them: its ranks connect when they first exchange something, not at the start,
            and would wait for an answer forever. gloo's ports cannot be told from them, and stay open too.
    """
    if with_nccl:
        yield
        return
    before = _listening()
    yield
    for fd in _listening() - before:
        try:
            _ask_for_signatures(fd)
        except OSError as error:
            logging.getLogger(__name__).warning(
                "ports between ranks stay open to others: no TCP signatures (%s)", error
            )


def connections() -> dict[int, int]:
    """Return the TCP connections of this process: the inode of each socket by its file descriptor (Linux)."""
    if sys.platform != "linux":
        return {}
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, or not connected
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as handle:
                    if handle.family in (socket.AF_INET, socket.AF_INET6) and handle.type == socket.SOCK_STREAM:
                        handle.getpeername()
                        found[int(path.name)] = os.fstat(handle.fileno()).st_ino
    return found


def break_off(broken: Mapping[int, int]) -> None:
    """Break connections, so that whoever waits on them, here and at their other ends, gets an error at once.

    Args:
        broken: as `connections` returned them; those that have been closed since are left alone.
    """
    for fd, inode in broken.items():
        with suppress(OSError):  # closed meanwhile
            if os.fstat(fd).st_ino == inode:
                with socket.socket(fileno=os.dup(fd)) as handle:
                    handle.shutdown(socket.SHUT_RDWR)


def _listening() -> set[int]:
    """Return the file descriptors of this process on which it listens for TCP connections."""
    if sys.platform != "linux":
        return set()
    return {int(path.name) for path in Path("/proc/self/fd").iterdir() if _is_listener(path)}


def _is_listener(path: Path) -> bool:
    with suppress(OSError):  # closed meanwhile
        if str(path.readlink()).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(path.name))) as handle:
                is_tcp = handle.family in (socket.AF_INET, socket.AF_INET6) and handle.type == socket.SOCK_STREAM
                return is_tcp and bool(handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _ask_for_signatures(fd: int) -> None:
    """Let the kernel drop packets for a listening socket that are not signed by a key nobody has (RFC 2385).

    A packet filter would do the same, but many kernels let only root attach one.
    """
    key = os.urandom(16)
    with socket.socket(fileno=os.dup(fd)) as handle:
        address = struct.pack("H", handle.family).ljust(128, b"\0")
        option = address + struct.pack("BBHi", *_ANY_ADDRESS, len(key), 0) + key.ljust(80, b"\0")
        handle.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, option)
