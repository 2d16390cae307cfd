"""`echelon compare`: the candidates, on equal terms, and what came of it."""

from __future__ import annotations

import re
import sys
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from echelon.cli.app import COMMANDS, as_command
from echelon.cli.settings import overrides_of, parameter, with_settings
from echelon.core.errors import UserError
from echelon.core.files import full_disk_in_words

if TYPE_CHECKING:
    from echelon.study import Study

_CONTINUE = "echelon compare --run"
_EXIT_INCOMPLETE = 1
_EXIT_STOPPED = 130
_OWN = ("tries", "seeds", "loss", "config", "retry", "dry_run", "serve")


def command() -> Any:
    """Build `echelon compare`."""

    def compare(**given: Any) -> None:
        own = {name: given.pop(name) for name in _OWN}
        settings = {name: str(value) for name, value in overrides_of(given).items()}
        folder = settings.pop("run", "")
        study = _described(settings, own)
        path = Path(folder) if folder else _default_folder(study, settings)
        if own["dry_run"]:
            _show(study, path)
            return
        _run(path, study, own["retry"], own["serve"])

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
    ]  # fmt: skip
    function = with_settings(compare, extra, without=("training.seed",))
    return as_command(function, "compare", f"{COMMANDS['compare'][1]}\n\n{text}.")


def conclude(path: Path) -> bool:
    """Write a study's report and say what it says; returns whether every run completed."""
    from echelon.study import write_study

    with full_disk_in_words(path, _CONTINUE):
        report = write_study(path)
    for line in report.words:
        print(line)
    print(f"report: {path / 'report.html'}")
    return report.completed == len(report.runs)


def _described(settings: dict[str, str], own: dict[str, Any]) -> Study | None:
    """The study that the command line describes; None: the one in the folder."""
    from echelon.study import from_tries, load_study

    data = settings.get("data.source", "")
    if data.endswith((".yaml", ".yml")):
        beside = [name for name in ("tries", "seeds", "loss", "config") if own[name]] + [
            n for n in settings if n != "data.source"
        ]
        if beside:
            raise UserError(f"{data} describes the whole study: write there what {beside[0]} should be")
        return load_study(Path(data))
    if not own["tries"]:
        if settings or own["seeds"] or own["loss"] or own["config"]:
            raise UserError('no candidate to compare: give each with --try, such as --try "sync=allreduce"')
        return None
    base = {**_from_config(own["config"]), **settings}
    return from_tries(base, own["tries"], own["seeds"] or "3", own["loss"])


def _from_config(file: str | None) -> dict[str, str]:
    if not file:
        return {}
    from echelon.config import build

    resolved = build(Path(file))
    given = [name for name, origin in resolved.origins.items() if origin != "default"]
    return {name: str(reduce(getattr, name.split("."), resolved.config)) for name in given if name != "run"}


def _default_folder(study: Study | None, settings: dict[str, str]) -> Path:
    if study is None:
        raise UserError("nothing to compare: give DATA and --try, a study file, or --run of a study to continue")
    word = re.sub(r"[^A-Za-z0-9_.]+", "-", Path(settings.get("data.source", "digits")).stem).strip("-") or "study"
    root = Path("runs")
    numbers = [int(m[1]) for p in root.glob(f"compare-{word}-*") if (m := re.fullmatch(r".*-(\d+)", p.name))]
    return root / f"compare-{word}-{max(numbers, default=0) + 1}"


def _show(study: Study | None, path: Path) -> None:
    from echelon.study import load_study, planned_runs
    from echelon.study.execute import command_of
    from echelon.study.folder import run_folder

    study = study or load_study(path / "study.yaml")
    _check(study)
    runs = planned_runs(study)
    for run in runs:
        print(command_of(run, run_folder(path, run.name)))
    print(f"would start {len(runs)} runs, one after the other", file=sys.stderr)


def _check(study: Study) -> None:
    """Say before anything starts what will be refused: hours later it would be found out.

    Raises:
        UserError: no run can start.
    """
    from echelon.run import start as starting
    from echelon.study.execute import check_settings

    for name, reason in check_settings(study, starting.check).items():
        print(f"echelon: {name} will be refused: {reason}", file=sys.stderr, flush=True)


def _run(path: Path, study: Study | None, retry: bool, serve: bool) -> None:
    from echelon.cli.serving import served
    from echelon.study import StudyStopped, open_study, run_study
    from echelon.study.live import StudyDisplay

    if study is not None:
        _check(study)
    study = open_study(path, study)
    try:
        with full_disk_in_words(path, _CONTINUE), served(path, serve), StudyDisplay(path) as display:
            run_study(path, study, display, retry)
    except StudyStopped:
        conclude(path)
        print(f"stopped; continue with: echelon compare --run {path}")
        raise SystemExit(_EXIT_STOPPED) from None
    if not conclude(path):
        print(f"to run again what was refused or failed: echelon compare --run {path} --retry")
        raise SystemExit(_EXIT_INCOMPLETE)
