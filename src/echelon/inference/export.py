"""Writing a run's model for others, and refusing what is not the function that was trained."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import torch

from echelon.config import RunConfig
from echelon.core.adapters import adapted_layer
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, check_source
from echelon.data.loader import EvalLoader
from echelon.inference.check import Agreement, compare
from echelon.inference.exports import format_of
from echelon.inference.exports.base import ExportFormat
from echelon.models import leads_to_model
from echelon.observe.screen import Screen
from echelon.run.needs import EXPORT, check_data_is_here, check_objects
from echelon.run.trained import TrainedModel, load_trained
from echelon.tasks import nest
from echelon.tasks.nest import Nest
from echelon.trainer.assemble import UserObjects
from echelon.trainer.start_weights import best_weights

_EXAMPLES = 4  # samples that a model is traced with

T = TypeVar("T")


@dataclass(frozen=True)
class Exported(os.PathLike[str]):
    """A file, or folder, that a model was written to.

    Attributes:
        agreement: how it did on the run's evaluation data, beside the run's model; None: model or data are not here,
            and the weights were compared bit by bit.
    """

    path: Path
    agreement: Agreement | None

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def check(self) -> str:
        """How it was checked, in a line."""
        if self.agreement is None:
            return "its tensors are the run's bit by bit; it was not evaluated: the run's model or data is not here"
        return str(self.agreement)


def write_export(folder: Path, config: RunConfig, file: Path, objects: UserObjects) -> Exported:
    """Write the best model of a run to a file, evaluate it again from there, and keep it if it is the same function.

    Args:
        objects: what the caller gave in place of names.

    Raises:
        UserError: no whole checkpoint, the data is gone, the format does not suit the model, or what was written is
            another function than what was trained: then no file is left.
    """
    target = format_of(file)
    if file.is_dir() and any(file.iterdir()):
        raise UserError(f"{file} is there already, and is not empty: name another one")
    if target.holds_weights_alone and not _is_here(config, objects):
        return _only_weights(target, folder, file)
    check_objects(folder, objects.needed, EXPORT)
    if objects.source is None:
        check_data_is_here(folder, config.data.source, "run the command there; .safetensors needs no data")
    trained = load_trained(folder, config, objects, with_data=True)
    unfinished = file.with_name(f".{file.stem}-{uuid4().hex}{file.suffix}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        agreement = _written(target, trained, unfinished, file)
        if file.is_dir():
            file.rmdir()
        unfinished.rename(file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        unfinished.unlink(missing_ok=True)
    return Exported(file, agreement)


def _is_here(config: RunConfig, objects: UserObjects) -> bool:
    """Whether names, or what the caller gives, lead to the run's model and data."""
    if objects.model is None and not leads_to_model(config.model.name):
        return False
    try:
        if objects.source is None:
            check_source(config.data.source)
    except UserError:
        return False
    return True


def _only_weights(target: ExportFormat, folder: Path, file: Path) -> Exported:
    """Write weights, and compare what was written with them bit by bit.

    Raises:
        UserError: they were not written as they are, or hold adapters, which the model's code is needed to add in.
    """
    weights = dict(best_weights(folder))
    if any(map(adapted_layer, weights)):
        raise UserError(f"{file}: the run holds adapters, and the model or data to add them in for is not here")
    try:
        target.write_weights(weights, file)
    except UserError:
        file.unlink(missing_ok=True)
        raise
    return Exported(file, None)


def _written(target: ExportFormat, trained: TrainedModel, path: Path, file: Path) -> Agreement:
    """Write a model, read it back and compare both.

    Raises:
        UserError: names the file that the user asked for.
    """
    loader = _evaluation(trained)
    try:
        example = example_of(loader)
        _library_call(lambda: target.write(trained, path, example), "written")
        with Screen(True, to_stderr=True) as screen, screen.bar("checking the export, batch", len(loader)) as bar:
            exported = _library_call(lambda: target.read(trained, path), "read again")
            agreement = compare(
                lambda inputs: nest.call(trained.model, inputs), exported, trained.task, loader, bar.advance
            )
        if agreement.objection:
            layer = target.first_difference(trained, path, agreement.worst)
            first = f"; the first layer that differs is {layer}" if layer else ""
            raise UserError(f"not written, for it is not what was trained: {agreement.objection}{first}")
    except UserError as error:
        text = str(error).removeprefix(f"{path}: ")
        raise UserError(f"{file}: {text}") from error
    finally:
        loader.close()
    return agreement


def _library_call(work: Callable[[], T], done: str) -> T:
    """Do what a library does with a model.

    Raises:
        UserError: the first line of what it raised.
    """
    try:
        return work()
    except UserError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"it cannot be {done} ({type(error).__name__}: {reason})") from error


def _evaluation(trained: TrainedModel) -> EvalLoader:
    """Return the evaluation data, on the CPU, as `echelon evaluate` reads it."""
    source = trained.source
    assert source is not None
    seed, cpu = trained.config.training.seed, torch.device("cpu")
    settings = LoaderConfig.of(trained.config.data, seed, cpu, trained.transforms)
    return EvalLoader(source, settings, Shard(0, 1), source.test)


def example_of(loader: EvalLoader) -> Nest:
    """Return some samples of the first batch that is not skipped, at least two: a size of 1 would be taken for a
    constant.

    Raises:
        UserError: there is none.
    """
    batch = next((batch for batch in loader if nest.rows(batch.targets)), None)
    if batch is None:
        raise UserError("the run's evaluation data has no sample")
    some = nest.take(batch.inputs, slice(0, _EXAMPLES))
    return some if nest.rows(some) > 1 else nest.map_leaves(lambda leaf: torch.cat([leaf, leaf]), some)
