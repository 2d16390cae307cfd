"""`echelon evaluate`, `echelon export` and `echelon report`: commands on a run that exists."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from echelon.cli.app import COMMANDS, as_command
from echelon.cli.settings import parameter, trust_parameter, with_parameters
from echelon.core.json_values import finite_object
from echelon.core.output import print_words
from echelon.core.units import format_metric

_TITLE = 16  # of a metric, in characters: most are shorter


def evaluate_command() -> Any:
    """Build `echelon evaluate`."""

    def evaluate(run: str, as_json: bool, **options: Any) -> None:
        """Print the metrics of a checkpoint."""
        from echelon import api
        from echelon.records.file import newest
        from echelon.records.kinds import Start

        metrics = api.evaluate(run, **options)
        if as_json:
            print(json.dumps(finite_object(dict(metrics)), allow_nan=False))
            return
        begun = next(newest(Path(run), Start), None)
        titles = [begun.task.title_of(name) if begun else name for name in metrics]
        values = ["undefined" if value is None else format_metric(value) for value in metrics.values()]
        widest, longest = max(map(len, titles), default=0), max(map(len, values), default=0)
        for title, text in zip(titles, values, strict=True):
            print(f"{title:{max(_TITLE, widest)}} {text:>{longest}}")

    options = [
        parameter("run", str, typer.Argument(..., help="the run's folder")),
        trust_parameter(),
        parameter("follow_links", bool, typer.Option(
            False, "--follow-links", help="follow links that lead out of the data folder")),
        parameter("data", str, typer.Option(
            "", "--data", help="other data than the run's, here or at a URL: its test part, else its val part; all of "
            "data without parts")),
        parameter("checkpoint", str, typer.Option(
            "best", "--checkpoint", metavar="best|newest|STEP", help="the checkpoint to evaluate [default: best]")),
        parameter("workers", int, typer.Option(
            0, "--workers", min=0, metavar="N",
            help="processes that share the work [default: as many as the run has]")),
        parameter("as_json", bool, typer.Option(False, "--json", help="print the metrics as one JSON object")),
    ]  # fmt: skip
    return as_command(with_parameters(evaluate, options), "evaluate", COMMANDS["evaluate"][1])


def export_command() -> Any:
    """Build `echelon export`."""

    def export(run: str, file: str, trust: bool) -> None:
        """Write a run's best model."""
        from echelon import api

        exported = api.export(run, file, trust)
        print(f"written: {exported.path}")
        print(exported.check)

    suffixes = "by its suffix: .safetensors, .onnx, .pt2, .keras, .peft (adapters); without one, for transformers"
    options = [
        parameter("run", str, typer.Argument(..., help="the run's folder")),
        parameter("file", str, typer.Argument(..., help=f"what to write, {suffixes}")),
        trust_parameter(),
    ]
    return as_command(with_parameters(export, options), "export", COMMANDS["export"][1])


def report_command() -> Any:
    """Build `echelon report`."""

    def report(
        run: Annotated[str, typer.Argument(help="the folder of a run or a study")],
        trace: Annotated[str, typer.Option(help="write a pipeline's timeline to this file, for Perfetto")] = "",
    ) -> None:
        """Write the report of a run or of a study."""
        from echelon.study.file import is_study

        if is_study(Path(run)):
            from echelon.cli.compare import show_outcome
            from echelon.study.outcome import concluded

            show_outcome(concluded(Path(run)))
            return
        from echelon import api
        from echelon.reporting.report import closing_words, load_run, summarise

        folder = api.report(run)
        for line in closing_words(summarise(load_run(folder))):
            print_words(line)
        print(f"report: {folder / 'report.html'}")
        if trace:
            from echelon.reporting.report.charts_pipeline import write_trace

            write_trace(folder, Path(trace))
            print(f"trace: {trace}")

    return as_command(report, "report", COMMANDS["report"][1])
