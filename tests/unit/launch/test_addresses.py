"""A machine's own address, where its network is not up yet, and its only command for a run."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from echelon.core.address import Address, parse_rendezvous
from echelon.core.errors import UserError
from echelon.launch import addresses


def test_a_network_that_is_down_is_waited_for_and_a_name_that_nobody_knows_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, said, downs = Address("127.0.0.1", 29400), list[str](), [errno.ENETUNREACH, errno.ENETDOWN]
    real = addresses.address_towards

    def towards(host: str, port: int) -> str:
        if downs:
            raise OSError(downs[-1], os.strerror(downs.pop()))
        return real(host, port)

    monkeypatch.setattr(addresses, "address_towards", towards)
    assert addresses.own_address(there, said.append) and not downs
    assert len(said) == 1 and "waiting up to 30 s for a network" in said[0]
    monkeypatch.setattr(addresses, "NETWORK_S", 0.0)
    downs = [errno.ENETUNREACH] * 9
    with pytest.raises(UserError, match=r"127.0.0.1:29400: cannot be reached \(Network is unreachable\)"):
        addresses.own_address(there)
    downs.clear()
    monkeypatch.setattr(addresses, "NETWORK_S", 60.0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(socket.gaierror(-2, "no name")))
    with pytest.raises(UserError, match="no name"):
        addresses.own_address(there)


@pytest.mark.parametrize(
    "number, name_s, words",
    [
        (socket.EAI_AGAIN, 0.0, "for a network"),  # just booted: no name server answers
        (socket.EAI_NONAME, 600.0, "up to 600 s for its name"),  # a place names its first machine late
        (socket.EAI_NODATA, 600.0, "for its name"),
    ],
)
def test_a_name_that_is_not_known_yet_is_waited_for(
    number: int, name_s: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, said, real = [number], list[str](), socket.getaddrinfo

    def resolve(host: str, *arguments: Any, **named: Any) -> Any:
        if failures:
            raise socket.gaierror(failures.pop(), "no name")
        return real("127.0.0.1" if host == "job-0.job" else host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert addresses.own_address(Address("job-0.job", 29400), said.append, name_s) and not failures
    assert len(said) == 1 and words in said[0]


def test_a_host_with_ipv6_too_is_met_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def resolve(host: str, port: Any, family: int = 0, **named: Any) -> Any:
        loopback = "127.0.0.1" if family == socket.AF_INET else "::1"
        return real(loopback if host == "node0" else host, port, family, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert "127.0.0.1" in addresses.listening_addresses(Address("node0", 29400))
    assert addresses.is_own("node0", "10.0.0.1")


@pytest.mark.parametrize("text", ["::1:29400", "[2001:db8::1]:29400"])
def test_an_ipv6_address_is_refused_in_words(text: str) -> None:
    with pytest.raises(UserError, match=r"machines meet by IPv4: write a host's name, or its IPv4 address"):
        parse_rendezvous(text)


HOLDS = """
import time
from echelon.core.address import Address
from echelon.launch.addresses import only_command
with only_command(Address("127.0.0.1", 29417)):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_command_of_a_machine_is_refused_while_the_first_one_lives() -> None:
    there = Address("127.0.0.1", 29417)
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout is not None and first.stdout.readline() == b"held\n"
            already = pytest.raises(UserError, match=f"already, by the command of process {first.pid}: ")
            with already, addresses.only_command(there):
                pass
            with addresses.only_command(Address("127.0.0.1", 29418)):
                pass
        finally:
            first.kill()
        first.wait()
    with addresses.only_command(there):
        pass
