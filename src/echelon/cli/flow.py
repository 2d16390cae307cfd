"""`echelon flow`: steps that follow each other, and how they stand."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from echelon.cli.app import COMMANDS, as_command
from echelon.core.columns import seconds_column
from echelon.core.errors import UserError
from echelon.core.output import print_words
from echelon.core.stop import stopped_exit_code
from echelon.observe.screen import print_table

if TYPE_CHECKING:
    from echelon.flows.base import Flow
    from echelon.flows.driver import FlowOutcome

_LOOKS = ("status", "graph", "logs", "stop")
TEXT = """

FILE begins or continues the flow that a file describes, in flows/NAME; with --resume a folder alone does.

Examples:
  echelon flow flow.yaml --dry-run             what would run, and why
  echelon flow flow.yaml --set epochs=5        with another value of a parameter
  echelon flow --resume flows/NAME             go on after any end
  echelon flow status flows/NAME               how each step stands
  echelon flow graph flows/NAME                the same as a graph, and a page
  echelon flow logs flows/NAME STEP            what a step wrote
  echelon flow stop flows/NAME                 end it; runs save a checkpoint"""


def command() -> Any:
    """Build `echelon flow`."""

    def flow(
        arguments: Annotated[list[str], typer.Argument(metavar="FILE | status|graph|logs|stop FOLDER [STEP]")],
        on: Annotated[
            str,
            typer.Option(
                "--on",
                metavar="PLACE",
                help="where steps run: local, slurm(...), ray, k8s(...) [default: local; with --resume as before]",
            ),
        ] = "",
        run: Annotated[
            str, typer.Option("--run", metavar="FOLDER", help="the flow's folder [default: flows/NAME]")
        ] = "",
        values: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="a parameter")] = None,
        cores: Annotated[int, typer.Option(min=0, metavar="N", help="for all steps together [default: all]")] = 0,
        memory: Annotated[str, typer.Option(metavar="SIZE", help="likewise, such as 16GB [default: all]")] = "",
        gpus: Annotated[int, typer.Option(min=-1, metavar="N", help="likewise [default: all]")] = -1,
        resume: Annotated[bool, typer.Option("--resume", help="continue the flow of a folder")] = False,
        hash_content: Annotated[
            bool, typer.Option("--hash-content", help="know data by its bytes, not by names, sizes and times")
        ] = False,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would run, start nothing")] = False,
    ) -> None:
        """Run a flow, or show one."""
        if arguments[0] in _LOOKS:
            _look(arguments)
            return
        if len(arguments) > 1:
            raise UserError(
                f"one file a flow: {' '.join(arguments[1:])!r} is too much; write --set NAME=VALUE for parameters"
            )
        from echelon.flows.run import FlowRequest, plan_flow, start_flow

        request = FlowRequest(
            arguments[0], on, run, _parameters(values or []), cores, memory, gpus, resume, hash_content
        )
        if dry_run:
            for line in plan_flow(request):
                print_words(line)
            return
        _finish(start_flow(request, lambda line: print(line, flush=True)))

    return as_command(flow, "flow", f"{COMMANDS['flow'][1]}{TEXT}")


def _parameters(values: list[str]) -> dict[str, str]:
    found = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--set {text}: write NAME=VALUE")
        found[name.strip()] = value.strip()
    return found


def _finish(outcome: FlowOutcome) -> None:
    from echelon.flows.state import PAGE_FILE

    counts = {"run": outcome.ran, "kept": outcome.kept, "failed": outcome.failed, "blocked": outcome.blocked}
    said = ", ".join(f"{len(names)} {word}" for word, names in counts.items() if names)
    print(f"flow {outcome.status}: {said or 'no step ended'}; page: {outcome.folder / PAGE_FILE}")
    if outcome.status == "completed":
        return
    print(f"continue with: echelon flow --resume {outcome.folder}")
    raise SystemExit(stopped_exit_code(outcome.signum) if outcome.status == "stopped" else 1)


def _look(arguments: list[str]) -> None:
    """Show a flow, or end it."""
    what, folder = arguments[0], Path(arguments[1]) if len(arguments) > 1 else None
    if folder is None or len(arguments) > (3 if what == "logs" else 2):
        raise UserError(f"echelon flow {what} takes the folder of a flow" + ", and a step" * (what == "logs"))
    from echelon.flows.state import load_flow

    flow = load_flow(folder)
    if what == "stop":
        _stop(flow, folder)
    elif what == "logs":
        _logs(folder, arguments[2] if len(arguments) > 2 else "", list(flow.steps))
    else:
        _show(folder, as_graph=what == "graph")


def _show(folder: Path, as_graph: bool) -> None:
    from echelon.flows.page import levels, summary, write_page
    from echelon.flows.state import load_flow, step_statuses

    flow = load_flow(folder)
    found = step_statuses(flow, folder, _queued(flow, folder))
    depth = levels(flow)
    shown_steps = sorted(found, key=lambda each: depth[each.step.name]) if as_graph else found
    times = seconds_column("time", [each.seconds or None for each in shown_steps])
    table = Table("step", "does", "state", times.head, "starts", "needs" if as_graph else "why", box=None)
    for column in table.columns[3:5]:
        column.justify = "right"
    for each, seconds in zip(shown_steps, times.cells, strict=True):
        name = each.step.name
        shown = f"{'  ' * depth[name]}{'└ ' * bool(depth[name])}{name}" if as_graph else name
        took = seconds if each.seconds else ""
        why = ", ".join(each.step.before) if as_graph else each.message
        cells = [shown, each.step.kind, each.stands, took, str(each.starts), why]
        table.add_row(*cells)
    print_table(table)
    print(f"{summary(found)}; page: {write_page(flow, folder, found) if as_graph else folder}")


def _queued(flow: Flow, folder: Path) -> set[str]:
    """Return the steps that a queue has jobs for; one that does not answer is told, and known to have none."""
    from echelon.flows.chained import queued_jobs
    from echelon.flows.run import queue_of

    queue = queue_of(folder)
    try:
        return set(queued_jobs(flow, folder, queue)) if queue is not None else set()
    except UserError as error:
        print(f"echelon: whether jobs go on is not known: {error}", file=sys.stderr)
        return set()


def _logs(folder: Path, step: str, known: list[str]) -> None:
    from echelon.core.errors import unknown
    from echelon.flows.base import step_folder
    from echelon.flows.state import LOG_FILE

    if not step:
        raise UserError(f"echelon flow logs takes a step too, one of {', '.join(known)}")
    if step not in known:
        raise unknown("step", step, known)
    file = step_folder(folder, step) / LOG_FILE
    if not file.exists():
        raise UserError(f"{step} has no log: it has not run")
    print(file.read_text(encoding="utf-8", errors="replace"), end="")


def _stop(flow: Flow, folder: Path) -> None:
    from echelon.flows.chained import stop_queued
    from echelon.flows.run import queue_of
    from echelon.records.going import signal_holder

    if signal_holder(folder, signal.SIGTERM):
        print(f"{folder} ends, its runs save checkpoints; continue it with: echelon flow --resume {folder}")
        return
    queue = queue_of(folder)
    stopped = stop_queued(flow, folder, queue, print) if queue is not None else []
    if not stopped:
        raise UserError(f"{folder} does not go on: there is nothing to stop")
    print(f"the jobs of {', '.join(stopped)} end; continue the flow with: echelon flow --resume {folder}")
