"""Training, resuming, evaluating and reporting runs from Python: what the command line calls, too."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from echelon.checkpoint.files import check_whole
from echelon.config import Resolved, RunConfig, build
from echelon.config.build import DEFAULT, SettingValue, hint_for, leaves
from echelon.config.keywords import RESUMABLE, for_compare, for_resume, for_train, keywords, setting_of, takes_settings
from echelon.config.typed import ResumeSettings, TrainSettings
from echelon.core.errors import UserError
from echelon.core.own import code_mark, of_object
from echelon.core.system import short_spins_inside
from echelon.run.defaults import with_task_defaults
from echelon.run.export_names import export_format
from echelon.run.home import at_home, bring, mirror_at_home
from echelon.run.machine import say
from echelon.run.needs import EVALUATE, PREDICT, check_data_is_here, check_objects
from echelon.run.outcome import Outcome, RunFailed
from echelon.run.overview import bring_from_place
from echelon.run.own_imports import import_metrics
from echelon.run.resolve import launch_request
from echelon.run.start import start, start_again
from echelon.run.trust import check_trust
from echelon.storage.url import check_url, is_url
from echelon.trainer import folder as folders

if TYPE_CHECKING:
    from torch import nn

    from echelon.data import OwnData
    from echelon.flows.driver import FlowOutcome
    from echelon.inference.export import Exported
    from echelon.inference.predict import PredictedRow
    from echelon.observe.loggers.base import LoggerSettings
    from echelon.planning.plan import PlanReport
    from echelon.run.trained import TrainedModel
    from echelon.study.outcome import StudyOutcome
    from echelon.tasks.base import Task, Writing
    from echelon.tasks.own_loss import LossFunction
    from echelon.trainer.assemble import UserObjects

OBJECTS = (
    "model",
    "data",
    "task",
    "loss",
    "metrics",
    "callbacks",
    "loggers",
    "transform",
    "eval_transform",
    "optimizer",
)


@takes_settings(for_train())
def train(
    model: str | nn.Module = "auto",
    data: str | OwnData = "digits",
    run: str | Path = "",
    task: str | Task = "auto",
    loss: str | LossFunction = "",
    metrics: object = "",
    callbacks: object = "",
    loggers: Sequence[str | LoggerSettings] = (),
    **settings: Unpack[TrainSettings],
) -> Outcome:
    """Train a model on data and return how it went.

    Args:
        model: a name as on the command line, or a module; workers train copies of it, sent by value.
        data: a name or folder as on the command line; or map-style data sets of (input, target), (input, input, ...,
            target), or dicts with a target: (training, evaluation), (training, validation, test), or one, of which
            `holdout` is held out; or a `Source`. Tensors that differ in length are padded (`data.lengths`).
        run: the run's folder; empty: `runs/DATA-MODEL-NUMBER`.
        task: a name as on the command line, or a task of your own (see `echelon.tasks.base.Task`).
        loss: a function of outputs and targets, or a module of `torch.nn`, that returns one number for each sample,
            their sum or their mean; or a name as on the command line.
        metrics: metrics of torchmetrics, one, a list, a dict by name or a `MetricCollection`; or names as on the
            command line, one text or a list. `primary_metric` names the one by which checkpoints are compared.
        callbacks: objects that the leading rank tells what happens (see `echelon.observe.callbacks.Callback`), one or a
            list, or their names as on the command line; several workers have copies of them.
        loggers: names as on the command line, and objects (see `echelon.observe.loggers.base.LoggerSettings`).
        settings: any other setting by its command-line name, such as `epochs=5, workers=2, sync="allreduce"`; they are
            listed below. `optimizer` may be a subclass of `torch.optim.Optimizer`, or `functools.partial` of one.

    Raises:
        UserError: a setting that does not exist or does not fit.
        RunFailed: the run could not go on.

    Example:
        >>> echelon.train("small_cnn", "digits", epochs=2).status  # doctest: +SKIP
        'completed'
    """
    _check_objects({"model": model, "task": task, "loss": loss}, settings.get("optimizer"))
    module, data = _as_module(model), str(data) if isinstance(data, Path) else data
    loss, metrics, callbacks = _left_out(loss), _metrics_text(metrics), _given_callbacks(callbacks)
    if module is not model:
        derived, metrics = _compiled(module, loss, metrics)
        loss = derived if isinstance(task, str) else loss
    own = {name: value for name, value in settings.items() if callable(value)}
    named = {**settings, **{name: _name_of(name, function) for name, function in own.items()}}
    overrides = _by_setting(named) | _logger_names(loggers, settings.get("logger", ""))
    overrides |= {"run": str(run), "model.name": model if isinstance(model, str) else type(model).__name__}
    overrides["data.source"] = data if isinstance(data, str) else _name_of_data(data)
    overrides["task"] = task if isinstance(task, str) else task.facts().spec
    overrides |= {"optimizer.loss": _described(loss), "training.metrics": _described(metrics)}
    overrides["tracking.callbacks"] = callbacks if isinstance(callbacks, str) else _callback_names(callbacks)
    resolved = build(None, overrides, in_python=True)
    check_trust(resolved, trust=False)  # all of it is the caller's own: remembered, for what resumes or evaluates it
    with short_spins_inside():  # likewise
        data, known_task = _with_its_task(data, task, resolved.config)
        resolved = with_task_defaults(resolved, known_task, isinstance(data, str))
    given = {"model": module, "data": data, "task": task, "loss": loss, "metrics": metrics, "callbacks": callbacks}
    objects = _user_objects({**given, **own, "loggers": _logger_objects(loggers)}, resolved.config)
    return _told(_started(resolved, objects))


def finetune(
    run: str | Path, data: str | OwnData, into: str | Path = "", trust: bool = False, **settings: Any
) -> Outcome:
    """Train on from the best weights of a run: its model, preprocessing and tokeniser are known.

    Args:
        run: the folder of the run to start from.
        data: as for `train`.
        trust: import code that the run's description names (`module:function`) and you have not used before.
        into: the new run's folder; empty: `runs/DATA-MODEL-NUMBER`.
        settings: any other keyword of `train`.

    Raises:
        UserError: the folder holds no run with a checkpoint, or a setting does not exist or does not fit.
        RunFailed: the run could not go on.
    """
    from echelon.run.finetune import tuned_from

    overrides = {setting_of(name): str(value) for name, value in settings.items() if name != "loggers"}
    known = tuned_from(Path(run), overrides, trust)
    taken = {keyword.name: known[keyword.setting] for keyword in keywords().values() if keyword.setting in known}
    return train(data=data, run=into, **{**taken, **settings})


def flow(
    file: str | Path,
    run: str | Path = "",
    resume: bool = False,
    hash_content: bool = False,
    on: str = "",
    **parameters: Any,
) -> FlowOutcome:
    """Run the steps of a flow that are missing or changed, as `echelon flow FILE` does, and return how it ended.

    Args:
        file: the flow's description; with `resume` the folder of one.
        run: the flow's folder; empty: `flows/NAME`.
        hash_content: know data by its bytes, not by names, sizes and times.
        on: where steps run, such as `slurm(partition=main)`; empty: on this machine, with `resume` as before.
        parameters: values in place of those that the file gives.

    Raises:
        UserError: the flow cannot be; nothing was started.

    Example:
        >>> echelon.flow("flow.yaml", epochs=5).status  # doctest: +SKIP
        'completed'
    """
    from echelon.flows.run import FlowRequest, start_flow

    given = {name: str(value) for name, value in parameters.items()}
    request = FlowRequest(str(file), on, str(run), given, resume=resume, hash_content=hash_content)
    return start_flow(request, say)


def _started(resolved: Resolved, objects: UserObjects | None) -> Outcome:
    """Train in this process where nothing speaks for others, else in processes of their own."""
    config = resolved.config
    folders.check_weights(config.model.weights)
    if resolved.origins["launch.max_restarts"] == DEFAULT and not config.optimizer.lr_find:
        with short_spins_inside():  # where torch is not imported yet, this does so
            from echelon.run.in_process import runs_in_process, start_in_process
        request = launch_request(config)
        if runs_in_process(request):
            return _ended(start_in_process(request, objects), objects)
    return _ended(start(config, objects), objects)


class ModelObjects(TypedDict, total=False):
    """What a run's model and task are made of, and what changes its evaluation samples, where these were given from
    Python in place of names, to be given again.
    """

    model: nn.Module
    task: Task
    loss: LossFunction
    metrics: object
    eval_transform: Callable[[Any], Any]


class GivenObjects(ModelObjects, total=False):
    """Likewise, with the data."""

    data: OwnData


class ResumeKeywords(ResumeSettings, total=False):
    """Keywords of `resume`: settings that may change, and what was not given by name."""

    model: nn.Module
    data: OwnData
    task: Task
    loss: LossFunction
    metrics: object
    callbacks: object
    loggers: Sequence[str | LoggerSettings]
    transform: Callable[[Any], Any]
    eval_transform: Callable[[Any], Any]
    optimizer: Callable[..., Any]


@takes_settings(for_resume(), *OBJECTS)
def resume(
    run: str | Path,
    overrides: Mapping[str, SettingValue] | None = None,
    trust: bool = False,
    from_scratch: bool = False,
    rescan: bool = False,
    detach: bool = False,
    **settings: Unpack[ResumeKeywords],
) -> Outcome:
    """Continue a run from its newest whole checkpoint, on any number of workers.

    Args:
        run: its folder, or the URL of one (`--run URL`, `--mirror URL`), which goes on there.
        overrides: settings to change, by dotted name.
        trust: import code that the run's description names (`module:function`) and you have not used before.
        from_scratch: train from the beginning; the checkpoints so far are put aside.
        rescan: take samples that are new in the data: from the next epoch on.
        detach: leave the run to its place (`on=`) once that has taken it; its status is `submitted` then.
        settings: settings to change, by their command-line names: `epochs=20, workers=4`. A run of a module, data
            sets or a task of the caller's own needs them again: `model=..., data=..., task=...`; so do `callbacks=...`,
            transforms, objects of `loggers=[...]`, and a `loss=...`, `metrics=...` or `optimizer=...` that no name
            leads to.

    Raises:
        UserError: the folder holds no run, names code that is not trusted, its newest checkpoint is gone, or a setting
            would make it another run.
        RunFailed: the run could not go on.
    """
    return _told(continue_run(run, {**settings}, overrides, trust, from_scratch, rescan, detach))


def continue_run(
    run: str | Path,
    settings: Mapping[str, Any],
    overrides: Mapping[str, SettingValue] | None = None,
    trust: bool = False,
    from_scratch: bool = False,
    rescan: bool = False,
    detach: bool = False,
) -> Outcome:
    """Continue a run as `resume` does, without saying how it ended."""
    path, keywords = _brought(run), {name: value for name, value in settings.items() if value is not None}
    if "metrics" in keywords:
        keywords["metrics"] = _metrics_text(keywords["metrics"])
    loggers = keywords.pop("loggers", ())
    given = [name for name in OBJECTS if not isinstance(keywords.get(name, ""), str)]
    user_objects = {name: keywords.pop(name) for name in given}
    changes = {**(overrides or {}), **_by_setting(keywords)} | _logger_names(loggers, keywords.get("logger", ""))
    if "callbacks" in user_objects:
        user_objects["callbacks"] = _callback_list(user_objects["callbacks"])
    if named := _callback_names(user_objects.get("callbacks", ())):
        changes["tracking.callbacks"] = named
    if is_url(str(run)):
        changes["checkpoint.mirror"] = mirror_at_home(check_url(str(run)), changes.get("checkpoint.mirror"))
    resolved = _with_overrides(path, changes)
    config = resolved.config
    for keyword, described in (("loss", config.optimizer.loss), ("metrics", config.training.metrics)):
        if keyword in user_objects:
            _check_same(keyword, described, of_object(user_objects[keyword]))
    objects = _user_objects({**user_objects, "loggers": _logger_objects(loggers)}, config)
    check_trust(resolved, trust)
    config = at_home(replace(config, run=str(path)))
    return _ended(start_again(path, config, from_scratch, objects, rescan, detach=detach), objects)


def _ended(outcome: Outcome, objects: UserObjects | None) -> Outcome:
    outcome = replace(outcome, objects=objects)
    if outcome.status == "failed":
        raise RunFailed(outcome)
    return outcome


def _told(outcome: Outcome) -> Outcome:
    """Say in a line how a run ended, as the command does in several."""
    for words in outcome.words[:1]:
        report = outcome.folder / "report.html"  # of several machines, the one that leads has it
        say(f"{words} Report: {report}" if report.exists() else words)
    return outcome


def evaluate(
    run: str | Path,
    trust: bool = False,
    follow_links: bool = False,
    data: str | OwnData = "",
    checkpoint: str = "best",
    workers: int = 0,
    **objects: Unpack[ModelObjects],
) -> Mapping[str, float | None]:
    """Evaluate a checkpoint of a run on its evaluation data; returns the metrics, the same for any number of workers.

    Args:
        data: other data than the run's, by name, folder or URL; or data sets as for `train`, where the run was given
            such.
        checkpoint: `best`, `newest`, or the number of its step.
        workers: processes that share the work; 1: this one alone; 0: as many as the run has, where this machine has
            GPUs or cores for them.
        trust: import code that the run's description names (`module:function`) and you have not used before.
        follow_links: use links in the data folder that lead out of it, as the run may have done.
        objects: `model=...`, `task=...`, `loss=...`, `metrics=...`, `eval_transform=...`, where the run was given such
            from Python.

    Raises:
        UserError: the folder holds no run that can be evaluated, or names code that is not trusted.
        JobFailed: a worker died.
    """
    path = Path(run)
    resolved = _read(path, _links(follow_links) | ({"data.source": data} if isinstance(data, str) and data else {}))
    check_trust(resolved, trust)
    from echelon.run.evaluate import rescore

    given = _user_objects({"data": data, **objects}, resolved.config)
    check_objects(path, [*(given.needed if given else ()), *(["data"] if data else [])], EVALUATE)
    if not data:
        check_data_is_here(path, resolved.config.data.source, "run the command there, or give --data")
    return rescore(path, resolved.config, checkpoint, workers, given)


def export(run: str | Path, file: str | Path, trust: bool = False, **objects: Unpack[GivenObjects]) -> Exported:
    """Write the model of a run's best checkpoint (its moving average, where there is one) to a file for other programs.

    What was written is read back and evaluated on the run's evaluation data beside the run's model: a file whose
    loss, metric or outputs are not the run's is not left.

    Args:
        file: by its suffix: `.safetensors` (weights), `.onnx` (for ONNX Runtime; classes and preprocessing in its
            metadata), `.pt2` (for `torch.export.load`), `.peft` (a folder with adapters alone, for
            `PeftModel.from_pretrained`); without one, a folder for transformers.
        trust: import code that the run's description names (`module:function`) and you have not used before.
        objects: `model=...`, `data=...`, `task=...`, where the run was given such from Python.

    Returns:
        where it lies, a path, and how it was checked.

    Raises:
        UserError: no whole checkpoint, no such format, one that does not suit the model, or the check failed.
    """
    export_format(Path(file))
    resolved = usable(run, "best", trust)
    import_metrics()
    from echelon.inference.export import write_export

    given = _user_objects(dict(objects), resolved.config)
    return write_export(Path(run), resolved.config, Path(file), given or _no_objects())


def skips_bad_images(on_bad_image: str) -> bool:
    """Whether images and sounds that cannot be read are passed over.

    Raises:
        UserError: it is neither `stop` nor `skip`.
    """
    if on_bad_image not in ("stop", "skip"):
        raise UserError(f"--on-bad-image {on_bad_image}: it is stop or skip")
    return on_bad_image == "skip"


def predict(
    run: str | Path,
    data: Any,
    masks: str | Path | None = None,
    checkpoint: str = "best",
    trust: bool = False,
    device: str = "auto",
    writing: Writing | None = None,
    workers: int = 1,
    follow_links: bool = False,
    on_bad_image: Literal["stop", "skip"] = "stop",
    **objects: Unpack[ModelObjects],
) -> list[PredictedRow]:
    """Return what a run's model says of new samples; `[row.plain() for row in ...]` is for JSON or a data frame.

    Samples go through the run's own steps: its tokeniser, its columns' means and categories, its images' size.

    Args:
        data: paths or URLs of images or sounds, or of folders of them; texts, or files with one a line; tables (files,
            rows as mappings, data frames of pandas or tables of pyarrow); or arrays and tensors as the model takes
            them; images as uint8 `(N, C, H, W)`, or a list of `(C, H, W)` of one shape.
        masks: folder that a segmentation's masks are written to, as PNG of class numbers: rows then have the names of
            the files (`mask_file`); None: rows have the masks themselves (`prediction.mask`).
        checkpoint: `best`, `newest`, or the number of its step.
        trust: import code that the run's description names (`module:function`) and you have not used before.
        device: `auto`, `cpu` or `cuda`.
        writing: how a language model writes on (see `echelon.tasks.base.Writing`).
        workers: processes that share the work, with the same rows whatever their number; 1: this one alone; 0: one for
            each GPU, or each core where there is none.
        follow_links: use links in a folder of samples that lead out of it.
        on_bad_image: of an image or a sound that cannot be read: `stop`, or `skip`: its row has an `error` alone.
        objects: `model=...`, `task=...`, where the run was given such from Python.

    Raises:
        UserError: no such checkpoint that is whole, or samples that are not of the run's kind or cannot be read.
        JobFailed: a worker died.
    """
    if workers < 0:
        raise UserError(f"workers={workers}: name how many processes predict, or 0 for all cores")
    skips = skips_bad_images(on_bad_image)
    resolved = usable(run, checkpoint, trust, follow_links)
    import_metrics()
    from echelon.inference.predict import MaskOutput, device_of, predict_samples
    from echelon.run.trained import load_trained
    from echelon.tasks.base import Writing

    folder = None if masks is None else MaskOutput.of(masks)
    given = _user_objects(dict(objects), resolved.config)
    check_objects(Path(run), given.needed if given else (), PREDICT)
    given = given or _no_objects()
    if workers != 1:
        from echelon.inference.workers import PredictionJob, predict_on_workers

        job = PredictionJob(Path(run), resolved.config, checkpoint, data, writing or Writing(), device, folder, skips)
        return predict_on_workers(job, given, workers)
    trained = load_trained(Path(run), resolved.config, given, checkpoint)
    return list(predict_samples(trained, data, writing or Writing(), device_of(device), folder, skips_bad=skips))


def trained_model(
    run: str | Path,
    checkpoint: str = "best",
    trust: bool = False,
    follow_links: bool = False,
    **objects: Unpack[ModelObjects],
) -> TrainedModel:
    """Return a run's model with its task and what it keeps of its data, on the CPU, in evaluation mode.

    Raises:
        UserError: as `predict`.
    """
    resolved = usable(run, checkpoint, trust, follow_links)
    import_metrics()
    from echelon.run.trained import load_trained

    given = _user_objects(dict(objects), resolved.config)
    check_objects(Path(run), given.needed if given else (), PREDICT)
    return load_trained(Path(run), resolved.config, given or _no_objects(), checkpoint)


def usable(run: str | Path, checkpoint: str, trust: bool, follow_links: bool = False) -> Resolved:
    """Return the description of a run whose model can be had; without torch, which takes seconds to say no.

    Raises:
        UserError: the folder holds no run, or no such checkpoint that is whole, or names code that is not trusted.
    """
    resolved = _read(Path(run), _links(follow_links))
    check_trust(resolved, trust)
    check_whole(Path(run) / folders.CHECKPOINTS_FOLDER, checkpoint)
    return resolved


def report(run: str | Path) -> Path:
    """Write a run's report and summary again from its record; returns its folder.

    The page needs no other file, also where the run is one of a study's, whose pages share a script.

    Raises:
        UserError: the folder holds no run, or does not take the report.
    """
    path = Path(run)
    _read(path)
    from echelon.reporting.report import write_report

    try:
        write_report(path, alone=True)
    except OSError as error:
        raise UserError(f"{path}: the report could not be written: {error.strerror or error}") from error
    return path


@takes_settings(for_compare())
def compare(
    tries: Sequence[str] = (),
    model: str = "auto",
    data: str = "digits",
    run: str | Path = "",
    seeds: int | Sequence[int] | None = None,
    trust: bool = False,
    equal_time: str = "",
    tune_lr: bool = False,
    at_once: int = 0,
    **settings: Unpack[TrainSettings],
) -> StudyOutcome:
    """Train candidates on equal terms, and compare them with the first one.

    Args:
        tries: the candidates, as for `--try`: `["compression=none", "sync=local(8), compression=int8"]`.
        model: a name as on the command line: each run is a command in a process of its own.
        data: a name or folder as on the command line, or a study file (`study.yaml`), which says everything else.
        run: the study's folder; one that holds a study goes on. Empty: `runs/compare-DATA-NUMBER`.
        seeds: how many, or which; left out: 3.
        trust: import code that a study file names (`module:function`) and you have not used before.
        equal_time: say, too, who is best after what the baseline takes (`baseline`), or after a time such as `60s`.
        tune_lr: look first, in short runs, for the learning rate that is best for each candidate.
        at_once: runs that go on at the same time, on a cluster (`on=`); 0: four there, and one on this machine.
        settings: settings of every run, by their command-line names: `epochs=5, workers=2`.

    Raises:
        UserError: a setting that does not exist or does not fit, no candidate, or the folder holds something else.
    """
    if isinstance(tries, str):
        raise UserError(f"tries is a list of candidates: [{tries!r}, ...]")
    if "seed" in settings:
        raise UserError("the runs of every candidate have the same seeds: write seeds=3, or seeds=[0, 5, 7]")
    from echelon.study.execute import How
    from echelon.study.file import StudyRequest, claim_folder, requested_study
    from echelon.study.outcome import carry_out, check_study_trust, warn_of_refusals

    given = {"model": model, "data": os.fspath(data) if isinstance(data, os.PathLike) else data}
    objects = [name for name, value in given.items() if not isinstance(value, str)]
    if objects := objects + [name for name, value in settings.items() if callable(value)]:
        raise UserError(f"{objects[0]}: each run of a study is a command: name code of yours as 'module:name'")
    base = {name: str(value) for name, value in _by_setting(settings).items()}
    if tries or model != "auto":
        base["model.name"] = model
    if tries or data != "digits":
        base["data.source"] = data
    count = "" if seeds is None else str(seeds) if isinstance(seeds, int) else ",".join(map(str, seeds))
    request = StudyRequest(base, tuple(tries), count, tune_lr=tune_lr, equal_time=equal_time)
    study = requested_study(request)
    check_study_trust(request, str(run), trust)
    if study is not None:
        How.of(study, at_once)  # before anything is in the folder
        warn_of_refusals(study)
    return carry_out(Path(run) if str(run) else claim_folder(study, request), study, at_once=at_once)


@takes_settings(for_compare())
def plan(
    data: str | Path = "digits",
    at: str | Sequence[str] = (),
    model: str = "auto",
    study: str | Path = "",
    trust: bool = False,
    **settings: Unpack[TrainSettings],
) -> PlanReport:
    """Predict time, memory and cost of each way to train on machines that are described; two short runs calibrate it.

    Args:
        data: a name or folder as on the command line, or the folder of a run: its record is enough, nothing is trained.
        at: the machines, such as `"workers=64, link=1gbit, memory=24GB, price=2.5"`; several in a list.
        model: a name as on the command line.
        study: the folder of a study of this model and data, for the time to its target; without it, the newest beside
            the run, or in `runs`, is taken where there is one.
        trust: import code that a description names (`module:function`) and you have not used before.
        settings: settings of the run, by their command-line names: `epochs=5, batch_size=256`.

    Returns:
        For each description of machines the ways with their seconds (with bounds), bytes and cost, the fastest first.

    Raises:
        UserError: the machines or the study cannot be read, a setting does not exist or does not fit, or a calibrating
            run failed.
    """
    from echelon.config.machines import read_machines
    from echelon.planning.request import plan as planned
    from echelon.planning.request import request_of
    from echelon.study.samples import samples_for

    machines = read_machines((at,) if isinstance(at, str) else at)
    named = {"model.name": model} if model != "auto" else {}
    resolved = build(None, {"data.source": str(data), **named, **_by_setting(settings)})
    request = request_of(resolved, machines, trust)
    return planned(replace(request, samples=samples_for(str(study), str(data), request.config)))


def _check_objects(objects: Mapping[str, object], optimizer: object) -> None:
    """Refuse a class or a function in place of an object, and an optimizer in place of what makes one.

    Raises:
        UserError: says what to give.
    """
    for keyword, given in objects.items():
        if given is None and keyword != "loss":
            raise UserError(f"{keyword}=None: leave it out for the default, or give one")
        name = getattr(given, "__name__", "")
        if inspect.isclass(given):
            raise UserError(f"{keyword}={name} is a class: give an object of it, {name}(...)")
        if keyword == "model" and inspect.isfunction(given):
            raise UserError(f"model={name} is a function: give what it returns, or its name, 'module:{name}'")
    kind = type(optimizer).__name__
    if not isinstance(optimizer, str) and hasattr(optimizer, "param_groups"):
        raise UserError(
            f"optimizer={kind}(...) has parameters already, and each worker trains its own copy of the model: give the "
            f"class, torch.optim.{kind}, or functools.partial of it with its settings"
        )


def _name_of(keyword: str, code: Callable[..., Any]) -> str:
    """Return how a run's description names what was given as an object."""
    if keyword == "optimizer":
        from echelon.optim.own import check_factory, described

        check_factory(code, getattr(code, "__name__", type(code).__name__))
        return described(code)
    return getattr(code, "__name__", type(code).__name__)


