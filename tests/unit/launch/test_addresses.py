"""A machine's own address, where its network is not up yet, and its only command for a run."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest

from echelon.core.address import Address
from echelon.core.errors import UserError
from echelon.launch import addresses


def test_a_network_that_is_down_is_waited_for_and_a_name_that_nobody_knows_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, said, downs = Address("127.0.0.1", 29400), list[str](), [errno.ENETUNREACH, errno.ENETDOWN]
    real = addresses._address_towards

    def towards(family: int, address: tuple[object, ...]) -> str:
        if downs:
            raise OSError(downs[-1], os.strerror(downs.pop()))
        return real(family, address)

    monkeypatch.setattr(addresses, "_address_towards", towards)
    assert addresses.own_address(there, said.append) and not downs
    assert len(said) == 1 and "waiting up to 30 s for a network" in said[0]
    monkeypatch.setattr(addresses, "NETWORK_S", 0.0)
    downs = [errno.ENETUNREACH] * 9
    with pytest.raises(UserError, match=r"127.0.0.1:29400: cannot be reached \(Network is unreachable\)"):
        addresses.own_address(there)
    monkeypatch.setattr(addresses, "NETWORK_S", 60.0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(socket.gaierror(-2, "no name")))
    with pytest.raises(UserError, match="no name"):
        addresses.own_address(there)


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
