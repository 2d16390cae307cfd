"""One process of `echelon evaluate`: its part of the evaluation set, with the weights that the first one read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from echelon.config import RunConfig, load_run_config
from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.units import first_few, format_seconds
from echelon.data import DataInfo, LoaderConfig, Shard, Source
from echelon.data.kept_info import read_info
from echelon.data.loader import EvalLoader
from echelon.data.measures import measured_as
from echelon.models import build_model
from echelon.models.trial import own_copy
from echelon.observe.notes import RankNotes
from echelon.observe.screen import Screen
from echelon.run.machine import say
from echelon.run.parcel import Parcel
from echelon.run.resolve import resolve
from echelon.run.worker_job import WorkerFiles, as_worker
from echelon.tasks.base import TargetNames
from echelon.trainer.assemble import UserObjects
from echelon.trainer.evaluate import evaluate
from echelon.trainer.folder import CONFIG_FILE, SECRET_FOLDER
from echelon.trainer.inputs import model_input
from echelon.trainer.precision import PRECISIONS
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.saving import state_of
from echelon.trainer.state import averaged
from echelon.trainer.world import join_world


def run_evaluator(files: WorkerFiles, folder: str, config: RunConfig, checkpoint: str, parcel: Parcel | None) -> None:
    """Be one of several processes; the first one writes the metrics, any of them what went wrong."""
    with as_worker(files) as rank:
        objects = parcel.open() if parcel is not None else None
        metrics = evaluate_part(Path(folder), config, checkpoint, objects, on_begin=files.begun.touch)
    if rank == 0:
        write_atomic(files.metrics, json.dumps(metrics))


def evaluate_part(
    folder: Path,
    config: RunConfig,
    checkpoint: str,
    objects: UserObjects | None = None,
    on_begin: Callable[[], None] = lambda: None,
) -> Mapping[str, float | None]:
    """Evaluate this process's part of the data; returns the loss and the metrics over all of it.

    Args:
        checkpoint: `best`, `newest`, or the number of its step.
        objects: what the caller gave in place of names; the model given stays as it is.
        on_begin: is called by the first process before its first batch.

    Raises:
        UserError: no such checkpoint that is whole, the data is gone, or the model does not fit it.
    """
    objects = objects or UserObjects()
    run = resolve(replace(config, run=str(folder)))  # a folder may have been moved
    with join_world(run, folder / SECRET_FOLDER, RankNotes()) as world:
        source, part = _opened(run, folder, objects)
        kept = read_info(folder)
        if kept is not None:
            source = as_trained_on(source, kept)
        task = run.task.fitted(source.info, objects.of_task)
        if objects.model is not None:
            model = own_copy(objects.model).to(world.device)
        else:
            model = build_model(config.model, model_input(source.info, task)).to(world.device)
        run.tuning.rebuild(model)
        if world.leads:
            for note in source.notes:
                say(note)
            step = _load(model, folder, run, checkpoint)
        if world.size > 1:
            _share(model)
        settings = LoaderConfig.of(config.data, config.training.seed, world.device, objects.transforms)
        loader = EvalLoader(source, settings, Shard(world.data_rank, world.data_size), source.test)
        try:
            with Screen(world.leads, to_stderr=True) as screen:
                if world.leads:
                    on_begin()
                with screen.bar(f"evaluation of {loader.total:,} samples, batch", len(loader)) as bar:
                    autocast = PRECISIONS[config.training.precision].autocast
                    report = evaluate(model, loader, task, world, bar.advance, autocast)
                if world.leads:
                    took = f"{_samples(report.samples, source, part)} evaluated in {format_seconds(report.seconds)}"
                    # in the place of the launcher's bar, which may still be there
                    screen.say(f"echelon: {took}, with the checkpoint of step {step}")
        finally:
            loader.close()
        is_other = kept is not None and kept.name != source.info.name
        if world.leads and is_other and source.test is None and part != "":
            say(left_out(source))
    return {"loss": report.loss, **report.metrics}


def as_trained_on(source: Source, kept: DataInfo) -> Source:
    """Return data as a model knows its own: size and means of images, rate of sounds, units of targets, classes.

    What other data would be by its own measure is another input, or another class, in the same place.

    Raises:
        UserError: it has classes that the run does not know, or they are numbered otherwise in its items.
    """
    measured = measured_as(source, kept)
    info, known = measured.info, TargetNames.of(kept)
    here = TargetNames.of(info)
    if not here.are_numbered_as(known):
        unknown = [name for name in here.names if name not in known.names]
        why = f"the run knows no {first_few(unknown)}" if unknown else "some are missing, or in another order"
        raise UserError(
            f"data {info.name} does not fit the run's model: its {here.noun} are {first_few(here.names)}; the run's "
            f"are {first_few(known.names)}: {why}, and the model knows each by its number: name and number them as "
            "the run's"
        )
    return measured


def _opened(run: ResolvedRun, folder: Path, objects: UserObjects) -> tuple[Source, str | None]:
    """Return the data, and the part of it that is evaluated (`SourceChoice.open_other`); None: it is the run's own.

    Raises:
        UserError: there is no such data, or it cannot be used.
    """
    if objects.source is not None:
        return objects.source, None
    own = load_run_config(folder / CONFIG_FILE).data.source
    return (run.source.open(), None) if _is_same(own, run.described.data.source) else run.source.open_other()


def _is_same(source: str, other: str) -> bool:
    """Whether data is a run's own, however its path is written."""
    paths = [Path(each).expanduser() for each in (source, other)]
    return source == other or (all(each.exists() for each in paths) and paths[0].samefile(paths[1]))


def _samples(count: int, source: Source, part: str | None) -> str:
    """Say how many samples were evaluated, and of other data than the run's which these are."""
    if part is None:
        return f"{count:,} samples"
    if not part:
        return f"all {count:,} samples of {source.info.name}"
    return f"the {part} part of {source.info.name}, {count:,} samples,"


def left_out(source: Source) -> str:
    """Say that a part of other data is not evaluated."""
    return (
        f"{source.info.train_size:,} samples of {source.info.name} are its part for training and were not evaluated: "
        "it has no test part, which would be"
    )


def _load(model: nn.Module, folder: Path, run: ResolvedRun, checkpoint: str) -> int:
    """Give a model the weights of a run's checkpoint; returns the checkpoint's step."""
    state = state_of(folder, checkpoint)
    try:
        model.load_state_dict(run.tuning.plain(averaged(state), model))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(f"data {run.config.data.source} does not fit the run's model ({reason})") from error
    return int(state["cursor"]["step"])


@torch.no_grad()
def _share(model: nn.Module) -> None:
    """Give all ranks the parameters and buffers of the first one, as bytes: of whatever type they are."""
    for tensor in model.state_dict().values():
        flat = tensor.reshape(-1).contiguous()
        dist.broadcast(flat.view(torch.uint8), src=0)
        tensor.copy_(flat.view(tensor.shape))
