"""`echelon train` and `echelon resume`: one option per setting of the description."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from echelon.cli.app import COMMANDS, EXIT_CODES, as_command
from echelon.cli.settings import overrides_of, parameter, trust_parameter, with_settings
from echelon.config import build
from echelon.config.build import COMMAND_LINE
from echelon.config.keywords import RESUMABLE
from echelon.core.output import print_words
from echelon.optim.names import check_optimizer_name
from echelon.run.data_names import check_data_name
from echelon.run.resolve import check_names

if TYPE_CHECKING:
    from echelon.config import Resolved, RunConfig
    from echelon.run.outcome import Outcome

EXAMPLES = """Examples:
  echelon train digits --epochs 3 --workers 2
  echelon train PATH/cifar10 --model resnet20 --batch-size 256 --lr 0.2
  echelon train DATA --workers 2 --sync "local(8)" --compression "topk(0.01)"
  echelon train DATA --parallel "dp=2,tp=2" --dry-run
  echelon train DATA --nodes 2 --rendezvous HOST:29400      on each machine
  echelon train --config runs/NAME/config.yaml              the same run again"""


def command() -> Any:
    """Build `echelon train`."""

    def train(config: str | None, dry_run: bool, all_settings: bool, serve: bool, trust: bool, **settings: Any) -> None:
        """Train, or show what would be started."""
        resolved = build(Path(config) if config else None, overrides_of(settings))
        if config and _describes_itself(resolved, Path(config)):  # the run is repeated, under the next free name
            resolved = replace(resolved, config=replace(resolved.config, run=""))
        _train(resolved, dry_run, all_settings, serve, trust)

    of_file = parameter(
        "config", str | None, typer.Option(None, "--config", help="YAML file of settings; options override it")
    )
    text = f"{COMMANDS['train'][1]}\n\n{EXAMPLES}\n\n{EXIT_CODES}"
    return as_command(with_settings(train, [of_file, *_ways_to_start()]), "train", text)


def finetune_command() -> Any:
    """Build `echelon finetune`."""

    def finetune(run_folder: str, dry_run: bool, all_settings: bool, serve: bool, trust: bool, **settings: Any) -> None:
        """Train from a run's best weights."""
        from echelon.run.finetune import tuned_from

        overrides = tuned_from(Path(run_folder), overrides_of(settings), trust)
        _train(build(None, overrides), dry_run, all_settings, serve, trust)

    places = [
        parameter("run_folder", str, typer.Argument(..., metavar="RUN", help="the folder of the run to start from")),
        parameter("data__source", str, typer.Argument(..., metavar="DATA", help="what is trained on, as for train")),
    ]
    wanted = with_settings(finetune, [*places, *_ways_to_start()], without=("data.source",))
    text = f"{COMMANDS['finetune'][1]}\n\nThe model, its preprocessing and tokeniser are the run's; a head of another "
    return as_command(wanted, "finetune", f"{text}size is made anew.\n\n{EXIT_CODES}")


def _train(resolved: Resolved, dry_run: bool, all_settings: bool, serve: bool, trust: bool) -> None:
    """Start what is described, or show what would be started."""
    check_names(resolved.config)  # before what starts runs is imported: a misspelt word is said at once
    check_data_name(resolved.config.data.source)
    check_optimizer_name(resolved.config.optimizer.name)
    from echelon.run.defaults import with_task_defaults
    from echelon.run.trust import check_trust

    check_trust(resolved, trust)
    resolved = with_task_defaults(resolved)
    if dry_run:
        from echelon.cli.dry_run import show

        show(resolved, all_settings)
        return
    _finish(_start(resolved.config, serve))


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
        trust_parameter(),
    ]


def _describes_itself(resolved: Resolved, file: Path) -> bool:
    """Whether a file is the description in the very run folder that it names."""
    return resolved.origins["run"] != COMMAND_LINE and Path(resolved.config.run).resolve() == file.resolve().parent


def _start(config: RunConfig, serve: bool) -> Outcome:
    from echelon.run.start import start

    if not serve:
        return start(config)
    from echelon.study.serving import served

    return start(config, around=partial(served, wanted=True))


def resume_command() -> Any:
    """Build `echelon resume`."""

    def resume(run_folder: str, trust: bool, from_scratch: bool, rescan: bool, **settings: Any) -> None:
        """Continue a run."""
        from echelon import api
        from echelon.run.outcome import RunFailed

        try:
            outcome = api.resume(run_folder, overrides_of(settings), trust, from_scratch, rescan)
        except RunFailed as failure:
            outcome = failure.outcome
        _finish(outcome)

    extra = [
        parameter("run_folder", str, typer.Argument(..., metavar="RUN", help="the run's folder")),
        trust_parameter(),
        parameter("from_scratch", bool, typer.Option(
            False, "--from-scratch", help="train from the beginning; checkpoints so far are put aside")),
        parameter("rescan", bool, typer.Option(
            False, "--rescan", help="take images that are new in the data's folder, from the next epoch on")),
    ]  # fmt: skip
    return as_command(with_settings(resume, extra, RESUMABLE), "resume", f"{COMMANDS['resume'][1]}\n\n{EXIT_CODES}")


def _finish(outcome: Outcome) -> None:
    """Print the closing words of a run; exits with another code than 0 unless it completed."""
    from echelon.run.outcome import failed_log

    for line in outcome.words or _closing_words(outcome.folder):
        print_words(line)
    where = outcome.folder / "report.html"
    print(f"{outcome.status}; report: {where}" if where.exists() else f"{outcome.status}; run: {outcome.folder}")
    if outcome.status == "failed":
        print(f"log: {failed_log(outcome.folder)}")
    if outcome.status == "stopped":
        print(f"continue with: echelon resume {outcome.folder}")
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)


def _closing_words(folder: Path) -> list[str]:
    """Return what a report would say in closing, from the record: it takes a second or more."""
    from echelon.reporting.report import closing_words, load_run, summarise

    return closing_words(summarise(load_run(folder)))