def _logger_names(loggers: object, names: object) -> dict[str, SettingValue]:
    """Return the setting of the loggers that are named, among others in a list; nothing where it names none."""
    listed = [logger for logger in _listed(loggers) if isinstance(logger, str)]
    return {"tracking.loggers": "+".join([*([str(names)] if names else []), *listed])} if listed else {}


def _callback_names(callbacks: object) -> str:
    """Return the callbacks that are named, among objects in a list."""
    return "+".join(each for each in _callback_list(callbacks) if isinstance(each, str))


def _callback_objects(callbacks: object) -> tuple[object, ...]:
    """Return the callbacks that are objects: one alone, or those of a list."""
    return tuple(each for each in _callback_list(callbacks) if not isinstance(each, str))


def _given_callbacks(callbacks: object) -> str | Sequence[object]:
    """Return names as they are, else a list that can be looked at more than once."""
    text = _left_out(callbacks)
    return text if isinstance(text, str) else _callback_list(text)


def _callback_list(callbacks: object) -> Sequence[object]:
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        return (callbacks,)
    return callbacks if isinstance(callbacks, Sequence) else tuple(callbacks)


def _logger_objects(loggers: object) -> tuple[object, ...] | str:
    """Return the loggers that are objects; an empty text where none is."""
    return tuple(logger for logger in _listed(loggers) if not isinstance(logger, str)) or ""


