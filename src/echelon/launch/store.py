"""Where the ranks of a process group find each other: a store that listens on one address, and holds no pickle."""

from __future__ import annotations

import socket
from typing import Any


class GroupStore:
    """A `TCPStore` of torch's on a socket of ours: by itself it would listen on every interface of the machine.

    It lives in the process that supervises the ranks: what a rank's end must not take away. The socket listens at once,
    and torch is imported by `serve`, while the ranks start; what they ask before waits in the socket.
    """

    def __init__(self, host: str) -> None:
        """Listen at any port of an address of this machine."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket: socket.socket | None = socket.create_server((host, 0), family=family, backlog=1024)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._store: Any = None

    def serve(self) -> None:
        """Begin to answer, if not begun."""
        if self._socket is None:
            return
        from torch.distributed import TCPStore

        descriptor, self._socket = self._socket.detach(), None
        self._store = TCPStore(
            self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )

    def close(self) -> None:
        """Stop."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._store = None


class StoreHost:
    """Opens a store for each round, at one address; that of the round before is closed."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._store: GroupStore | None = None

    def open(self) -> tuple[str, int]:
        """Open a fresh store; returns its host and port."""
        self.close()
        self._store = GroupStore(self._host)
        return self._store.host, self._store.port

    def serve(self) -> None:
        """Let the newest store answer."""
        if self._store is not None:
            self._store.serve()

    def close(self) -> None:
        """Close the store of the last round."""
        if self._store is not None:
            self._store.close()
            self._store = None
