"""`echelon copy`, `echelon verify` and `echelon clean`: what is done to runs in folders and at URLs."""

from typing import Annotated, Any

import typer

from echelon.cli.app import COMMANDS, as_command
from echelon.core.units import format_bytes

_PLACE = "the run's folder or URL"


def copy_command() -> Any:
    """Build `echelon copy`."""

    def copy(
        source: Annotated[str, typer.Argument(metavar="FROM", help=_PLACE)],
        target: Annotated[str, typer.Argument(metavar="TO", help="a URL, or a new folder")],
        codec: Annotated[
            str, typer.Option("--checkpoint-codec", help="at a URL: none, or zstd [default: none]")
        ] = "none",
    ) -> None:
        """Copy a run."""
        from echelon.core.errors import unknown
        from echelon.run.upkeep import copy_run
        from echelon.storage.codec import CODECS

        if codec not in CODECS:
            raise unknown("--checkpoint-codec", codec, CODECS)
        print(copy_run(source, target, codec))

    return as_command(copy, "copy", COMMANDS["copy"][1])


def verify_command() -> Any:
    """Build `echelon verify`."""

    def verify(place: Annotated[str, typer.Argument(metavar="RUN", help=_PLACE)]) -> None:
        """Compare every byte with its hash; exits with 1 where something is damaged."""
        from echelon.run.upkeep import findings

        found = list(findings(place))
        for each in found:
            size = f" ({format_bytes(each.n_bytes)})" if each.n_bytes else ""
            print(
                f"{'DAMAGED' if each.damage else 'whole':8}{each.name}{size}{f': {each.damage}' if each.damage else ''}"
            )
        damaged = sum(bool(each.damage) for each in found)
        print(f"{place}: {len(found) - damaged} whole, {damaged} damaged")
        if damaged:
            raise SystemExit(1)

    return as_command(verify, "verify", COMMANDS["verify"][1])


def clean_command() -> Any:
    """Build `echelon clean`."""

    def clean(
        place: Annotated[str, typer.Argument(metavar="RUN", help=f"{_PLACE}, or the --data-root of data from URLs")],
        yes: Annotated[bool, typer.Option("--yes", help="remove it without asking")] = False,
    ) -> None:
        """Show what a run, or what data from URLs, takes and what of it may go; remove that once it is agreed."""
        from echelon.run.upkeep import removables, remove

        total, found = removables(place)
        print(f"{place} takes {format_bytes(total)}")
        for each in found:
            print(f"{format_bytes(each.n_bytes):>10}  {each.name}: {each.why}")
        if not found:
            print("nothing of it may go")
            return
        freed = format_bytes(sum(each.n_bytes for each in found))
        if yes or typer.confirm(f"remove these ({freed})?"):
            remove(place, found)
            print(f"removed: {freed}")

    return as_command(clean, "clean", COMMANDS["clean"][1])
