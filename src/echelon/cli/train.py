"""`echelon train` and `echelon resume`: one option per setting of the description."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from echelon.cli.app import COMMANDS, EXIT_CODES, as_command
from echelon.cli.settings import overrides_of, parameter, with_settings
from echelon.config import build
from echelon.run.resolve import check_names

if TYPE_CHECKING:
    from echelon.config import RunConfig
    from echelon.run.start import Outcome


def command() -> Any:
    """Build `echelon train`."""

    def train(config: str | None, dry_run: bool, serve: bool, **settings: Any) -> None:
        """Train, or show what would be started."""
        resolved = build(Path(config) if config else None, overrides_of(settings))
        check_names(resolved.config)  # before what starts runs is imported: a misspelt word is said at once
        if dry_run:
            from echelon.cli.dry_run import show

            show(resolved)
            return
        _finish(_start(resolved.config, serve))

    extra = [
        parameter(
            "config", str | None, typer.Option(None, "--config", help="YAML file of settings; options override it")
        ),
        parameter(
            "dry_run",
            bool,
            typer.Option(False, "--dry-run", help="show the settings with their origins, start nothing"),
        ),
        parameter(
            "serve", bool, typer.Option(False, "--serve", help="show the run as a page on this machine while it goes")
        ),
    ]
    return as_command(with_settings(train, extra), "train", f"{COMMANDS['train'][1]}\n\n{EXIT_CODES}")


def _start(config: RunConfig, serve: bool) -> Outcome:
    """Start a run; with a page, its folder must be known beforehand (under torchrun the ranks agree on it later)."""
    from echelon.run.start import start

    if not serve:
        return start(config)
    from echelon.launch.plan import is_worker
    from echelon.study.serving import served
    from echelon.trainer.folder import default_folder

    folder = Path(config.run) if config.run else default_folder(config)
    with served(folder, wanted=True):
        return start(config if is_worker() else replace(config, run=str(folder)))


def resume_command() -> Any:
    """Build `echelon resume`."""
    from echelon.api import RESUMABLE

    def resume(run_folder: str, **settings: Any) -> None:
        """Continue a run."""
        from echelon import api

        _finish(api.resume(run_folder, overrides_of(settings)))

    extra = [parameter("run_folder", str, typer.Argument(..., metavar="RUN", help="the run's folder"))]
    return as_command(with_settings(resume, extra, RESUMABLE), "resume", f"{COMMANDS['resume'][1]}\n\n{EXIT_CODES}")


def _finish(outcome: Outcome) -> None:
    """Print the closing words of a run; exits with another code than 0 unless it completed."""
    from echelon.reporting.report import closing_words, load_run, summarise

    for line in closing_words(summarise(load_run(outcome.folder))):
        print(line)
    where = outcome.folder / "report.html"
    print(f"{outcome.status}; report: {where}" if where.exists() else f"{outcome.status}; run: {outcome.folder}")
    if outcome.status == "stopped":
        print(f"continue with: echelon resume {outcome.folder}")
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
