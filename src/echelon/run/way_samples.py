"""How many samples ways to train take to a target, as a study measured it: what a plan turns into time to accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.run.resolve import canonical

WAY = {"strategy.sync": "allreduce", "strategy.compression": "none"}
"""Settings that decide on how many samples a run takes, with their defaults."""


@dataclass(frozen=True)
class WaySamples:
    """Samples that one way took to the target.

    Attributes:
        label: of the candidate.
        settings: sync and codec by dotted name, as `way_of` returns them.
        ratio: of its samples to those of the study's first candidate, the geometric mean over the seeds.
        low, high: bounds of the 95% interval; None: the seeds are too few for one.
        reached: seeds in which it reached the target, of `seeds`.
    """

    label: str
    settings: Mapping[str, str]
    ratio: float
    low: float | None
    high: float | None
    reached: int
    seeds: int


@dataclass(frozen=True)
class StudySamples:
    """What a study measured of a model and its data.

    Attributes:
        study: its name.
        target: in words, such as `top-1 95.20%`.
        first: the label of the first candidate, by which the others are counted.
        epochs: that it took to the target, the mean over the seeds; `low` and `high` of the 95% interval, None: the
            seeds are too few for one.
        workers, batch: of its runs.
        ways: that were measured.
        notes: in what its runs differ from the planned one, and what it leaves out, in sentences.
    """

    study: str
    target: str
    first: str
    epochs: float
    low: float | None
    high: float | None
    workers: int
    batch: int
    ways: Sequence[WaySamples]
    notes: Sequence[str] = ()

    def of(self, settings: Mapping[str, str]) -> WaySamples | None:
        """Return what was measured of a way with these settings; None: it was not."""
        wanted = way_of(settings)
        return next((way for way in self.ways if way.settings == wanted), None)


def way_of(settings: Mapping[str, str]) -> dict[str, str]:
    """Return sync and codec of some settings by dotted name, written alike where they are equal.

    Raises:
        UserError: one cannot be read.
    """
    return {name: canonical(name, settings.get(name, default)) for name, default in WAY.items()}
