"""Connections to the live page that ask nothing: few, and not for long, so that its owner finds the page free."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST_SILENT = 32
_REQUEST_S = 10.0


class ImpatientProtocol(H11Protocol):
    """HTTP whose connections must ask something within 10 s; beyond 32 that have not, the oldest one is closed."""

    _opened_s = 0.0
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._opened_s = self.loop.time()
        self._patience = self.loop.call_later(_REQUEST_S, self._close_if_silent)
        silent = [c for c in map(_of_ours, self.connections) if c.cycle is None and not c.transport.is_closing()]
        if len(silent) > _MOST_SILENT:
            min(silent, key=lambda connection: connection._opened_s)._close_if_silent()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.abort()


def _of_ours(connection: object) -> ImpatientProtocol:
    return cast(ImpatientProtocol, connection)
