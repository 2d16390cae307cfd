"""Changes of a run's members that a user asks for while it goes: files in its folder, for the command that runs it.

Who may signal that command may ask it: it makes the folder, which no other user can enter, and takes the files of its
own user and of root. A request is for one process, so that machines with a common disk do not take each other's.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from echelon.core.errors import UserError
from echelon.core.files import open_plain, write_atomic
from echelon.core.patience import may_pass
from echelon.records.decode import decode

REQUESTS_FOLDER = "requests"  # below a run's folder
LOOK_S = 0.5


@dataclass(frozen=True)
class Change:
    """Members leave, or come.

    Attributes:
        workers: names of those that leave.
        pids: of their processes, on the machine that is asked.
        add: so many more come.
    """

    workers: Sequence[str] = ()
    pids: Sequence[int] = ()
    add: int = 0


def ask(run: Path, pid: int, change: Change) -> None:
    """Ask the command with a process id, which runs a run on this machine, for a change.

    Raises:
        UserError: it takes none.
    """
    try:
        write_atomic(run / REQUESTS_FOLDER / f"{_addressee(pid)}{uuid.uuid4().hex}.json", json.dumps(asdict(change)))
    except FileNotFoundError:
        raise UserError(f"{run}: its command takes no changes of its members") from None


def _addressee(pid: int) -> str:
    return f"{socket.gethostname()}-{pid}-"


class Requests:
    """What this process is asked for from now on; each request is taken once."""

    def __init__(self, run: Path, every_s: float = LOOK_S) -> None:
        self._folder, self._every_s, self._looked_s = run / REQUESTS_FOLDER, every_s, 0.0
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:  # then nobody can ask
            if not may_pass(error):
                raise
        self.take()  # those for an earlier process of this number

    def take(self) -> list[Change]:
        """Return the requests since the last look; again and again, and none while the disk does not answer."""
        now = time.monotonic()
        if self._looked_s and now - self._looked_s < self._every_s:
            return []
        self._looked_s = now
        try:
            files = sorted(self._folder.glob(f"{_addressee(os.getpid())}*.json"))
            return [change for file in files if (change := _taken(file)) is not None]
        except OSError as error:
            if not may_pass(error):
                raise
            return []


def _taken(file: Path) -> Change | None:
    """Read a request and remove it; None: another user's, or one that cannot be read."""
    try:
        with open_plain(file) as opened:
            owner, text = os.fstat(opened.fileno()).st_uid, opened.read()
        file.unlink()
        return decode(Change, json.loads(text)) if owner in (os.geteuid(), 0) else None
    except (FileNotFoundError, UserError, ValueError, TypeError, AttributeError):
        return None
