"""`echelon nodes`: who takes part in a run, and who is to leave it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from echelon.cli.app import COMMANDS, as_command
from echelon.core.columns import NONE, Column, measure_column, number_column, rows_of, seconds_column
from echelon.core.errors import UserError, unknown
from echelon.observe.screen import print_table

if TYPE_CHECKING:
    from echelon.run.nodes import NodeMember

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
        print(f"{run} is {state}; no member is told of here: the first machine's record tells of all, once they train")
    else:
        print(f"{run} does not go on ({state}): it has no members")


def _print(members: list[NodeMember]) -> None:
    now = time.time()
    columns = [
        Column("member", [member.name for member in members]),
        Column("role", [member.role for member in members]),
        Column("host", [member.host for member in members]),
        Column("pid", [NONE if member.pid is None else str(member.pid) for member in members], counts=True),
        seconds_column("here for", [m.since_t and max(0.0, now - m.since_t) for m in members]),
        number_column("steps", [member.steps for member in members]),
        Column("share", [NONE if m.share is None else f"{m.share:.0%}" for m in members], counts=True),
        measure_column("steps/s", [member.steps_per_s for member in members]),
    ]
    table = Table(box=None)
    for column in columns:
        table.add_column(column.head, justify="right" if column.counts else "left")
    for row in rows_of(columns):
        table.add_row(*row)
    print_table(table)
