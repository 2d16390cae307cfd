"""Starting a run on this machine: its plan, what is refused, its processes, and how it ended."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.config import Resolved, RunConfig
from echelon.config.validate import Nodes, check_batch
from echelon.coordinator.config import CONTINUES
from echelon.core.errors import LEFT, JobFailed, UserError, naming
from echelon.core.files import allow_open_files, full_disk_in_words
from echelon.core.model_names import check_model_name, library_of
from echelon.core.stop import StopFlag, Stopped, stop_if_asked, stop_on_signals
from echelon.core.system import COMPILER
from echelon.launch.fork_server import is_running, start_import_server
from echelon.launch.link import check_link
from echelon.launch.logs import prepare_logs
from echelon.launch.places.base import STOP_S, Place
from echelon.launch.places.cluster import PlaceFiles
from echelon.launch.plan import LaunchPlan, is_worker, thread_count, worker_count
from echelon.launch.supervisor import FirstMachineGone, Refused, StopCut, supervise
from echelon.observe.callbacks import check_callbacks, check_methods
from echelon.observe.environment import command_given_t, is_own_command
from echelon.observe.loggers.base import own_loggers
from echelon.optim.names import check_optimizer_name, is_of_timm
from echelon.records.events import CallbackError, CannotGoOn, MachineLeft, Refusal, RunDiverged, WorkerDied
from echelon.records.file import Recorder, newest
from echelon.records.going import LAUNCH_FILE, read_launch
from echelon.records.kinds import CommandRefused, End, Evaluation, Start
from echelon.run.closing import close_run
from echelon.run.data_names import check_data_name, modules_of
from echelon.run.deaths import Trained, watched
from echelon.run.defaults import are_told_late, with_task_defaults
from echelon.run.elsewhere import Around, followed, left_place, prepared, submitted, submitted_again
from echelon.run.ending import check_checkpoints, failed_by, nothing_left, why_cut
from echelon.run.foretold import Foretold, foretell, told_by_record, trained_scalars, trains_all
from echelon.run.home import at_home, home_of, mend
from echelon.run.job import RANK
from echelon.run.machine import Machine, machine_words, say, this_machine
from echelon.run.micro_batches import check_micro_batches, is_batch_open, is_open
from echelon.run.needs import check_objects
from echelon.run.notify import Notifier
from echelon.run.opening import Opening, describe_untold
from echelon.run.outcome import SUBMITTED, Outcome, outcome_of
from echelon.run.rate_search import Search, as_search, check_no_search
from echelon.run.rescan import take_new_samples
from echelon.run.resolve import LaunchRequest, check_names, launch_request, resolve
from echelon.tasks.registry import TaskObjects
from echelon.trainer import folder as folders

if TYPE_CHECKING:
    from echelon.launch.places.cluster import NodeRank, Submission
    from echelon.run.mirror import Mirror
    from echelon.run.parcel import Parcel
    from echelon.trainer.assemble import UserObjects
    from echelon.trainer.resolved import ResolvedRun

SHARED = ("torch", "echelon.trainer.compatibility", "echelon.trainer.start_weights", "echelon.config.yaml_file")
"""What a command imports that checks a run, and its processes as well."""
OF_SPLITS = ("torch.distributed.fsdp", COMPILER, "echelon.parallel.tensor")
"""What models need that are split over ranks, and others never: DTensor, with sympy, and what their hooks import."""
PRELOAD = (
    "echelon.tasks.metrics_import",
    "echelon.run.worker",
    "numpy.ma",  # by np.unique
)
PRELOAD_ROLES = ("zmq", "echelon.run.servers")


def start(
    config: RunConfig, user_objects: UserObjects | None = None, around: Around = lambda _: nullcontext()
) -> Outcome:
    """Start a new run.

    Args:
        around: entered with the run's folder, for as long as the run takes.

    Raises:
        UserError: it cannot start as described.
    """
    given_t, described = command_given_t(), as_search(config)
    config = at_home(described)
    if is_worker():
        return _start_as_worker(config, user_objects, around)
    request = launch_request(config)  # refuses names at once, before anything heavy is imported
    folders.check_weights(config.model.weights)
    _check_rendezvous(request)
    cluster = request.place.cluster()
    request = with_open_batch(request, user_objects)
    config = request.config
    if cluster is not None:
        return followed(submitted(described, cluster, foretell(config).model, user_objects is not None), around)
    plan, told = plan_of(request, Path(config.run)), foretold(config, user_objects)
    with (
        _only_command(request),
        folders.reserved(config, folder_word(config, told)) as named,
        Opening(named, plan, told) as opening,
        closing(request.place.build()) as place,
    ):
        _begin_imports(request, opening)
        run = check(request, user_objects)  # before anything is in the folder: what is refused leaves nothing behind
        config = replace(settled(run, plan, user_objects), run=named.run)
        parcel = _parcel(user_objects)
        stop_if_asked()  # from here on there is a folder
        with folders.claimed(config, given_t, leads=_is_first(plan)) as config:
            path, request = Path(config.run), replace(request, config=config)
            opening.runs_in(path)
            with around(path), _lock(path, request.nodes):
                return _run_here(resolve(config), plan_of(request, path, parcel), path, place, opening, user_objects)


def prepare_elsewhere(config: RunConfig) -> Submission:
    """Make the folder of a new run for its place, which takes whole runs, and is to get it later, with others.

    Raises:
        UserError: it cannot start as described, or its place takes no whole runs.
    """
    check_names(config)
    check_data_name(config.data.source)
    check_model_name(config.model.name)
    check_optimizer_name(config.optimizer.name)
    described = as_search(config)
    request = launch_request(at_home(described))
    folders.check_weights(config.model.weights)
    cluster = request.place.cluster()
    if cluster is None:
        raise UserError(f"--on {config.launch.on} takes no whole runs")
    return prepared(described, cluster, foretell(with_open_batch(request).config).model)


def check_described(resolved: Resolved) -> None:
    """Refuse what a command that trains would refuse before its processes start; leaves nothing behind.

    Args:
        resolved: a description whose names are known to exist.

    Raises:
        UserError: it cannot start as described.
    """
    check(launch_request(with_task_defaults(resolved).config))


def _check_rendezvous(request: LaunchRequest) -> None:
    """Refuse a host that nobody knows, or to which no way leads, before anything heavy is imported.

    Raises:
        UserError: says which.
    """
    if request.voters and request.node_rank is None:
        from echelon.launch.addresses import own_address, own_number

        if len(request.voters) == 1:
            own_address(request.voters[0], say)
        else:
            own_number(request.voters, request.nodes.most, say)


def said_before(config: RunConfig) -> str:
    """Return what is to be said of a new run before its data is read, which takes seconds; empty: nothing.

    Raises:
        UserError: a name is known by nobody.
    """
    if is_worker() or not are_told_late(config):
        return ""
    request = launch_request(config)
    return "" if request.place.cluster() else describe_untold(config, _workers(request), request.nodes.most)


def start_again(
    path: Path,
    config: RunConfig,
    from_scratch: bool = False,
    user_objects: UserObjects | None = None,
    rescan: bool = False,
    node_rank: NodeRank | None = None,
    detach: bool = False,
) -> Outcome:
    """Continue the run of a folder, as its description says now.

    Args:
        from_scratch: train from the beginning, whatever was saved; with several machines, on the first one alone.
        rescan: take samples that are new in the data from the next epoch on; likewise on the first machine alone.
        node_rank: of this machine, where a place gave it one: its part of the run is run here.
        detach: leave the run to its place once that has taken it; its status is `submitted` then.

    Raises:
        UserError: it cannot start as described, or goes on already.
    """
    check_no_search(path, config)
    if rescan and is_worker():
        raise UserError("--rescan is for `echelon resume` without torchrun, which may start all processes again")
    given_t, request = command_given_t(), launch_request(config, node_rank)
    if from_scratch and is_worker():
        raise UserError("--from-scratch would start over at each restart by torchrun: leave it to `echelon resume`")
    cluster = request.place.cluster()
    if cluster is None and detach:
        raise UserError(f"--detach leaves a run to a place that takes it whole: --on {config.launch.on} does not")
    if cluster is not None and rescan:
        raise UserError("--rescan needs the run here for a moment: give --on local")
    if node_rank is None and not is_worker():
        left_place(path)
    if from_scratch:
        check_objects(path, user_objects.needed if user_objects else ())
        check(request, user_objects)
    if cluster is not None and not is_worker():
        handed = submitted_again(path, config, cluster, user_objects is not None, from_scratch)
        return Outcome(SUBMITTED, path, {}) if detach else followed(handed)
    if from_scratch:
        plan_of(request, path)  # refuses too many workers before the checkpoints are put aside
        from echelon.trainer.saving import start_over

        start_over(path, shared=request.nodes.most > 1)
    return _start_again_here(path, request, user_objects, rescan, given_t)


def _start_again_here(
    path: Path, request: LaunchRequest, user_objects: UserObjects | None, rescan: bool, given_t: float
) -> Outcome:
    config = request.config
    with _only_command(request), _lock(path, request.nodes):
        if is_worker():
            run = resolve(config)
            check_micro_batches(run, int(os.environ["WORLD_SIZE"]))
            before = folders.prepare(path, config)
            try:
                return _as_worker(path, run, user_objects)
            except UserError:
                folders.put_back(path, before)
                raise
        if nothing_left(path, config):
            return outcome_of(path, "completed")
        check_objects(path, user_objects.needed if user_objects else ())
        if config.checkpoint.mirror:
            mend(path, config.checkpoint.mirror, say)
        if request.nodes.most == 1:
            check_checkpoints(path)
        plan, told = plan_of(request, path), told_by_record(path, config)
        with Opening(config, plan, told, resumes=True) as opening, closing(request.place.build()) as place:
            _begin_imports(request, opening)
            run = check(request, user_objects, path)  # before its description is replaced: refused, it stays as it is
            parcel = _parcel(user_objects)
            if rescan:
                take_new_samples(path, run, user_objects is not None and user_objects.source is not None)
            config = settled(run, plan, user_objects)
            before = folders.prepare(path, config, given_t, _is_first(plan))  # ranks read it
            opening.runs_in(path)
            plan = plan_of(request, path, parcel)
            return _run_here(resolve(config), plan, path, place, opening, user_objects, before)


def check(
    request: LaunchRequest, user_objects: UserObjects | None = None, goes_on_in: Path | None = None
) -> ResolvedRun:
    """Refuse what this machine, or the combination of the four choices, cannot do, and data that is not there.

    Args:
        goes_on_in: folder of a run that is resumed: where it has a checkpoint, it needs no weights to start from.

    Returns:
        the run as typed objects.

    Raises:
        UserError: names the setting, the reason, and what works.
    """
    config = request.config
    if request.link:
        with naming("--link"):
            check_link(request.link)
    from echelon.data.transforms import NO_TRANSFORMS
    from echelon.trainer.compatibility import check_strategies
    from echelon.trainer.folder import has_checkpoint
    from echelon.trainer.layouts import check_own_chain
    from echelon.trainer.start_weights import bring_weights

    run = resolve(config, user_objects.optimizer if user_objects else None)
    if goes_on_in is None or not has_checkpoint(goes_on_in):
        bring_weights(config.model, run.tuning, run.start_tuning())
    check_callbacks(config.tracking.callbacks)
    for callback in user_objects.callbacks if user_objects else ():
        check_methods(callback)
    own_loggers(user_objects.loggers if user_objects else ())
    run.task.check(user_objects.of_task if user_objects else TaskObjects())
    if user_objects is None or user_objects.source is None:
        run.source.check()
        run.source.bring()
    run.source.check_options(NO_TRANSFORMS if user_objects is None else user_objects.transforms)
    if run.sync.uses_servers and is_worker():
        raise UserError(f"--sync {config.strategy.sync} starts roles of its own: run `echelon train` without torchrun")
    if config.launch.elastic == "on" and is_worker():
        raise UserError("--elastic on is for `echelon train` without torchrun, which ends all processes with one")
    ranks = _workers(request) * request.nodes.most
    check_micro_batches(run, ranks)
    ranks = int(os.environ["WORLD_SIZE"]) if is_worker() else ranks
    check_strategies(run, ranks)
    if user_objects is not None and user_objects.model is not None:
        check_own_chain(run, ranks, user_objects.model)
    return run


def settled(run: ResolvedRun, plan: LaunchPlan, user_objects: UserObjects | None = None) -> RunConfig:
    """Return a run's description with what it leaves open about memory chosen for this machine.

    Raises:
        UserError: that cannot be told.
    """
    if not is_open(run.described):
        return run.described
    from echelon.run.fit_memory import chosen

    return chosen(run, plan.workers, user_objects)


def with_open_batch(request: LaunchRequest, user_objects: UserObjects | None = None) -> LaunchRequest:
    """Return a request with the batch chosen for this machine, where its description leaves that open.

    Raises:
        UserError: that cannot be told, or nothing fits.
    """
    if not is_batch_open(request.config):
        return request
    from echelon.run.fit_memory import with_batch

    return replace(request, config=with_batch(request, _workers(request), user_objects))


def foretold(config: RunConfig, user_objects: UserObjects | None) -> Foretold:
    """Return what is known at once of a run's model: of objects from Python what they are called, and their size."""
    if not user_objects:
        return foretell(config)
    parameters = trained_scalars(user_objects.model) if trains_all(config.model) else None
    return Foretold(config.model.name, parameters, objects=user_objects.needed)


