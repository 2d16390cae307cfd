"""What one rank uses of its machine: processor, memory, network, GPU. One row of numbers, for the window's sum.

A sample costs a few tenths of a millisecond and is taken at most every `EVERY_S`; listing the loaders' processes costs
some milliseconds, and is done far less often.
"""

from __future__ import annotations

import logging
import math
import re
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from echelon.core.patience import may_pass
from echelon.records.kinds import RESOURCE_NAMES

EVERY_S = 1.5  # less than a window: each long one brings a sample
LIST_CHILDREN_EVERY_S = 30.0
UNKNOWN = math.nan
_TUNNELS = ("wireguard", "vxlan", "geneve")


class Sampler:
    """Samples this process; `row` is what was sampled last, in the order of `RESOURCE_NAMES`.

    Args:
        gpu: the UUID of the rank's GPU; empty: it has none.
    """

    def __init__(self, gpu: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._process = psutil.Process()
        self._children: list[psutil.Process] = []
        self._listed_s = -math.inf
        self._cpu_s: dict[int, float] = {}
        self._network: tuple[int, int, int] | None = None
        self._at_s = -math.inf
        self._gpu = Gpu(gpu) if gpu else None
        self._said: set[str] = set()
        self.row = [UNKNOWN] * len(RESOURCE_NAMES)

    def sample(self) -> bool:
        """Sample anew when it is time; returns whether it was, and `row` is new. What fails is logged, once."""
        now = self._clock()
        passed = now - self._at_s
        if passed < EVERY_S:
            return False
        first = math.isinf(passed)
        cpu_s, network = self._used_cpu_s(now), self._try(_network_bytes)
        rates = [UNKNOWN] * 3
        if self._network is not None and network is not None:
            rates = [max(0, b - a) / passed for a, b in zip(self._network, network, strict=True)]
        before = self._cpu_s
        # A loader that was listed just now may have run since long before: what it used so far is not of this sample.
        spent = sum(max(0.0, s - before[pid]) for pid, s in cpu_s.items() if pid in before)
        self._cpu_s, self._network, self._at_s = cpu_s, network, now
        if first:
            return False  # rates need two looks
        memory = rss if (rss := self._try(lambda: self._process.memory_info().rss)) is not None else UNKNOWN
        loaders = sum(info.rss for child in self._children if (info := self._try(child.memory_info)) is not None)
        gpu = (self._try(self._gpu.read) if self._gpu else None) or (UNKNOWN,) * 3
        self.row = [100 * spent / passed, float(memory), float(loaders), *rates, *gpu]
        return True

    def _used_cpu_s(self, now: float) -> dict[int, float]:
        if now - self._listed_s >= LIST_CHILDREN_EVERY_S:
            self._children, self._listed_s = self._try(lambda: self._process.children(recursive=True)) or [], now
        used = {}
        for process in (self._process, *self._children):
            times = self._try(process.cpu_times)
            if times is not None:
                used[process.pid] = times.user + times.system
        return used

    def _try(self, look: Callable[[], Any]) -> Any:
        """Look, or return None: what a rank uses is worth no rank's life."""
        try:
            return look()
        except psutil.NoSuchProcess:  # a loader that ended
            return None
        except (psutil.Error, OSError, RuntimeError) as error:
            words = f"{type(error).__name__}: {error}"
            if words not in self._said:
                self._said.add(words)
                logging.warning("what this rank uses is not known in full: %s", words)
            return None


def _network_bytes() -> tuple[int, int, int]:
    """Bytes sent, received, and sent over the loopback interface, in this process's network namespace."""
    interfaces = psutil.net_io_counters(pernic=True, nowrap=False)
    loopback = [c for name, c in interfaces.items() if name.startswith("lo")]
    others = [
        interfaces[name] for name in carrying_interfaces([name for name in interfaces if not name.startswith("lo")])
    ]
    return (
        sum(c.bytes_sent for c in others),
        sum(c.bytes_recv for c in others),
        sum(c.bytes_sent for c in loopback),
    )


def carrying_interfaces(names: Sequence[str], system: Path = Path("/sys/class/net")) -> list[str]:
    """Return the interfaces that carry bytes themselves: a bond, a bridge or a tunnel counts what others carry, again.

    So does a container's end of a bridge on its host; in the container, its interface is all that is seen.
    """
    lowest = [name for name in names if not any((system / name).glob("lower_*"))]
    carry = [name for name in lowest if (system / name / "device").exists() or not _is_carried(system / name)]
    return carry or lowest


def _is_carried(interface: Path) -> bool:
    try:
        kind = re.search(r"^DEVTYPE=(\w+)", (interface / "uevent").read_text(), re.MULTILINE)
    except OSError:
        kind = None
    is_tunnel = (interface / "tun_flags").exists() or (kind is not None and kind[1] in _TUNNELS)
    return is_tunnel or (interface / "master").exists()


def resident_bytes() -> int:
    """Return this process's resident set."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the largest resident set that this process has had; where the system does not tell it, the present one."""
    try:
        for line in Path("/proc/self/status").read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError as error:
        if may_pass(error):  # too many files are open: this needs none, but counts what started the process, too
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return resident_bytes()


class Gpu:
    """One GPU by its UUID; NVML is opened at the first look.

    Args:
        uuid: as torch or nvidia-smi names it, with or without `GPU-`.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._handle: Any = None

    def read(self) -> tuple[float, float, float]:
        """Return utilisation in percent, bytes in use and bytes in all; NaN for a counter that this GPU does not have.

        Raises:
            RuntimeError: NVML is absent, knows no such GPU, or lost it.
        """
        import pynvml  # type: ignore[import-untyped]

        try:
            if self._handle is None:
                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
            busy = self._busy(pynvml)
        except pynvml.NVMLError as error:
            raise RuntimeError(f"NVML has no counters of {self._uuid}: {error}") from error
        return busy, float(memory.used), float(memory.total)

    def _busy(self, pynvml: Any) -> float:
        try:
            return float(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except pynvml.NVMLError_NotSupported:  # a part of a GPU (MIG) has no such counter
            return math.nan
