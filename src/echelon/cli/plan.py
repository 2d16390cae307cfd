"""`echelon plan`: what a run would take on machines that were described."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table

from echelon.cli.app import COMMANDS, as_command
from echelon.cli.settings import overrides_of, parameter, trust_parameter, with_settings
from echelon.config import build
from echelon.config.machines import read_machines
from echelon.core.columns import Column, rows_of, seconds_column
from echelon.core.errors import UserError
from echelon.core.output import print_words

if TYPE_CHECKING:
    from echelon.planning.plan import PlanReport

_PAGE = "plan.html"
_WIDTH = 140  # of what is no terminal
ABOUT = """DATA is what `train` takes, or the folder of a run: its record is planned from, and nothing is trained.
Of data, two short runs on this machine calibrate the plan (about a minute). Ways are ranked by the time of the whole
run; those that end in * may cost accuracy.

--at describes the machines, and may be repeated: workers=N in all; per_machine=N of them on one; link=1gbit (or
"10mbit,20ms") between machines, inside=100gbit within one; memory=24GB and price=2.5 (an hour; 0: free) of a worker;
speed=2 of a worker, in those of this machine, or tflops=400 where the model is too large for it; mtbf=1000h of a
machine. A YAML file holds a list of such descriptions, or of groups of unlike workers.

Examples:
  echelon plan runs/NAME --at "workers=64, link=1gbit, memory=24GB, price=2"
  echelon plan DATA --at "workers=8, link=100mbit" --at "workers=8, link=1gbit"
  echelon plan --history runs
  echelon plan TEXT --model MODULE:FUNCTION \\
      --at "workers=64, link=400gbit, tflops=900"
"""


def command() -> Any:
    """Build `echelon plan`."""

    def plan(
        at: list[str] | None,
        config: str | None,
        study: str,
        page: str,
        as_json: bool,
        history: str,
        trust: bool,
        **settings: Any,
    ) -> None:
        """Print what a run would take, and write the page."""
        if history:
            _show_history(Path(history))
            return
        if not as_json:
            _check_page(Path(page))
        machines = read_machines(at or ())
        resolved = build(Path(config) if config else None, overrides_of(settings))
        from echelon.planning.request import plan as planned
        from echelon.planning.request import remember, request_of
        from echelon.study.samples import samples_for

        request = request_of(resolved, machines, trust)
        samples = samples_for(study, resolved.config.data.source, request.config)
        made = planned(replace(request, samples=samples))
        if as_json:
            from echelon.planning.page import as_json as to_json

            print(json.dumps(to_json(made)))
        else:
            from echelon.planning.page import write_page

            _show(made)
            write_page(made, Path(page))
            print(f"page: {page}")
        try:
            remember(request, made)
        except UserError as error:  # the folder may be another's; the plan itself is whole
            print(f"{error}: runs are not compared with this plan", file=sys.stderr)

    extra = [
        parameter("at", list[str] | None, typer.Option(
            None, "--at", metavar="MACHINES", show_default=False, help="machines, as above; may be repeated")),
        parameter("config", str | None, typer.Option(
            None, "--config", metavar="FILE", help="YAML file of settings for DATA")),
        parameter("study", str, typer.Option(
            "", "--study", metavar="FOLDER", show_default=False,
            help="of `compare` with this model and data: how many samples ways take to its target; default: the newest "
            "beside the run, or in runs")),
        parameter("page", str, typer.Option(_PAGE, "--page", metavar="FILE", help="the page that is written")),
        parameter("history", str, typer.Option(
            "", "--history", metavar="RUNS",
            help="plan nothing: show what was predicted of the runs in this folder, and what was measured")),
        parameter("as_json", bool, typer.Option(False, "--json", help="print the plan as one JSON object, no page")),
        trust_parameter(),
    ]  # fmt: skip
    return as_command(with_settings(plan, extra), "plan", f"{COMMANDS['plan'][1]}\n\n{ABOUT}")


def _check_page(page: Path) -> None:
    """Refuse a page that cannot be written, before anything is measured for it."""
    if not os.access(page.parent, os.W_OK):
        raise UserError(f"--page {page}: {page.parent} is no folder that you may write to: name another, or use --json")


def _show_history(folder: Path) -> None:
    """Print the predictions that runs in a folder were measured by, the oldest first."""
    from echelon.planning.pictures import history_lines
    from echelon.run.residuals import history_words, residuals_of

    residuals = residuals_of(folder)
    table = Table(box=None)
    columns = [
        Column("when", [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.when)) for each in residuals]),
        Column("run", [each.run for each in residuals]),
        Column("way", [each.way for each in residuals]),
        seconds_column("a step: predicted", [each.predicted_s for each in residuals]),
        seconds_column("measured", [each.measured_s for each in residuals]),
        Column("off", [f"{each.off:+.0%}" for each in residuals]),
        Column("in bounds", [{None: "", True: "yes", False: "no"}[each.held] for each in residuals]),
    ]
    _add(table, columns, numbers_from=3)
    if residuals:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(table, highlight=False, markup=False)
        _draw(history_lines(residuals))
    for line in history_words(residuals):
        print_words(line)


def _add(table: Table, columns: Sequence[Column], numbers_from: int = 1) -> None:
    """Fill a table; on a narrow terminal its cells are folded."""
    for place, column in enumerate(columns):
        justify: JustifyMethod = "right" if place >= numbers_from else "left"
        table.add_column(column.head, overflow="fold", justify=justify)
    for row in rows_of(columns):
        table.add_row(*row)


def _draw(lines: Sequence[str]) -> None:
    """Print a picture in characters after an empty line."""
    if lines:
        print("", *lines, sep="\n")


def _show(plan: PlanReport) -> None:
    """Print the answers, one table for each description of machines."""
    from echelon.planning.pictures import front_lines, scaling_lines, timeline_lines
    from echelon.planning.words import answer_words, choice_words, columns_of, opening, target_columns, target_title

    for line in opening(plan):
        print_words(line)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)

    def show(title: str, columns: Sequence[Column]) -> None:
        """Print a table after an empty line."""
        table = Table(box=None, title=title, title_justify="left")
        _add(table, columns)
        console.print()
        console.print(table, highlight=False, markup=False)

    for answer in plan.answers:
        show(answer.machines.name, columns_of(answer.predictions))
        if plan.samples is not None:
            show(target_title(plan.samples), target_columns(answer.predictions, plan.samples))
        for line in answer_words(answer):
            print_words(line)
        shown = [*answer.best, *answer.predictions][0]
        _draw(scaling_lines(plan, answer))
        _draw(timeline_lines(shown))
    _draw(front_lines(plan))
    if words := choice_words(plan):
        console.print()
    for line in words:
        print_words(line)