def folder_word(config: RunConfig, told: Foretold) -> str:
    """Return what the run's folder is called after the model."""
    return f"{told.model}-lr-find" if config.optimizer.lr_find else told.model


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
        voters=request.voters,
        max_restarts=launch.max_restarts,
        log_dir=path / "logs",
        trusted_network=launch.trusted_network,
        link=request.link,
        node_rank=request.node_rank,
    )


def elastic_plan(plan: LaunchPlan, run: ResolvedRun) -> LaunchPlan:
    """Return what would be started, with what the others do when a worker is killed."""
    from echelon.trainer.compatibility import survivors_go_on, survivors_save

    ranks = plan.workers * plan.nodes.most
    return replace(plan, elastic=survivors_go_on(run, ranks), rescues=survivors_save(run, ranks))


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


def _only_command(request: LaunchRequest) -> AbstractContextManager[None]:
    """Be the only command on this machine that takes part in a run of several; what a place starts, it sees to.

    Raises:
        UserError: another one is; nothing of its run was touched.
    """
    if not request.voters or request.nodes.most == 1 or request.node_rank is not None or is_worker():
        return nullcontext()
    from echelon.launch.addresses import only_command

    return only_command(request.voters[0])


def _lock(path: Path, nodes: Nodes) -> AbstractContextManager[None]:
    return nullcontext() if is_worker() else folders.locked(path, shared=nodes.most > 1)


