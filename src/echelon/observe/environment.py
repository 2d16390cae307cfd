"""What machine a run ran on, for the record."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import psutil

from echelon.records.kinds import Environment


def environment(command: str) -> Environment:
    """Return versions, processor and GPUs of this process, beside the command that started the run."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        echelon=version("echelon"),
        platform=platform.platform(),
        cpu=cpu_name(),
        cores=os.cpu_count(),
        gpus=gpus,
        command=command,
    )


def cpu_name() -> str:
    """Return the processor's name as the kernel tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def allowed_cores() -> str:
    """Return the cores that this process may run on, such as `0-3,8`; empty where the system does not tell."""
    return as_ranges(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ""


def as_ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ranges.

    >>> as_ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


_STARTED = 19  # of the fields of /proc/self/stat behind the name: in clock ticks since the machine began


def command_given_t() -> float:
    """Return when the command was given, in unix seconds: when this process began, where it is `echelon` itself.

    A program of the user's did other work before it trains: there it is now.
    """
    return time.time() - (process_age_s() if is_own_command() else 0.0)


def is_own_command() -> bool:
    """Return whether this process is the command `echelon`, which ends with what it does."""
    script = Path(sys.argv[0])
    return script.name == "echelon" or script.parts[-2:] == ("echelon", "__main__.py")


def process_age_s() -> float:
    """Return the seconds since the kernel began this process, the interpreter's start among them."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    except FileNotFoundError:
        return time.time() - psutil.Process().create_time()
    began_s = int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s  # psutil knows when the machine began to the second


def command_line() -> str:
    """Return the command that started this process, as one would type it."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
