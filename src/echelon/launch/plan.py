"""What is to be started, as data: pure and torch-free, so that a dry run can show it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.config import LaunchConfig
from echelon.config.validate import Nodes
from echelon.core.address import Address
from echelon.core.errors import UserError
from echelon.core.link import Link

if TYPE_CHECKING:
    from echelon.launch.places.cluster import NodeRank

_MOST_PROCESSES, _MOST_PER_CORE = 16, 4
ROUND_VARIABLE = "ECHELON_ROUND"  # in a worker's environment: a name that only the ranks started with it know


@dataclass(frozen=True)
class LaunchPlan:
    """Processes of one machine.

    Attributes:
        entry: `package.module:function` that each worker calls with `args`.
        log_dir: each rank's output goes to a file here.
        voters: the machines that may lead, where the others meet them; empty: this one is alone.
        trusted_network: the machines meet without a secret.
        link: of the shaped links between the workers; None: loopback.
        elastic: when a worker is killed, the others go on.
        rescues: when a worker is killed, the others save what they have trained, and all start again from there.
        meets_again: the first machine had gone, which the user has been told.
        after: the epoch, counted from 0, of the launch that this one follows, to train more; -1: of none.
        node_rank: of this machine, where a place gave it one.
    """

    entry: str
    args: tuple[Any, ...]
    workers: int
    threads: int
    nodes: Nodes
    voters: tuple[Address, ...]
    max_restarts: int
    log_dir: Path
    trusted_network: bool = False
    link: Link | None = None
    meets_again: bool = False
    after: int = -1
    elastic: bool = False
    rescues: bool = False
    node_rank: NodeRank | None = None

    @property
    def rendezvous(self) -> Address | None:
        """Where the machines meet, with the first one; None: this one is alone."""
        return self.voters[0] if self.voters else None


def is_worker() -> bool:
    """Whether torchrun or another launcher started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def visible_gpus() -> int:
    """Count NVIDIA GPUs that this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([v for v in visible.split(",") if v.strip() and v.strip() != "-1"])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or len(list(Path("/dev").glob("nvidia[0-9]*")))


def usable_cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_processes(workers: int) -> None:
    """Refuse more processes for an evaluation, or for predictions, than a machine can hold.

    Raises:
        UserError: names the most that it takes.
    """
    most = max(_MOST_PROCESSES, _MOST_PER_CORE * usable_cores())
    if workers > most:
        raise UserError(f"--workers {workers}: this machine has {usable_cores()} cores; at most {most} processes")


def worker_count(config: LaunchConfig, device: str) -> int:
    """Return how many workers this machine runs.

    Raises:
        UserError: more GPU workers than GPUs.
    """
    gpus = 0 if device == "cpu" else visible_gpus()
    if device == "cuda" and config.workers > gpus:
        raise UserError(f"--workers {config.workers} with --device cuda, but this machine shows {gpus} GPUs")
    return config.workers or gpus or min(2, usable_cores())


def thread_count(config: LaunchConfig, workers: int) -> int:
    """Return compute threads per worker: as described, else its share of the cores, or OMP_NUM_THREADS if that is less.

    A loop of one's own takes OMP_NUM_THREADS, too.
    """
    share = max(1, usable_cores() // workers)
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    most = int(wanted) if wanted.isascii() and wanted.isdigit() else 0
    return config.threads or min(share, most or share)
