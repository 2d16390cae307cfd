"""Where a program of another machine is asked: host and port."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from echelon.core.errors import UserError

STORE_VARIABLE = "ECHELON_STORE"
"""In the environment of a group's ranks: where they find each other, `file:PATH` or `meeting:HOST:PORT`."""


_ELSEWHERE = "198.51.100.1"  # reserved for documentation: nobody has it


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
        UserError: host or port is missing, or the host is an IPv6 address.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") or host.count(":") > 1:
        raise UserError(f"--rendezvous {text}: machines meet by IPv4: write a host's name, or its IPv4 address")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--rendezvous {text!r}: write HOST:PORT, for example node0:29400")
    return Address(host, int(port))


def parse_voters(text: str) -> tuple[Address, ...]:
    """Read `HOST:PORT`, or several with commas between them: the machines of which one leads the run.

    >>> [str(address) for address in parse_voters("a:29400,b:29400,c:29400")]
    ['a:29400', 'b:29400', 'c:29400']

    Raises:
        UserError: one is no address, is there twice, or their number is even.
    """
    voters = tuple(parse_rendezvous(each.strip()) for each in text.split(","))
    twice = next((voter for i, voter in enumerate(voters) if voter in voters[:i]), None)
    if twice is not None:
        raise UserError(f"--rendezvous {text}: {twice} is there twice; each machine has one vote")
    if len(voters) == 2:
        raise UserError(
            f"--rendezvous {text}: 2 voters protect from nothing, because more than half of them, so both, have to be "
            "there: name one machine, or three"
        )
    if len(voters) % 2 == 0:
        raise UserError(
            f"--rendezvous {text}: {len(voters)} voters survive the loss of {len(voters) // 2 - 1}, as "
            f"{len(voters) - 1} do: name an odd number of machines"
        )
    return voters


def ipv4_of(host: str) -> str:
    """Return a host's IPv4 address: machines meet by these. Raises OSError."""
    return str(socket.getaddrinfo(host, None, family=socket.AF_INET)[0][4][0])


def address_towards(host: str, port: int) -> str:
    """Return the address that this machine has for others on the way to a host, which may be itself.

    Raises:
        OSError: no way leads there, or nobody knows the host.
    """
    own = _source_towards(ipv4_of(host), port)
    if not ipaddress.ip_address(own).is_loopback:
        return own
    try:  # this machine is that host, and knows its own name by loopback: others come by the default route
        return _source_towards(_ELSEWHERE, port)
    except OSError:  # there are no other machines
        return own


def _source_towards(address: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((address, port))  # chooses a route, sends nothing
        own: str = way.getsockname()[0]
        return own
