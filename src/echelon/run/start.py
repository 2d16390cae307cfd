"""Starting a run on this machine: its plan, what is refused, its processes, and how it ended."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.config import RunConfig
from echelon.config.validate import Nodes, check_batch
from echelon.core.errors import UserError, naming
from echelon.core.files import allow_open_files, full_disk_in_words
from echelon.core.stop import StopFlag, Stopped, stop_on_signals, stopped_exit_code
from echelon.launch.link import check_link
from echelon.launch.logs import prepare_logs
from echelon.launch.places.base import Place
from echelon.launch.places.local import start_import_server
from echelon.launch.plan import LaunchPlan, is_worker, thread_count, worker_count
from echelon.launch.supervisor import FirstMachineGone, JobFailed, Refused, supervise
from echelon.observe.environment import command_given_t
from echelon.records.events import MachineLeft, Refusal, StartedOver, WorkerDied
from echelon.records.file import Recorder, newest
from echelon.records.going import LAUNCH_FILE, read_launch
from echelon.records.kinds import Checkpoint, CommandEnd, End, Start
from echelon.run.deaths import watched
from echelon.run.job import RANK
from echelon.run.machine import Machine, say, this_machine
from echelon.run.resolve import LaunchRequest, launch_request, resolve
from echelon.trainer import folder as folders

if TYPE_CHECKING:
    from echelon.run.parcel import Parcel
    from echelon.trainer.assemble import UserObjects
    from echelon.trainer.resolved import ResolvedRun

Around = Callable[[Path], AbstractContextManager[None]]

_EXIT_FAILED = 1
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
    """How a run ended.

    Attributes:
        status: `completed`, `stopped` or `failed`.
        summary: the numbers of `summary.json`.
        signum: the signal that stopped it; 0 where that came to another machine, or none did.
        words: what the report that was written since the command was given says in closing; empty where none was.
    """

    status: str
    folder: Path
    summary: Mapping[str, Any]
    signum: int = 0
    words: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """A command's exit code: 0 when completed, 1 when failed, 128 + signal when stopped (130 for Ctrl-C)."""
        if self.status == "stopped":
            return stopped_exit_code(self.signum)
        return 0 if self.status == "completed" else _EXIT_FAILED


class RunFailed(Exception):
    """A run could not go on. Says in one line why, and where the log is.

    Attributes:
        outcome: how it ended; its folder has the record and a report.
    """

    def __init__(self, outcome: Outcome) -> None:
        """Take how the run ended."""
        super().__init__(outcome)
        self.outcome = outcome

    def __str__(self) -> str:
        reason = " ".join(str(self.outcome.summary.get("message") or "the run failed").split())
        return f"{reason.rstrip('.')}; log: {failed_log(self.outcome.folder)}"


def failed_log(folder: Path) -> Path:
    """Return the log of the process that a run failed with, else the folder of its logs."""
    logs = folder / "logs"
    died = next(newest(folder, WorkerDied), None)
    if died is None:
        return logs
    file = logs / f"{died.role or f'rank{died.rank}'}.log"
    return file if file.exists() else logs


def start(
    config: RunConfig, user_objects: UserObjects | None = None, around: Around = lambda _: nullcontext()
) -> Outcome:
    """Start a new run.

    Args:
        around: entered with the run's folder, for as long as the run takes.

    Raises:
        UserError: it cannot start as described.
    """
    given_t = command_given_t()
    if is_worker():
        return _start_as_worker(config, user_objects, around)
    request = launch_request(config)  # refuses names at once, before anything heavy is imported
    _begin_imports(plan_of(request, Path(config.run)))
    check(request, user_objects)  # before there is a folder: what is refused leaves nothing behind
    parcel = _parcel(user_objects)
    with closing(request.place.build()) as place:
        config = folders.claim(config, given_t=given_t)
        path, request = Path(config.run), replace(request, config=config)
        with around(path), _lock(path, request.nodes):
            return _run_here(resolve(config), plan_of(request, path, parcel), path, place)


def start_again(path: Path, config: RunConfig, from_scratch: bool = False) -> Outcome:
    """Continue the run of a folder, as its description says now.

    Args:
        from_scratch: train from the beginning, whatever was saved; with several machines, on the first one alone.

    Raises:
        UserError: it cannot start as described, or goes on already.
    """
    given_t, request = command_given_t(), launch_request(config)
    if from_scratch:
        if is_worker():
            raise UserError("--from-scratch would start over at each restart by torchrun: leave it to `echelon resume`")
        check(request)
        from echelon.trainer.saving import start_over

        with folders.locked(path, shared=False):
            start_over(path)
    with _lock(path, request.nodes):
        if is_worker():
            folders.prepare(path, config)
            return _as_worker(path)
        plan = plan_of(request, path)
        _begin_imports(plan)
        run = check(request)  # before its description is replaced: what is refused changes nothing
        if _nothing_left(path, config):
            return outcome_of(path, "completed")
        with closing(request.place.build()) as place:
            folders.prepare(path, config, given_t)
            return _run_here(run, plan, path, place)


