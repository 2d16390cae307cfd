"""`echelon nodes`: who takes part in a run, and who is to leave it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from echelon.cli.app import COMMANDS, as_command
from echelon.core.errors import UserError, unknown
from echelon.core.units import format_seconds

if TYPE_CHECKING:
    from echelon.run.nodes import NodeMember

_WHOLE = 1000  # columns
_WHAT = {"add": "how many workers", "drain": "which workers or hosts, by their names in the table"}


def command() -> Any:
    """Build `echelon nodes`."""

    def nodes(
        run: Annotated[str, typer.Argument(metavar="RUN", help="the run's folder, or its URL")],
        action: Annotated[
            str, typer.Argument(metavar="[add|drain]", help="let workers join, or finish what is under way and leave")
        ] = "",
        what: Annotated[
            list[str] | None,
            typer.Argument(metavar="[N|WORKER|HOST ...]", help="how many join here, or who leaves"),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="print the members as one JSON object")] = False,
    ) -> None:
        """Show who takes part in a run now, and let workers join or leave it."""
        from echelon.run.home import folder_of

        path = folder_of(run)
        if not action:
            _show(path, as_json)
            return
        if action not in _WHAT:
            raise unknown("action", action, _WHAT)
        if not what:
            raise UserError(f"echelon nodes {run} {action}: say {_WHAT[action]}")
        for line in _changed(path, action, what):
            print(line)

    return as_command(nodes, "nodes", COMMANDS["nodes"][1])


def _changed(run: Path, action: str, what: list[str]) -> list[str]:
    """Change the members, and return what the run says of it."""
    from echelon.records.going import holder
    from echelon.run.elsewhere import nodes_there
    from echelon.run.nodes import add, drain, how_to_come
    from echelon.run.overview import cluster_of

    if action == "add" and (len(what) != 1 or not what[0].isdecimal() or int(what[0]) < 1):
        raise UserError(how_to_come(run, " and ".join(what)))
    cluster = cluster_of(run)
    if cluster is not None and holder(run) is None:  # else this is its first machine
        return nodes_there(run, cluster, [action, *what])
    return drain(run, what) if action == "drain" else add(run, int(what[0]))


def _show(run: Path, as_json: bool) -> None:
    from echelon.records.going import is_held
    from echelon.run.nodes import members_of
    from echelon.run.overview import bring_from_place, cluster_of, overview_of

    cluster_of(run)  # that it is a run
    bring_from_place(run)
    state = "running" if is_held(run) else overview_of(run).state
    members = members_of(run) if state.startswith("running") else []
    if as_json:
        print(json.dumps({"run": str(run), "state": state, "members": [asdict(member) for member in members]}))
    elif members:
        _print(members)
    elif state.startswith("running"):
        print(f"{run} is {state}; its record tells of no member yet")
    else:
        print(f"{run} does not go on ({state}): it has no members")


def _print(members: list[NodeMember]) -> None:
    table = Table("member", "role", "host", "pid", "since", "steps", "share", "steps/s", box=None)
    for member in members:
        table.add_row(
            member.name,
            member.role,
            member.host,
            "" if member.pid is None else str(member.pid),
            "" if member.since_t is None else format_seconds(max(0.0, time.time() - member.since_t)),
            "" if member.steps is None else f"{member.steps:g}",
            "" if member.share is None else f"{member.share:.0%}",
            "" if member.steps_per_s is None else f"{member.steps_per_s:.3g}",
        )
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = _WHOLE  # who reads a pipe wants names whole, on one line
    console.print(table)
