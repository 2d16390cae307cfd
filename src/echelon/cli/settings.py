"""Settings as options of a command, for every command that takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field
from typing import Any, get_args, get_origin

import typer

from echelon.config.build import flag_of, leaves

TRUST = "import code (module:function) that a description's file names and you have not used before"

Setting = str | bool | None


def overrides_of(arguments: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the settings that were given, by dotted name; `arguments` has None for the others."""
    names = {_argument_name(name): name for name, _, _ in leaves()}
    return {names[key]: value for key, value in arguments.items() if value is not None}


def _argument_name(dotted: str) -> str:
    return dotted.replace(".", "__")


def trust_parameter() -> inspect.Parameter:
    """Build `--trust`, for commands that read descriptions which may be anyone's."""
    return parameter("trust", bool, typer.Option(False, "--trust", help=TRUST))


def with_settings(
    function: Callable[..., None],
    extra: list[inspect.Parameter],
    only: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
) -> Callable[..., None]:
    """Give a function one keyword parameter per setting, for typer to read; `only` holds prefixes, `without` names."""
    wanted = [leaf for leaf in leaves() if (not only or leaf[0].startswith(only)) and leaf[0] not in without]
    settings = [_setting(name, item, kind) for name, item, kind in wanted]
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
        return parameter(
            _argument_name(name), str | None, typer.Argument(None, metavar=flag, help=text, show_default=False)
        )
    if kind is bool:
        flags = f"{flag}/--no-{flag[2:]}"
        return parameter(
            _argument_name(name),
            bool | None,
            typer.Option(None, flags, help=text, rich_help_panel=panel, show_default=False),
        )
    metavar = "|".join(get_args(kind)) if get_origin(kind) is not None else kind.__name__.upper()
    option = typer.Option(None, flag, help=text, metavar=metavar, rich_help_panel=panel, show_default=False)
    return parameter(_argument_name(name), str | None, option)


def parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """Build one keyword parameter."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
