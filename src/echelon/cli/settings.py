"""Settings as options of a command, for every command that takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field
from functools import partial
from typing import Any, get_args, get_origin

import typer

from echelon.cli.help import BASIC
from echelon.collectives.registry import PATHS
from echelon.compression.registry import CODECS
from echelon.config.build import flag_of, leaves
from echelon.config.schema import traits_of
from echelon.core.tuning import TUNINGS
from echelon.sync.registry import STRATEGIES

TRUST = "import code (module:function) that a file of settings names and that you have not used before"

BASICS = (  # what most commands need: shown first
    "task", "model.name", "training.epochs", "data.batch_size", "optimizer.name", "optimizer.lr", "launch.workers",
    "training.device", "training.precision", "strategy.parallel", "strategy.sync", "strategy.compression",
    "strategy.collective", "training.seed", "run",
)  # fmt: skip
HEADINGS = {
    "data": "Data", "model": "Model", "optimizer": "Optimizer and loss", "training": "Training",
    "strategy": "Layout", "launch": "Processes and machines", "checkpoint": "Checkpoints",
    "tracking": "Callbacks and loggers",
}  # fmt: skip
METAVARS = {
    "strategy.parallel": "LAYOUT", "strategy.sync": "SPEC", "strategy.compression": "SPEC",
    "strategy.collective": "SPEC", "model.tune": "SPEC", "run": "FOLDER",
    "data.root": "FOLDER", "launch.log_dir": "FOLDER",
    "model.weights": "FILE", "model.name": "NAME", "optimizer.name": "NAME", "task": "NAME", "launch.on": "PLACE",
    "training.max_time": "TIME", "launch.timeout": "TIME", "launch.machine_patience": "TIME",
    "checkpoint.io_patience": "TIME", "launch.log_limit": "SIZE", "launch.rendezvous": "HOST:PORT",
    "checkpoint.mirror": "URL",
}  # fmt: skip
_TYPES = {int: "N", float: "NUMBER", str: "TEXT"}

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
    parameters = sorted([*settings, *extra], key=lambda p: (isinstance(p.default, typer.models.OptionInfo), _place(p)))
    return with_parameters(function, parameters)


def with_parameters(function: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """Give a function keyword parameters for typer to read, in place of those that it is written with."""
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


def _setting(name: str, item: Field[Any], kind: Any) -> inspect.Parameter:
    flag, key = flag_of(name, item), _argument_name(name)
    text = traits_of(item).help + _values(name, kind) + _default(item)
    if not flag.startswith("--"):
        return parameter(key, str | None, typer.Argument(None, metavar=flag, help=text, show_default=False))
    panel = BASIC if name in BASICS else HEADINGS[name.partition(".")[0]]
    option = partial(typer.Option, None, help=text, rich_help_panel=panel, show_default=False)
    if kind is bool:
        return parameter(key, bool | None, option(f"{flag}/--no-{flag[2:]}"))
    metavar = "WORD" if get_origin(kind) is not None else METAVARS.get(name, _TYPES[kind])
    return parameter(key, str | None, option(flag, metavar=metavar))


def _values(name: str, kind: Any) -> str:
    """Return the values of a setting that has only a few, or what their names are."""
    registry = {
        "strategy.sync": STRATEGIES, "strategy.compression": CODECS, "strategy.collective": PATHS,
        "model.tune": TUNINGS,
    }.get(name)  # fmt: skip
    if registry is not None:
        return f" [{', '.join(registry.names())}; see echelon explain NAME]"
    return f" [{', '.join(get_args(kind))}]" if get_origin(kind) is not None else ""


def _default(item: Field[Any]) -> str:
    if item.default in ("", MISSING):
        return ""
    default = {True: "yes", False: "no"}.get(item.default) if isinstance(item.default, bool) else f"{item.default}"
    return f" [default: {default}]"


def _place(option: inspect.Parameter) -> int:
    """Return where an option stands in help: basic settings first, in their order, then others as they come."""
    keys = [_argument_name(name) for name in BASICS]
    return keys.index(option.name) if option.name in keys else len(keys)


def parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """Build one keyword parameter."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
