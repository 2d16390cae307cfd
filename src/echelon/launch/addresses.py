"""Which address a machine has on the way to the others of its run, and which command is its part of the run."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from echelon.core.address import Address, address_towards, ipv4_of
from echelon.core.errors import UserError

NETWORK_S = 30.0  # a machine that has just started, or whose cable was out, may have its network by then
_AGAIN_S = 0.25
_DOWN = (errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, socket.EAI_AGAIN)
_UNKNOWN = (socket.EAI_NONAME, socket.EAI_NODATA)


def own_address(rendezvous: Address, say: Callable[[str], None] | None = None, name_s: float = 0.0) -> str:
    """Return this machine's address on the way to the rendezvous: host names often lead to loopback.

    Where no network leads there, or no name server answers, it is waited for; `say` is told so, once.

    Args:
        name_s: how long a name that nobody knows is waited for: a place makes that of its first machine known late.

    Raises:
        UserError: the host is unknown, or after `NETWORK_S` there is still no way to it.
    """
    begun = time.monotonic()
    while True:
        try:
            return address_towards(rendezvous.host, rendezvous.port)
        except OSError as error:
            reason = f"--rendezvous {rendezvous}: cannot be reached ({error.strerror})"
            is_down, is_unknown = error.errno in _DOWN, error.errno in _UNKNOWN
            most_s = max(name_s, NETWORK_S) if is_down else name_s if is_unknown else 0.0
            if time.monotonic() - begun >= most_s:
                raise UserError(reason) from None
        if say is not None:
            say(f"{reason}; waiting up to {most_s:g} s for {'a network' if is_down else 'its name'}")
            say = None
        time.sleep(_AGAIN_S)


@contextmanager
def only_command(rendezvous: Address) -> Iterator[None]:
    """Be this user's only command on this machine for the run that meets somewhere, while the block takes.

    What is held is the name of a Unix socket without a file, which the kernel gives back when this process dies.

    Raises:
        UserError: another process is; names it.
    """
    machine = f"{os.geteuid()} {own_address(rendezvous)} {rendezvous}"
    name = f"\0echelon-{hashlib.sha256(machine.encode()).hexdigest()}"
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(name)
            held.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            pid, user = _listens_at(name)
            if pid and user == os.geteuid():
                raise UserError(
                    f"--rendezvous {rendezvous}: this machine takes part in that run already, by the command of "
                    f"process {pid}: wait for it, or end it first"
                ) from None
        yield  # also where another user has taken the name: that is no command of this run


def _listens_at(name: str) -> tuple[int, int]:
    """Return the process that listens at a socket of this machine, and its user; zeros: nobody any more."""
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(name)
        except OSError:
            return 0, 0
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user


def own_number(voters: Sequence[Address], machines: int, say: Callable[[str], None] | None = None) -> int | None:
    """Return which of the machines that may lead this one is; None: none of them.

    Args:
        machines: of the run: where each may lead, this one must be there.
        say: see `own_address`.

    Raises:
        UserError: it is not, or is there twice, or no way leads to the others.
    """
    addresses = {voter: own_address(voter, say) for voter in voters}
    numbers = [number for number, voter in enumerate(voters) if is_own(voter.host, addresses[voter])]
    text = ",".join(map(str, voters))
    if len(numbers) > 1:
        twice = " and ".join(str(voters[number]) for number in numbers)
        raise UserError(f"--rendezvous {text}: {twice} are both this machine; each machine has one vote")
    if not numbers and machines == len(voters):
        raise UserError(
            f"--rendezvous {text}: all {machines} machines are named there, and none of them is this one "
            f"({addresses[voters[0]]}): name it by an address of its own"
        )
    return numbers[0] if numbers else None


def listening_addresses(rendezvous: Address) -> list[str]:
    """Return where the first machine listens: at its address for the others, and at the one that its own name has.

    Raises:
        UserError: the host is unknown.
    """
    own = own_address(rendezvous)
    return list(dict.fromkeys((own, ipv4_of(rendezvous.host))))


def is_own(host: str, address: str) -> bool:
    """Whether a host is this machine, which has an address."""
    target = ipv4_of(host)
    return target == address or ipaddress.ip_address(target).is_loopback
