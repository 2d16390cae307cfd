"""`--collective auto`: paths are tried before the first step, and what was chosen is kept with the run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from echelon.collectives.chooser import BACKEND, PathBySize, SizeChoice, choose_paths
from echelon.core.files import write_atomic
from echelon.core.units import format_bytes
from echelon.trainer.folder import CHECKPOINTS_FOLDER
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.world import World, text_from_rank_0

PATHS_FILE = "paths.json"


@dataclass(frozen=True)
class PathsFile:
    """What the file in a run's folder says: the choices, and between how many ranks they were measured."""

    ranks: int
    choices: tuple[SizeChoice, ...]

    def as_text(self) -> str:
        """Return the file's text; no limit is null."""
        rows = [asdict(choice) for choice in self.choices]
        for row in rows:
            row["up_to_bytes"] = None if row["up_to_bytes"] == math.inf else row["up_to_bytes"]
        return json.dumps({"ranks": self.ranks, "choices": rows}, indent=1)

    @staticmethod
    def from_text(text: str) -> PathsFile:
        """Read the file's text."""
        value: dict[str, Any] = json.loads(text)
        rows = [
            (math.inf if row["up_to_bytes"] is None else row["up_to_bytes"], row["spec"]) for row in value["choices"]
        ]
        return PathsFile(int(value["ranks"]), tuple(SizeChoice(limit, str(spec)) for limit, spec in rows))


def with_chosen_paths(run: ResolvedRun, world: World, folder: Path) -> tuple[ResolvedRun, list[str]]:
    """Return the run with the path of each size where `--collective auto` chooses, and what to tell the user.

    A run that goes on uses what it chose before between as many ranks: another path would sum in another order. One
    that was trained before there was a choice stays with the backend. All ranks call it together.
    """
    if not run.path.is_choice:
        return run, []
    group = world.placement.replica_group if world.placement is not None else world.group
    if reason := _no_choice(run, world, group):
        return run, [f"--collective auto is backend: {reason}"]
    assert group is not None
    kept, began_before = _kept(folder, world, group.size())
    if began_before:
        return run, ["--collective auto is backend: the run began with it"]
    choices = kept.choices if kept is not None else choose_paths(group)
    if kept is None and world.leads:
        first = folder / PATHS_FILE
        file = first if not first.exists() else _of_ranks(folder, group.size())
        write_atomic(file, PathsFile(group.size(), choices).as_text())
    source = "as at the run's start" if kept is not None else "tried before the first step"
    note = f"--collective auto, {source}: {in_words(choices)}"
    if len(choices) == 1 and choices[0].spec == BACKEND:
        return run, [note]
    return replace(run, path=PathBySize(choices, order=run.path.order)), [note]


def in_words(choices: tuple[SizeChoice, ...]) -> str:
    """Return choices as a list.

    >>> in_words((SizeChoice(32768, "ring"), SizeChoice(math.inf, "backend")))
    'ring up to 32.8 kB, backend beyond'
    """
    *limited, last = choices
    words = [f"{choice.spec} up to {format_bytes(choice.up_to_bytes)}" for choice in limited]
    return ", ".join([*words, f"{last.spec} beyond" if words else f"{last.spec} for all sizes"])


def _no_choice(run: ResolvedRun, world: World, group: dist.ProcessGroup | None) -> str:
    """Return why there is nothing to choose; empty where there is."""
    if group is None or group.size() <= 2:
        return "up to 2 replicas have one path"
    if world.device.type != "cpu":
        return "NCCL chooses by itself"
    if run.compression.encodes:
        return "what is compressed is not summed on the way"
    if group.size() != world.size:
        return "replicas are split over several ranks"
    return ""


def _of_ranks(folder: Path, ranks: int) -> Path:
    """Return the file of what was chosen between another number of ranks than the run began with."""
    first = folder / PATHS_FILE
    return first.with_name(f"{first.stem}-{ranks}{first.suffix}")


def _kept(folder: Path, world: World, ranks: int) -> tuple[PathsFile | None, bool]:
    """Return what the folder has of a measurement between as many ranks, and whether a run began there without one."""
    said = b""
    if world.leads:
        other = _of_ranks(folder, ranks)
        file = other if other.exists() else folder / PATHS_FILE
        checkpoints = folder / CHECKPOINTS_FOLDER
        if file.exists():
            said = b"+" + file.read_bytes()
        elif checkpoints.exists() and any(checkpoints.iterdir()):
            said = b"-"
    text = text_from_rank_0(said.decode(), world)
    if text.startswith("-"):
        return None, True
    kept = PathsFile.from_text(text[1:]) if text else None
    return (kept if kept is not None and kept.ranks == ranks else None), False
