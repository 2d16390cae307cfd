"""A run of one worker in the process that asks for it: breakpoints stop there, and nothing has to be sent."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from echelon.core.errors import UserError
from echelon.core.files import full_disk_in_words
from echelon.core.stop import StopFlag, stop_on_signals
from echelon.data.images import random_state_kept
from echelon.launch.logs import kept_short, prepare_logs
from echelon.launch.plan import LaunchPlan, is_worker
from echelon.models.trial import own_copy
from echelon.observe.environment import command_given_t
from echelon.observe.notes import RankNotes
from echelon.records.events import RankFailed, RunDiverged
from echelon.records.file import Recorder
from echelon.records.going import LAUNCH_FILE
from echelon.records.kinds import End
from echelon.run.closing import close_run
from echelon.run.ending import failed_by
from echelon.run.machine import say
from echelon.run.micro_batches import Halving
from echelon.run.opening import Opening
from echelon.run.outcome import Outcome, RunFailed, outcome_of
from echelon.run.own_imports import import_metrics
from echelon.run.resolve import LaunchRequest
from echelon.run.start import (
    check,
    folder_word,
    foretold,
    plan_of,
    settled,
    with_open_batch,
    write_own_file,
)
from echelon.run.worker import train_rank
from echelon.storage.url import is_url
from echelon.trainer import folder as folders
from echelon.trainer.assemble import UserObjects
from echelon.trainer.loss_guard import Diverged
from echelon.trainer.process import is_out_of_memory, one_line, place_of, record_last
from echelon.trainer.resolved import ResolvedRun


def runs_in_process(request: LaunchRequest) -> bool:
    """Whether a run is one worker of this machine alone, with nothing beside it, that no launcher started."""
    launch = request.config.launch
    alone = launch.workers == 1 and request.nodes.most == 1 and request.link is None
    copied = bool(request.config.checkpoint.mirror) or is_url(request.config.run)  # in the time of training
    told = bool(request.config.tracking.notify)  # by the command, whatever becomes of who trains
    return (
        alone and not copied and not told and request.place.runs_here and not request.uses_servers and not is_worker()
    )


def start_in_process(request: LaunchRequest, user_objects: UserObjects | None) -> Outcome:
    """Start a new run of one worker in this process, and train it to its end.

    The caller's model stays as it is; random state, signal handlers, logging and torch's settings are put back.

    Raises:
        UserError: it cannot start as described.
        RunFailed: the run could not go on; what the caller's own code raised is its cause.
    """
    given_t, request = command_given_t(), with_open_batch(request, user_objects)
    import_metrics()
    config, plan = request.config, plan_of(request, Path(request.config.run))
    told = foretold(config, user_objects)
    with folders.reserved(config, folder_word(config, told)) as named, Opening(named, plan, told) as opening:
        run = check(request, user_objects)
        config = replace(settled(run, plan, user_objects), run=named.run)
        objects = user_objects or UserObjects()
        if objects.model is not None:
            # weights from a file would be written over the caller's
            still = frozenset() if config.model.weights else run.tuning.never_trained(objects.model)
            objects = replace(objects, model=own_copy(objects.model, still))
        with folders.claimed(config, given_t) as config:
            opening.runs_in(Path(config.run))
            opening.leaves()
            say("workers=1 trains in this process, with no restarts; max_restarts=N gives it a process of its own")
            return _train(run, plan_of(replace(request, config=config), Path(config.run)), objects)


def _train(run: ResolvedRun, plan: LaunchPlan, objects: UserObjects) -> Outcome:
    notes = RankNotes()
    try:
        return _train_to_its_end(run, plan, objects, notes)
    except UserError as error:
        if not notes.finished:
            raise
        raise RunFailed(failed_by(plan.log_dir.parent, error)) from error


def _train_to_its_end(run: ResolvedRun, plan: LaunchPlan, objects: UserObjects, notes: RankNotes) -> Outcome:
    log_dir, path = run.config.launch.log_dir, plan.log_dir.parent
    opened = closing(Recorder(path, patience_s=run.io_patience_s))
    with folders.locked(path, shared=False), full_disk_in_words(path), stop_on_signals() as stop, opened as record:
        prepare_logs(plan.log_dir, Path(log_dir) / path.absolute().name if log_dir else None)
        try:
            with kept_short(plan.log_dir, run.log_limit), _process_kept(plan.threads):
                status = _attempts(run, path, stop, objects, record, notes)
        except UserError as error:
            if notes.finished:
                record.patience.give_up()  # the run is over: no disk is waited for
                record.write(End("failed", str(error)))
                close_run(path, record, stop)
            else:
                record.write(End("refused", str(error)))
            raise
        except Diverged as error:
            record_last(path, RunDiverged(str(error), 0))
            record.write(End("failed", str(error)))
            close_run(path, record, stop)
            raise RunFailed(outcome_of(path, "failed")) from error
        except Exception as error:
            record_last(path, RankFailed(one_line(error), 0, os.getpid(), None, place_of(error)))
            record.write(End("failed", one_line(error)))
            close_run(path, record, stop)
            raise RunFailed(outcome_of(path, "failed")) from error
        finally:
            record.patience.insist(LAUNCH_FILE, lambda: folders.mark_ended(path))
        close_run(path, record, stop)
        write_own_file(path, run, status, objects)
        return outcome_of(path, status, stop.signum)


def _attempts(
    run: ResolvedRun, path: Path, stop: StopFlag, objects: UserObjects, record: Recorder, notes: RankNotes
) -> str:
    """Train, where that is asked for again with smaller micro-batches when memory is short; returns how it ended."""
    halving = Halving.of(run, 1, path, record)
    while True:
        model = own_copy(objects.model) if halving and objects.model is not None else objects.model
        try:
            return train_rank(path, stop, replace(objects, model=model), notes)
        except Exception as error:
            if halving is None or not is_out_of_memory(error):
                if not isinstance(error, UserError | Diverged):
                    logging.exception("this rank failed")
                raise
            remedy = halving.ease("rank0")
            if not remedy.eased:
                error.add_note(remedy.hopeless)
                raise
        del model
        gc.collect()  # the error's traceback held on to what was computed
        torch.cuda.empty_cache()


@contextmanager
def _process_kept(threads: int) -> Iterator[None]:
    """Compute on so many threads inside the block, and give the process back as it was before."""
    root, before = logging.getLogger(), torch.get_num_threads()
    handlers, level, show = root.handlers, root.level, warnings.showwarning
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    root.handlers = []  # whoever logs anew closes the handlers of before, which are the caller's
    torch.set_num_threads(threads)
    try:
        with random_state_kept():
            yield
    finally:
        logging.captureWarnings(False)
        warnings.showwarning = show
        for handler in root.handlers:
            handler.close()
        root.handlers = handlers
        root.setLevel(level)
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, benchmark
        torch.use_deterministic_algorithms(deterministic)
