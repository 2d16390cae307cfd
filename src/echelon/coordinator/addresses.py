"""Where the scheduler of a run is found: its folder, its address, its last word, and the launcher's line to it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.errors import LEFT
from echelon.core.files import write_atomic
from echelon.core.patience import may_pass

if TYPE_CHECKING:
    from echelon.messages.endpoint import Channel
    from echelon.messages.framing import Content

ROLES_FOLDER = "ps"
ADDRESS_FILE = "scheduler.json"
STATUS_FILE = "status.json"
_TELL_S = 2.0
_LONGEST_SOCKET = 100


def prepare_roles(path: Path, trusted: bool = False) -> Path:
    """Make a fresh folder for the roles of this launch, with a new secret that only this user can read.

    Where the network is trusted, it is the secret that everybody knows.
    """
    from echelon.messages.identity import PUBLIC_SECRET, make_secret, write_secret

    roles = path / ROLES_FOLDER
    shutil.rmtree(roles, ignore_errors=True)
    roles.mkdir(mode=0o700)
    if trusted:
        write_secret(roles, PUBLIC_SECRET)
    else:
        make_secret(roles)
    return roles


def role_address(roles: Path, name: str, host: str = "") -> str:
    """Return where a role listens: on `host`, an address of this machine, at any port, with the run's keys.

    Without a host it is a Unix socket in the roles' folder, which only this user can enter. Who can open it can read
    the run's secret beside it, so encryption would protect nothing there. Where the path is too long for a socket, TCP
    on the loopback interface with the run's keys.
    """
    if host:
        return f"tcp://{host}:0"
    socket = roles.resolve() / f"{name}.socket"
    return f"ipc://{socket}" if len(os.fsencode(socket)) < _LONGEST_SOCKET else "tcp://127.0.0.1:0"


def note_address(roles: Path, address: str) -> None:
    """Write where the scheduler of another machine listens, unless it has done so itself on a common disk.

    One at another address belongs to another launch: what this machine's servers saved for the one before goes.
    """
    roles.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = roles / ADDRESS_FILE
    if not file.exists() or json.loads(file.read_text())["address"] != address:
        (roles / STATUS_FILE).unlink(missing_ok=True)
        shutil.rmtree(roles / "servers", ignore_errors=True)
        write_atomic(file, json.dumps({"address": address}))


def note_status(roles: Path, status: str) -> None:
    """Write how the run ended, where its scheduler is on another machine and has no common disk with this one."""
    if _status(roles) in ("", LEFT):  # who left was not there at the end
        write_atomic(roles / STATUS_FILE, json.dumps({"status": status}))


def _status(roles: Path) -> str:
    file = roles / STATUS_FILE
    return str(json.loads(file.read_text())["status"]) if file.exists() else ""


class SchedulerLine:
    """The launcher's word to the scheduler: who died, and that the run shall stop."""

    def __init__(self, roles: Path) -> None:
        self._roles = roles
        self._channel: Channel | None = None

    def died(self, name: str, how: str, pid: int) -> None:
        """Tell that a process of this machine ended."""
        from echelon.coordinator.messages import Died

        self._send(Died(name, how, pid))

    def stop(self) -> None:
        """Tell that the run shall stop after a checkpoint."""
        from echelon.coordinator.messages import Stop

        self._send(Stop("stop"))

    def drain(self, workers: Sequence[str]) -> None:
        """Tell that workers shall leave."""
        from echelon.coordinator.messages import Drain

        self._send(Drain(list(workers)))

    def connect(self) -> None:
        """Open the line once the scheduler listens; called again and again, so that to tell later takes no file."""
        try:
            self._channel = self._channel or self._connect()
        except OSError as error:
            if not may_pass(error):
                raise

    def _send(self, content: Content) -> None:
        self.connect()
        if self._channel is not None:
            self._channel.send(content)

    def _connect(self) -> Channel | None:
        import zmq

        from echelon.messages.endpoint import Channel, Sender
        from echelon.messages.identity import derive_keys, read_secret
        from echelon.messages.sockets import Limits

        file = self._roles / ADDRESS_FILE
        if not file.exists():
            return None  # it has not begun to listen: there is nobody to tell, and nothing that it could miss
        keys = derive_keys(read_secret(self._roles))
        address = json.loads(file.read_text())["address"]
        return Channel(zmq.Context.instance(), Sender(keys, "launcher"), address, Limits(1 << 20), {})

    def status(self) -> str:
        """Return how the run ended, as the scheduler wrote it."""
        return _status(self._roles) or "failed"

    def close(self) -> None:
        """Let what was sent leave."""
        if self._channel is not None:
            self._channel.close(linger_ms=int(1000 * _TELL_S))
            self._channel = None


def wait_for_address(roles: Path, deadline_s: float) -> str:
    """Return where the scheduler listens, once it has said so.

    Raises:
        TimeoutError: it did not in time.
    """
    ends = time.monotonic() + deadline_s
    while not (roles / ADDRESS_FILE).exists():
        if time.monotonic() > ends:
            raise TimeoutError(f"no scheduler within {deadline_s:g} s: there is no {roles / ADDRESS_FILE}")
        time.sleep(0.01)
    return str(json.loads((roles / ADDRESS_FILE).read_text())["address"])
