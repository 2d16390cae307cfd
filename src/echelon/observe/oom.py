"""Whether the kernel killed a process for want of memory: by the counter of its cgroup, or by the kernel's log."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

OUT_OF_MEMORY = "out of memory"  # what the line of such an error begins with
CGROUPS = Path("/sys/fs/cgroup")
_LOG_BYTES = 8192  # of one message at most
_UNLIMITED = 1 << 60  # cgroup v1 has a number for "no limit"


@dataclass(frozen=True)
class MemoryGroup:
    """The cgroup whose memory a process uses: the file with its counter of kills, and the file with its limit."""

    events: Path
    limit: Path

    def kills(self) -> int:
        """Return how many of its processes the kernel has killed for want of memory; 0 where it does not tell."""
        try:
            match = re.search(r"^oom_kill (\d+)$", self.events.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return int(match[1]) if match else 0

    def free_bytes(self) -> int | None:
        """Return what its processes may still use, with files' contents that the kernel would drop; None: no limit."""
        limit = self.limit_bytes()
        now = self.limit.with_name({"memory.max": "memory.current"}.get(self.limit.name, "memory.usage_in_bytes"))
        try:
            used, told = int(now.read_text()), now.with_name("memory.stat").read_text()
            files = re.search(r"^(?:total_)?inactive_file (\d+)$", told, re.MULTILINE)
        except (OSError, ValueError):
            return limit
        return None if limit is None else max(0, limit - used + (int(files[1]) if files else 0))

    def limit_bytes(self) -> int | None:
        """Return its limit; None where it has none, or does not tell."""
        try:
            text = self.limit.read_text().strip()
        except OSError:
            return None
        return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def memory_group(pid: int, mounted: Path = CGROUPS, proc: Path = Path("/proc")) -> MemoryGroup | None:
    """Return the cgroup of a process, of version 2 or 1; None where it cannot be seen.

    In a container the process's path may be that of the host, whose own group is then the root of what is mounted.
    """
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            roots, events, limit = [mounted / "memory"], "memory.oom_control", "memory.limit_in_bytes"
        elif not controllers:
            roots, events, limit = [mounted, mounted / "unified"], "memory.events", "memory.max"
        else:
            continue
        for folder in [*(root / path.lstrip("/") for root in roots), *roots]:
            if (folder / events).exists():
                return MemoryGroup(folder / events, folder / limit)
    return None


def log_names(pid: int) -> bool:
    """Whether the kernel's log, where it may be read, says that a process was killed for want of memory."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        while True:
            try:
                message = os.read(descriptor, _LOG_BYTES)
            except BrokenPipeError:  # what was next has been overwritten
                continue
            if re.search(rb"[Oo]ut of memory: Killed process %d " % pid, message):
                return True
    except OSError:  # nothing is left to read, or it may not be read
        return False
    finally:
        os.close(descriptor)


class KillsForMemory:
    """Tells of processes, noted when they begin, whether the kernel killed them for want of memory."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[MemoryGroup, int]] = {}

    def begin(self, pid: int) -> None:
        """Note a process's cgroup and its counter."""
        group = memory_group(pid)
        if group is not None:
            self._before[pid] = group, group.kills()

    def killed(self, pid: int) -> bool:
        """Whether a process that was ended by SIGKILL, or one of its children, was killed for want of memory."""
        group, before = self._before.get(pid, (None, 0))
        return (group is not None and group.kills() > before) or log_names(pid)

    def limit_bytes(self, pid: int) -> int | None:
        """Return the limit of the process's cgroup; None where there is none."""
        group, _ = self._before.get(pid, (None, 0))
        return group.limit_bytes() if group is not None else None
