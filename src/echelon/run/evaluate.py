"""Evaluating a checkpoint of a run, on as many processes as this machine has for it; imports no torch for several."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.checkpoint.files import check_whole
from echelon.config import RunConfig, StrategyConfig
from echelon.core.files import scratch_folder
from echelon.launch.culprit import Living
from echelon.launch.fork_server import start_import_server
from echelon.launch.plan import check_processes, is_worker, usable_cores, visible_gpus
from echelon.observe.screen import Screen
from echelon.run.job import EVALUATOR
from echelon.run.own_imports import import_metrics
from echelon.run.worker_job import WorkerFiles, WorkerJob
from echelon.trainer.folder import CHECKPOINTS_FOLDER

if TYPE_CHECKING:
    from echelon.trainer.assemble import UserObjects

_PRELOAD = ("torch", "echelon.tasks.metrics_import", "echelon.run.evaluator")
_USUAL = 2  # processes of a run that does not say, without GPUs


def rescore(
    folder: Path, config: RunConfig, checkpoint: str = "best", workers: int = 0, objects: UserObjects | None = None
) -> Mapping[str, float | None]:
    """Evaluate a checkpoint of a run on its test data, or where there is none apart, on its evaluation data.

    Other data than the run's is evaluated whole where it has no parts.

    Returns the metrics, the same on any number of processes.

    Args:
        checkpoint: `best`, `newest`, or the number of its step.
        workers: processes; 0: those of the run, as far as this machine has GPUs or cores for them.
        objects: what the caller gave in place of names.

    Raises:
        UserError: no such checkpoint that is whole, the data is gone, or the model does not fit it.
        JobFailed: a process died.
    """
    check_whole(folder / CHECKPOINTS_FOLDER, checkpoint)
    check_processes(workers)
    gpus = 0 if config.training.device == "cpu" else visible_gpus()
    workers = workers or min(config.launch.workers or gpus or _USUAL, gpus or usable_cores())
    if config.training.device == "cuda" and gpus < workers:  # a run's machine had them
        config = replace(config, training=replace(config.training, device="auto"))
    config = replace(config, strategy=StrategyConfig(), training=replace(config.training, worst_samples=0))
    if workers > 1 and not is_worker():
        return _on_workers(folder, config, checkpoint, workers, objects)
    import_metrics()
    from echelon.run.evaluator import evaluate_part

    return evaluate_part(folder, config, checkpoint, objects)


def _on_workers(
    folder: Path, config: RunConfig, checkpoint: str, workers: int, objects: UserObjects | None
) -> Mapping[str, float | None]:
    parcel = None
    if objects is not None:
        from echelon.run.parcel import Parcel

        parcel = Parcel.of(objects)
    start_import_server(_PRELOAD)
    with scratch_folder() as results, Screen(to_stderr=True) as screen:
        which = checkpoint if checkpoint in ("best", "newest") else f"step-{checkpoint}"
        files = WorkerFiles(results)
        args = (str(folder), config, checkpoint, parcel)
        job = WorkerJob("the evaluation", EVALUATOR, files, args, workers, config.launch)
        with ExitStack() as start:
            what = f"{which} checkpoint on {config.data.source}"  # in the bar: a refusal is one line
            start.enter_context(screen.bar(f"{what}: starting {workers} workers"))

            def look(_: Sequence[Living]) -> None:
                """Leave the screen to the first process once that shows something."""
                if files.begun.exists():
                    start.close()

            job.run(look)
        metrics: Mapping[str, float | None] = json.loads(files.metrics.read_text())
        return metrics
