"""`echelon runs`, `echelon logs` and `echelon stop`: runs wherever they are."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from echelon.cli.app import COMMANDS, as_command
from echelon.core.errors import UserError
from echelon.core.units import format_seconds

_WHOLE = 1000  # columns
_LOOK_S = 0.5  # between looks at a log
_RUN = typer.Argument(metavar="RUN", help="the run's folder, or its URL")
_RUNS = "runs"


def runs_command() -> Any:
    """Build `echelon runs`."""

    def runs(
        folder: Annotated[
            str, typer.Argument(metavar="[FOLDER]", help="where runs lie [default: runs, and those that live at URLs]")
        ] = _RUNS,
    ) -> None:
        """Print how all runs stand."""
        from echelon.run.home import local_copies
        from echelon.run.overview import overview_of, runs_below

        found = list(runs_below(Path(folder)))
        found += runs_below(local_copies()) if folder == _RUNS else []
        if not found:
            raise UserError(f"{folder}: no runs there; name the folder in which they lie")
        table = Table(
            Column("run", overflow="fold"),
            "place",
            "state",
            "progress",
            "metric",
            Column("age", justify="right"),
            box=None,
        )
        for run in found:
            try:
                now = overview_of(run)
            except UserError as error:
                table.add_row(str(run), "", str(error), "", "", "")
                continue
            age = "" if now.age_s is None else format_seconds(now.age_s)
            table.add_row(now.home or str(run), now.place, now.state, now.progress, now.metric, age)
        console = Console(soft_wrap=True)
        if not console.is_terminal:
            console.width = _WHOLE  # who reads a pipe wants names whole, on one line
        console.print(table)

    return as_command(runs, "runs", COMMANDS["runs"][1])


def logs_command() -> Any:
    """Build `echelon logs`."""

    def logs(
        run: Annotated[str, _RUN],
        follow: Annotated[
            bool, typer.Option("--follow", "-f", help="go on with what is added, until the run ends")
        ] = False,
        rank: Annotated[
            int | None,
            typer.Option(
                "--rank", min=0, metavar="N", help="whose log [default: what a run at a place prints, else 0]"
            ),
        ] = None,
    ) -> None:
        """Print the log of a run's process, or what a run elsewhere prints."""
        from echelon.run.elsewhere import FIRST_NODE, LogTail
        from echelon.run.home import folder_of
        from echelon.run.overview import bring_from_place, cluster_of, until_over

        path = folder_of(run)
        if not follow:
            bring_from_place(path, logs=True)
        file = path / "logs" / f"rank{rank or 0}.log"
        if not file.parent.is_dir():
            raise UserError(f"{run}: no logs there: name a run's folder")
        if rank is None and cluster_of(path) is not None:
            file = file.with_name(FIRST_NODE)
        if not file.exists() and not follow:
            known = ", ".join(sorted(p.name for p in file.parent.iterdir())) or "nothing"
            raise UserError(f"{file} is not there; {file.parent} has {known}")
        tail = LogTail(file, from_start=True)
        tail.show()
        try:
            for _ in until_over(path, _LOOK_S) if follow else ():
                tail.show()
        except KeyboardInterrupt:  # the way to end it
            return

    return as_command(logs, "logs", COMMANDS["logs"][1])


def stop_command() -> Any:
    """Build `echelon stop`."""

    def stop(run: Annotated[str, _RUN]) -> None:
        """Ask a run to save a checkpoint and end."""
        from echelon.records.going import resumed_by
        from echelon.run.elsewhere import stop as stop_there
        from echelon.run.home import folder_of
        from echelon.run.overview import cluster_of

        path = folder_of(run)
        cluster = cluster_of(path)
        if cluster is not None:
            asked = stop_there(path, cluster)
        else:
            asked = _stop_here(path)
        if not asked:
            raise UserError(f"{run} does not go on: there is nothing to stop")
        print(f"{run} saves a checkpoint and ends; continue it with: {resumed_by(path, run)}", file=sys.stderr)

    return as_command(stop, "stop", COMMANDS["stop"][1])


def _stop_here(run: Path) -> bool:
    """Signal the command of this machine that holds a run's folder; returns whether there is one.

    Raises:
        UserError: it is another user's.
    """
    from echelon.records.going import holder

    pid = holder(run)
    if pid is None:
        return False
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise UserError(f"{run} is another user's: process {pid}") from None
    return True
