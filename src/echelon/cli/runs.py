"""`echelon evaluate`, `echelon export` and `echelon report`: commands on a run that exists."""

from pathlib import Path
from typing import Annotated, Any

import typer

from echelon.cli.app import COMMANDS, as_command
from echelon.cli.settings import TRUST


def evaluate_command() -> Any:
    """Build `echelon evaluate`."""

    def evaluate(
        run: Annotated[str, typer.Argument(help="the run's folder")],
        trust: Annotated[bool, typer.Option("--trust", help=TRUST)] = False,
        follow_links: Annotated[
            bool, typer.Option("--follow-links", help="use links in the data folder that lead out of it")
        ] = False,
    ) -> None:
        """Print the metrics of a run's best checkpoint."""
        from echelon import api

        for name, value in api.evaluate(run, trust, follow_links).items():
            print(f"{name:16} {value:.4f}" if value is not None else f"{name:16} undefined")

    return as_command(evaluate, "evaluate", COMMANDS["evaluate"][1])


def export_command() -> Any:
    """Build `echelon export`."""

    def export(
        run: Annotated[str, typer.Argument(help="the run's folder")],
        file: Annotated[str, typer.Argument(help="the file to write, such as weights.safetensors")],
    ) -> None:
        """Write a run's best weights."""
        from echelon import api

        print(f"weights: {api.export(run, file)}")

    return as_command(export, "export", COMMANDS["export"][1])


def report_command() -> Any:
    """Build `echelon report`."""

    def report(
        run: Annotated[str, typer.Argument(help="the folder of a run or a study")],
        trace: Annotated[str, typer.Option(help="write a pipeline's timeline to this file, for Perfetto")] = "",
    ) -> None:
        """Write the report of a run or of a study."""
        from echelon.study.file import is_study

        if is_study(Path(run)):
            from echelon.cli.compare import conclude

            conclude(Path(run))
            return
        from echelon import api
        from echelon.reporting.report import closing_words, load_run, summarise

        folder = api.report(run)
        for line in closing_words(summarise(load_run(folder))):
            print(line)
        print(f"report: {folder / 'report.html'}")
        if trace:
            from echelon.reporting.report.charts_pipeline import write_trace

            write_trace(folder, Path(trace))
            print(f"trace: {trace}")

    return as_command(report, "report", COMMANDS["report"][1])
