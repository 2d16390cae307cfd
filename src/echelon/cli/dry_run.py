"""`--dry-run`: the settings, where each came from, and what would be started."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

from rich.console import Console
from rich.table import Table

from echelon.api import check, plan_of
from echelon.config import Resolved
from echelon.train.folder import default_folder


def show(resolved: Resolved) -> None:
    """Print the description and the plan; refuses what a start would refuse."""
    config = resolved.config
    folder = Path(config.run) if config.run else default_folder(config)
    plan = plan_of(config, folder)
    check(config)
    console = Console(soft_wrap=True)
    table = Table("setting", "value", "from", box=None)
    for name, origin in resolved.origins.items():
        value = reduce(getattr, name.split("."), config)
        table.add_row(name, str(value), origin, style=None if origin != "default" else "dim")
    console.print(table)
    nodes = plan.nodes
    machines = str(nodes.most) if nodes.least == nodes.most else f"{nodes.least} to {nodes.most}"
    console.print(
        f"would start {plan.workers} workers with {plan.threads} threads each on each of {machines} machines, "
        f"restarting at most {plan.max_restarts} times; run folder {folder}",
        highlight=False,
    )