def _start_as_worker(config: RunConfig, user_objects: UserObjects | None, around: Around) -> Outcome:
    from echelon.run.worker import agree_on_folder

    run = check(launch_request(config), user_objects)
    path = agree_on_folder(config)
    with around(path):
        return _as_worker(path, run, user_objects)


def _as_worker(path: Path, run: ResolvedRun, user_objects: UserObjects | None = None) -> Outcome:
    """Be one rank, started by a launcher of the user's."""
    from echelon.run.worker import train_launched

    leads = int(os.environ["RANK"]) == 0
    opened = closing(Recorder(path if leads else None, patience_s=run.io_patience_s))
    with stop_on_signals() as stop, opened as record, _mirrored(run, path, record, stop, leads, STOP_S):
        status = train_launched(path, stop, user_objects)
        if leads and status != "failed":
            close_run(path, record, stop)
            write_own_file(path, run, status, user_objects)
        if leads:
            Notifier(run.described.tracking.notify, path).end(status, _how_it_ended(path))
    return outcome_of(path, status, stop.signum)


def _mirrored(
    run: ResolvedRun, path: Path, record: Recorder, stop: StopFlag, leads: bool, stop_s: float
) -> AbstractContextManager[Mirror | None]:
    """Keep the copy of the run that its description asks for, where this process leads."""
    asked = run.described.checkpoint
    if not asked.mirror or not leads:
        return nullcontext()
    from echelon.run.mirror import MirrorTerms, mirrored

    is_home = asked.mirror in (PlaceFiles(path).home, home_of(replace(run.described, run=str(path))))
    terms = MirrorTerms(asked.mirror, asked.codec, run.io_patience_s, is_home, stop_s)
    return mirrored(path, terms, record, stop)


