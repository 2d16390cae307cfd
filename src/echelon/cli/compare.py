"""`echelon compare`: the candidates, on equal terms, and what came of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from echelon.cli.app import COMMANDS, as_command
from echelon.cli.settings import overrides_of, parameter, trust_parameter, with_settings
from echelon.config.keywords import NOT_OF_STUDIES
from echelon.core.output import print_words
from echelon.core.stop import stopped_exit_code

if TYPE_CHECKING:
    from echelon.study import Study
    from echelon.study.outcome import StudyOutcome

_EXIT_INCOMPLETE = 1


def command() -> Any:
    """Build `echelon compare`."""

    def compare(
        tries: list[str] | None, seeds: str | None, loss: str | None, config: str | None, **others: Any
    ) -> None:
        """Describe a study, and run it or show what would be run."""
        from echelon.study.file import StudyRequest, claim_folder, requested_folder, requested_study
        from echelon.study.outcome import check_study_trust, warn_of_refusals

        retry, dry_run, serve, trust = (others.pop(name) for name in ("retry", "dry_run", "serve", "trust"))
        at_once = others.pop("at_once")
        tune_lr, equal_time = others.pop("tune_lr"), others.pop("equal_time")
        settings = {name: str(value) for name, value in overrides_of(others).items()}
        folder = settings.pop("run", "")
        request = StudyRequest(
            settings, tuple(tries or ()), seeds or "", loss or "", config or "", tune_lr, equal_time or ""
        )
        study = requested_study(request)
        check_study_trust(request, folder, trust)
        if dry_run:
            _show(study, Path(folder) if folder else requested_folder(study, request), at_once)
            return
        if study is not None:
            from echelon.study.execute import How

            How.of(study, at_once)  # before anything is in the folder
            warn_of_refusals(study)
        _run(Path(folder) if folder else claim_folder(study, request), study, retry, serve, at_once)

    text = "DATA, or a study file (study.yaml); with --run alone the study in that folder is continued"
    extra = [
        parameter("tries", list[str] | None, typer.Option(
            None, "--try", metavar="SETTING=VALUE, ...", show_default=False,
            help='a candidate, such as "sync=diloco(period=20), compression=int8"; the first one is the baseline')),
        parameter("seeds", str | None, typer.Option(
            None, "--seeds", help="how many (3), or which (0,5,7) [default: 3]")),
        parameter("loss", str | None, typer.Option(
            None, "--loss", help="points of accuracy that the target lies below the baseline [default: 0.5]")),
        parameter("equal_time", str | None, typer.Option(
            None, "--equal-time", metavar="baseline|TIME",
            help="say, too, who is best after the time that the baseline takes, or after another, such as 60s: each "
            "candidate is trained again for the epochs that end in it")),
        parameter("tune_lr", bool, typer.Option(
            False, "--tune-lr", help="look first, in short runs, for each candidate's best learning rate")),
        parameter("config", str | None, typer.Option(
            None, "--config", metavar="FILE", help="YAML file of settings for every run; its seed is left out")),
        parameter("at_once", int, typer.Option(
            0, "--at-once", min=0, metavar="N",
            help="runs that go on at the same time, on a cluster (--on); 0: four there, one on this machine")),
        parameter("retry", bool, typer.Option(False, "--retry", help="run again what was refused or failed")),
        parameter("dry_run", bool, typer.Option(False, "--dry-run", help="show each run's command, start nothing")),
        parameter("serve", bool, typer.Option(
            False, "--serve", help="show the study as a page on this machine while it goes")),
        trust_parameter(),
    ]  # fmt: skip
    function = with_settings(compare, extra, without=NOT_OF_STUDIES)
    return as_command(function, "compare", f"{COMMANDS['compare'][1]}\n\n{text}.")


def show_outcome(outcome: StudyOutcome) -> None:
    """Print the words of a study, and where its page is."""
    for line in outcome.words:
        print_words(line)
    print(f"report: {outcome.folder / 'report.html'}")


def _show(study: Study | None, path: Path, at_once: int) -> None:
    from echelon.study import load_study
    from echelon.study.execute import How
    from echelon.study.folder import command_of, run_folder
    from echelon.study.outcome import warn_of_refusals
    from echelon.study.stages import all_runs

    study = study or load_study(path / "study.yaml")
    pace = How.of(study, at_once).pace
    warn_of_refusals(study)
    runs = all_runs(study)
    for run in runs:
        print(command_of(run, run_folder(path, run.name)))
    more = "; then those of equal time, by what these take" if study.equal_time and not study.choices.epochs else ""
    print(f"would start {len(runs)} runs, {pace}{more}", file=sys.stderr)


def _run(path: Path, study: Study | None, retry: bool, serve: bool, at_once: int) -> None:
    from echelon.study.outcome import carry_out

    outcome = carry_out(path, study, retry, serve, at_once)
    show_outcome(outcome)
    if outcome.status == "stopped":
        print(f"stopped; continue with: echelon compare --run {path}")
        raise SystemExit(stopped_exit_code(outcome.signum))
    if outcome.status == "partial":
        print(f"to run again what was refused or failed: echelon compare --run {path} --retry")
        raise SystemExit(_EXIT_INCOMPLETE)
