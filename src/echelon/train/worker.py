"""Where the parts meet: one worker process, from a run's folder to its end."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from echelon.config import load_run_config
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.core.files import full_disk_in_words, is_full
from echelon.observe.record import Recorder
from echelon.observe.report import write_report
from echelon.train.alternatives import record_alternatives
from echelon.train.assemble import Given, assemble
from echelon.train.folder import read_launch
from echelon.train.loop import TrainingRun, fit
from echelon.train.precision import set_numerics
from echelon.train.stop import stop_on_signals
from echelon.train.world import join_world

_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory")
_LESS_MEMORY = (
    "divide the model with --parallel fsdp=N, tp=N or pp=N, or use --recompute blocks or a smaller --batch-size; "
    "--dry-run predicts what each rank needs"
)


def run_worker(folder: str, given: Given | None = None) -> str:
    """Train one rank in a process of the launcher's; returns `completed` or `stopped`.

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
        record.event("rank_failed", _one_line(error), rank=rank, pid=os.getpid())
        _leave(1)
    if status == "stopped":
        _leave(0)  # the launcher that signalled us no longer listens for a result
    record.close()
    return status


def train_rank(path: Path, given: Given | None = None) -> str:
    """Train one rank of the run that a folder describes; returns `completed` or `stopped`.

    Raises:
        UserError: something in the description cannot be used.
    """
    _log_to(path / "logs" / f"rank{os.environ.get('RANK', '0')}.log")
    config = load_run_config(path / "config.yaml")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with full_disk_in_words(path), stop_on_signals() as stop, join_world(config) as world:
        set_numerics(config.training)
        record = Recorder(path if world.leads else None)
        run, cursor = assemble(config, path, world, record, given or Given())
        try:
            with run.display:
                status = fit(run, cursor, stop)
        except Exception as error:
            error.add_note(f"in step {cursor.step + 1}")
            raise
        run.saver.finish()
        run.parts.sync.close()
        run.train_loader.close()
        run.eval_loader.close()
        run.scalars.close()
        if status == "completed":
            run.saver.bytes_sent += record_alternatives(run, config)
        _end(run, path, status)
        record.close()
    return status


def _refuse(record: Recorder, reason: str, rank: int) -> NoReturn:
    """Record why, and end; on a full disk there is no place for it, and the launcher finds that out as well."""
    try:
        record.event("refused", reason, rank=rank)
    except OSError as error:
        if not is_full(error):
            raise
    _leave(USER_ERROR_EXIT_CODE)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)


def _end(run: TrainingRun, path: Path, status: str) -> None:
    """Record what each rank saw, then let rank 0 write the report."""
    own = Recorder(path)
    for file, reason in run.train_loader.bad_images + run.eval_loader.bad_images:
        own.event("bad_image", f"{file}: {reason}", path=file)
    own.close()
    sent, others_sent = run.traffic.since_last(run.parts.sync.bytes_sent(), run.saver.bytes_sent)
    others = torch.tensor([sum(sent.values()) + others_sent], device=run.world.device)
    if run.world.group is not None:
        dist.all_reduce(others, group=run.world.group)  # and so no rank is still writing
    if run.world.leads:
        seconds = time.time() - read_launch(path)["launched_t"]
        run.record.write("end", status=status, seconds=seconds, other_wire_bytes=int(others))
        write_report(path)


def _one_line(error: BaseException) -> str:
    where = ", ".join(getattr(error, "__notes__", []))
    said = " ".join(str(error).split()).partition(" This is typically caused by")[0]  # gloo's guesses help nobody
    text = f"{type(error).__name__}: {said}"[:400]
    if isinstance(error, MemoryError) or any(words in said.lower() for words in _NO_MEMORY):
        short = text.partition(" Error code")[0][:200]
        text = f"out of memory ({short}): {_LESS_MEMORY}"
    return f"{text} ({where})" if where else text


def _log_to(file: Path) -> None:
    """Send this process's log to a file of its rank; warnings too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=file, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
    logging.captureWarnings(True)
