"""Commands by name. A command's module is imported when it is used: help takes no torch."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from echelon.cli.help import BASIC, HelpfulCommand, Row, paragraphs, section, shown_width
from echelon.core.errors import unknown

COMMANDS = {
    "train": ("echelon.cli.train:command", "Train a model on data with any number of workers."),
    "resume": ("echelon.cli.train:resume_command", "Continue a run from its newest checkpoint."),
    "finetune": ("echelon.cli.train:finetune_command", "Train a new run from the best weights of another one."),
    "evaluate": ("echelon.cli.runs:evaluate_command", "Evaluate a checkpoint of a run."),
    "export": ("echelon.cli.runs:export_command", "Write a run's best model for other programs, and check it."),
    "predict": ("echelon.cli.use:predict_command", "Apply a run's model to new samples."),
    "serve": ("echelon.cli.use:serve_command", "Answer requests for predictions on this machine."),
    "compare": (
        "echelon.cli.compare:command",
        "Compare ways of training on your own work.",
    ),
    "flow": ("echelon.cli.flow:command", "Run a flow of steps, and repeat only what changed."),
    "plan": ("echelon.cli.plan:command", "Predict time, memory and cost on machines that you do not have."),
    "watch": ("echelon.cli.watch:command", "Watch a run or a study while it runs."),
    "runs": ("echelon.cli.places:runs_command", "Show the state of all runs, wherever they are."),
    "logs": ("echelon.cli.places:logs_command", "Print the log of a run's process."),
    "stop": ("echelon.cli.places:stop_command", "Stop a run after a checkpoint, wherever it is."),
    "nodes": ("echelon.cli.nodes:command", "Show who takes part in a run, and let workers join or leave it."),
    "report": ("echelon.cli.runs:report_command", "Write the report of a run or a study again."),
    "copy": ("echelon.cli.upkeep:copy_command", "Copy a run between a folder and a URL."),
    "verify": ("echelon.cli.upkeep:verify_command", "Compare every byte of a run with its hash."),
    "clean": ("echelon.cli.upkeep:clean_command", "Show what space a run takes, and free some of it."),
    "list": ("echelon.cli.catalogue:list_command", "List what can be chosen: models, codecs, ..."),
    "explain": ("echelon.cli.catalogue:explain_command", "Explain a choice: what it does, helps with and costs."),
    "completion": ("echelon.cli.completion:completion_command", "Print a shell's completion: bash, zsh, fish."),
}
ABOUT = """Echelon trains PyTorch models on many processes and machines, and shows what each way of doing so costs.

Examples:
  echelon train digits                            a first run, and its report
  echelon train DATA --model resnet20 --epochs 5  a folder per class of images
  echelon train DATA --sync "local(8)" --dry-run  show what would start
  echelon compare DATA --try "compression=none" --try "compression=sign"
  echelon plan runs/NAME --at "workers=64, link=1gbit, memory=24GB, price=2.5"
  echelon resume runs/NAME                        go on from the last checkpoint
  echelon explain topk                            what a choice does and costs"""

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
            command = build_command(name)
        return name, command, rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write what Echelon is, examples and the commands."""
        options = [Row("--version", "print the versions and exit"), Row("-h, --help", "show this and exit")]
        options.append(Row("--debug", "with any command: show the traceback of an error"))
        width = shown_width()
        lines = ["usage: echelon COMMAND [OPTIONS]", "", *paragraphs(ABOUT, width)]
        lines += section("Commands", [Row(name, text) for name, (_, text) in COMMANDS.items()], width)
        lines += [*section(BASIC, options, width), "", "echelon COMMAND --help shows a command's options."]
        formatter.buffer.append("\n".join(lines))


def build_command(name: str) -> TyperCommand:
    """Import a command's module and build it."""
    module, _, function = COMMANDS[name][0].partition(":")
    command: TyperCommand = getattr(importlib.import_module(module), function)()
    return command


HELP_NAMES = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    cls=LazyGroup, rich_markup_mode=None, invoke_without_command=True, add_completion=False,
    pretty_exceptions_enable=False, context_settings=HELP_NAMES,
)  # fmt: skip


def _print_version(asked: bool) -> None:
    if asked:
        import platform
        from importlib.metadata import version

        print(f"echelon {version('echelon')}, torch {version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the versions and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Echelon trains PyTorch models on many processes and machines, and shows what each way of doing so costs.

    Add --debug to any command to see the traceback of an error.
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def as_command(function: Any, name: str, help: str) -> Any:
    """Turn one function into a command."""
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name=name, help=help, cls=HelpfulCommand, context_settings=HELP_NAMES)(function)
    return typer.main.get_command(single)
