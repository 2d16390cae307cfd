"""What a container takes from a process, one by one or all at once: `prefix` is put before a command.

Namespaces alone: no image and no daemon; needs root and util-linux. The first process is the command itself.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

USER = 12345  # in no file of users


def _reason() -> str:
    if os.geteuid() != 0:
        return "needs root"
    try:
        made = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "setpriv", "--no-new-privs", "true"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        return f"needs util-linux: {error}"
    return made.stderr.strip() if made.returncode else ""


CANNOT = _reason()
NEEDS_NAMESPACES = [pytest.mark.root, pytest.mark.skipif(bool(CANNOT), reason=CANNOT or "this machine has namespaces")]


@dataclass(frozen=True)
class Container:
    """What is taken away, and what is there instead.

    Attributes:
        first_process: the command is process 1; else it has an init above it.
        user: it is no root, and in no file of users.
        home: `read-only`, `none` (no variable at all), or as it is.
        shm: `small` (64 kB), `read-only`, or as it is.
        temporary: `long` (a path too long for sockets), `read-only`, `none` (no folder but the run's can be written),
            or as it is.
        root: `read-only`: nothing can be written but the run's folder and the temporary ones.
    """

    first_process: bool = True
    user: bool = False
    home: str = ""
    shm: str = ""
    temporary: str = ""
    root: str = ""

    def prefix(self, folder: Path) -> list[str]:
        """Return what runs a command in the container; `folder`, which is made writable for all, is for its runs."""
        folder.chmod(0o777)
        lines = [*_readable(Path(sys.executable).resolve())] if self.user else []
        lines += self._lines(folder)
        limits = "setpriv --no-new-privs --bounding-set=-sys_ptrace"
        if self.user:
            limits += f" --reuid={USER} --regid={USER} --clear-groups"
        script = "\n".join(["set -e", *lines, f'exec {limits} "$@"'])
        pid = ["--pid", "--fork", "--mount-proc", "--kill-child"] if self.first_process else []
        return ["unshare", "--mount", *pid, "sh", "-c", script, "sh"]

    def _lines(self, folder: Path) -> list[str]:
        where = shlex.quote(str(folder.resolve()))
        lines = []
        if self.home == "read-only":
            lines += ["mount -t tmpfs -o ro tmpfs /mnt", "export HOME=/mnt"]
        elif self.home == "none":
            lines += ["unset HOME"]
        if self.shm:
            options = "size=64k,mode=1777" if self.shm == "small" else "ro"
            lines += [f"mount -t tmpfs -o {options} tmpfs /dev/shm"]
        if self.temporary == "long":
            path = f"{where}/{'t' * 100}"
            lines += [f"mkdir -m 1777 {path}", f"export TMPDIR={path}"]
        elif self.temporary == "read-only":
            lines += [f"mkdir {where}/ro", f"mount -t tmpfs -o ro tmpfs {where}/ro", f"export TMPDIR={where}/ro"]
        if self.temporary == "none":
            for path in ("/tmp", "/var/tmp", "/dev/shm", "/run"):
                lines += [f"mount --bind {path} {path}", f"mount -o remount,bind,ro {path}"]
            lines += [f"mount --bind {where} {where}", f"mount -o remount,bind,rw {where}", "cd /"]
        if self.root == "read-only":
            kept = [] if self.temporary == "none" else [where, "/tmp"]
            lines += [*(f"mount --bind {path} {path}" for path in kept), "mount -o remount,bind,ro /"]
        return lines


def _readable(path: Path) -> list[str]:
    """Return the commands that let others pass the folders above a path, in this namespace alone."""
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & 0o001:
            inner = path.relative_to(parent).parts[0]
            child = shlex.quote(str(parent / inner))
            return [
                "mkdir -p /run/inner", f"mount --bind {child} /run/inner",
                f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(parent))}", f"mkdir {child}",
                f"mount --bind /run/inner {child}",
            ]  # fmt: skip
    return []


def first_process_of(pid: int) -> int:
    """Return the process, as seen from here, that is the first one of the container which a command started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0])


def zombies_below(pid: int) -> list[int]:
    """Return the children of a process that have ended and were not reaped."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    stats = {int(child): Path(f"/proc/{child}/stat") for child in children}
    return [child for child, stat in stats.items() if stat.exists() and ") Z " in stat.read_text()]
