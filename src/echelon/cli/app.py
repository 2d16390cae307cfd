"""Commands by name. A command's module is imported when it is used: help takes no torch."""

from __future__ import annotations

import importlib
import platform
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from echelon.core.errors import unknown

COMMANDS = {
    "train": ("echelon.cli.train:command", "Train a model on data with any number of workers."),
    "resume": ("echelon.cli.train:resume_command", "Continue a run from its newest checkpoint."),
    "evaluate": ("echelon.cli.runs:evaluate_command", "Evaluate a run's best checkpoint."),
    "export": ("echelon.cli.runs:export_command", "Write a run's best weights as one plain safetensors file."),
    "compare": (
        "echelon.cli.compare:command",
        "Compare ways of training on your own work, with intervals and verdicts.",
    ),
    "watch": ("echelon.cli.watch:command", "Watch a run or a study while it goes, here or as a local page."),
    "report": ("echelon.cli.runs:report_command", "Write the report of a run or a study again from its record."),
}

EXIT_CODES = (
    "Exit codes: 0 completed; 1 failed; 2 refused, before the first step; 128 + signal when a signal stopped it, after "
    "a checkpoint of the last step and a report: 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP (the terminal was closed), 131 "
    "SIGQUIT."
)


class LazyGroup(TyperGroup):
    """Shows all commands from their one-line help; builds the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """Return a stand-in that knows its help."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Build the command that is called."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise unknown("command", args[0], COMMANDS)
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            module, _, function = COMMANDS[name][0].partition(":")
            command = getattr(importlib.import_module(module), function)()
        return name, command, rest


app = typer.Typer(
    cls=LazyGroup, rich_markup_mode=None, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"echelon {version('echelon')}, torch {version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the versions and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Echelon trains PyTorch models on many processes and machines, and shows what each way of doing so costs.

    Add --debug to any command to see the traceback of an error.
    """


def as_command(function: Any, name: str, help: str) -> Any:
    """Turn one function into a command."""
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name=name, help=help)(function)
    return typer.main.get_command(single)