def _listed(loggers: object) -> Sequence[object]:
    if isinstance(loggers, str) or not isinstance(loggers, Sequence):
        raise UserError("loggers is a list: loggers=['wandb', MyLogger()]; or names alone: logger='wandb+mlflow'")
    return loggers


def _left_out(value: Any) -> Any:
    """Return what a caller gave for a keyword; None stands for nothing."""
    return "" if value is None else value


def _described(value: object) -> str:
    """Return how a run's description names a loss or metrics."""
    return value if isinstance(value, str) else of_object(value)


def _metrics_text(metrics: Any) -> Any:
    """Return metrics that are names in a list as one text, as the command line takes them; others as they are."""
    if isinstance(metrics, list | tuple) and all(isinstance(metric, str) for metric in metrics):
        return "+".join(metrics)
    return _left_out(metrics)


def _check_same(keyword: str, described: str, name: str) -> None:
    if name != described:
        raise UserError(f"the run's {keyword} is {described!r}, and what is given from Python is {name!r}")


def _by_setting(settings: Mapping[str, Any]) -> dict[str, SettingValue]:
    return {setting_of(name): value for name, value in settings.items()}


def _name_of_data(data: OwnData) -> str:
    from echelon.data import name_of_data

    return name_of_data(data)


def _with_its_task(data: str | OwnData, task: str | Task, config: RunConfig) -> tuple[str | OwnData, Task | None]:
    """Return data with the task that is known: the caller's own, or what data sets of the caller's are for.

    Where none is named these are made a source here, once: the tasks that targets tell hold out no other share. A loss
    of the caller's own is in the description.
    """
    if not isinstance(task, str):
        return data, task
    if isinstance(data, str) or task != "auto":
        return data, None
    from echelon.data import source_of
    from echelon.tasks.registry import TaskChoice, TaskObjects, build_task

    source = source_of(data, config.data.holdout, config.training.seed)
    return source, build_task(TaskChoice.of(config).name_for(source.info, TaskObjects()))


