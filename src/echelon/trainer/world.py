"""This process among the others: ranks, device and process group, from the environment that any launcher sets."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from echelon.collectives.meeting_store import MeetingStore
from echelon.core.address import STORE_VARIABLE
from echelon.core.axes import Axis
from echelon.core.errors import UserError
from echelon.core.layout import Layout
from echelon.core.listeners import closed_afterwards
from echelon.core.system import why_untried
from echelon.core.terms import Term
from echelon.messages.identity import derive_keys, read_secret
from echelon.observe.environment import allowed_cores
from echelon.observe.notes import RankNotes
from echelon.parallel.base import Placement, alone, place
from echelon.ps.worker_rank import WorkerRank
from echelon.torch_compat import forget_failed_groups, process_groups, set_timeout
from echelon.trainer.membership import Membership, TermStore
from echelon.trainer.resolved import ResolvedRun

_STORES_FOLDER = "stores"
_CONNECT = timedelta(seconds=10)  # who waits for a dead member's connection cannot be told that it is lost
_TRIES_S = (3.0, 6.0, 12.0)  # of the first connections of a term
_HOST_BYTES = 64  # the longest host name on Linux
_CORES_BYTES = 192


@dataclass(frozen=True)
class World:
    """Where this process stands. `group` is None when it is alone.

    `placement` is where it stands in the layout; left out, every rank is a replica. `notes` are what it is at.
    `meeting` is where ranks of several machines find each other, whenever they meet again; `store` is where those of
    this term do, which is referred to while its group is used.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    placement: Placement | None = None
    notes: RankNotes = field(default_factory=RankNotes)
    meeting: MeetingStore | None = None
    store: dist.Store | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which shows and records."""
        return self.rank == 0

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that together have every sample once."""
        return self.placement.data_group if self.placement else self.group

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same piece of the model in other replicas; None: there is one replica."""
        return self.placement.replica_group if self.placement else self.group

    @property
    def replica_ranks(self) -> list[int]:
        """Those of the replica group."""
        group = self.replica_group
        return [self.rank] if group is None else dist.get_process_group_ranks(group)

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
def join_world(
    run: ResolvedRun, secret_folder: Path, notes: RankNotes, membership: Membership | None = None
) -> Iterator[World]:
    """Join the process group of the run and leave it at the end.

    Not after an error: that is recorded first, for leaving a group whose peers are gone may wait for them, or end the
    process; then the process ends, and its groups with it.

    Args:
        secret_folder: where the run's secret lies, for a run of several machines.
        membership: of a run whose survivors go on; a newcomer to it begins alone, as a rank that does not lead.

    Raises:
        UserError: the number of ranks does not fit the description, or there is no GPU for this rank.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    layout = run.layout_for(size)
    is_newcomer = membership is not None and membership.is_newcomer
    timeout = timedelta(seconds=run.timeout_s)
    if size == 1 or is_newcomer:
        device = _taken(choose_device(run.config.training.device, local_rank, _local_size()))
        place_of_own = (size, size + 1) if is_newcomer else (rank, size)
        meeting = _meeting(secret_folder, timeout) if membership is not None else None
        yield World(*place_of_own, local_rank, device, None, alone(), notes, meeting)
        _leave(meeting, membership)
        return
    base = _store(size, secret_folder, timeout)  # referred to until the end: the group holds its C++ half alone
    round_name = os.environ.get("ECHELON_ROUND") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"echelon/{round_name}", base)  # it may outlive a restart, with addresses of the dead
    wanted = run.config.training.device
    table = GpuTable(store, rank, size, () if wanted == "cpu" else None)
    device = _taken(_device_among(wanted, local_rank, table))
    with membership.connecting() if membership is not None else nullcontext():
        with closed_afterwards(with_nccl=device.type == "cuda"):
            dist.init_process_group(
                _backend(device), store=store, rank=rank, world_size=size, timeout=timeout, device_id=_bound(device)
            )
        with closed_afterwards(with_nccl=device.type == "cuda"):
            placement = place(layout, rank, device.type, timeout)
    meeting = base if isinstance(base, MeetingStore) else None
    yield World(rank, size, local_rank, device, dist.group.WORLD, placement, notes, meeting)
    _leave(meeting, membership)


def _leave(meeting: MeetingStore | None, membership: Membership | None) -> None:
    if membership is None:  # else the process ends now, and waits for no connection to one that is gone
        leave_groups()
    if meeting is not None:
        meeting.close()