def _nothing_left(path: Path, config: RunConfig) -> bool:
    """Whether a run has completed as long as its description says now, which is said.

    Raises:
        UserError: it would be shorter than what is done.
    """
    begun, last = next(newest(path, Start), None), next(newest(path, Checkpoint, StartedOver), None)
    if begun is None or not begun.steps_per_epoch or not isinstance(last, Checkpoint):
        return False
    done, per_epoch = last.step, begun.steps_per_epoch
    epochs, most = config.training.epochs, config.training.max_steps
    if epochs * per_epoch < done:
        raise UserError(
            f"--epochs {epochs} is less than what is done: {path} has trained {done / per_epoch:.4g} epochs"
        )
    if 0 < most < done:
        raise UserError(f"--max-steps {most} is less than what is done: {path} has trained {done} steps")
    end = next(newest(path, End, Start), None)
    if not isinstance(end, End) or end.status != "completed" or done < min(epochs * per_epoch, most or math.inf):
        return False
    say(
        f"{path} is complete ({done} steps, epochs: {done / per_epoch:.4g}): nothing to do. To train further: "
        f"echelon resume {path} --epochs {math.ceil(done / per_epoch) + 1}{' --max-steps 0' if most else ''}"
    )
    return True


def check(request: LaunchRequest, user_objects: UserObjects | None = None) -> ResolvedRun:
    """Refuse what this machine, or the combination of the four choices, cannot do, and data that is not there.

    Returns:
        the run as typed objects.

    Raises:
        UserError: names the setting, the reason, and what works.
    """
    config = request.config
    if request.link:
        with naming("--link"):
            check_link(request.link)
    from echelon.trainer.compatibility import check_strategies

    run = resolve(config)
    if user_objects is None or user_objects.task is None:
        run.task.check()
    if user_objects is None or user_objects.source is None:
        run.source.check()
    if run.sync.uses_servers and is_worker():
        raise UserError(f"--sync {config.strategy.sync} starts roles of its own: run `echelon train` without torchrun")
    ranks = _workers(request) * request.nodes.most
    check_strategies(run, int(os.environ["WORLD_SIZE"]) if is_worker() else ranks)
    return run


def plan_of(request: LaunchRequest, path: Path, parcel: Parcel | None = None) -> LaunchPlan:
    """Return what would be started on this machine.

    Raises:
        UserError: the workers do not fit the machine or the description.
    """
    nodes, launch, workers = request.nodes, request.config.launch, _workers(request)
    if nodes.least == nodes.most:
        check_batch(request.config, request.layout.resolve(workers * nodes.most))
    return LaunchPlan(
        entry=RANK,
        args=(str(path), parcel),
        workers=workers,
        threads=thread_count(launch, workers),
        nodes=nodes,
        rendezvous=request.rendezvous,
        max_restarts=launch.max_restarts,
        log_dir=path / "logs",
        preload=(*PRELOAD, *(PRELOAD_ROLES if request.uses_servers else ())),
        trusted_network=launch.trusted_network,
        link=request.link,
    )


