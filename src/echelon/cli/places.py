"""`echelon runs`, `echelon logs` and `echelon stop`: runs wherever they are."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from echelon.cli.app import COMMANDS, as_command
from echelon.core.errors import UserError
from echelon.core.units import format_seconds

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
        from echelon.observe.screen import print_table
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
        print_table(table)

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
        is_here = cluster_of(path) is None
        if rank is None and not is_here:
            file = file.with_name(FIRST_NODE)
        tail = LogTail(file, from_start=True)
        tail.show()
        try:
            for _ in until_over(path, _LOOK_S) if follow else ():
                tail.show()
                if is_here and not file.exists() and _has_fewer(path, rank or 0):
                    break
        except KeyboardInterrupt:  # the way to end it
            return
        if not file.exists():
            known = ", ".join(sorted(p.name for p in file.parent.iterdir())) or "nothing"
            raise UserError(f"{file} is not there; {file.parent} has {known}")

    return as_command(logs, "logs", COMMANDS["logs"][1])


def _has_fewer(run: Path, rank: int) -> bool:
    """Whether the ranks of the newest command have begun, and are too few for one of this number."""
    from echelon.records.file import newest
    from echelon.records.going import read_launch
    from echelon.records.kinds import Start

    begun = next(newest(run, Start), None)
    return begun is not None and begun.t >= (read_launch(run).launched_t or 0.0) and begun.world_size <= rank


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
        is_sure = True
        if cluster is not None:
            asked = stop_there(path, cluster)
        else:
            asked, is_sure = _stop_here(path)
        if not asked:
            raise UserError(f"{run} does not go on: there is nothing to stop")
        if not is_sure:
            print(f"this machine's part of {run} ends; stop it on the first machine, if others go on", file=sys.stderr)
            return
        print(f"{run} saves a checkpoint and ends; continue it with: {resumed_by(path, run)}", file=sys.stderr)

    return as_command(stop, "stop", COMMANDS["stop"][1])


def _stop_here(run: Path) -> tuple[bool, bool]:
    """Signal the command of this machine that holds a run's folder.

    Returns:
        Whether there is one, and whether the whole run ends: for one of several machines, SIGTERM may say that it is
        taken away. A shell's background jobs may ignore every other signal.

    Raises:
        UserError: it is another user's.
    """
    from echelon.config import load_run_config
    from echelon.records.going import signal_holder
    from echelon.run.resolve import nodes_of
    from echelon.trainer.folder import CONFIG_FILE

    is_alone = nodes_of(load_run_config(run / CONFIG_FILE)).most == 1
    of_all = () if is_alone else (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    signum = signal_holder(run, *of_all, signal.SIGTERM)
    return signum != 0, is_alone or signum != signal.SIGTERM
