"""`echelon train` and `echelon resume`: one option per setting of the description."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from echelon.cli.app import COMMANDS, as_command
from echelon.config import build
from echelon.config.build import flag_of, leaves

_EXIT_FAILED = 1


def command() -> Any:
    """Build `echelon train`."""

    def train(**given: Any) -> None:
        file, dry_run = given.pop("config"), given.pop("dry_run")
        resolved = build(Path(file) if file else None, _overrides(given))
        if dry_run:
            from echelon.cli.dry_run import show

            show(resolved)
            return
        from echelon import api

        _finish(api.start(resolved.config))

    extra = [
        _parameter(
            "config", str | None, typer.Option(None, "--config", help="YAML file of settings; options override it")
        ),
        _parameter(
            "dry_run",
            bool,
            typer.Option(False, "--dry-run", help="show the settings with their origins, start nothing"),
        ),
    ]
    return as_command(_with_settings(train, extra), "train", COMMANDS["train"][1])


def resume_command() -> Any:
    """Build `echelon resume`."""
    from echelon.api import RESUMABLE

    def resume(**given: Any) -> None:
        run = given.pop("run_folder")
        from echelon import api

        _finish(api.resume(run, _overrides(given)))

    extra = [_parameter("run_folder", str, typer.Argument(..., metavar="RUN", help="the run's folder"))]
    return as_command(_with_settings(resume, extra, RESUMABLE), "resume", COMMANDS["resume"][1])


def _finish(outcome: Any) -> None:
    from echelon.observe.report import closing_words, load_run, summarise

    for line in closing_words(summarise(load_run(outcome.folder))):
        print(line)
    where = outcome.folder / "report.html"
    print(f"{outcome.status}; report: {where}" if where.exists() else f"{outcome.status}; run: {outcome.folder}")
    if outcome.status == "stopped":
        print(f"continue with: echelon resume {outcome.folder}")
    if outcome.status == "failed":
        raise SystemExit(_EXIT_FAILED)


def _overrides(given: dict[str, Any]) -> dict[str, Any]:
    names = {_argument_name(name): name for name, _, _ in leaves()}
    return {names[key]: value for key, value in given.items() if value is not None}


def _argument_name(dotted: str) -> str:
    return dotted.replace(".", "__")


def _with_settings(
    function: Callable[..., None], extra: list[inspect.Parameter], only: tuple[str, ...] = ()
) -> Callable[..., None]:
    """Give a function one keyword parameter per setting, for typer to read."""
    settings = [_setting(name, item, kind) for name, item, kind in leaves() if not only or name.startswith(only)]
    parameters = sorted([*extra, *settings], key=lambda p: isinstance(p.default, typer.models.OptionInfo))
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


def _setting(name: str, item: Field[Any], kind: Any) -> inspect.Parameter:
    flag = flag_of(name, item)
    panel = name.partition(".")[0].capitalize() if "." in name else "Run"
    default = "" if item.default in ("", MISSING) else f" [default: {item.default}]"
    text = item.metadata["help"] + default
    if not flag.startswith("--"):
        return _parameter(
            _argument_name(name), str | None, typer.Argument(None, metavar=flag, help=text, show_default=False)
        )
    if kind is bool:
        flags = f"{flag}/--no-{flag[2:]}"
        return _parameter(
            _argument_name(name),
            bool | None,
            typer.Option(None, flags, help=text, rich_help_panel=panel, show_default=False),
        )
    metavar = "|".join(get_args(kind)) if get_origin(kind) is not None else kind.__name__.upper()
    option = typer.Option(None, flag, help=text, metavar=metavar, rich_help_panel=panel, show_default=False)
    return _parameter(_argument_name(name), str | None, option)


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
