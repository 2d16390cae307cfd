"""`echelon watch`: a run or a study while it goes, in the terminal or as a local page."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer

from echelon.cli.app import COMMANDS, as_command
from echelon.core.errors import UserError
from echelon.core.units import seconds_for


def command() -> Any:
    """Build `echelon watch`."""

    def watch(
        run: Annotated[str, typer.Argument(metavar="RUN|STUDY", help="the folder of a run or a study")],
        once: Annotated[bool, typer.Option("--once", help="print how it stands now, as plain text, and end")] = False,
        serve: Annotated[bool, typer.Option("--serve", help="show it as a page on this machine instead")] = False,
        port: Annotated[int, typer.Option("--port", metavar="N", help="port of the page; 0: any free one")] = 0,
        wait_s: Annotated[
            float,
            typer.Option(
                "--wait",
                parser=seconds_for("--wait"),
                metavar="TIME",
                help="how long to wait for a folder that is not there yet",
            ),
        ] = "1m",  # type: ignore[assignment]  # read by the parser
    ) -> None:
        """Watch a run or a study until it is over, or until ctrl-c."""
        if port and not serve:
            raise UserError("--port is the page's: it needs --serve")
        if once and serve:
            raise UserError("--once and --serve exclude each other")
        from echelon.run.home import folder_of
        from echelon.run.overview import kept_near
        from echelon.study.serving import serve_here
        from echelon.study.view import show, wait_for_folder

        path = folder_of(run)
        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            wait_for_folder(path, 0.0 if once else wait_s)
            with kept_near(path):
                if serve:
                    serve_here(path, port)
                else:
                    show(path, once)

    return as_command(watch, "watch", COMMANDS["watch"][1])
