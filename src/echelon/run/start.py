"""Starting a run on this machine: its plan, what is refused, its processes, and how it ended."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.config import RunConfig
from echelon.config.validate import check_world
from echelon.core.errors import UserError, naming
from echelon.core.files import full_disk_in_words
from echelon.core.layout import parse_layout
from echelon.launch.link import check_link, parse_link
from echelon.launch.plan import LaunchPlan, is_worker, nodes_of, thread_count, worker_count
from echelon.launch.preload import start_import_server
from echelon.records.events import RankFailed, Refusal, WorkerDied
from echelon.records.file import Recorder, read_records
from echelon.records.kinds import End, LinkTraffic
from echelon.trainer import folder as folders
from echelon.trainer.server_checks import uses_servers

if TYPE_CHECKING:
    from echelon.launch.elastic import Death
    from echelon.launch.link import LinkCounters
    from echelon.trainer.assemble import Given

PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "timm.optim",
    "timm.scheduler",
    "torchmetrics.classification",
    "echelon.run.worker",
)
PRELOAD_ROLES = ("torch._dynamo", "zmq", "echelon.trainer.leased", "echelon.run.served")


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `completed`, `stopped` or `failed`; its folder; the numbers of `summary.json`."""

    status: str
    folder: Path
    summary: Mapping[str, Any]


def start(config: RunConfig, given: Given | None = None) -> Outcome:
    """Start a new run.

    Raises:
        UserError: it cannot start as described.
    """
    if is_worker():
        return _start_as_worker(config, given)
    path = Path(config.run) if config.run else folders.default_folder(config)
    config = replace(config, run=str(path))
    _begin_imports(plan_of(config, path, given))
    check(config, given)  # before there is a folder: what is refused leaves nothing behind
    folders.create(path, config)
    with _lock(path, config):
        return _start_in(path, config, given, fresh=True)


def start_again(path: Path, config: RunConfig) -> Outcome:
    """Continue the run of a folder, as its description says now.

    Raises:
        UserError: it cannot start as described, or goes on already.
    """
    with _lock(path, config):
        return _start_in(path, config, None, fresh=False)


def check(config: RunConfig, given: Given | None = None) -> None:
    """Refuse what this machine, or the combination of the four choices, cannot do, and data that is not there.

    Raises:
        UserError: names the setting, the reason, and what works.
    """
    if config.launch.link:
        with naming("--link"):
            check_link(parse_link(config.launch.link))
    from echelon.data import check_source
    from echelon.trainer.compatibility import check_strategies

    if given is None or given.source is None:
        check_source(config.data.source)
    if uses_servers(config) and is_worker():
        raise UserError(f"--sync {config.strategy.sync} starts roles of its own: run `echelon train` without torchrun")
    ranks = _workers(config) * nodes_of(config.launch).most
    check_strategies(config, int(os.environ["WORLD_SIZE"]) if is_worker() else ranks)


def plan_of(config: RunConfig, path: Path, given: Given | None = None) -> LaunchPlan:
    """Return what would be started on this machine.

    Raises:
        UserError: the workers do not fit the machine or the description.
    """
    nodes = nodes_of(config.launch)
    workers = _workers(config)
    if nodes.least == nodes.most:
        check_world(config, workers * nodes.most)
    return LaunchPlan(
        entry="echelon.run.worker:run_worker",
        args=(str(path), given),
        workers=workers,
        threads=thread_count(config.launch, workers),
        nodes=nodes,
        rendezvous=config.launch.rendezvous,
        max_restarts=config.launch.max_restarts,
        log_dir=path / "logs",
        preload=_preload(config),
        link=config.launch.link,
    )


def _workers(config: RunConfig) -> int:
    """Return the workers of this machine: as given, else as many as the layout asks for."""
    workers = worker_count(config.launch, config.training.device)
    layout, machines = parse_layout(config.strategy.parallel), nodes_of(config.launch).most
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
    return nullcontext() if is_worker() else folders.locked(path, shared=nodes_of(config.launch).most > 1)


def _start_as_worker(config: RunConfig, given: Given | None) -> Outcome:
    from echelon.run.under_launcher import agree_on_folder
    from echelon.run.worker import train_rank

    check(config, given)
    path = agree_on_folder(config)
    status = train_rank(path, given)
    return _outcome(path, status)


def _start_in(path: Path, config: RunConfig, given: Given | None, fresh: bool) -> Outcome:
    if not fresh:
        folders.prepare(path, config)
    if is_worker():
        from echelon.run.worker import train_rank

        return _outcome(path, train_rank(path, given))
    plan = plan_of(config, path, given)
    if not fresh:
        _begin_imports(plan)
        check(config, given)
    with full_disk_in_words(path):
        record = Recorder(path)
        try:
            status = _run(config, plan, path, record)
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


def _run(config: RunConfig, plan: LaunchPlan, path: Path, record: Recorder) -> str:
    if not uses_servers(config):
        return _run_group(plan, path, record)
    from echelon.run.roles import run_leased_roles

    return run_leased_roles(config, plan, path, record)


def _run_group(plan: LaunchPlan, path: Path, record: Recorder) -> str:
    from echelon.launch.elastic import Interrupted, Refused, Watch, WorkersFailed, run_workers
    from echelon.reporting.report import write_report

    def on_death(death: Death, restarts_left: int) -> None:
        then = "the group restarts from the newest checkpoint" if restarts_left else "no restarts are left"
        message = f"{death}{_last_words(path, death)}; {then}"
        record.write(WorkerDied(message, rank=death.rank, host=death.host, pid=death.pid, exit_code=death.exit_code))

    def on_counters(counters: list[LinkCounters]) -> None:
        record.write(LinkTraffic(plan.link, counters))

    try:
        return next(iter(run_workers(plan, Watch(on_death, on_counters)).values()), "completed") or "completed"
    except Interrupted:
        return "stopped"
    except Refused:
        reason = folders.last_message(path, Refusal)
        record.write(End("refused", reason))
        write_report(path)
        raise UserError(reason) from None
    except WorkersFailed:
        reason = folders.last_message(path, WorkerDied)
        record.write(End("failed", reason))
        write_report(path)
        return "failed"


def _last_words(path: Path, death: Death) -> str:
    """Return what a failed rank said, or what another said that waited in vain for a silent one."""
    if death.exit_code is not None and death.exit_code < 0:
        return ""
    failures = read_records(path, RankFailed)
    if death.exit_code is None:
        return f"; rank {failures[-1].rank} waited in vain: {failures[-1].message}" if failures else ""
    errors = [failure.message for failure in failures if (failure.rank, failure.pid) == (death.rank, death.pid)]
    return f": {errors[-1]}" if errors else ""


def _outcome(path: Path, status: str) -> Outcome:
    summary = path / "summary.json"
    return Outcome(status, path, json.loads(summary.read_text()) if summary.exists() else {})
