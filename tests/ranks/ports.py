"""Which ports a run's processes have open, as the kernel says: in this machine's network and in their own."""

from __future__ import annotations

import ipaddress
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.ranks.runs import Run, marked_processes

_DEADLINE_S = 30.0
_EVERY_S = 0.1
HAS_SS = shutil.which("ss") is not None


@dataclass(frozen=True)
class Port:
    """A socket that others can reach.

    Attributes:
        local: whether it is in this machine's network, and not in a namespace of the run's own.
    """

    address: str
    number: int
    local: bool

    @property
    def is_private(self) -> bool:
        """Whether only this machine, or only a namespace of the run's own, reaches it."""
        return not self.local or (self.address != "*" and ipaddress.ip_address(self.address).is_loopback)


def open_ports(pids: Iterable[int]) -> set[Port]:
    """Return the TCP and UDP ports that processes listen on; processes that end meanwhile have none."""
    by_network: dict[str, set[int]] = {}
    for pid in pids:
        try:
            by_network.setdefault(str(Path(f"/proc/{pid}/ns/net").readlink()), set()).add(pid)
        except OSError:  # it has ended
            continue
    own = str(Path("/proc/self/ns/net").readlink())
    return {port for network, pids in by_network.items() for port in _ports_in(pids, network == own)}


def _ports_in(pids: set[int], local: bool) -> set[Port]:
    enter = [] if local else ["nsenter", f"--net=/proc/{min(pids)}/ns/net", "--"]
    shown = subprocess.run([*enter, "ss", "-Hltnup"], capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    ports = set()
    for line in shown.stdout.splitlines():
        if pids & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}:
            address, _, number = line.split()[4].rpartition(":")
            ports.add(Port(address.strip("[]").partition("%")[0], int(number), local))
    return ports


def ports_during(run: Run) -> set[Port]:
    """Return every port that a run's processes had open until it ended, as looked at ten times a second."""
    ports: set[Port] = set()
    while run.process.poll() is None:
        ports |= open_ports(marked_processes(run.mark))
        time.sleep(_EVERY_S)
    return ports
