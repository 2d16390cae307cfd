"""Where the parts meet: one worker process, from a run's folder, which ranks of a launcher agree on, to its end."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from echelon.config import RunConfig, load_run_config
from echelon.coordinator.addresses import ROLES_FOLDER, note_status
from echelon.core.errors import (
    LEFT,
    LEFT_EXIT_CODE,
    RESCUED,
    RESCUED_EXIT_CODE,
    STOPPED_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    UserError,
)
from echelon.core.files import full_disk_in_words
from echelon.core.stop import StopFlag, stop_on_signals
from echelon.core.terms import MEMBER_VARIABLE
from echelon.forecast.alternatives import record_alternatives
from echelon.observe.callbacks import CallbackFailed
from echelon.observe.notes import RankNotes, open_notes
from echelon.observe.screen import Screen
from echelon.ps.worker_rank import WorkerRank
from echelon.records.events import BadImageSkipped, CallbackError, CannotGoOn, RankFailed, Refusal, RunDiverged
from echelon.records.file import Recorder
from echelon.records.going import read_launch
from echelon.records.kinds import MAX_TIME, End
from echelon.run.ending import failed_by, why_ended
from echelon.run.machine import say
from echelon.run.parcel import Parcel
from echelon.run.rate_search import as_ended
from echelon.run.resolve import resolve
from echelon.torch_compat import spare_dynamo
from echelon.trainer.assemble import UserObjects, assemble, assemble_worker
from echelon.trainer.batches import EpochOrder
from echelon.trainer.elastic import ElasticLoop
from echelon.trainer.folder import CONFIG_FILE, SECRET_FOLDER, claim
from echelon.trainer.loop import TrainingRun, fit
from echelon.trainer.loss_guard import Diverged
from echelon.trainer.membership import Membership
from echelon.trainer.precision import set_numerics
from echelon.trainer.process import is_lost_wait, keep_freed_memory, leave, log_to, one_line, place_of, record_last
from echelon.trainer.rescue import RescueLoop
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.world import World, join_worker, join_world

_STORE_TIMEOUT = timedelta(seconds=60)


def run_worker(folder: str, parcel: Parcel | None = None) -> None:
    """Train one rank in a process of its own, which ends with exit code 3 when the run was stopped."""
    path, rank, notes = Path(folder), int(os.environ.get("RANK", "0")), open_notes()
    with _recording_errors(path, rank, notes), stop_on_signals() as stop:
        _prepare_process()
        status = train_rank(path, stop, parcel.open() if parcel else None, notes)
    if status == "stopped":
        leave(STOPPED_EXIT_CODE)
    if status == LEFT:
        leave(LEFT_EXIT_CODE)
    if status == RESCUED:
        leave(RESCUED_EXIT_CODE)
    if MEMBER_VARIABLE in os.environ:  # threads of a term that is over may wait for one that is gone
        leave(0)


def run_server_worker(folder: str, process: WorkerRank, parcel: Parcel | None = None) -> None:
    """Be a process of a parameter server's worker, to the end of the run that a folder describes."""
    path, notes = Path(folder), open_notes()
    number = process.number * process.size + process.rank
    with _recording_errors(path, number, notes, process.name):
        log_to(path / "logs" / f"{process.name}.log")
        status = _train_on_servers(path, process, parcel.open() if parcel else UserObjects(), notes)
    if process.machine and process.leads:
        note_status(path / ROLES_FOLDER, status)
    if status == "refused":
        sys.exit(USER_ERROR_EXIT_CODE)
    if status == LEFT:
        leave(LEFT_EXIT_CODE)