def _workers(request: LaunchRequest) -> int:
    """Return the workers of this machine: as given, else as many as the layout asks for."""
    config, layout, machines = request.config, request.layout, request.nodes.most
    workers = worker_count(config.launch, config.training.device)
    if config.launch.workers:
        return workers
    if layout.ranks is not None:
        return max(1, layout.ranks // machines)
    of_replica = max(1, layout.fixed // machines)
    return max(of_replica, workers - workers % of_replica)


def _lock(path: Path, nodes: Nodes) -> AbstractContextManager[None]:
    return nullcontext() if is_worker() else folders.locked(path, shared=nodes.most > 1)


def _start_as_worker(config: RunConfig, user_objects: UserObjects | None, around: Around) -> Outcome:
    from echelon.run.worker import agree_on_folder

    check(launch_request(config), user_objects)
    path = agree_on_folder(config)
    with around(path):
        return _as_worker(path, user_objects)


def _as_worker(path: Path, user_objects: UserObjects | None = None) -> Outcome:
    """Be one rank, started by a launcher of the user's."""
    from echelon.run.worker import train_launched

    with stop_on_signals() as stop:
        status = train_launched(path, stop, user_objects)
        if int(os.environ["RANK"]) == 0:
            with closing(Recorder(path)) as record:
                close_run(path, record)
        return outcome_of(path, status, stop.signum)


def _parcel(user_objects: UserObjects | None) -> Parcel | None:
    from echelon.run.parcel import Parcel

    return None if user_objects is None else Parcel.of(user_objects)


def _run_here(run: ResolvedRun, plan: LaunchPlan, path: Path, place: Place) -> Outcome:
    """Run this machine's processes to the end; a signal stops them after a checkpoint."""
    opened = closing(Recorder(path, patience_s=run.io_patience_s))
    with full_disk_in_words(path), stop_on_signals(raises=True) as stop, opened as record:
        try:
            status, closes = _run(run, plan, place, path, record, stop)
        except Stopped:
            status, closes = "stopped", plan.nodes.most == 1
            if closes:
                _end_before_start(path, record)
        finally:
            stop.raises = False
            record.flush()
            record.patience.insist(LAUNCH_FILE, lambda: folders.mark_ended(path))
        if closes:
            close_run(path, record)
        return outcome_of(path, status, stop.signum)


def close_run(path: Path, record: Recorder) -> None:
    """Record when the command ended, and write the report: what all its processes did is known only now."""
    from echelon.reporting.report import write_report

    record.write(CommandEnd(read_launch(path).seconds_since()))
    record.flush()
    record.patience.insist("report", lambda: write_report(path))


def _end_before_start(path: Path, record: Recorder) -> None:
    """Record the end of a run that was stopped, where its processes did not: they had not begun."""
    end = next(newest(path, End), None)
    if end is None or end.t < (read_launch(path).launched_t or 0.0):
        record.write(End("stopped", "it was stopped before it began"))


def _begin_imports(plan: LaunchPlan) -> None:
    """Start what processes are forked from; they inherit how many files may be open."""
    if remark := allow_open_files():
        say(remark)
    start_import_server(plan.preload)


def _run(
    run: ResolvedRun, plan: LaunchPlan, place: Place, path: Path, record: Recorder, stop: StopFlag
) -> tuple[str, bool]:
    """Run this machine's processes to the end of the run.

    Returns:
        `completed`, `stopped` or `failed`; and whether this machine is the one that records how the run ended.

    Raises:
        UserError: a process refused its input, or the machines do not meet.
    """
    log_dir = run.config.launch.log_dir
    prepare_logs(plan.log_dir, Path(log_dir) / path.absolute().name if log_dir else None)
    while True:
        try:
            return _run_once(run, plan, place, path, record, stop)
        except FirstMachineGone:
            if stop:
                return "stopped", False
            stop.raises = True  # while the machines meet
            plan = replace(plan, meets_again=True)


def _run_once(
    run: ResolvedRun, plan: LaunchPlan, place: Place, path: Path, record: Recorder, stop: StopFlag
) -> tuple[str, bool]:
    """Meet the other machines and run this one's processes; returns what `_run` does.

    Raises:
        UserError: a process refused its input, or the machines do not meet.
        FirstMachineGone: the run's scheduler is gone with its machine.
    """
    with (
        this_machine(run, plan, path, record) as machine,
        watched(machine, place, run, path, record) as (job, watch),
    ):
        try:
            stop.raises = False  # from now on the ranks have something to save
            stopped = supervise(job, place, watch, stop, machine.rounds)
        except Refused:
            reason = folders.last_message(path, Refusal)
            _end(path, record, machine, "refused", reason)
            if machine.number == 0:
                close_run(path, record)
            raise UserError(reason) from None
        except JobFailed as failure:
            _end(path, record, machine, "failed", str(failure) or folders.last_message(path, WorkerDied))
            return "failed", machine.number == 0
        if stopped and machine.number == 0:
            _end_before_start(path, record)
        status = machine.scheduler.status() if machine.scheduler else "stopped" if stopped else "completed"
        return "stopped" if stopped and status != "completed" else status, machine.number == 0


def _end(path: Path, record: Recorder, machine: Machine, status: str, reason: str) -> None:
    """Record how the run ended; where another machine fails, that it left."""
    record.patience.give_up()  # the run is over: no disk is waited for
    if machine.number == 0:
        record.write(End(status, reason))
    else:
        record.write(MachineLeft(f"machine {machine.number} left the run: {reason}", machine.number))


def outcome_of(path: Path, status: str, signum: int = 0) -> Outcome:
    """Return how the run of a folder ended, with the numbers of its summary."""
    summary = path / "summary.json"
    if not summary.exists():
        return Outcome(status, path, {}, signum)
    numbers = json.loads(summary.read_text())
    is_new = summary.stat().st_mtime >= (read_launch(path).launched_t or math.inf)
    return Outcome(status, path, numbers, signum, numbers.get("words", ()) if is_new else ())
