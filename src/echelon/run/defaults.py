"""Settings that a run's task suggests, where its user said nothing."""

from __future__ import annotations

import mimetypes
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.config import Resolved, RunConfig
from echelon.config.build import DEFAULT, SettingValue
from echelon.core.own import HUGGING_FACE, TRANSFORMERS
from echelon.core.task import TaskDefaults
from echelon.core.tokeniser import FOLDER_FILE
from echelon.core.tuning import rate_share, trains_weights
from echelon.optim.traits import is_sgd
from echelon.run.data_names import holds_folders_of_a_kind
from echelon.run.resolve import has_servers, sync_of
from echelon.storage.url import is_url
from echelon.tasks.registry import AUTO, TASKS, build_task

if TYPE_CHECKING:
    from echelon.data.base import DataOutline
    from echelon.tasks.base import Task


_OF_LIBRARIES = ("timm/", "torchvision/", TRANSFORMERS)
_TRANSFORMERS_LR, _TRANSFORMERS_NEW_LR = 5e-5, 5e-4
"""At most, with models of transformers and adamw: where their weights move, as in its own trainer; of what is new."""


def with_task_defaults(resolved: Resolved, task: Task | None = None, opens_data: bool = True) -> Resolved:
    """Return a description with the defaults of its task, wherever the general defaults still stand.

    Of data that may be for several tasks the columns that tell are read, where the task or its model are `auto`. Where
    the run starts from given weights, the rate is one that keeps what they are worth.

    Args:
        task: the caller's own, in place of the described one.
        opens_data: whether the description names the data; not where the caller has it.

    Raises:
        UserError: the task cannot be built, or data that decides on it cannot be read.
    """
    suggested = _with_pixels(_with_warmup(_with_task_defaults(resolved, task, opens_data)))
    config, name = suggested.config, "optimizer.lr"
    described = {resolved.origins[name], resolved.origins["optimizer.name"]} != {DEFAULT}
    if described or not config.model.weights:
        return suggested
    rate = config.optimizer.lr * rate_share(config.model.tune)
    if config.model.name.startswith(TRANSFORMERS) and config.optimizer.name == "adamw":
        rate = min(rate, _TRANSFORMERS_LR if trains_weights(config.model.tune) else _TRANSFORMERS_NEW_LR)
    rate = float(f"{rate:.3g}")
    if rate == config.optimizer.lr:
        return suggested
    config = replace(config, optimizer=replace(config.optimizer, lr=rate))
    return Resolved(config, {**suggested.origins, name: "--weights"})


def _with_pixels(resolved: Resolved) -> Resolved:
    """Normalise images as published weights know them, where nobody set how."""
    config, name = resolved.config, "data.normalise"
    if resolved.origins[name] != DEFAULT or not config.model.weights or not config.model.name.startswith(_OF_LIBRARIES):
        return resolved
    from echelon.data.normalise import as_text
    from echelon.models.pretrained import pixels_of

    pixels = pixels_of(config.model.weights, config.model.name)
    if pixels is None:
        return resolved
    config = replace(config, data=replace(config.data, normalise=as_text(*pixels)))
    return Resolved(config, {**resolved.origins, name: "--weights"})


def _with_warmup(resolved: Resolved) -> Resolved:
    """Let the learning rate rise over the first epochs where the strategy's workers need it, and nobody set any."""
    config, name = resolved.config, "optimizer.warmup_epochs"
    chosen = resolved.origins[name] != DEFAULT or config.training.max_steps or config.launch.workers == 1
    if chosen or not is_sgd(config.optimizer.name):
        return resolved
    share = sync_of(config).warmup_share if has_servers(config) else 0.0
    if not share:
        return resolved
    config = replace(config, optimizer=replace(config.optimizer, warmup_epochs=share * config.training.epochs))
    return Resolved(config, {**resolved.origins, name: "--sync"})


def are_told_late(config: RunConfig) -> bool:
    """Whether `with_task_defaults` imports torch: for a task with defaults, or for files that tell the task."""
    return _files_tell(config) if config.task == AUTO else not _suggests_nothing(config.task)