def enter_term(run: ResolvedRun, membership: Membership, term: Term, before: World) -> World:
    """Return the world of a term, whose members all call it together; the groups of the one before are left.

    Args:
        before: the world that this process was in.

    Raises:
        TermOver: a member was lost before all were connected.
    """
    rank, size = term.members.index(membership.member), len(term.members)
    if size == 1 and not run.compression.encodes:  # a codec goes on remembering in a group of one
        return replace(before, rank=0, size=1, group=None, placement=alone())
    timeout = timedelta(seconds=run.timeout_s)
    meeting = membership.led_by(term, before.meeting)
    store = TermStore(membership.meeting_of(term, meeting), membership.check_term, timeout)
    with membership.connecting(), closed_afterwards():
        _connect(store, rank, size, _backend(before.device))
        set_timeout(timeout)
        placement = place(Layout({Axis.DP: size}), rank, before.device.type, timeout)
    return replace(
        before, rank=rank, size=size, group=dist.group.WORLD, placement=placement, store=store, meeting=meeting
    )


class LeftGroups:
    """Groups that were left, until a thread of its own lets them go.

    In rare cases gloo waits without end in the destructor of a group whose connections have broken. A survivor that
    trains on must not wait with it.
    """

    def __init__(self) -> None:
        self._held: list[dist.ProcessGroup] = []

    def hold(self) -> None:
        """Keep the groups that this process is in; whoever else lets them go does not wait for their end."""
        self._held += process_groups()

    def let_go(self) -> None:
        """Let go of what is held, where nobody else has it any more."""
        held, self._held = self._held, []
        if held:
            threading.Thread(target=held.clear, name="echelon-left-groups", daemon=True).start()


def _connect(store: dist.Store, rank: int, size: int, backend: str) -> None:
    """Make the default group of a term; where one of its members cannot connect in time, all try again, for longer.

    Whoever waits for the connection of a member that has died waits for the whole of a try; then it learns of it from
    the store.

    Raises:
        TermOver: a member was lost before all were connected.
        RuntimeError: the last try failed.
    """
    for attempt, limit_s in enumerate(_TRIES_S):
        own, failed = dist.PrefixStore(f"try{attempt}", store), f"failed{attempt}"
        error: Exception | None = None
        try:
            dist.init_process_group(
                backend, store=own, rank=rank, world_size=size, timeout=timedelta(seconds=limit_s)
            )  # fmt: skip
        except RuntimeError as raised:
            error = raised
            store.set(failed, "1")
        store.set(f"tried{attempt}/{rank}", "1")
        store.wait([f"tried{attempt}/{each}" for each in range(size)])
        if not store.check([failed]):
            return
        leave_groups()
        if attempt == len(_TRIES_S) - 1:
            raise error or RuntimeError("another member of the term could not connect")


@contextmanager
def short_connects(timeout: timedelta) -> Iterator[None]:
    """Give up groups that are made inside the block where a member does not connect within 10 s.

    Args:
        timeout: of the operations of all groups, afterwards.
    """
    set_timeout(min(timeout, _CONNECT))
    yield
    set_timeout(timeout)


