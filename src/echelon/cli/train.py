"""`echelon train` and `echelon resume`: one option per setting of the description."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from echelon.cli.app import COMMANDS, EXIT_CODES, as_command
from echelon.cli.settings import overrides_of, parameter, trust_parameter, with_settings
from echelon.config import build
from echelon.config.build import COMMAND_LINE
from echelon.config.keywords import RESUMABLE
from echelon.core.errors import UserError
from echelon.core.model_names import check_model_name
from echelon.core.output import print_words
from echelon.optim.names import check_optimizer_name
from echelon.run.data_names import check_data_name
from echelon.run.resolve import check_names, left_open, place_of

if TYPE_CHECKING:
    from echelon.config import Resolved, RunConfig
    from echelon.records.events import Event
    from echelon.run.outcome import Outcome

EXAMPLES = """Examples:
  echelon train digits --epochs 3 --workers 2
  echelon train PATH/cifar10 --model resnet20 --batch-size 256 --lr 0.2
  echelon train DATA --workers 2 --sync "local(8)" --compression "topk(0.01)"
  echelon train DATA --parallel "dp=2,tp=2" --dry-run
  echelon train DATA --nodes 2 --rendezvous HOST:29400      on each machine
  echelon train DATA --on "slurm(nodes=2, gpus=4, time=8h)"
  echelon train DATA --on "ssh(hosts=a+b+c)"
  echelon train --config runs/NAME/config.yaml              the same run again"""


def command() -> Any:
    """Build `echelon train`."""

    def train(config: str | None, **settings: Any) -> None:
        """Train, or show what would be started."""
        auto, tolerance, way = settings.pop("auto"), settings.pop("tolerance"), WayToStart.of(settings)
        resolved = build(Path(config) if config else None, overrides_of(settings))
        if config and _describes_itself(resolved, Path(config)):  # the run is repeated, under the next free name
            resolved = replace(resolved, config=replace(resolved.config, run=""))
        if auto or left_open(resolved.config):
            resolved, trials = _chosen(resolved, tolerance, way.trust, auto)
            _train(resolved, way, trials)
            return
        _train(resolved, way)

    of_file = parameter(
        "config",
        str | None,
        typer.Option(None, "--config", metavar="FILE", help="YAML file of settings; options override it"),
    )
    text = f"{COMMANDS['train'][1]}\n\n{EXAMPLES}\n\n{EXIT_CODES}"
    return as_command(with_settings(train, [of_file, *_choosing(), *_ways_to_start()]), "train", text)


def finetune_command() -> Any:
    """Build `echelon finetune`."""

    def finetune(run_folder: str, **settings: Any) -> None:
        """Train from a run's best weights."""
        from echelon.run.finetune import tuned_from

        way = WayToStart.of(settings)
        overrides = tuned_from(Path(run_folder), overrides_of(settings), way.trust)
        _train(build(None, overrides), way)

    places = [
        parameter("run_folder", str, typer.Argument(..., metavar="RUN", help="the folder of the run to start from")),
        parameter("data__source", str, typer.Argument(..., metavar="DATA", help="what is trained on, as for train")),
    ]
    wanted = with_settings(finetune, [*places, *_ways_to_start()], without=("data.source",))
    text = f"{COMMANDS['finetune'][1]}\n\nThe model, its preprocessing and tokeniser are the run's; a head of another "
    return as_command(wanted, "finetune", f"{text}size is made anew.\n\n{EXIT_CODES}")


@dataclass(frozen=True)
class WayToStart:
    """What becomes of a description.

    Attributes:
        dry_run: it is shown, nothing is started.
        all_settings: those that are as by default are shown too.
        serve: the run is shown as a page.
        trust: import code that it names.
        detach: leave the run to its place.
    """

    dry_run: bool
    all_settings: bool
    serve: bool
    trust: bool
    detach: bool

    @classmethod
    def of(cls, settings: dict[str, Any]) -> WayToStart:
        """Take the options that say so out of a command's."""
        return cls(**{item.name: settings.pop(item.name) for item in fields(cls)})


def _train(resolved: Resolved, way: WayToStart, trials: Sequence[Event] = ()) -> None:
    """Start what is described, or show what would be started.

    Args:
        trials: that led to it, for the record.
    """
    check_names(resolved.config)  # before what starts runs is imported: a misspelt word is said at once
    check_data_name(resolved.config.data.source)
    check_model_name(resolved.config.model.name)
    check_optimizer_name(resolved.config.optimizer.name)
    from echelon.run.defaults import with_task_defaults
    from echelon.run.trust import check_trust

    check_trust(resolved, way.trust)
    if not (way.dry_run or way.detach):
        _say_first(resolved.config)
    resolved = with_task_defaults(resolved)
    if (way.dry_run or way.detach) and _elsewhere(resolved.config, way):
        return
    if way.dry_run:
        from echelon.cli.dry_run import show

        show(resolved, way.all_settings)
        return
    _finish(_start(resolved.config, way.serve, trials))


def _say_first(config: RunConfig) -> None:
    """Say at once what is known of a run whose data has to be read before the rest is."""
    from echelon.run.start import begin_imports, said_before

    if words := said_before(config):
        print_words(words)
        sys.stdout.flush()
        begin_imports(config)


def _elsewhere(config: RunConfig, way: WayToStart) -> bool:
    """Show what would be submitted to the run's place, or leave the run to it; returns whether it takes whole runs.

    Raises:
        UserError: it does not, and was to.
    """
    cluster = place_of(config).cluster()
    if cluster is None and way.detach:
        raise UserError(f"--detach leaves a run to a place that takes it whole: --on {config.launch.on} does not")
    if cluster is None:
        return False
    from echelon.run.elsewhere import submitted, text_for
    from echelon.run.foretold import foretell

    if way.dry_run:
        print(text_for(config, cluster, foretell(config).model), end="")
    else:
        submitted(config, cluster, foretell(config).model)
    return True


