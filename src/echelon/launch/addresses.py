"""Which address a machine has on the way to the others of its run."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from echelon.core.address import Address
from echelon.core.errors import UserError

_ELSEWHERE = "198.51.100.1"  # reserved for documentation: nobody has it


def own_address(rendezvous: Address) -> str:
    """Return this machine's address on the way to the rendezvous: host names often lead to loopback.

    Raises:
        UserError: the host is unknown or there is no way to it.
    """
    host, port = rendezvous.host, rendezvous.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        own = _address_towards(family, address)
    except OSError as error:
        raise UserError(f"--rendezvous {rendezvous}: cannot be reached ({error.strerror})") from None
    if not ipaddress.ip_address(own).is_loopback:
        return own
    try:  # this is the first machine, and knows its own name by loopback: others come by the default route
        return _address_towards(socket.AF_INET, (_ELSEWHERE, port))
    except OSError:  # there are no other machines
        return own


def listening_addresses(rendezvous: Address) -> list[str]:
    """Return where the first machine listens: at its address for the others, and at the one that its own name has.

    Raises:
        UserError: the host is unknown.
    """
    own = own_address(rendezvous)
    of_name = socket.getaddrinfo(rendezvous.host, rendezvous.port, type=socket.SOCK_DGRAM)[0][4][0]
    return list(dict.fromkeys((own, str(of_name))))


def _address_towards(family: int, address: tuple[Any, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(address)  # chooses a route, sends nothing
        own: str = way.getsockname()[0]
        return own


def is_own(host: str, address: str) -> bool:
    """Whether a host is this machine, which has an address."""
    target = str(socket.getaddrinfo(host, None)[0][4][0])
    return target == address or ipaddress.ip_address(target).is_loopback
