"""Predictions by several processes of a machine: each takes whole batches, so that rows do not depend on how many."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.config import RunConfig
from echelon.core.files import scratch_folder
from echelon.inference.predict import BatchShare, MaskOutput, PredictedRow, device_of, predict_samples
from echelon.launch.fork_server import start_import_server
from echelon.launch.plan import check_processes, usable_cores, visible_gpus
from echelon.run.parcel import Parcel
from echelon.run.trained import load_trained
from echelon.run.worker_job import WorkerFiles, WorkerJob, as_worker
from echelon.tasks.base import Prediction, Writing
from echelon.trainer.assemble import UserObjects

StoredRow = tuple[str | int, str, Any, float | None, dict[str, float], torch.Tensor | None, str]
"""A row as plain values: sample, mask's file, what is said, how surely, by name, mask `(H, W)`, error."""
_ENTRY = "echelon.inference.workers:run_predictor"
_PRELOAD = ("torch", "echelon.tasks.metrics_import", "echelon.inference.workers")


@dataclass(frozen=True)
class PredictionJob:
    """What is predicted of what.

    Attributes:
        folder: of the run.
        data: see `samples_of`.
        device: `auto`, `cpu` or `cuda`, of which each process takes its own.
    """

    folder: Path
    config: RunConfig
    checkpoint: str
    data: Any
    writing: Writing
    device: str
    masks: MaskOutput | None = None
    skips_bad: bool = False


def predict_on_workers(job: PredictionJob, objects: UserObjects, workers: int) -> list[PredictedRow]:
    """Return the rows of all samples, in their order.

    Args:
        objects: what the caller gave in place of names.
        workers: processes; 0: one for each GPU, or each core where there is none.

    Raises:
        UserError: as `predict_samples`.
        JobFailed: a process died.
    """
    check_processes(workers)
    workers = workers or (visible_gpus() if job.device != "cpu" else 0) or usable_cores()
    parcel = None if objects == UserObjects() else Parcel.of(objects)
    start_import_server(_PRELOAD)
    with scratch_folder() as results:
        args = (job, workers, parcel)
        WorkerJob("predicting", _ENTRY, WorkerFiles(results), args, workers, job.config.launch).run()
        return [row for rank in range(workers) for row in _read(_rows_of(results, rank))]


def run_predictor(files: WorkerFiles, job: PredictionJob, workers: int, parcel: Parcel | None) -> None:
    """Be one of several processes: write the rows of its batches, or what went wrong."""
    with as_worker(files) as rank:
        objects = parcel.open() if parcel is not None else UserObjects()
        trained = load_trained(job.folder, job.config, objects, job.checkpoint)
        device = device_of(job.device)
        if device.type == "cuda":
            device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(device)  # a model's own code may say "cuda"
        share = BatchShare(rank, workers)
        rows = list(
            predict_samples(trained, job.data, job.writing, device, job.masks, part=share, skips_bad=job.skips_bad)
        )
        torch.save(list(map(_stored, rows)), _rows_of(files.folder, rank))  # read once this process has ended


def _rows_of(folder: Path, rank: int) -> Path:
    return folder / f"rows{rank}"


def _stored(row: PredictedRow) -> StoredRow:
    said = row.prediction
    mask = None if said.mask is None else torch.from_numpy(said.mask)
    return row.sample, row.mask_file, said.value, said.probability, dict(said.probabilities), mask, row.error


def _read(file: Path) -> list[PredictedRow]:
    """Return what `_stored` made of rows; nothing is unpickled but plain values and tensors."""
    rows: list[StoredRow] = torch.load(file, weights_only=True)
    return [
        PredictedRow(sample, Prediction(value, sure, names, None if mask is None else mask.numpy()), mask_file, error)
        for sample, mask_file, value, sure, names, mask, error in rows
    ]
