"""Starting a run on this machine: its plan, what is refused, its processes, and how it ended."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.config import RunConfig
from echelon.config.validate import check_world
from echelon.core.errors import UserError, naming
from echelon.core.files import full_disk_in_words
from echelon.launch.link import check_link
from echelon.launch.places import build_place
from echelon.launch.places.local import start_import_server
from echelon.launch.plan import LaunchPlan, is_worker, thread_count, worker_count
from echelon.launch.supervisor import Refused, RunFailed, supervise
from echelon.records.events import MachineLeft, Refusal, WorkerDied
from echelon.records.file import Recorder
from echelon.records.kinds import End
from echelon.run.deaths import watched
from echelon.run.job import RANK
from echelon.run.machine import Machine, this_machine
from echelon.run.resolve import check_names, layout_of, link_of, nodes_of, rendezvous_of, resolve, uses_servers
from echelon.trainer import folder as folders

if TYPE_CHECKING:
    from echelon.trainer.assemble import UserObjects
    from echelon.trainer.resolved import ResolvedRun

PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "timm.optim",
    "timm.scheduler",
    "torchmetrics.classification",
    "echelon.run.worker",
)
PRELOAD_ROLES = ("torch._dynamo", "zmq", "echelon.run.servers")


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `completed`, `stopped` or `failed`; its folder; the numbers of `summary.json`."""

    status: str
    folder: Path
    summary: Mapping[str, Any]


def start(config: RunConfig, user_objects: UserObjects | None = None) -> Outcome:
    """Start a new run.

    Raises:
        UserError: it cannot start as described.
    """
    if is_worker():
        return _start_as_worker(config, user_objects)
    check_names(config)  # at once, before anything heavy is imported
    path = Path(config.run) if config.run else folders.default_folder(config)
    config = replace(config, run=str(path))
    plan = plan_of(config, path, user_objects)
    _begin_imports(plan)
    run = check(config, user_objects)  # before there is a folder: what is refused leaves nothing behind
    folders.create(path, config)
    with _lock(path, config):
        return _run_here(run, plan, path)


def start_again(path: Path, config: RunConfig) -> Outcome:
    """Continue the run of a folder, as its description says now.

    Raises:
        UserError: it cannot start as described, or goes on already.
    """
    with _lock(path, config):
        folders.prepare(path, config)
        if is_worker():
            from echelon.run.worker import train_rank

            return _outcome(path, train_rank(path))
        check_names(config)
        plan = plan_of(config, path)
        _begin_imports(plan)
        return _run_here(check(config), plan, path)


def check(config: RunConfig, user_objects: UserObjects | None = None) -> ResolvedRun:
    """Refuse what this machine, or the combination of the four choices, cannot do, and data that is not there.

    Returns:
        the run as typed objects.

    Raises:
        UserError: names the setting, the reason, and what works.
    """
    if link := link_of(config):
        with naming("--link"):
            check_link(link)
    from echelon.data import check_source
    from echelon.tasks.registry import check_task
    from echelon.trainer.compatibility import check_strategies

    if user_objects is None or user_objects.task is None:
        check_task(config.task)
    if user_objects is None or user_objects.source is None:
        check_source(config.data.source)
    run = resolve(config)
    if run.sync.uses_servers and is_worker():
        raise UserError(f"--sync {config.strategy.sync} starts roles of its own: run `echelon train` without torchrun")
    ranks = _workers(config) * nodes_of(config).most
    check_strategies(run, int(os.environ["WORLD_SIZE"]) if is_worker() else ranks)
    return run


def plan_of(config: RunConfig, path: Path, user_objects: UserObjects | None = None) -> LaunchPlan:
    """Return what would be started on this machine.

    Raises:
        UserError: the workers do not fit the machine or the description.
    """
    nodes = nodes_of(config)
    workers = _workers(config)
    if nodes.least == nodes.most:
        check_world(config, workers * nodes.most)
    return LaunchPlan(
        entry=RANK,
        args=(str(path), user_objects),
        workers=workers,
        threads=thread_count(config.launch, workers),
        nodes=nodes,
        rendezvous=rendezvous_of(config),
        max_restarts=config.launch.max_restarts,
        log_dir=path / "logs",
        preload=_preload(config),
        link=link_of(config),
    )


def _workers(config: RunConfig) -> int:
    """Return the workers of this machine: as given, else as many as the layout asks for."""
    workers = worker_count(config.launch, config.training.device)
    layout, machines = layout_of(config), nodes_of(config).most
    if config.launch.workers:
        return workers
    if layout.ranks is not None:
        return max(1, layout.ranks // machines)
    of_replica = max(1, layout.fixed // machines)
    return max(of_replica, workers - workers % of_replica)


def _preload(config: RunConfig) -> tuple[str, ...]:
    digits = ("sklearn.datasets",) if config.data.source == "digits" else ()
    return (*PRELOAD, *digits, *(PRELOAD_ROLES if uses_servers(config) else ()))


def _lock(path: Path, config: RunConfig) -> AbstractContextManager[None]:
    return nullcontext() if is_worker() else folders.locked(path, shared=nodes_of(config).most > 1)


def _start_as_worker(config: RunConfig, user_objects: UserObjects | None) -> Outcome:
    from echelon.run.worker import agree_on_folder, train_rank

    check(config, user_objects)
    path = agree_on_folder(config)
    status = train_rank(path, user_objects)
    return _outcome(path, status)


def _run_here(run: ResolvedRun, plan: LaunchPlan, path: Path) -> Outcome:
    """Run this machine's processes to the end."""
    with full_disk_in_words(path):
        record = Recorder(path)
        try:
            status = _run(run, plan, path, record)
        finally:
            record.close()
            folders.mark_ended(path)
    if plan.link:  # what the kernel counted is known only now
        from echelon.reporting.report import write_report

        write_report(path)
    return _outcome(path, status)


def _begin_imports(plan: LaunchPlan) -> None:
    if plan.link or plan.nodes.most > 1:  # torch's store wants the name of every client, and many have none
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    start_import_server(plan.preload)


def _run(run: ResolvedRun, plan: LaunchPlan, path: Path, record: Recorder) -> str:
    """Run this machine's processes to the end of the run; returns `completed`, `stopped` or `failed`.

    Raises:
        UserError: a process refused its input, or the machines do not meet.
    """
    plan.log_dir.mkdir(parents=True, exist_ok=True)
    with (
        closing(build_place(run.config.launch.on)) as place,
        this_machine(run, plan, path, record) as machine,
        watched(machine, place, run, path, record) as (job, watch),
    ):
        try:
            stopped = supervise(job, place, watch, machine.rounds)
        except Refused:
            reason = folders.last_message(path, Refusal)
            _end(path, record, machine, "refused", reason)
            raise UserError(reason) from None
        except RunFailed as failure:
            _end(path, record, machine, "failed", str(failure) or folders.last_message(path, WorkerDied))
            return "failed"
        if machine.scheduler is None:
            return "stopped" if stopped else "completed"
        status = machine.scheduler.status()
        return "stopped" if stopped and status != "completed" else status


def _end(path: Path, record: Recorder, machine: Machine, status: str, reason: str) -> None:
    """Record how the run ended; where another machine fails, that it left."""
    from echelon.reporting.report import write_report

    if machine.number == 0:
        record.write(End(status, reason))
        write_report(path)
    else:
        record.write(MachineLeft(f"machine {machine.number} left the run: {reason}", machine.number))


def _outcome(path: Path, status: str) -> Outcome:
    summary = path / "summary.json"
    return Outcome(status, path, json.loads(summary.read_text()) if summary.exists() else {})
