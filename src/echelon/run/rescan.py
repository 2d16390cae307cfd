"""Taking samples that are new in a run's data: they are trained on from the next epoch on."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.records.events import DataGrew
from echelon.records.file import Recorder
from echelon.run.machine import say

if TYPE_CHECKING:
    from echelon.data.sample_index import SampleIndex
    from echelon.trainer.resolved import ResolvedRun


def take_new_samples(path: Path, run: ResolvedRun, from_python: bool) -> None:
    """Look through a run's data again, and write to its folder which samples are new and from which epoch on.

    Args:
        from_python: the data is the caller's own.

    Raises:
        UserError: samples or classes are gone or there are new classes, or the run cannot take any.
    """
    from echelon.data.weights import UNWEIGHTED

    config = run.config
    if run.sync.uses_servers:
        raise UserError(f"--rescan: --sync {config.strategy.sync} leases the batches of epochs of one size: not for it")
    if config.data.sample_weights != UNWEIGHTED:
        raise UserError("--rescan: --sample-weights are of the samples that the run began with: use none")
    source = None if from_python else run.source.open()
    if source is None or source.sample_index is None or not source.sample_index.can_grow:
        raise UserError(
            "--rescan is for folders of images, sounds or texts with classes, tar shards, tables and parallel text, of "
            f"which new samples can be told from those that the run began with: not for {config.data.source}"
        )
    sample_index = source.sample_index
    if not sample_index.is_kept:
        raise UserError(f"--rescan: {path} does not hold which samples the run began with: it was made before that was")
    if not sample_index.added:
        say(f"no sample of {config.data.source} is new")
        return
    epoch = _next_epoch(path)
    grown = sample_index.grown(epoch)
    of_new = _keep_grown(path, run, grown)
    said = f"{sample_index.added} samples are new, such as {sample_index.example}: trained on from epoch {epoch + 1} on"
    if epoch >= config.training.epochs:
        said += f", which --epochs {config.training.epochs} does not reach"
    said = "; ".join([said, *of_new])
    with closing(Recorder(path, patience_s=run.io_patience_s)) as record:
        record.write(DataGrew(said, epoch, sample_index.added, grown.count))
    say(said)


def _keep_grown(path: Path, run: ResolvedRun, grown: SampleIndex) -> tuple[str, ...]:
    """Write the grown samples to a run's folder; returns what a user has to know of the new ones.

    Raises:
        UserError: the run cannot use new ones, such as rows of a class that it does not have: its folder is as it was.
    """
    from echelon.data.sample_index import RUN_FILE

    as_begun = (path / RUN_FILE).read_text(encoding="utf-8")
    grown.keep(path)
    try:
        source = run.source.open()
        if source.info.tightest is not None:  # the model may give too few frames for what is said in a new sound
            from echelon.models import build_model, leads_to_model
            from echelon.trainer.inputs import model_input

            if leads_to_model(run.config.model.name):  # a model of the user's own is tried as the run starts
                build_model(run.config.model, model_input(source.info, run.task.fitted(source.info)))
        return source.of_new
    except UserError:
        write_atomic(path / RUN_FILE, as_begun)
        raise


def _next_epoch(path: Path) -> int:
    """Return the first epoch of which nothing is trained in any checkpoint that a resume may go on from; from 0."""
    from echelon.checkpoint import CheckpointStore
    from echelon.checkpoint.incomplete import incompletes
    from echelon.trainer.folder import CHECKPOINTS_FOLDER

    folder = path / CHECKPOINTS_FOLDER
    found = CheckpointStore(folder, keep=1).newest(rank=0)
    cursors = [each.entry("cursor") for each in incompletes(folder)]
    cursors += [] if found is None else [found[1]["cursor"]]
    return max((int(cursor["epoch"]) + (cursor["batch"] > 0) for cursor in cursors), default=0)