def _choosing() -> list[inspect.Parameter]:
    return [
        parameter("auto", bool, typer.Option(
            False, "--auto", help="choose layout, sync and codec by memory and short trial runs on these workers "
            "and links, and say why; for one of them alone: --parallel auto, --sync auto, --compression auto")),
        parameter("tolerance", float, typer.Option(
            0.3, "--tolerance", min=0.0, metavar="NUMBER", help="with --auto: points of accuracy that a choice may "
            "cost, by Echelon's own measurements on other work [default: 0.3]")),
    ]  # fmt: skip


def _chosen(resolved: Resolved, tolerance: float, trust: bool, all_of_it: bool) -> tuple[Resolved, Sequence[Event]]:
    """Return the description with what fits and what short runs found best in place of `auto`, and what was tried.

    Args:
        all_of_it: layout, sync and codec are all to be chosen.
    """
    from echelon.planning.auto import choose, settled
    from echelon.run.defaults import with_task_defaults
    from echelon.run.trust import check_trust

    free = left_open(resolved.config)
    if all_of_it and free:
        words = ", ".join(f"--{name.removeprefix('strategy.')} auto" for name in sorted(free))
        raise UserError(f"--auto chooses layout, sync and codec: leave out {words}, or --auto")
    described = replace(resolved, config=settled(resolved.config))
    check_names(described.config)
    check_data_name(described.config.data.source)
    check_model_name(described.config.model.name)
    check_trust(described, trust)
    choice = choose(with_task_defaults(described), tolerance, free)
    for line in choice.words:
        print_words(line)
    origins = {**resolved.origins, **dict.fromkeys(choice.settings, "auto")}
    return replace(resolved, config=settled(resolved.config, choice.settings), origins=origins), choice.trials


def _ways_to_start() -> list[inspect.Parameter]:
    return [
        parameter(
            "dry_run",
            bool,
            typer.Option(False, "--dry-run", help="show what would start and what is not as by default, start nothing"),
        ),
        parameter("all_settings", bool, typer.Option(False, "--all", help="with --dry-run: show all settings")),
        parameter(
            "serve", bool, typer.Option(False, "--serve", help="show the run as a page on this machine while it goes")
        ),
        _detach_parameter(),
        trust_parameter(),
    ]


def _detach_parameter() -> inspect.Parameter:
    words = "return as soon as the place (--on) has accepted the run, which goes on there"
    return parameter("detach", bool, typer.Option(False, "--detach", help=words))


def _describes_itself(resolved: Resolved, file: Path) -> bool:
    """Whether a file is the description in the very run folder that it names."""
    return resolved.origins["run"] != COMMAND_LINE and Path(resolved.config.run).resolve() == file.resolve().parent


def _start(config: RunConfig, serve: bool, trials: Sequence[Event]) -> Outcome:
    from echelon.run.start import start

    return start(config, around=partial(_around, serve=serve, trials=trials))


@contextmanager
def _around(path: Path, serve: bool, trials: Sequence[Event]) -> Iterator[None]:
    """Begin a run's record with what was tried before it, and show the run as a page while it goes, if wanted."""
    if trials:
        from echelon.records.file import Recorder

        with closing(Recorder(path)) as record:
            for trial in trials:
                record.write(trial)
    if not serve:
        yield
        return
    from echelon.study.serving import live_page_of

    with live_page_of(path, wanted=True):
        yield


def resume_command() -> Any:
    """Build `echelon resume`."""

    def resume(run_folder: str, trust: bool, from_scratch: bool, rescan: bool, detach: bool, **settings: Any) -> None:
        """Continue a run."""
        from echelon import api
        from echelon.run.outcome import SUBMITTED, RunFailed

        try:
            outcome = api.continue_run(run_folder, {}, overrides_of(settings), trust, from_scratch, rescan, detach)
        except RunFailed as failure:
            outcome = failure.outcome
        if outcome.status != SUBMITTED:
            _finish(outcome)

    extra = [
        parameter("run_folder", str, typer.Argument(..., metavar="RUN", help="the run's folder")),
        trust_parameter(),
        parameter("from_scratch", bool, typer.Option(
            False, "--from-scratch", help="train from the beginning; checkpoints so far are put aside")),
        parameter("rescan", bool, typer.Option(
            False, "--rescan", help="take samples that are new in the data, from the next epoch on")),
        _detach_parameter(),
    ]  # fmt: skip
    return as_command(with_settings(resume, extra, RESUMABLE), "resume", f"{COMMANDS['resume'][1]}\n\n{EXIT_CODES}")


def _finish(outcome: Outcome) -> None:
    """Print the closing words of a run; exits with another code than 0 unless it completed."""
    from echelon.records.going import resumed_by
    from echelon.run.outcome import failed_log

    for line in outcome.words or _closing_words(outcome.folder):
        print_words(line)
    where = outcome.folder / "report.html"
    print(f"{outcome.status}; report: {where}" if where.exists() else f"{outcome.status}; run: {outcome.folder}")
    if outcome.status == "failed":
        print(f"log: {failed_log(outcome.folder)}")
    if outcome.status == "stopped":
        print(f"continue with: {resumed_by(outcome.folder)}")
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)


def _closing_words(folder: Path) -> list[str]:
    """Return what a report would say in closing, from the record: it takes a second or more."""
    from echelon.reporting.report import closing_words, load_run, summarise

    return closing_words(summarise(load_run(folder)))
