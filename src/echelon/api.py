"""Training, resuming, evaluating and reporting runs from Python: what the command line calls, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.config import Resolved, build
from echelon.config.build import DEFAULT, SettingValue, flag_of, leaves
from echelon.core.errors import UserError, nearest
from echelon.run.resolve import launch_request
from echelon.run.start import Outcome, RunFailed, start, start_again
from echelon.run.trust import check_trust
from echelon.trainer import folder as folders

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from echelon.tasks.base import Task
    from echelon.trainer.assemble import UserObjects

RESUMABLE = (
    *("launch.", "checkpoint.", "training.epochs", "training.max_steps", "training.eval_every", "data.loaders"),
    *("data.on_bad_image", "data.follow_links"),  # one may be found hours after the start
    *("strategy.parallel", "strategy.tensor_plan", "strategy.cuts", "training.recompute"),
)
SAFETENSORS = ".safetensors"


def train(
    model: str | nn.Module = "auto",
    data: str | tuple[Dataset[Any], Dataset[Any]] = "digits",
    run: str | Path = "",
    task: str | Task = "auto",
    **settings: Any,
) -> Outcome:
    """Train a model on data and return how it went.

    Args:
        model: a name as on the command line, or a module; workers train copies of it, sent by value.
        data: a name or folder as on the command line, or (training, evaluation) map-style data sets of (input, target),
            (input, input, ..., target), or dicts with a target.
        run: the run's folder; empty: `runs/DATA-MODEL-NUMBER`.
        task: a name as on the command line, or a task of your own (see `echelon.tasks.base.Task`).
        settings: any other setting by its command-line name: `epochs=5, batch_size=64, workers=2, sync="allreduce"`.

    Raises:
        UserError: a setting that does not exist or does not fit.
        RunFailed: the run could not go on.

    Example:
        >>> echelon.train("small_cnn", "digits", epochs=2).status  # doctest: +SKIP
        'completed'
    """
    overrides = {_dotted(name): value for name, value in settings.items()}
    overrides |= {"run": str(run), "model.name": model if isinstance(model, str) else type(model).__name__}
    overrides["data.source"] = data if isinstance(data, str) else type(data[0]).__name__
    overrides["task"] = task if isinstance(task, str) else task.facts().spec
    resolved = build(None, overrides)
    check_trust(resolved, trust=False)  # all of it is the caller's own: remembered, for what resumes or evaluates it
    config = resolved.config
    objects = [None if isinstance(value, str) else value for value in (model, data, task)]
    user_objects = _user_objects(*objects) if any(value is not None for value in objects) else None
    if resolved.origins["launch.max_restarts"] == DEFAULT:
        from echelon.run.in_process import runs_in_process, start_in_process

        request = launch_request(config)
        if runs_in_process(request):
            return start_in_process(request, user_objects)
    return _unless_failed(start(config, user_objects))


def resume(
    run: str | Path,
    overrides: Mapping[str, SettingValue] | None = None,
    trust: bool = False,
    from_scratch: bool = False,
) -> Outcome:
    """Continue a run from its newest whole checkpoint, on any number of workers.

    Args:
        overrides: settings to change, by dotted name.
        trust: import code that the run's description names (`module:function`) and you have not used before.
        from_scratch: train from the beginning; the checkpoints so far are put aside.

    Raises:
        UserError: the folder holds no run, names code that is not trusted, its newest checkpoint is gone, or a setting
            would make it another run.
        RunFailed: the run could not go on.
    """
    path = Path(run)
    resolved = _with_overrides(path, overrides or {})
    check_trust(resolved, trust)
    return _unless_failed(start_again(path, replace(resolved.config, run=str(path)), from_scratch))


def _unless_failed(outcome: Outcome) -> Outcome:
    if outcome.status == "failed":
        raise RunFailed(outcome)
    return outcome


def evaluate(run: str | Path, trust: bool = False, follow_links: bool = False) -> Mapping[str, float | None]:
    """Evaluate a run's best checkpoint on its evaluation data; returns the metrics.

    Args:
        trust: import code that the run's description names (`module:function`) and you have not used before.
        follow_links: use links in the data folder that lead out of it, as the run may have done.

    Raises:
        UserError: the folder holds no run that can be evaluated, or names code that is not trusted.
    """
    path = Path(run)
    resolved = _read(path, {"data.follow_links": True} if follow_links else {})
    check_trust(resolved, trust)
    from echelon.run.evaluate import rescore

    return rescore(path, resolved.config)


def export(run: str | Path, file: str | Path) -> Path:
    """Write the weights of a run's best checkpoint (their moving average, where there is one) under plain names.

    Returns:
        the file: one safetensors file, whatever layout the run had.

    Raises:
        UserError: no whole checkpoint, the file is to be of another format, or it cannot be written.
    """
    if Path(file).suffix not in ("", SAFETENSORS):
        raise UserError(f"{file}: weights are written as safetensors: name a file that ends in {SAFETENSORS}")
    path = Path(run)
    _read(path)
    from echelon.checkpoint import export_weights
    from echelon.trainer.saving import best_state

    state = best_state(path)
    export_weights(state["ema"]["average"] if state["ema"] else state["model"], Path(file))
    return Path(file)


def report(run: str | Path) -> Path:
    """Write a run's report and summary again from its record; returns its folder.

    Raises:
        UserError: the folder holds no run.
    """
    path = Path(run)
    _read(path)
    from echelon.reporting.report import write_report

    write_report(path)
    return path


def _dotted(setting: str) -> str:
    flags = {flag_of(name, item).lstrip("-").replace("-", "_"): name for name, item, _ in leaves()}
    if setting not in flags:
        raise UserError(f"unknown setting {setting!r}: {nearest(setting, flags)}".rstrip(": "))
    return flags[setting]


def _user_objects(model: Any, data: Any, task: Any) -> UserObjects:
    from echelon.data import from_datasets
    from echelon.trainer.assemble import UserObjects

    return UserObjects(model, from_datasets(*data) if data is not None else None, task)


def _read(path: Path, overrides: Mapping[str, SettingValue] | None = None) -> Resolved:
    if not (path / folders.CONFIG_FILE).exists():
        known = [str(p.parent) for p in Path("runs").glob(f"*/{folders.CONFIG_FILE}")]
        raise UserError(f"{path} holds no run: {nearest(str(path), known)}there is no {folders.CONFIG_FILE} in it")
    return build(path / folders.CONFIG_FILE, overrides)


def _with_overrides(path: Path, overrides: Mapping[str, SettingValue]) -> Resolved:
    _read(path)
    for name in overrides:
        if not name.startswith(RESUMABLE):
            raise UserError(
                f"{name} cannot change when a run is resumed: start a new run, with --weights from this one"
            )
    return _read(path, overrides)
