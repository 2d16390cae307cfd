"""Where the machines of a run meet: the rendezvous, and the address by which the others reach this machine."""

from __future__ import annotations

import ipaddress
import multiprocessing
import os
import socket
import uuid
import warnings
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from echelon.config.validate import parse_rendezvous
from echelon.core.errors import UserError
from echelon.launch.plan import LaunchPlan

JOIN_TIMEOUT_S = 600
ELSEWHERE = "198.51.100.1"  # reserved for documentation: nobody has it
LAST_CALL_S = 2
PROBE_S = 3
KEEP_ALIVE_S = 1
KEEP_ALIVE_MISSED = 6  # a machine that is silent for so many intervals is gone


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
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return ""


def rendezvous(plan: LaunchPlan, address: str) -> RendezvousParameters:
    """Return how the agents of a run find each other.

    Args:
        address: this machine's.

    Raises:
        UserError: the host is unknown, or another program holds the port.
    """
    several = plan.nodes.most > 1
    if several:
        _check_port(*parse_rendezvous(plan.rendezvous))
    settings: dict[str, Any] = {
        "join_timeout": JOIN_TIMEOUT_S,
        "last_call_timeout": LAST_CALL_S,
        "keep_alive_interval": KEEP_ALIVE_S,
        "keep_alive_max_attempt": KEEP_ALIVE_MISSED,
    }
    return RendezvousParameters(
        backend="c10d",
        endpoint=plan.rendezvous if several else f"{address}:0",
        run_id=plan.rendezvous if several else uuid.uuid4().hex,
        min_nodes=plan.nodes.least,
        max_nodes=plan.nodes.most,
        local_addr=address,
        is_host=is_own(parse_rendezvous(plan.rendezvous)[0], address) if several else True,
        **settings,
    )


def _check_port(host: str, port: int) -> None:
    """Refuse a port of this machine that another program holds.

    Raises:
        UserError: the host is unknown, or the port is taken by something that is not a rendezvous.
    """
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise UserError(f"--rendezvous {host}:{port}: the host is unknown ({error.strerror})") from None
    with socket.socket(socket.AF_INET6 if ":" in str(address[0]) else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            return
        except OSError as error:
            if error.errno != 98:  # not EADDRINUSE: the address is another machine's
                return
    if not _answers_as_store(host, port):
        raise UserError(
            f"--rendezvous {host}:{port}: the port is taken by another program; "
            "choose another, the same on all machines"
        )


def _answers_as_store(host: str, port: int) -> bool:
    """Whether a store answers at an address.

    Asked by a process of its own that is ended after a while: where something else listens and says nothing, a store's
    client waits for ever, holding the interpreter's lock.
    """
    asking = multiprocessing.get_context("fork").Process(target=_ask_store, args=(host, port), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # no thread of ours holds a lock here
        asking.start()
    asking.join(PROBE_S)
    if asking.exitcode is None:
        asking.kill()
        asking.join()
    return asking.exitcode == 0


def _ask_store(host: str, port: int) -> None:
    try:
        TCPStore(host, port, is_master=False, timeout=timedelta(seconds=PROBE_S), wait_for_workers=False)
    except (RuntimeError, ValueError):
        os._exit(1)
    os._exit(0)
