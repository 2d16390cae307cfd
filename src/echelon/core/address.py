"""Where a program of another machine is asked: host and port."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.errors import UserError

STORE_VARIABLE = "ECHELON_STORE"
"""In the environment of a group's ranks: where they find each other, `file:PATH` or `meeting:HOST:PORT`."""


@dataclass(frozen=True)
class Address:
    """A host, by name or number, and a port of it; as text `HOST:PORT`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_rendezvous(text: str) -> Address:
    """Read `HOST:PORT`, where the machines of a run meet.

    >>> parse_rendezvous("node0:29400")
    Address(host='node0', port=29400)

    Raises:
        UserError: host or port is missing.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--rendezvous {text!r}: write HOST:PORT, for example node0:29400")
    return Address(host, int(port))
