"""Where the parts meet: one worker process, from a run's folder to its end."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import torch

from echelon.config import load_run_config
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.observe.record import Recorder
from echelon.observe.report import write_report
from echelon.train.assemble import Given, assemble
from echelon.train.folder import read_launch
from echelon.train.loop import TrainingRun, fit
from echelon.train.stop import StopFlag, stop_on_signals
from echelon.train.world import join_world


def run_worker(folder: str, given: Given | None = None) -> str:
    """Train one rank of the run that a folder describes; returns `completed` or `stopped`.

    A user's mistake is written to the record, then ends the process with exit code 2. Any other error is logged with
    its traceback and ends it with exit code 1, so that the group can be restarted.
    """
    path = Path(folder)
    _log_to(path / "logs" / f"rank{os.environ.get('RANK', '0')}.log")
    record = Recorder(path)
    try:
        return _run(path, given or Given())
    except UserError as error:
        record.event("refused", str(error), rank=int(os.environ.get("RANK", "0")))
        sys.exit(USER_ERROR_EXIT_CODE)
    except Exception as error:
        logging.exception("this rank failed")
        record.event("rank_failed", _one_line(error), rank=int(os.environ.get("RANK", "0")), pid=os.getpid())
        os._exit(1)  # a peer is gone: nothing that exit handlers would wait for will come
    finally:
        record.close()


def _run(path: Path, given: Given) -> str:
    config = load_run_config(path / "config.yaml")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with stop_on_signals() as stop, join_world(config) as world:
        record = Recorder(path if world.leads else None)
        run, cursor = assemble(config, path, world, record, given)
        try:
            with run.display:
                status = fit(run, cursor, stop)
            run.saver.finish()
        finally:
            run.train_loader.close()
            run.eval_loader.close()
            run.scalars.close()
        _end(run, path, record, status)
        if stop:
            _leave(stop, record)
        return status


def _leave(stop: StopFlag, record: Recorder) -> None:
    """End at once: the launcher that signalled us no longer listens for a result."""
    record.close()
    sys.stdout.flush()
    logging.shutdown()
    os._exit(0)


def _end(run: TrainingRun, path: Path, record: Recorder, status: str) -> None:
    for bad, reason in run.train_loader.bad_images + run.eval_loader.bad_images:
        record.event("bad_image", f"{bad}: {reason}", path=str(bad))
    if run.world.leads:
        record.write("end", status=status, seconds=time.time() - read_launch(path)["launched_t"])
        write_report(path)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def _log_to(file: Path) -> None:
    """Send this process's log to a file of its rank; warnings too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=file, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
    logging.captureWarnings(True)