def _is_first(plan: LaunchPlan) -> bool:
    """Whether this is the machine that records how the run ends; of several that may, nobody knows before they meet."""
    if plan.nodes.most == 1 or plan.rendezvous is None:
        return True
    if len(plan.voters) > 1:
        return False
    from echelon.launch.addresses import is_own, own_address

    if plan.node_rank is not None:
        return plan.node_rank.number == 0
    return is_own(plan.rendezvous.host, own_address(plan.rendezvous))


def _parcel(user_objects: UserObjects | None) -> Parcel | None:
    if user_objects is None:
        return None
    from echelon.run.parcel import Parcel

    return Parcel.of(user_objects)


def _run_here(
    run: ResolvedRun,
    plan: LaunchPlan,
    path: Path,
    place: Place,
    opening: Opening,
    user_objects: UserObjects | None,
    before: str = "",
) -> Outcome:
    """Run this machine's processes to the end; a signal stops them after a checkpoint.

    Args:
        before: the description that a resumed run had, which it has again where this one is refused.

    Raises:
        UserError: it was refused. What ends it once this command has trained, such as a disk that stays full, is a
            failure, of which the outcome tells.
    """
    trained = Trained()
    try:
        return _run_to_its_end(run, elastic_plan(plan, run), path, place, opening, user_objects, before, trained)
    except UserError as error:
        if not trained:
            raise
        failed = failed_by(path, error)
        say(failed.failure)
        Notifier(run.described.tracking.notify, path).end("failed", failed.failure)
        return failed


