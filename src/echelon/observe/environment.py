"""What machine a run ran on, for the record."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

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


def command_line() -> str:
    """Return the command that started this process, as one would type it."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
