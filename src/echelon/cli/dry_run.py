"""`--dry-run`: the settings, where each came from, and what would be started."""

from __future__ import annotations

from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from echelon.config import Resolved
from echelon.core.axes import Axis
from echelon.core.output import print_words
from echelon.core.units import format_bytes, many
from echelon.observe.screen import Screen, print_table
from echelon.run.foretold import foretell
from echelon.run.resolve import launch_request, resolve
from echelon.run.start import check, elastic_plan, plan_of, settled, with_open_batch
from echelon.trainer.folder import check_new, default_folder

if TYPE_CHECKING:
    from echelon.data.base import DataInfo
    from echelon.forecast.memory import Forecast
    from echelon.launch.plan import LaunchPlan
    from echelon.trainer.resolved import ResolvedRun

_TOLD_APART = ("checkpoint", "copies", "peak")


def show(resolved: Resolved, all_settings: bool = False) -> None:
    """Print what is not as by default, what `auto` became, and the plan; refuses what a start or a worker would refuse.

    Args:
        all_settings: print the settings that are as by default, too.

    Raises:
        UserError: it would not start; nothing has been printed.
    """
    from echelon.data.loader import size_note
    from echelon.forecast.memory import try_out
    from echelon.trainer.compatibility import interplay_notes

    config = resolved.config
    folder = Path(config.run) if config.run else default_folder(config, model=foretell(config).model)
    request = with_open_batch(launch_request(config))
    settings, config = config, request.config
    with Screen(to_stderr=True) as screen, screen.bar("checking: nothing is started"):
        plan, run = plan_of(request, folder), check(request)
        check_new(folder, config)
        run = resolve(settled(run, plan))
        plan = elastic_plan(plan, run)
        ranks = plan.workers * plan.nodes.most
        tried = try_out(run, plan.workers, ranks)
    table = Table("setting", "value", "from", box=None)
    became = _chosen(run, plan, tried.info)
    for name, origin in resolved.origins.items():
        value, chosen = str(reduce(getattr, name.split("."), settings)), became.get(name)
        if chosen is not None and chosen != value:
            table.add_row(name, chosen, f"chosen for {value} ({origin})")
        elif origin != "default" or all_settings:
            table.add_row(name, value, origin, style=None if origin != "default" else "dim")
    print_table(table)
    if not all_settings:
        print_words("all other settings have their defaults: --dry-run --all shows them")
    nodes = plan.nodes
    machines = many(nodes.most, "machine") if nodes.least == nodes.most else f"{nodes.least} to {nodes.most} machines"
    where = "" if nodes.most == 1 else f" on each of {machines}"
    print_words(
        f"would start {many(plan.workers, 'worker')} of {many(plan.threads, 'thread')}{where}, "
        f"restarting at most {many(plan.max_restarts, 'time')}; run folder {folder}"
    )
    if note := size_note(tried.info, config.data.batch_size):
        print_words(note)
    for note in (*tried.notes, *interplay_notes(run, ranks)):
        print_words(note)
    if plan.rescues:
        print_words("when a worker dies, the others save what was trained, and all start again from there")
    _show_layout(run, tried.forecast, ranks)


def _chosen(run: ResolvedRun, plan: LaunchPlan, info: DataInfo) -> dict[str, str]:
    """Return what settings that leave a choice become in this run, by name."""
    from echelon.models import auto_name
    from echelon.trainer.inputs import model_input

    config = run.config
    chosen = {"launch.workers": str(plan.workers), "launch.threads": str(plan.threads)}
    chosen["launch.elastic"] = "on" if plan.elastic or plan.rescues else "off"
    chosen["data.batch_size"] = str(config.data.batch_size)
    chosen["training.accumulate"] = str(config.training.accumulate)
    chosen["strategy.parallel"] = str(run.layout_for(plan.workers * plan.nodes.most))
    if config.task == "auto":
        chosen["task"] = info.task.replace("_", "-")
    if config.model.name == "auto":
        chosen["model.name"] = auto_name(model_input(info, run.task.fitted(info)))
    if not config.data.image_size and info.shape is None and info.several is None:
        chosen["data.image_size"] = str(info.image_size)
    return chosen


def _show_layout(run: ResolvedRun, forecast: Forecast, ranks: int) -> None:
    """Print what each rank would have of the model, and the memory that this takes."""
    layout = run.layout_for(ranks)
    sizes = " x ".join(f"{axis}={layout.size(axis)}" for axis in Axis if layout.size(axis) > 1) or "one process"
    cut = f"; its tables are cut by rows over {layout.table} replicas" if layout.table > 1 else ""
    print_words(f"layout: {sizes}; a replica of the model is {many(layout.model_size, 'rank')}{cut}")
    for number, stage in enumerate(forecast.stages):
        print_words(f"stage {number}: {stage}")
    for note in forecast.notes:
        print_words(note)
    if forecast.unknown:
        print_words(
            f"memory per rank cannot be predicted: values matter to this model or its optimizer ({forecast.unknown})"
        )
    for rank, memory in enumerate(forecast.memory):
        of = f" of pipeline rank {rank}" if forecast.stages else ""
        kinds = [
            f"{item.name} {format_bytes(getattr(memory, item.name))}"
            for item in fields(memory)
            if item.name not in _TOLD_APART and getattr(memory, item.name)
        ]
        print_words(
            f"predicted memory per rank{of}: {format_bytes(memory.peak)} at its peak ({', '.join(kinds)}), "
            "beyond what the process and its libraries take"
        )
    if forecast.leader:
        print_words(
            "each replica is one worker of the parameter server; its first rank has the whole model with gradients "
            f"beside its piece, in the processor's memory: {format_bytes(forecast.leader)} more"
        )
    if forecast.memory:
        copy = format_bytes(max(memory.checkpoint for memory in forecast.memory))
        print_words(f"while a checkpoint is written, its copy of up to {copy} comes on top of it")
    if copies := max((memory.copies for memory in forecast.memory), default=0):
        print_words(
            f"the copy of what its neighbour alone has takes up to {format_bytes(copies)} more; it is left out where "
            "that is more than half of the memory that is free at the start (--elastic off: none)"
        )
    if forecast.memory and run.sync.uses_servers:
        print_words("the servers hold the parameters and the optimizer's state, which the workers do not")
