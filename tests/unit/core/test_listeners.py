"""Ports that a block opened let nobody in after it; connections and the ports of others stay."""

from __future__ import annotations

import socket
import sys

import pytest

from echelon.core.listeners import closed_afterwards

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these signatures")


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_newcomers_stay_outside_and_who_is_in_stays_in(family: socket.AddressFamily, host: str) -> None:
    with socket.create_server((host, 0), family=family) as other:
        with closed_afterwards():
            listener = socket.create_server((host, 0), family=family)
            friend = socket.create_connection(listener.getsockname()[:2], timeout=5)
            inside, _ = listener.accept()
        with listener, friend, inside:
            with pytest.raises(TimeoutError):
                socket.create_connection(listener.getsockname()[:2], timeout=0.3)
            friend.sendall(b"still here")
            assert inside.recv(10) == b"still here"
            socket.create_connection(other.getsockname()[:2], timeout=5).close()
