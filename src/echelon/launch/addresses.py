"""How the other machines of a run reach this one."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import psutil

from echelon.config.validate import parse_rendezvous
from echelon.core.errors import UserError

ELSEWHERE = "198.51.100.1"  # reserved for documentation: nobody has it


def own_address(rendezvous: str) -> str:
    """Return this machine's address on the way to the rendezvous: host names often lead to loopback.

    Raises:
        UserError: the host is unknown or there is no way to it.
    """
    host, port = parse_rendezvous(rendezvous)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        own = _address_towards(family, address)
    except OSError as error:
        raise UserError(f"--rendezvous {rendezvous}: cannot be reached ({error.strerror})") from None
    if not ipaddress.ip_address(own).is_loopback:
        return own
    try:  # this is the first machine, and knows its own name by loopback: others come by the default route
        return _address_towards(socket.AF_INET, (ELSEWHERE, port))
    except OSError:  # there are no other machines
        return own


def _address_towards(family: int, address: tuple[Any, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(address)  # chooses a route, sends nothing
        own: str = way.getsockname()[0]
        return own


def is_own(host: str, own: str) -> bool:
    """Whether a host is this machine."""
    address = str(socket.getaddrinfo(host, None)[0][4][0])
    return address == own or ipaddress.ip_address(address).is_loopback


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address; empty when none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return ""