def _is_one_text(config: RunConfig, task: Task | None) -> bool:
    """Whether samples are windows of one text, whose end is held out."""
    from echelon.tasks.base import Encoding
    from echelon.tasks.registry import AUTO, build_task

    if task is None and config.task != AUTO:
        task = build_task(config.task)
    return task is not None and task.encoding in (Encoding.NEXT_TOKEN, Encoding.MASKED_TOKENS)


def _user_objects(candidates: Mapping[str, Any], config: RunConfig) -> UserObjects | None:
    """Return what is not given by name; None: all of it is."""
    objects = {name: value for name, value in candidates.items() if value is not None and not isinstance(value, str)}
    if not objects:
        return None
    from echelon.data import source_of
    from echelon.data.normalise import read_normalise
    from echelon.data.transforms import Transforms
    from echelon.trainer.assemble import UserObjects

    data, model = objects.get("data"), objects.get("model")
    _check_targets(model, candidates.get("loss"), data)
    if (module := _as_module(model)) is not model:
        loss, metrics = _compiled(module, objects.get("loss", ""), objects.get("metrics", ""))
        described = {"loss": (loss, config.optimizer.loss), "metrics": (metrics, config.training.metrics)}
        objects |= {name: value for name, (value, text) in described.items() if value and of_object(value) == text}
    source = None
    if data is not None:
        end = _is_one_text(config, objects.get("task"))
        source = source_of(data, config.data.holdout, config.training.seed, end)
        source = source.normalised(read_normalise(config.data.normalise))
    return UserObjects(
        model=module,
        source=source,
        task=objects.get("task"),
        callbacks=_callback_objects(objects.get("callbacks", ())),
        loggers=objects.get("loggers", ()),
        transforms=Transforms(objects.get("transform"), objects.get("eval_transform")),
        loss=objects.get("loss"),
        loss_mark=code_mark(objects["loss"]) if "loss" in objects else "",
        metrics=objects.get("metrics"),
        optimizer=objects.get("optimizer"),
    )


