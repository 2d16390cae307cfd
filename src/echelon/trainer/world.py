"""This process among the others: ranks, device and process group, from the environment that any launcher sets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from echelon.collectives.meeting_store import MeetingStore
from echelon.core.address import STORE_VARIABLE
from echelon.core.axes import Axis
from echelon.core.errors import UserError
from echelon.core.listeners import closed_afterwards
from echelon.messages.identity import derive_keys, read_secret
from echelon.observe.environment import allowed_cores
from echelon.observe.notes import RankNotes
from echelon.parallel.base import Placement, alone, place
from echelon.ps.worker_rank import WorkerRank
from echelon.trainer.resolved import ResolvedRun

_STORES_FOLDER = "stores"
_HOST_BYTES = 64  # the longest host name on Linux
_CORES_BYTES = 192


@dataclass(frozen=True)
class World:
    """Where this process stands. `group` is None when it is alone.

    `placement` is where it stands in the layout; left out, every rank is a replica. `notes` are what it is at.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    placement: Placement | None = None
    notes: RankNotes = field(default_factory=RankNotes)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which shows and records."""
        return self.rank == 0

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that together have every sample once."""
        return self.placement.data_group if self.placement else self.group

    @property
    def data_rank(self) -> int:
        """Which of `data_size` parts of the samples this rank has."""
        return self.placement.data_rank if self.placement else self.rank

    @property
    def data_size(self) -> int:
        """Parts that samples are divided into."""
        return self.placement.data_size if self.placement else self.size

    @property
    def counts(self) -> bool:
        """Whether this rank's samples enter sums over the world; others may have the same ones."""
        return self.placement.counts if self.placement else True


@contextmanager
def join_world(run: ResolvedRun, secret_folder: Path, notes: RankNotes) -> Iterator[World]:
    """Join the process group of the run and leave it at the end.

    Args:
        secret_folder: where the run's secret lies, for a run of several machines.

    Raises:
        UserError: the number of ranks does not fit the description, or there is no GPU for this rank.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    layout = run.layout_for(size)
    device = _device(run.config.training.device, local_rank)
    if size == 1:
        yield World(rank, size, local_rank, device, None, alone(), notes)
        return
    timeout = timedelta(seconds=run.timeout_s)
    base = _store(size, secret_folder, timeout)  # referred to until the end: the group holds its C++ half alone
    round_name = os.environ.get("ECHELON_ROUND") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"echelon/{round_name}", base)  # it may outlive a restart, with addresses of the dead
    with closed_afterwards():
        dist.init_process_group(_backend(device), store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        with closed_afterwards():
            placement = place(layout, rank, device.type, timeout)
        yield World(rank, size, local_rank, device, dist.group.WORLD, placement, notes)
    finally:
        dist.destroy_process_group()
        if isinstance(base, MeetingStore):
            base.close()


def _store(size: int, secret_folder: Path, timeout: timedelta) -> dist.Store:
    """Return the store of this start: a file on one machine, the first machine's among several, else the launcher's."""
    kind, _, where = os.environ.get(STORE_VARIABLE, "").partition(":")
    if kind == "file":
        store: dist.Store = dist.FileStore(where, size)
        store.set_timeout(timeout)
        return store
    if kind == "meeting":
        return MeetingStore(where, derive_keys(read_secret(secret_folder)), os.environ["ECHELON_ROUND"], timeout)
    return next(dist.rendezvous("env://", timeout=timeout))[0]


@contextmanager
def join_worker(run: ResolvedRun, process: WorkerRank, roles: Path, notes: RankNotes) -> Iterator[World]:
    """Join the other ranks of a parameter server's worker, and leave them at the end; one rank is a world of its own.

    They meet by a file that is named after this start of theirs, so that nothing of an earlier one is read.

    Raises:
        UserError: there is no GPU for this rank.
    """
    device = _device(run.config.training.device, process.local)
    if process.size == 1:
        yield World(0, 1, process.local, device, None, alone(), notes)
        return
    timeout = timedelta(seconds=run.timeout_s)
    folder = roles / _STORES_FOLDER
    folder.mkdir(exist_ok=True)
    store = dist.FileStore(str(folder / f"worker{process.number}-{os.environ['ECHELON_ROUND']}"), process.size)
    store.set_timeout(timeout)
    layout = run.layout_for(process.workers * process.size)
    with closed_afterwards():
        dist.init_process_group(
            _backend(device), store=store, rank=process.rank, world_size=process.size, timeout=timeout
        )
        placement = place(replace(layout, sizes={**layout.sizes, Axis.DP: 1}), process.rank, device.type, timeout)
    yield World(process.rank, process.size, process.local, device, dist.group.WORLD, placement, notes)
    dist.destroy_process_group()  # not after an error: that is recorded first, and then the process ends at once


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@dataclass(frozen=True)
class RollCall:
    """Who the ranks are, in order: host names, process ids, and the cores that each may run on (such as `0-3,8`)."""

    hosts: list[str]
    pids: list[int]
    affinity: list[str]


def roll_call(world: World) -> RollCall:
    """Ask every rank who it is; all ranks call it."""
    texts = [(socket.gethostname(), _HOST_BYTES), (allowed_cores(), _CORES_BYTES)]
    parts = [text.encode()[:size].ljust(size, b"\0") for text, size in texts]
    row = torch.tensor([*b"".join(parts), os.getpid()], dtype=torch.int64, device=world.device)
    rows = [torch.empty_like(row) for _ in range(world.size)] if world.group else [row]
    if world.group is not None:
        dist.all_gather(rows, row, group=world.group)
    table = [each.tolist() for each in rows]
    hosts, cores = (
        [bytes(each[a:b]).rstrip(b"\0").decode(errors="replace") for each in table]
        for a, b in ((0, _HOST_BYTES), (_HOST_BYTES, _HOST_BYTES + _CORES_BYTES))
    )
    return RollCall(hosts, [each[-1] for each in table], cores)


def _device(wanted: str, local_rank: int) -> torch.device:
    device = choose_device(wanted, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """Return the device of one of `local_size` workers on this machine; nothing is set up on it.

    Raises:
        UserError: a GPU is asked for, and there is none for this worker.
    """
    gpus = 0 if wanted == "cpu" else torch.cuda.device_count()
    if wanted == "cuda" and gpus <= local_rank:
        raise UserError(
            f"--device cuda: worker {local_rank} finds {gpus} GPUs on this machine; use --device cpu or fewer workers"
        )
    return torch.device("cpu") if gpus < local_size else torch.device("cuda", local_rank)
