"""Whether a run or a study goes on: what its folder and the kernel say."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOCK_FILE = ".lock"  # held by whoever runs it
LAUNCH_FILE = "launch.json"
_LOCKS = Path("/proc/locks")


def is_held(folder: Path) -> bool | None:
    """Whether a process of this machine holds a folder's lock; None: it has none, or this system does not tell.

    Only looks: taking the lock, even for an instant, could refuse a run that starts in that instant.
    """
    if not _LOCKS.exists():
        return None
    try:
        number = str((folder / LOCK_FILE).stat().st_ino)
    except FileNotFoundError:
        return None
    fields = [line.split() for line in _LOCKS.read_text().splitlines() if "->" not in line]  # these only wait for it
    return any(f[1] == "FLOCK" and f[5].rpartition(":")[2] == number for f in fields)


def is_deserted(folder: Path, start: Mapping[str, Any]) -> bool:
    """Whether nobody holds a run's lock and all ranks of its newest `start` record, on this machine, have died."""
    pids = start.get("pids")
    if not isinstance(pids, list) or not pids or not is_local(start.get("hosts")) or is_held(folder) is not False:
        return False
    return not any(_is_alive(pid) for pid in pids)


def _is_alive(pid: object) -> bool:
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not after_name.startswith(b"Z")


def read_launch(folder: Path) -> dict[str, Any]:
    """Return how a run was started, as far as its folder says."""
    try:
        found = json.loads((folder / LAUNCH_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_local(hosts: object) -> bool:
    """Whether all of a run's ranks are on this machine, as far as its record says."""
    return not isinstance(hosts, list) or all(host == socket.gethostname() for host in hosts)
