"""The processes of a run on one machine, as a job: ranks that restart together, or roles that restart alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from echelon.core.errors import UserError
from echelon.launch.link import Host
from echelon.launch.places.base import Group, Job, Process, Restart
from echelon.launch.plan import LaunchPlan
from echelon.ps.worker_rank import WorkerRank

RANK = "echelon.run.worker:run_worker"
SCHEDULER = "echelon.run.servers:run_scheduler"
SERVER = "echelon.run.servers:run_server"
WORKER = "echelon.run.worker:run_server_worker"
EVALUATOR = "echelon.run.evaluator:run_evaluator"
_NEAR = {  # between ranks of one machine
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
_CARRIED = (
    "ATEN_", "CUBLAS_", "CUDA_", "ECHELON_", "GLOO_", "GOMP_", "HF_", "KERAS_", "KMP_", "MKL_", "MLFLOW_", "NCCL_",
    "OMP_", "PYTORCH_", "TORCH_", "TRACKIO_", "WANDB_",
)  # fmt: skip


@dataclass(frozen=True)
class ServerPart:
    """This machine's part of a run with a parameter server.

    Attributes:
        machine: its number; the first one, 0, has the scheduler.
        first_worker: number of its first worker's first process.
        ranks: processes of a worker, which are several where the model is split.
        workers: of all machines.
        servers, standbys: numbers of those that live here.
        addresses: by process, where it listens; absent: for this machine only.
        hosts: by server, standby and worker, the network namespace that its processes live in.
        scheduler: where it listens, on another machine; empty: on this one.
        epoch: counted from 0, in which this launch begins, of a run that trains more from one on.
    """

    ranks: int
    workers: int
    servers: tuple[int, ...] = ()
    standbys: tuple[int, ...] = ()
    machine: int = 0
    first_worker: int = 0
    addresses: Mapping[str, str] = field(default_factory=dict)
    hosts: Mapping[str, Host] = field(default_factory=dict)
    scheduler: str = ""
    epoch: int = 0


def ranks_job(plan: LaunchPlan, hosts: Sequence[Host] = (), interface: str | None = None) -> Job:
    """Return the ranks of a run without servers; the first one's output is the run's.

    Args:
        hosts: network namespaces of the ranks; empty: the machine's own network.
        interface: network interface that leads to the other machines (empty: unknown), through which ranks talk unless
            the user's environment says otherwise; None: there are none, and ranks talk through loopback alone.
    """
    environment = _environment(plan)
    if interface is None:
        environment |= _NEAR
    elif interface:
        environment = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} | environment
    if hosts:  # a namespace has its own interfaces
        environment = {name: value for name, value in environment.items() if name not in _NEAR}
    processes = [
        Process(
            f"rank{i}", plan.entry, plan.args, environment, hosts[i] if hosts else None,
            str(plan.log_dir.absolute() / f"rank{i}.out") if i else "", folder=str(Path.cwd()),
        )
        for i in range(plan.workers)
    ]  # fmt: skip
    restart = Restart.BESIDE if plan.elastic else Restart.RESCUED if plan.rescues else Restart.TOGETHER
    return Job((Group(tuple(processes), restart),), plan.max_restarts)


def server_job(plan: LaunchPlan, part: ServerPart) -> Job:
    """Return the scheduler, servers and workers of a machine; the scheduler's output is the run's.

    Each restarts alone; a split worker's processes, which need each other, together. Where the scheduler is elsewhere,
    the run ends with workers and servers.
    """
    first, (path, *parcel) = part.machine == 0, plan.args
    for_roles = parcel[0].for_roles if parcel and parcel[0] else None
    environment = _environment(plan) | {"LOCAL_WORLD_SIZE": str(plan.workers)}

    def process(name: str, entry: str, args: tuple[Any, ...], leads: bool) -> Process:
        """Return one of the processes."""
        log = "" if entry == SCHEDULER else str(plan.log_dir.absolute() / f"{name}.out")
        host = part.hosts.get(name.partition(".")[0])
        return Process(
            name, entry, (path, *args), environment, host, log, leads, stops_on_signal=False, folder=str(Path.cwd())
        )

    expected = part.workers * plan.nodes.least // plan.nodes.most
    for_scheduler = (part.addresses.get("scheduler", ""), expected, for_roles)
    alone = [process("scheduler", SCHEDULER, for_scheduler, True)] if first else []
    for kind, numbers in (("server", part.servers), ("standby", part.standbys)):
        names = [(f"{kind}{i}", i) for i in numbers]
        # On another machine they stay when its workers are asked to leave.
        alone += [
            process(name, SERVER, (name, i, part.addresses.get(name, ""), part.workers, for_roles), not first)
            for name, i in names
        ]
    workers: dict[int, list[Process]] = {}
    for local in range(plan.workers):
        number, rank = divmod(part.first_worker + local, part.ranks)
        place = WorkerRank(number, local, part.machine, rank, part.ranks, part.workers)
        workers.setdefault(number, []).append(process(place.name, WORKER, (place, *parcel), not first))
    if part.ranks == 1:
        return Job((Group((*alone, *(p for [p] in workers.values())), Restart.ALONE),), plan.max_restarts)
    split = [
        tuple(_of_split(p, environment, first + rank) for rank, p in enumerate(ranks))
        for first, ranks in zip(range(0, plan.workers, part.ranks), workers.values(), strict=True)
    ]
    return Job((Group(tuple(alone), Restart.ALONE), *map(Group, split)), plan.max_restarts)


def another_worker(job: Job, logs: Path, number: int, batch_size: int, gpus: int) -> Process:
    """Return a worker beyond those that a job of this machine begins with, by its number from 0.

    Args:
        logs: folder that its output goes to; the job's only worker may have none of its own.
        batch_size: samples that the workers divide among them; 0: they do not.
        gpus: that the workers compute on; 0: on none.

    Raises:
        UserError: this machine cannot have one; says why.
    """
    workers = [process for group in job.groups for process in group.processes if process.entry in (RANK, WORKER)]
    process, local = workers[-1], len(workers) + number
    if 0 < batch_size <= local:
        raise UserError(f"--batch-size {batch_size} gives {local + 1} workers less than a sample each")
    if 0 < gpus <= local:
        raise UserError(f"each worker has a GPU, and this machine has {gpus}")
    if process.host is not None:
        raise UserError("with --link each worker has a network of its own, which is made at the start")
    name, args = f"rank{local}", process.args
    if process.entry == WORKER:
        path, place, *parcel = args
        if place.size > 1:
            raise UserError("a worker is several processes: only a whole machine can come")
        if place.machine:
            raise UserError("only the first machine can have more workers")
        place = replace(place, number=place.workers + number, local=local)
        name, args = place.name, (path, place, *parcel)
    return replace(process, name=name, args=args, log=str(logs.absolute() / f"{name}.out"))


def _of_split(process: Process, environment: Mapping[str, str], local: int) -> Process:
    """Return a process of a split worker; NCCL binds its device by `LOCAL_RANK`."""
    return replace(process, environment={**environment, **_NEAR, "LOCAL_RANK": str(local)})


def _environment(plan: LaunchPlan) -> dict[str, str]:
    """Return what processes need of this one's environment, wherever they are, and their number of threads."""
    carried = {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}
    return carried | {"OMP_NUM_THREADS": str(plan.threads)}