@contextmanager
def _recording_errors(path: Path, rank: int, notes: RankNotes, role: str | None = None) -> Iterator[None]:
    """Record what ends the block, and end the process.

    A user's mistake, a disk that stays full, a loss that is not finite, or a callback that raised, ends it with exit
    code 2: no restart would help. Whether the run was refused by that, or has failed, its launcher knows. Any other
    error is logged with its traceback and ends it with exit code 1, so that the rank or its group can be restarted: at
    once, for a peer may be gone, and nothing that exit handlers would wait for will come.
    """
    try:
        yield
    except UserError as error:
        kind = CannotGoOn if notes.finished else Refusal
        record_last(path, kind(str(error), None if role else rank, role))
        leave(USER_ERROR_EXIT_CODE)
    except Diverged as error:
        logging.error("%s", error)
        record_last(path, RunDiverged(str(error), None if role else rank, role))
        leave(USER_ERROR_EXIT_CODE)
    except CallbackFailed as error:
        logging.exception("a callback failed")
        record_last(path, CallbackError(str(error), rank, role, place_of(error.__cause__ or error)))
        leave(USER_ERROR_EXIT_CODE)
    except Exception as error:
        if is_lost_wait(error):
            notes.fail()
        logging.exception("this rank failed")
        record_last(path, RankFailed(one_line(error), rank, os.getpid(), role, place_of(error), notes.finished))
        leave(1)


def _train_on_servers(path: Path, process: WorkerRank, user_objects: UserObjects, notes: RankNotes) -> str:
    resolved = resolve(load_run_config(path / "config.yaml"), user_objects.optimizer)
    _prepare_process()
    with full_disk_in_words(path), join_worker(resolved, process, path / ROLES_FOLDER, notes) as world:
        set_numerics(resolved.config.training)
        run, batches = assemble_worker(resolved, path, world, process, user_objects)
        status = fit(run, batches)
        _close(run, path)
        run.progress.record.close()
    return status


def train_rank(
    path: Path,
    stop: StopFlag,
    user_objects: UserObjects | None = None,
    notes: RankNotes | None = None,
) -> str:
    """Train one rank of the run that a folder describes; returns how it ended for this rank.

    That is `completed`, `stopped` once the flag is set, `left` where the rank was asked to leave the others, or
    `rescued` where it has saved what was trained, for another rank was killed.

    Raises:
        UserError: something in the description cannot be used, or the disk takes nothing for too long.
    """
    log_to(path / "logs" / f"rank{os.environ.get('RANK', '0')}.log")
    objects = user_objects or UserObjects()
    resolved = resolve(load_run_config(path / "config.yaml"), objects.optimizer)
    secret, notes = path / SECRET_FOLDER, notes or RankNotes()
    membership = Membership.from_environment(resolved.timeout_s)
    with full_disk_in_words(path), join_world(resolved, secret, notes, membership) as world:
        set_numerics(resolved.config.training)
        record = Recorder(path if world.leads else None, patience_s=resolved.io_patience_s)
        run, cursor, rebuilder = assemble(resolved, path, world, record, objects, membership)
        try:
            with run.progress.display as display, closing(rebuilder):
                display.watch("checkpoint: writing", run.saver.is_writing)
                batches = EpochOrder(run, cursor, stop)
                if membership is None:
                    status = fit(run, batches)
                elif run.parts.split is not None:
                    status = RescueLoop(path, membership, resolved.timeout_s).fit(run, batches)
                else:
                    stop.waits = membership.waits_for_word
                    status, batches = ElasticLoop(rebuilder, membership, stop).fit(run, batches)
                if status in (LEFT, RESCUED):  # nothing is done together any more
                    _close_loaders(run)
                    run.progress.record.close()
                    return status
                with run.progress.display.bar("end: what is left to write"):
                    _close(run, path)
        except Exception as error:
            error.add_note(f"in step {notes.step}")
            if run.profiler is not None:
                run.profiler.close()
            if world.group is None:  # this process may go on after it
                _close_loaders(run)
                run.progress.broke_off()
                run.progress.record.close()
            raise
        in_time = status == "completed" and batches.reason != MAX_TIME
        measured_bytes = _time_alternatives(run, resolved, world) if in_time else 0
        stagnant = run.saver.stagnation.evaluations
        why = why_ended(batches.reason, run.task.facts(), stagnant, resolved.config, path)
        _end(run, path, End(status, why, reason=batches.reason, stagnant=stagnant), measured_bytes)
        run.progress.record.close()
    return status