def _run_to_its_end(
    run: ResolvedRun,
    plan: LaunchPlan,
    path: Path,
    place: Place,
    opening: Opening,
    user_objects: UserObjects | None,
    before: str,
    trained: Trained,
) -> Outcome:
    opened = closing(Recorder(path, patience_s=run.io_patience_s))
    with full_disk_in_words(path), stop_on_signals(raises=True) as stop, opened as record:
        leads = bool(run.described.checkpoint.mirror) and _is_first(plan)
        with _mirrored(run, path, record, stop, leads, place.stop_s) as mirror:
            notifier = Notifier(run.described.tracking.notify, path)
            try:
                ended = _run(_Here(run, place, path, record, stop, opening, mirror, trained), plan)
            except Stopped:
                ended = _Ended("stopped", plan.nodes.most == 1, "It was stopped while the machines met.")
                if ended.closes:
                    _end_before_start(path, record)
            except UserError as error:
                folders.put_back(path, before)
                if plan.node_rank is None and not trained:  # else the node command tells, or who called this
                    notifier.end("failed", str(error))
                raise
            finally:
                stop.raises = False
                record.flush()
                if _is_first(plan) or len(plan.voters) > 1 or folders.is_own_launch(path):  # else the run goes on
                    record.patience.insist(LAUNCH_FILE, lambda: folders.mark_ended(path))
            if not ended.closes:  # what its folder tells, if anything, is of the whole run
                return replace(outcome_of(path, ended.status, stop.signum), words=[ended.words])
            close_run(path, record, stop, place.stop_s)
            write_own_file(path, run, ended.status, user_objects)
            notifier.end(ended.status, _how_it_ended(path))
        return outcome_of(path, ended.status, stop.signum)


def _how_it_ended(path: Path) -> str:
    """Return why a run ended, and its newest metrics, in one line."""
    end, last = next(newest(path, End), None), next(newest(path, Evaluation), None)
    reasons = [end.message] if end is not None and end.message else []
    measured, begun = last.metrics.items() if last is not None else (), next(newest(path, Start), None)
    title = begun.task.title_of if begun else str
    return ", ".join([*reasons, *(f"{title(name)} {value:.4g}" for name, value in measured if value is not None)])


