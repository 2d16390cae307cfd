"""`echelon compare`: the candidates, on equal terms, and what came of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from echelon.cli.app import COMMANDS, as_command
from echelon.cli.settings import overrides_of, parameter, trust_parameter, with_settings
from echelon.core.files import full_disk_in_words
from echelon.core.stop import stop_on_signals, stopped_exit_code

if TYPE_CHECKING:
    from echelon.study import Study
    from echelon.study.file import StudyRequest

_CONTINUE = "echelon compare --run"
_EXIT_INCOMPLETE = 1


def command() -> Any:
    """Build `echelon compare`."""

    def compare(
        tries: list[str] | None, seeds: str | None, loss: str | None, config: str | None, **others: Any
    ) -> None:
        """Describe a study, and run it or show what would be run."""
        from echelon.study.file import StudyRequest, claim_folder, requested_folder, requested_study

        retry, dry_run, serve, trust = (others.pop(name) for name in ("retry", "dry_run", "serve", "trust"))
        settings = {name: str(value) for name, value in overrides_of(others).items()}
        folder = settings.pop("run", "")
        request = StudyRequest(settings, tuple(tries or ()), seeds or "", loss or "", config or "")
        study = requested_study(request)
        _check_trust(request, folder, trust)
        if dry_run:
            _show(study, Path(folder) if folder else requested_folder(study, request))
            return
        if study is not None:
            _warn(study)
        _run(Path(folder) if folder else claim_folder(study, request), study, retry, serve)

    text = "DATA, or a study file (study.yaml); with --run alone the study in that folder is continued"
    extra = [
        parameter("tries", list[str] | None, typer.Option(
            None, "--try", metavar="SETTING=VALUE, ...", show_default=False,
            help='a candidate, such as "sync=diloco(period=20), compression=int8"; the first one is the baseline')),
        parameter("seeds", str | None, typer.Option(
            None, "--seeds", help="how many (3), or which (0,5,7) [default: 3]")),
        parameter("loss", str | None, typer.Option(
            None, "--loss", help="points of accuracy that the target lies below the baseline [default: 0.5]")),
        parameter("config", str | None, typer.Option(None, "--config", help="YAML file of settings for every run")),
        parameter("retry", bool, typer.Option(False, "--retry", help="run again what was refused or failed")),
        parameter("dry_run", bool, typer.Option(False, "--dry-run", help="show each run's command, start nothing")),
        parameter("serve", bool, typer.Option(
            False, "--serve", help="show the study as a page on this machine while it goes")),
        trust_parameter(),
    ]  # fmt: skip
    function = with_settings(compare, extra, without=("training.seed",))
    return as_command(function, "compare", f"{COMMANDS['compare'][1]}\n\n{text}.")


def _check_trust(request: StudyRequest, folder: str, trust: bool) -> None:
    """Refuse code that a study's file, or a file of settings, names and this user has not used before.

    Raises:
        UserError: names the code and the file.
    """
    from echelon.config import build
    from echelon.run.trust import check_settings, check_trust
    from echelon.study.file import STUDY_FILE, is_study, load_study, study_file

    file = study_file(request) or (Path(folder) / STUDY_FILE if is_study(Path(folder)) else None)
    if request.config:
        check_trust(build(Path(request.config)), trust)
    if file is None:
        return
    study = load_study(file)
    for settings in [study.base, *(c.settings for c in study.candidates), *(t.settings for t in study.terms)]:
        check_settings(settings, dict.fromkeys(settings, str(file)), trust)


def conclude(path: Path) -> bool:
    """Write a study's report and print its words; returns whether every run completed."""
    from echelon.study import write_study

    with full_disk_in_words(path, _CONTINUE):
        report = write_study(path)
    for line in report.words:
        print(line)
    print(f"report: {path / 'report.html'}")
    return report.completed == len(report.runs)


def _show(study: Study | None, path: Path) -> None:
    from echelon.study import load_study, planned_runs
    from echelon.study.execute import command_of
    from echelon.study.folder import run_folder

    study = study or load_study(path / "study.yaml")
    _warn(study)
    runs = planned_runs(study)
    for run in runs:
        print(command_of(run, run_folder(path, run.name)))
    print(f"would start {len(runs)} runs, one after the other", file=sys.stderr)


def _warn(study: Study) -> None:
    """Print which candidates will be refused, before anything starts.

    Raises:
        UserError: no run can start.
    """
    from echelon.run.resolve import launch_request
    from echelon.run.start import check
    from echelon.study.execute import check_settings

    for name, reason in check_settings(study, lambda config: check(launch_request(config))).items():
        print(f"echelon: {name} will be refused: {reason}", file=sys.stderr, flush=True)


def _run(path: Path, study: Study | None, retry: bool, serve: bool) -> None:
    from echelon.study import StudyStopped, open_study, run_study
    from echelon.study.live import StudyDisplay
    from echelon.study.serving import served

    study = open_study(path, study)
    try:
        with full_disk_in_words(path, _CONTINUE), served(path, serve), StudyDisplay(path) as display:
            run_study(path, study, display, retry)
    except StudyStopped as stop:
        with stop_on_signals():  # another signal does not take the report away
            conclude(path)
        print(f"stopped; continue with: echelon compare --run {path}")
        raise SystemExit(stopped_exit_code(stop.signum)) from None
    if not conclude(path):
        print(f"to run again what was refused or failed: echelon compare --run {path} --retry")
        raise SystemExit(_EXIT_INCOMPLETE)