def _check_targets(model: Any, loss: Any, data: Any) -> None:
    """Refuse targets of a model of Keras that its loss takes as classes, and the task that they tell as numbers."""
    from echelon.data import Source
    from echelon.models.keras_model import KerasModule

    if not (isinstance(model, KerasModule) and loss == "" and isinstance(data, Source)):
        return
    values = data.info.target_values
    if data.info.task == "regression" or (values is not None and values.one_hot):
        from echelon.models.keras_compiled import check_targets

        check_targets(model, data.info.name)


def _compiled(module: Any, loss: Any, metrics: Any) -> tuple[Any, Any]:
    """Return the loss and the metrics that a model of Keras was compiled with, where none are given."""
    from echelon.models.keras_compiled import compiled_loss, compiled_metrics

    if loss == "" and (own := compiled_loss(module)) is not None:
        loss = own
    if metrics == "" and (measured := compiled_metrics(module)):
        metrics = measured
    return loss, metrics


def _as_module(model: Any) -> Any:
    """Return a caller's model as a module of torch: one of Keras is wrapped, a name stays a name.

    Raises:
        UserError: Keras computes with another backend, or the model has no weights yet.
    """
    if isinstance(model, str):
        return model
    from echelon.models.keras_model import is_keras_model, keras_module

    return keras_module(model, f"model {type(model).__name__}") if is_keras_model(model) else model