def write_own_file(path: Path, run: ResolvedRun, status: str, user_objects: UserObjects | None) -> None:
    """Leave the model of a run that is complete in the format of its own library, too, where that has one."""
    of_user = ":" in run.config.model.name or (user_objects is not None and user_objects.model is not None)
    if status == "completed" and of_user and not run.config.optimizer.lr_find:
        from echelon.run.trained import write_keras_file

        write_keras_file(path, run.config, user_objects)


def _end_before_start(path: Path, record: Recorder) -> None:
    """Record the end of a run that was stopped, where its processes did not: they had not begun."""
    end = next(newest(path, End), None)
    if end is None or end.t < (read_launch(path).launched_t or 0.0):
        record.write(End("stopped", "it was stopped before it began"))


def _end_of_lost(path: Path, record: Recorder) -> None:
    """Record the end of a run where the machine that led was lost after the last step, before it did."""
    last = next(newest(path, End, Start), None)
    if isinstance(last, Start):
        record.write(
            End("completed", "the machine that led was lost after the last step; its last checkpoint is there")
        )


def begin_imports(config: RunConfig) -> None:
    """Import what a run needs whose data is read before the rest is known, as `start` does of others.

    Raises:
        UserError: a name is known by nobody.
    """
    _begin_imports(launch_request(config))


def _begin_imports(request: LaunchRequest, opening: Opening | None = None) -> None:
    """Start what processes are forked from; they inherit how many files may be open."""
    if is_running():  # since the data was to be read
        return
    if remark := allow_open_files():
        say(remark)
    shared, alone = _shared(request), opening.rests if opening else nullcontext
    start_import_server((*shared, *_preload(request)), shared if is_own_command() else (), alone)


def _shared(request: LaunchRequest) -> tuple[str, ...]:
    """Return the modules that a run's processes need, and whoever checks it."""
    config = request.config
    compiler = (COMPILER,) if config.model.compile or config.training.recompute != "none" else ()
    return (*SHARED, request.modules.strategy, *compiler, *(OF_SPLITS if request.layout.splits else ()))


def _preload(request: LaunchRequest) -> tuple[str, ...]:
    """Return the modules that a run's processes need beside these."""
    config = request.config
    servers = PRELOAD_ROLES if request.uses_servers else ()
    by_timm = is_of_timm(config.optimizer.name) or config.data.mixup or config.data.cutmix
    libraries = filter(None, (library_of(config.model.name), "timm" if by_timm else ""))
    modules = request.modules
    return (*PRELOAD, modules.path, *modules_of(config.data.source), *libraries, *modules.tuning, *servers)


@dataclass(frozen=True)
class _Here:
    """A run on this machine: its parts, where it runs, who is told and who may stop it."""

    run: ResolvedRun
    place: Place
    path: Path
    record: Recorder
    stop: StopFlag
    opening: Opening
    mirror: Mirror | None
    trained: Trained


@dataclass(frozen=True)
class _Ended:
    """How the run of this machine ended.

    Attributes:
        status: `completed`, `stopped`, `failed`, or `left`.
        closes: whether this machine is the one that records how the run ended.
        words: where it is not: what ran here, and where the record is.
        epoch: in which its launch began (`Machine.epoch`).
    """

    status: str
    closes: bool
    words: str = ""
    epoch: int = 0


def _run(here: _Here, plan: LaunchPlan) -> _Ended:
    """Run this machine's processes to the end of the run.

    Raises:
        UserError: a process refused its input, or the machines do not meet.
    """
    log_dir = here.run.config.launch.log_dir
    prepare_logs(plan.log_dir, Path(log_dir) / here.path.absolute().name if log_dir else None)
    while True:
        try:
            ended = _run_once(here, plan)
            if ended.status != CONTINUES:
                return ended
            plan = replace(plan, after=ended.epoch, meets_again=False)
            here.stop.raises = plan.nodes.most > 1  # while the machines meet
            if here.stop:
                _end_before_start(here.path, here.record)
                return replace(ended, status="stopped")
        except FirstMachineGone:
            if here.stop:
                return _Ended("stopped", False, "It was stopped while it waited for the first machine's return.")
            here.stop.raises = True  # while the machines meet
            plan = replace(plan, meets_again=True)