def leave_groups() -> None:
    """Leave all process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()
    else:  # the making of one may have failed
        forget_failed_groups()


def _store(size: int, secret_folder: Path, timeout: timedelta) -> dist.Store:
    """Return the store of this start: a file on one machine, the first machine's among several, else the launcher's."""
    kind, _, where = os.environ.get(STORE_VARIABLE, "").partition(":")
    if kind == "file":
        store: dist.Store = dist.FileStore(where, size)
        store.set_timeout(timeout)
        return store
    if kind == "meeting":
        return _open_meeting(where, secret_folder, timeout)
    return next(dist.rendezvous("env://", timeout=timeout))[0]


def _meeting(secret_folder: Path, timeout: timedelta) -> MeetingStore | None:
    """Return the store of the first machine, where there are several."""
    kind, _, where = os.environ.get(STORE_VARIABLE, "").partition(":")
    return _open_meeting(where, secret_folder, timeout) if kind == "meeting" else None


def _open_meeting(where: str, secret_folder: Path, timeout: timedelta) -> MeetingStore:
    return MeetingStore(where, derive_keys(read_secret(secret_folder)), os.environ["ECHELON_ROUND"], timeout)


@contextmanager
def join_worker(run: ResolvedRun, process: WorkerRank, roles: Path, notes: RankNotes) -> Iterator[World]:
    """Join the other ranks of a parameter server's worker, and leave them at the end; one rank is a world of its own.

    They meet by a file that is named after this start of theirs, so that nothing of an earlier one is read.

    Raises:
        UserError: there is no GPU for this rank.
    """
    device = _taken(choose_device(run.config.training.device, process.local, _local_size()))
    if process.size == 1:
        yield World(0, 1, process.local, device, None, alone(), notes)
        return
    timeout = timedelta(seconds=run.timeout_s)
    folder = roles / _STORES_FOLDER
    folder.mkdir(exist_ok=True)
    store = dist.FileStore(str(folder / f"worker{process.number}-{os.environ['ECHELON_ROUND']}"), process.size)
    store.set_timeout(timeout)
    layout = run.layout_for(process.workers * process.size)
    with closed_afterwards(with_nccl=device.type == "cuda"):
        dist.init_process_group(
            _backend(device), store=store, rank=process.rank, world_size=process.size, timeout=timeout,
            device_id=_bound(device),
        )  # fmt: skip
        placement = place(replace(layout, sizes={**layout.sizes, Axis.DP: 1}), process.rank, device.type, timeout)
    yield World(process.rank, process.size, process.local, device, dist.group.WORLD, placement, notes)
    dist.destroy_process_group()  # not after an error: that is recorded first, and then the process ends at once


def _bound(device: torch.device) -> torch.device | None:
    """Return the GPU that NCCL is to bind at once: it would take that of `LOCAL_RANK`, which may be another."""
    return device if device.type == "cuda" else None


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@dataclass(frozen=True)
class RollCall:
    """Who the ranks are, in order: host names, process ids, the cores that each may run on (such as `0-3,8`), bytes."""

    hosts: list[str]
    pids: list[int]
    affinity: list[str]
    resident_bytes: list[int]


def roll_call(world: World, resident_bytes: int = 0) -> RollCall:
    """Ask every rank who it is, and how large it was before it had a model; all ranks call it."""
    texts = [(socket.gethostname(), _HOST_BYTES), (allowed_cores(), _CORES_BYTES)]
    parts = [text.encode()[:size].ljust(size, b"\0") for text, size in texts]
    row = torch.tensor([*b"".join(parts), os.getpid(), resident_bytes], dtype=torch.int64, device=world.device)
    rows = [torch.empty_like(row) for _ in range(world.size)] if world.group else [row]
    if world.group is not None:
        dist.all_gather(rows, row, group=world.group)
    table = [each.tolist() for each in rows]
    hosts, cores = (
        [bytes(each[a:b]).rstrip(b"\0").decode(errors="replace") for each in table]
        for a, b in ((0, _HOST_BYTES), (_HOST_BYTES, _HOST_BYTES + _CORES_BYTES))
    )
    return RollCall(hosts, [each[-2] for each in table], cores, [each[-1] for each in table])


def first_that_differs(text: str, world: World) -> int | None:
    """Return the first rank that gives another text than rank 0; None: all give the same. All ranks call it."""
    if world.group is None:
        return None
    row = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8).to(world.device)
    rows = [torch.empty_like(row) for _ in range(world.size)]
    dist.all_gather(rows, row, group=world.group)
    return next((rank for rank, each in enumerate(rows) if not torch.equal(each, rows[0])), None)


def text_from_rank_0(text: str, world: World) -> str:
    """Return on every rank what rank 0 gives; all ranks call it."""
    if world.group is None:
        return text
    said = text.encode() if world.leads else b""
    length = torch.tensor([len(said)])
    dist.broadcast(length, 0, group=world.group)
    body = torch.zeros(int(length), dtype=torch.uint8)
    if said:
        body.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    if body.numel():
        dist.broadcast(body, 0, group=world.group)
    return bytes(body.tolist()).decode()


def _local_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _taken(device: torch.device) -> torch.device:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


class GpuTable:
    """Which GPUs each rank sees, by their UUIDs: a launcher may show each of its tasks another one, as number 0."""

    def __init__(self, store: dist.Store, rank: int, size: int, seen: Sequence[str] | None = None) -> None:
        """Write this rank's row; `seen`: UUIDs, those that torch finds where not given."""
        self._store, self._rank, self._size = store, rank, size
        if seen is None:
            seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        self.seen = tuple(seen)
        store.set(f"gpus/{rank}", " ".join(self.seen))

    def is_own(self) -> bool:
        """Whether no other rank sees any of this rank's; waits for their rows, as long as the store does."""
        others = (self._store.get(f"gpus/{rank}") for rank in range(self._size) if rank != self._rank)
        return not any(set(row.decode().split()) & set(self.seen) for row in others)


def _device_among(wanted: str, local_rank: int, table: GpuTable) -> torch.device:
    """Choose a rank's device: where there are fewer than workers, the first of those that no other rank sees.

    Raises:
        UserError: a GPU is asked for, and there is none for this worker.
    """
    local_size = _local_size()
    if wanted != "cpu" and 0 < len(table.seen) < local_size and table.is_own():
        return torch.device("cuda", 0)
    return choose_device(wanted, local_rank, local_size)


def choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """Return the device of one of `local_size` workers on this machine; nothing is set up on it.

    Raises:
        UserError: a GPU is asked for, and there is none for this worker; or it is one that nobody tried.
    """
    gpus = 0 if wanted == "cpu" else torch.cuda.device_count()
    if gpus and torch.version.hip and (reason := why_untried("AMD GPUs (ROCm)", "use --device cpu")):
        raise UserError(reason)
    if wanted == "cuda" and gpus <= local_rank:
        raise UserError(
            f"--device cuda: worker {local_rank} finds {gpus} GPUs on this machine; use --device cpu or fewer workers"
        )
    return torch.device("cpu") if gpus < local_size else torch.device("cuda", local_rank)
