"""`echelon train` and `echelon resume`: one option per setting of the description."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from echelon.cli.app import COMMANDS, EXIT_CODES, as_command
from echelon.cli.settings import overrides_of, parameter, trust_parameter, with_settings
from echelon.config import build
from echelon.run.resolve import check_names

if TYPE_CHECKING:
    from echelon.config import RunConfig
    from echelon.run.start import Outcome


def command() -> Any:
    """Build `echelon train`."""

    def train(config: str | None, dry_run: bool, serve: bool, trust: bool, **settings: Any) -> None:
        """Train, or show what would be started."""
        resolved = build(Path(config) if config else None, overrides_of(settings))
        check_names(resolved.config)  # before what starts runs is imported: a misspelt word is said at once
        from echelon.run.trust import check_trust

        check_trust(resolved, trust)
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
        trust_parameter(),
    ]
    return as_command(with_settings(train, extra), "train", f"{COMMANDS['train'][1]}\n\n{EXIT_CODES}")


def _start(config: RunConfig, serve: bool) -> Outcome:
    from echelon.run.start import start

    if not serve:
        return start(config)
    from echelon.study.serving import served

    return start(config, around=partial(served, wanted=True))


def resume_command() -> Any:
    """Build `echelon resume`."""
    from echelon.api import RESUMABLE

    def resume(run_folder: str, trust: bool, from_scratch: bool, **settings: Any) -> None:
        """Continue a run."""
        from echelon import api

        _finish(api.resume(run_folder, overrides_of(settings), trust, from_scratch))

    extra = [
        parameter("run_folder", str, typer.Argument(..., metavar="RUN", help="the run's folder")),
        trust_parameter(),
        parameter("from_scratch", bool, typer.Option(
            False, "--from-scratch", help="train from the beginning; checkpoints so far are put aside")),
    ]  # fmt: skip
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
