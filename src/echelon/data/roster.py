"""Which training samples a run knows, by name and in the order of their numbers: what lets a folder grow under it.

Samples keep their numbers for as long as the run goes on, so that an epoch in progress is finished with the samples
that it began with, each once; new ones have the numbers behind them, and come from a later epoch on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import UserError
from echelon.core.files import write_atomic

RUN_FILE = "samples.json"


@dataclass(frozen=True)
class Growth:
    """From an epoch on, the first `count` samples are there."""

    epoch: int
    count: int


@dataclass(frozen=True)
class Roster:
    """The samples of a run.

    Attributes:
        source: name of the data.
        classes: of the samples, sorted; a run can learn no others.
        names: of the samples, in the order of their numbers.
        begun: how many there were when the run began; of these some may be held out.
        stages: in the order of their epochs; the first one begins with the run.
        new: names of samples that are there, and that the run does not know.
        is_kept: whether the run's folder has it.
    """

    source: str
    classes: tuple[str, ...]
    names: Sequence[str]
    begun: int
    stages: tuple[Growth, ...]
    new: Sequence[str] = ()
    is_kept: bool = False

    @classmethod
    def of(cls, folder: Path | None, source: str, classes: tuple[str, ...], names: Sequence[str]) -> Roster:
        """Return the samples that a run's folder keeps, of those that are there now; else all of these.

        Raises:
            UserError: one that the run knows is gone, there is another class, or the file cannot be read.
        """
        kept = _read(folder / RUN_FILE) if folder is not None else None
        if kept is None or kept.source != source:
            return cls(source, classes, names, len(names), (Growth(0, len(names)),))
        if kept.classes != classes:
            other = sorted(set(kept.classes) ^ set(classes))[0]
            change = "is new" if other in classes else "is gone"
            raise UserError(f"data {source}: the class {other} {change} since the run began: a run keeps its classes")
        known, there = set(kept.names), set(names)
        if gone := [name for name in kept.names if name not in there]:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            raise UserError(
                f"data {source}: {gone[0]}{more} of the run's samples is gone, or has another name: put it back; a run "
                "goes on with all samples that it began with, or start a new one with --weights"
            )
        return replace(kept, new=[name for name in names if name not in known])

    def order(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return where the samples lie among `names`."""
        places = {name: i for i, name in enumerate(names)}
        return np.array([places[name] for name in self.names], dtype=np.int64)

    def check(self, folder: Path) -> None:
        """Refuse data that has grown under a run.

        Raises:
            UserError: names the command that takes the new samples.
        """
        if self.new:
            raise UserError(
                f"data {self.source}: {len(self.new)} samples are new since the run began, such as {self.new[0]}: "
                f"`echelon resume {folder} --rescan` takes them from the next epoch on"
            )

    def grown(self, epoch: int) -> Roster:
        """Return the samples with the new ones from an epoch on."""
        names = [*self.names, *self.new]
        earlier = tuple(stage for stage in self.stages if stage.epoch < epoch)
        return replace(self, names=names, new=(), stages=(*earlier, Growth(epoch, len(names))))

    def keep(self, folder: Path) -> None:
        """Write it to the folder of a run."""
        values = {**asdict(self), "names": list(self.names), "new": [], "is_kept": True}
        write_atomic(folder / RUN_FILE, json.dumps(values))  # names of any bytes are written in ASCII


def _read(file: Path) -> Roster | None:
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        stages = tuple(Growth(**each) for each in values["stages"])
        return Roster(
            values["source"], tuple(values["classes"]), values["names"], values["begun"], stages, is_kept=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: cannot be read ({error}): which samples the run has is lost") from error
