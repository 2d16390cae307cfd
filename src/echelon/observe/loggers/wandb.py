"""Curves and settings at Weights & Biases, or in its offline files below the run's folder.

Helps: Runs of several people and machines are compared on one page.
Needs: `pip install 'echelon[wandb]'` and `wandb login`; WANDB_MODE=offline writes files for `wandb sync`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.observe.callbacks import RunInfo
from echelon.observe.loggers.base import LoggedRun, LoggerSettings, Point

if TYPE_CHECKING:
    from wandb import Run

_STEP = "trainer/step"
_INIT_S = 30.0


@dataclass(frozen=True)
class Wandb(LoggerSettings):
    """Where runs go at Weights & Biases.

    Attributes:
        project: that the run is part of.
        entity: user or team; empty: as you are logged in.
        name: of the run; empty: its folder's.
        group: of runs that belong together.
        tags: words to find it by: `a+b`.
    """

    package: ClassVar[str] = "wandb"
    project: str = "echelon"
    entity: str = ""
    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()

    def begin(self, run: RunInfo, known_as: str, new_id: str) -> tuple[LoggedRun, str]:
        """Begin a run under an identifier, or go on with it."""
        import wandb

        run_id = known_as or new_id
        settings = wandb.Settings(console="off", silent=True, init_timeout=_INIT_S, login_timeout=1)
        begun = wandb.init(
            project=self.project, entity=self.entity or None, name=self.name or run.folder.name,
            group=self.group or None, tags=self.tags or None, config=dict(run.settings), id=run_id, resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(run.folder), reinit="create_new", settings=settings,
        )  # fmt: skip
        begun.define_metric(_STEP, hidden=True)
        begun.define_metric("*", step_metric=_STEP)  # a run that goes on trains some steps again
        return _WandbRun(begun), run_id


LOGGER = Wandb


class _WandbRun(LoggedRun):
    def __init__(self, run: Run) -> None:
        self._run = run

    def log(self, points: Sequence[Point]) -> None:
        """Add points to its curves."""
        for point in points:
            self._run.log({**point.values, _STEP: point.step})

    def finish(self, status: str) -> None:
        """End it, once everything is sent."""
        self._run.finish(exit_code=int(status == "failed"))