def _time_alternatives(run: TrainingRun, resolved: ResolvedRun, world: World) -> int:
    """Record what other ways to communicate would cost, which takes about a second; returns the bytes that it sent."""
    with Screen(visible=world.leads) as screen, screen.bar("end: timing other ways to communicate"):
        return record_alternatives(run, resolved)


def _prepare_process() -> None:
    """Compute on as many threads as this process was started for, and keep memory from step to step."""
    keep_freed_memory()
    spare_dynamo()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def train_launched(path: Path, stop: StopFlag, user_objects: UserObjects | None = None) -> str:
    """Train the rank that a launcher of the user's started; returns what `train_rank` returns, or `failed`."""
    _prepare_process()
    notes = RankNotes()
    try:
        return train_rank(path, stop, user_objects, notes)
    except Diverged as error:
        record_last(path, RunDiverged(str(error), int(os.environ["RANK"])))
        say(str(error))
        return "failed"
    except CallbackFailed as error:  # it would fail again
        place = place_of(error.__cause__ or error)
        record_last(path, CallbackError(str(error), int(os.environ["RANK"]), place=place))
        say(str(error))
        return "failed"
    except UserError as error:
        if not notes.finished:
            raise
        say(failed_by(path, error).failure)
        return "failed"


def _close(run: TrainingRun, path: Path) -> None:
    """Wait for what is being saved, end connections and loaders, and record what this rank saw."""
    if run.profiler is not None:
        run.profiler.close()  # the run was too short for all of its steps
    run.saver.finish()
    run.parts.sync.close()
    _close_loaders(run)
    bad_images = run.train_loader.bad_images + run.eval_loader.bad_images
    if run.step.guard is not None:
        run.step.guard.close()
    record_last(path, *(BadImageSkipped(f"{file}: {reason}", file) for file, reason in bad_images))


def _close_loaders(run: TrainingRun) -> None:
    for loader in (run.train_loader, run.eval_loader, run.test_loader):
        if loader is not None:
            loader.close()


def _end(run: TrainingRun, path: Path, end: End, measured_bytes: int) -> None:
    """Record how the run ended, once no rank writes any more; the command that started the ranks writes the report."""
    sent, others_sent = run.traffic.since_last(run.parts.sync.bytes_sent(), run.other_bytes_sent + measured_bytes)
    others = torch.tensor([sum(sent.values()) + others_sent], device=run.world.device)
    if run.world.group is not None:
        dist.all_reduce(others, group=run.world.group)  # and so no rank is still writing
    if run.world.leads:
        record, seconds = run.progress.record, read_launch(path).seconds_since()
        record.flush()
        record.write(replace(as_ended(path, end), seconds=seconds, other_wire_bytes=int(others)))
        run.progress.ended(end.status)
        record.flush()


def agree_on_folder(config: RunConfig) -> Path:
    """Return the run's folder: rank 0 makes it and tells the others; a restarted group goes on in the same one.

    Raises:
        UserError: rank 0 could not make the folder.
    """
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    key = "echelon/folder"
    store = _launcher_store()
    if int(os.environ["RANK"]) != 0:
        name = store.get(key).decode()
        if not name:
            raise UserError("rank 0 could not make the run's folder")
        return Path(name)
    if restarted and store.check([key]):
        return Path(store.get(key).decode())
    try:
        path = Path(config.run)
        if not (restarted and config.run and (path / CONFIG_FILE).exists()):
            path = Path(claim(config).run)
    except UserError:
        store.set(key, "")
        raise
    store.set(key, str(path))
    return path


def _launcher_store() -> Store:
    """Connect to the store that the launcher keeps.

    Raises:
        UserError: the launcher keeps none.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UserError(
            "RANK and WORLD_SIZE are set but no launcher's store was found: start with torchrun, or unset them"
        )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)