def _run_once(here: _Here, plan: LaunchPlan) -> _Ended:
    """Meet the other machines and run this one's processes.

    Raises:
        UserError: a process refused its input, or the machines do not meet.
        FirstMachineGone: the run's scheduler is gone with its machine.
    """
    run, path, record, stop, mirror = here.run, here.path, here.record, here.stop, here.mirror
    with (
        this_machine(run, plan, path, record) as machine,
        watched(machine, here.place, run, here.opening, path, record, here.trained) as (job, watch),
    ):
        search = Search(path, stop) if run.config.optimizer.lr_find else None
        if search is not None:
            watch = watch.looking(search.look)
        if mirror is not None:
            watch = watch.looking(mirror.check)

        def ended(status: str) -> _Ended:
            """Return how it ended, as this machine tells it."""
            return _Ended(status, machine.leads, machine_words(machine, plan, path), machine.epoch)

        try:
            stop.raises = False  # from now on the ranks have something to save
            stopped = supervise(job, here.place, watch, stop, machine.rounds)
        except Refused:
            last = next(newest(path, Refusal, CannotGoOn, CallbackError, RunDiverged), None)
            if not isinstance(last, CallbackError | RunDiverged):
                raise _refusal(here, machine) from None
            say(last.message)
            _end(path, record, machine, "failed", last.message)
            return ended("failed")
        except StopCut:
            reason = why_cut(path, here.place.saving_s, here.place.stop_s)
            say(reason)
            _end(path, record, machine, "stopped", reason)
            return ended("stopped")
        except JobFailed as failure:
            _end(path, record, machine, "failed", str(failure) or folders.last_message(path, WorkerDied))
            return ended("failed")
        except UserError as error:
            if mirror is not None and mirror.failure is error:
                _end(path, record, machine, "failed", str(error))
            raise
        if search is not None and search.over:
            stop.signum = stop.count = 0  # nobody else asked
            shutil.rmtree(path / "checkpoints", ignore_errors=True)  # nothing in it is of use
            return _Ended("completed", True)
        if stopped and machine.leads:
            _end_before_start(path, record)
        elif machine.leads and len(plan.voters) > 1:
            _end_of_lost(path, record)
        status = machine.scheduler.status() if machine.scheduler else "stopped" if stopped else "completed"
        if machine.rounds is not None and machine.rounds.has_left:
            status = LEFT
        if status == LEFT:
            say("the workers of this machine have left the run, which goes on")
            return ended("stopped" if stop else status)  # by a signal, as who asked for its end expects
        return ended("stopped" if stopped and status not in ("completed", CONTINUES) else status)


def _refusal(here: _Here, machine: Machine) -> UserError:
    """Record that a process refused its input, or could not go on once it had trained; returns why."""
    reason = folders.last_message(here.path, Refusal, CannotGoOn)
    if machine.leads and _stays_as_it_was(here.path) and not here.trained:
        here.record.write(CommandRefused(read_launch(here.path).seconds_since(), reason))
        return UserError(reason)
    _end(here.path, here.record, machine, "failed" if here.trained else "refused", reason)
    if machine.leads:
        close_run(here.path, here.record, here.stop, here.place.stop_s)
    return UserError(reason)


def _stays_as_it_was(path: Path) -> bool:
    """Whether a run has begun before, and this command, which is refused, has not begun it again."""
    begun = next(newest(path, Start), None)
    return begun is not None and begun.t < (read_launch(path).launched_t or 0.0)


def _end(path: Path, record: Recorder, machine: Machine, status: str, reason: str) -> None:
    """Record how the run ended; where another machine fails, that it left."""
    record.patience.give_up()  # the run is over: no disk is waited for
    if machine.leads:
        record.write(End(status, reason))
    else:
        record.write(MachineLeft(f"machine {machine.number} left the run: {reason}", machine.number))
