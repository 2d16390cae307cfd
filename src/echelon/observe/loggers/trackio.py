"""Curves and settings in Trackio: a database on this machine, or a space at Hugging Face.

Helps: A dashboard on this machine (`trackio show`), without an account.
Needs: `pip install 'echelon[trackio]'`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.observe.callbacks import RunInfo
from echelon.observe.loggers.base import LoggedRun, LoggerSettings, Point

if TYPE_CHECKING:
    from trackio import Run

_ID_LETTERS = 6


@dataclass(frozen=True)
class Trackio(LoggerSettings):
    """Where runs go in Trackio.

    Attributes:
        project: that the run is part of.
        name: of the run, which `-` and some letters follow; empty: its folder's.
        group: of runs that belong together.
        space: at Hugging Face, such as `user/name`; empty: this machine's database.
    """

    package: ClassVar[str] = "trackio"
    project: str = "echelon"
    name: str = ""
    group: str = ""
    space: str = ""

    def begin(self, run: RunInfo, known_as: str, new_id: str) -> tuple[LoggedRun, str]:
        """Begin a run under a name of its own, or go on with it."""
        import trackio

        name = known_as or f"{self.name or run.folder.name}-{new_id[:_ID_LETTERS]}"
        begun = trackio.init(
            self.project, name=name, group=self.group or None, space_id=self.space or None, config=dict(run.settings),
            resume="allow", embed=False,
        )  # fmt: skip
        return _TrackioRun(begun), name


LOGGER = Trackio


class _TrackioRun(LoggedRun):
    def __init__(self, run: Run) -> None:
        self._run = run

    def log(self, points: Sequence[Point]) -> None:
        """Add points to its curves."""
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def finish(self, status: str) -> None:
        """End it, once everything is written."""
        self._run.finish()
