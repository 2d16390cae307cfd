"""A small process that keeps unnamed network namespaces alive, for as long as its owner lives.

Run as a script (`python -I -S netns_holder.py COUNT OWNER_PID`), standard library only: it starts in milliseconds.
It prints one JSON list of namespace paths and waits for its owner to say the end or to die, however it dies. The
namespaces have no name and exist only through the descriptors held here, so the kernel takes them, and every veth in
them, away with this process: nothing is left that a next start would have to clean.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

CLONE_NEWNET = 0x40000000
TERMINATE_GRACE_S = 5.0
KILL_GRACE_S = 5.0


def _call(name: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _create(count: int) -> list[int]:
    """Create namespaces and return a descriptor for each; the process ends up back where it started."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    held = []
    for _ in range(count):
        _call("unshare", CLONE_NEWNET)
        held.append(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
    _call("setns", home, CLONE_NEWNET)
    os.close(home)
    return held


def _inhabitants(spaces: set[tuple[int, int]], owner: int) -> list[int]:
    """Return the processes, other than the owner, that live in one of the namespaces (device and inode numbers)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (os.getpid(), owner):
            continue
        try:
            status = (entry / "ns/net").stat()
        except OSError:  # it ended while we looked, or is a zombie
            continue
        if (status.st_dev, status.st_ino) in spaces:
            found.append(int(entry.name))
    return found


def _end_inhabitants(spaces: set[tuple[int, int]], owner: int) -> None:
    """Ask whoever still lives inside to end, then end them: their network is gone."""
    for end, grace_s in ((signal.SIGTERM, TERMINATE_GRACE_S), (signal.SIGKILL, KILL_GRACE_S)):
        deadline = time.monotonic() + grace_s
        signalled: set[int] = set()
        while (living := _inhabitants(spaces, owner)) and time.monotonic() < deadline:
            for pid in set(living) - signalled:
                try:
                    os.kill(pid, end)
                except ProcessLookupError:
                    continue  # it has ended, which is what was wanted
            signalled.update(living)
            time.sleep(0.02)


def main() -> None:
    """Hold `COUNT` namespaces until standard input says something or closes, or the owner has died.

    The first namespace is the switch: given up at once, which cuts every link; the others once nobody lives there.
    """
    count, owner = int(sys.argv[1]), int(sys.argv[2])
    owner_fd = os.pidfd_open(owner)
    if os.getppid() != owner:  # it died before we could watch it
        return
    held = _create(count)
    spaces = {(status.st_dev, status.st_ino) for status in map(os.fstat, held)}
    print(json.dumps([f"/proc/{os.getpid()}/fd/{fd}" for fd in held]), flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager ends whole groups: we must outlive the workers
    waiting = select.poll()
    waiting.register(owner_fd, select.POLLIN)
    waiting.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    waiting.poll()
    os.close(held[0])
    _end_inhabitants(spaces, owner)


if __name__ == "__main__":
    main()