def _no_objects() -> UserObjects:
    from echelon.trainer.assemble import UserObjects

    return UserObjects()


def _read(path: Path, overrides: Mapping[str, SettingValue] | None = None) -> Resolved:
    folders.check_is_run(path)
    bring_from_place(path)
    return build(path / folders.CONFIG_FILE, overrides)


def _links(follow: bool) -> dict[str, SettingValue]:
    return {"data.follow_links": True} if follow else {}


def _brought(run: str | Path) -> Path:
    """Return the folder of a run; one at a URL is brought to this machine first."""
    return bring(check_url(str(run)), tell=say) if is_url(str(run)) else Path(run)


def _with_overrides(path: Path, overrides: Mapping[str, SettingValue]) -> Resolved:
    folders.check_is_run(path)
    stays = [name for name in overrides if not name.startswith(RESUMABLE)]
    present = _read(path).config if stays else None
    for name in overrides:
        if name not in {each for each, _, _ in leaves()}:
            raise UserError(f"unknown setting {name!r}: {hint_for(name)}".rstrip(": "))
    for name in stays:
        before = attrgetter(name)(present)
        if overrides[name] != before and str(overrides[name]) != str(before):
            raise UserError(
                f"{name} cannot change when a run is resumed: start a new run, with --weights from this one"
            )
    return _read(path, {name: value for name, value in overrides.items() if name not in stays})