def _with_task_defaults(resolved: Resolved, task: Task | None, opens_data: bool) -> Resolved:
    """Return a description with what its task suggests alone."""
    config, origins = resolved.config, dict(resolved.origins)
    outline = None
    if task is None:
        outline = _outline(config) if opens_data and config.task == AUTO else None
        task = _task_named(outline.task if outline else "" if config.task == AUTO else config.task)
        if task is None:
            return resolved
        if opens_data and outline is None and ":" not in config.task:
            outline = _outline(config, task)
        if opens_data and (model := _auto_model(task, config, outline)):
            config = replace(config, model=replace(config.model, name=model))
            origins["model.name"] = f"task {task.name.replace('_', '-')}"
    if origins["data.tokeniser"] == DEFAULT and (folder := _folder_of_tokeniser(config.model.name, task, outline)):
        config = replace(config, data=replace(config.data, tokeniser=folder))
        origins["data.tokeniser"] = f"model {config.model.name}"
    if origins["data.features"] == DEFAULT and task.encoding.reads_sounds and _is_of_transformers(config.model.name):
        config = replace(config, data=replace(config.data, features=config.model.name))
        origins["data.features"] = f"model {config.model.name}"
    for name, value in _settings(task.defaults_for(config.data, outline), origins["optimizer.name"] == DEFAULT):
        if origins[name] == DEFAULT:
            section, leaf = name.split(".")
            config = replace(config, **{section: replace(getattr(config, section), **{leaf: value})})
            origins[name] = f"task {task.name.replace('_', '-')}"
    return Resolved(config, origins)


def _settings(defaults: TaskDefaults, of_optimizer: bool) -> Iterator[tuple[str, SettingValue]]:
    """Yield dotted name and value of what a task suggests; of the optimizer only where the user chose no other."""
    suggested: list[tuple[str, SettingValue]] = [
        ("training.epochs", defaults.epochs),
        ("data.batch_size", defaults.batch_size),
        ("data.holdout", defaults.holdout),
    ]
    if of_optimizer:
        suggested += [
            ("optimizer.name", defaults.optimizer),
            ("optimizer.lr", defaults.lr),
            ("optimizer.weight_decay", defaults.weight_decay),
            ("optimizer.warmup_epochs", defaults.warmup_epochs),
        ]
    yield from ((name, value) for name, value in suggested if value is not None)


def _task_named(name: str) -> Task | None:
    """Return the task of a name; None: it has none, or is known to suggest nothing without being imported."""
    return build_task(name) if name and not _suggests_nothing(name) else None


def _suggests_nothing(task: str) -> bool:
    """Whether a task of ours has no defaults, by its file's text."""
    file = task.replace("-", "_")
    return file in TASKS.names() and TASKS.declaration(file).constants["defaults"] == f"{TaskDefaults.__name__}()"


def _auto_model(task: Task, config: RunConfig, outline: DataOutline | None) -> str:
    """Return what `--model auto` becomes by the task; empty: it stays, for what the opened data or a loss ask for."""
    if config.model.name != AUTO or ":" in config.task or config.optimizer.loss:
        return ""
    return task.auto_model(outline) if outline else ""


def _folder_of_tokeniser(model: str, task: Task, outline: DataOutline | None) -> str:
    """Return the folder of a model of transformers with a tokeniser beside it, where the task reads texts; else ''."""
    folder = model.removeprefix(TRANSFORMERS)
    has_one = folder != model and (Path(folder).expanduser() / FOLDER_FILE).is_file()
    if not has_one:
        return ""
    from echelon.tasks.base import are_tokens

    return folder if task.encoding.reads_text or (outline and are_tokens(outline.inputs)) else ""


def _is_of_transformers(model: str) -> bool:
    """Whether a model's name is that of a folder, or a file, which is there."""
    return model.startswith(TRANSFORMERS) and Path(model.removeprefix(TRANSFORMERS)).expanduser().exists()


def _outline(config: RunConfig, task: Task | None = None) -> DataOutline | None:
    """Return what files tell; None where the data is no files, or images: what reads them is heavy.

    Folders by which a kind of data is known make images another kind: with masks beside them, for instance.

    Args:
        task: the chosen one; None: the data tells it.
    """
    if not _files_tell(config):
        return None
    from echelon.data.base import DataRequest
    from echelon.data.sources import outline_of

    request = DataRequest(config.data, config.training.seed)
    if task is not None:
        request = replace(request, encoding=task.encoding, task=config.task)
    return outline_of(request)


def _files_tell(config: RunConfig) -> bool:
    """Whether the data is files, or of hf, and not images with a class each."""
    path = Path(config.data.source).expanduser()
    is_there = path.exists() or config.data.source.startswith(HUGGING_FACE) or is_url(config.data.source)
    return is_there and not (path.is_dir() and _is_of_images(path) and not holds_folders_of_a_kind(path))


def _is_of_images(path: Path) -> bool:
    return (mimetypes.guess_type(_first_file(path))[0] or "").startswith("image/")


def _first_file(path: Path) -> str:
    """Return the name of any file below a folder; empty: there is none."""
    return next((name for _, _, names in os.walk(path) for name in names if not name.startswith(".")), "")
