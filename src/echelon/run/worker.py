"""Where the parts meet: one worker process, from a run's folder to its end."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from echelon.config import load_run_config
from echelon.coordinator.addresses import ROLES_FOLDER, note_status
from echelon.core.errors import STOPPED_EXIT_CODE, USER_ERROR_EXIT_CODE, UserError
from echelon.core.files import full_disk_in_words, is_full
from echelon.forecast.alternatives import record_alternatives
from echelon.ps.worker_rank import WorkerRank
from echelon.records.events import BadImageSkipped, RankFailed, Refusal
from echelon.records.file import Recorder
from echelon.records.going import read_launch
from echelon.records.kinds import End
from echelon.reporting.report import write_report
from echelon.run.resolve import resolve
from echelon.trainer.assemble import Given, assemble
from echelon.trainer.batches import EpochOrder
from echelon.trainer.leased import train_leased
from echelon.trainer.loop import TrainingRun, fit
from echelon.trainer.precision import set_numerics
from echelon.trainer.process import leave, log_to, one_line
from echelon.trainer.stop import stop_on_signals
from echelon.trainer.world import join_world


def run_worker(folder: str, given: Given | None = None) -> None:
    """Train one rank in a process of its own, which ends with exit code 3 when the run was stopped.

    A user's mistake is written to the record, and the process ends with exit code 2. Any other error is logged with its
    traceback and the process ends with exit code 1, so that the group can be restarted: at once, for a peer may be
    gone, and nothing that exit handlers would wait for will come.
    """
    path, rank = Path(folder), int(os.environ.get("RANK", "0"))
    record = Recorder(path)
    try:
        status = train_rank(path, given.unshared() if given else None)
    except UserError as error:
        _refuse(record, str(error), rank)
    except Exception as error:
        logging.exception("this rank failed")
        record.write(RankFailed(one_line(error), rank, os.getpid()))
        leave(1)
    record.close()
    if status == "stopped":
        leave(STOPPED_EXIT_CODE)


def run_leased(folder: str, seat: WorkerRank, given: Given | None = None) -> None:
    """Be a worker of a parameter server to the end of the run that a folder describes.

    A user's mistake is written to the record and ends the process with exit code 2; any other error with 1.
    """
    path, name = Path(folder), seat.name
    record = Recorder(path)
    try:
        log_to(path / "logs" / f"{name}.log")
        run = resolve(load_run_config(path / "config.yaml"))
        status = train_leased(run, path, seat, record, given.unshared() if given else Given())
    except UserError as error:
        record.write(Refusal(str(error), role=name))
        leave(USER_ERROR_EXIT_CODE)
    except Exception as error:
        logging.exception("this worker failed")
        rank = seat.number * seat.size + seat.rank
        record.write(RankFailed(one_line(error), rank, os.getpid(), name))
        leave(1)
    record.close()
    if seat.machine and seat.leads:
        note_status(path / ROLES_FOLDER, status)
    if status == "refused":
        sys.exit(USER_ERROR_EXIT_CODE)


def train_rank(path: Path, given: Given | None = None) -> str:
    """Train one rank of the run that a folder describes; returns `completed` or `stopped`.

    Raises:
        UserError: something in the description cannot be used.
    """
    log_to(path / "logs" / f"rank{os.environ.get('RANK', '0')}.log")
    resolved = resolve(load_run_config(path / "config.yaml"))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with full_disk_in_words(path), stop_on_signals() as stop, join_world(resolved) as world:
        set_numerics(resolved.config.training)
        record = Recorder(path if world.leads else None)
        run, cursor = assemble(resolved, path, world, record, given or Given())
        try:
            with run.progress.display:
                status = fit(run, EpochOrder(run, cursor, stop))
        except Exception as error:
            error.add_note(f"in step {cursor.step + 1}")
            raise
        run.saver.finish()
        run.parts.sync.close()
        run.train_loader.close()
        run.eval_loader.close()
        run.progress.scalars.close()
        if status == "completed":
            run.saver.bytes_sent += record_alternatives(run, resolved)
        _end(run, path, status)
        record.close()
    return status


def _refuse(record: Recorder, reason: str, rank: int) -> NoReturn:
    """Record why, and end; on a full disk there is no place for it, and the launcher finds that out as well."""
    try:
        record.write(Refusal(reason, rank))
    except OSError as error:
        if not is_full(error):
            raise
    leave(USER_ERROR_EXIT_CODE)


def _end(run: TrainingRun, path: Path, status: str) -> None:
    """Record what each rank saw, then let rank 0 write the report."""
    own = Recorder(path)
    for file, reason in run.train_loader.bad_images + run.eval_loader.bad_images:
        own.write(BadImageSkipped(f"{file}: {reason}", file))
    own.close()
    sent, others_sent = run.traffic.since_last(run.parts.sync.bytes_sent(), run.saver.bytes_sent)
    others = torch.tensor([sum(sent.values()) + others_sent], device=run.world.device)
    if run.world.group is not None:
        dist.all_reduce(others, group=run.world.group)  # and so no rank is still writing
    if run.world.leads:
        seconds = read_launch(path).seconds_since()
        run.progress.record.write(End(status, seconds=seconds, other_wire_bytes=int(others)))
        write_report(path)
