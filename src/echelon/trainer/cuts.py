"""Where a pipeline was cut, kept with the run: balanced by measured time, cuts could fall elsewhere at a restart.

What each rank saved of its own (BatchNorm statistics, error feedback) belongs to its stages.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from echelon.core.files import write_atomic
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.state import RunParts
from echelon.trainer.world import World

FILE = "stages.json"


def with_kept_cuts(run: ResolvedRun, world: World, folder: Path) -> ResolvedRun:
    """Return the run with the cuts that the run had before in a pipeline of this size and schedule.

    All ranks call it before the pipeline is built, which is before any rank keeps new ones.
    """
    file = folder / FILE
    if run.cuts or world.placement is None or world.placement.layout.pp == 1 or not file.exists():
        return run
    kept = json.loads(file.read_text())
    if kept["pipeline"] != _pipeline(world):
        return run
    return replace(run, cuts=tuple(kept["cuts"]))


def keep_cuts(run_parts: RunParts, world: World, folder: Path) -> None:
    """Write down where the pipeline was cut; does nothing without one."""
    pipeline = run_parts.split.pipeline if run_parts.split else None
    if pipeline is not None and world.leads:
        cuts = [stage.steps[0].name for stage in pipeline.plan[1:]]
        write_atomic(folder / FILE, json.dumps({"pipeline": _pipeline(world), "cuts": cuts}))


def _pipeline(world: World) -> str:
    assert world.placement is not None
    return f"pp={world.placement.layout.pp},schedule={world.placement.layout.schedule}"
