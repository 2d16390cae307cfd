"""What a study is: candidates, the terms under which they are compared, seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Settings = Mapping[str, str]
Exclusion = Mapping[str, list[str]]

DEFAULT_LOSS = 0.5


@dataclass(frozen=True)
class Candidate:
    """One way of training: settings by dotted name, over the study's own; the label is how one writes them."""

    label: str
    settings: Settings


@dataclass(frozen=True)
class Terms:
    """What candidates are compared under, such as a link or a model; an empty label: there is only one."""

    label: str
    settings: Settings


@dataclass(frozen=True)
class Study:
    """All of a study. The first candidate is the baseline.

    Attributes:
        base: settings of every run, by dotted name.
        exclude: a candidate under terms that match one of these in all that it names is not run.
        loss_points: how many points of accuracy (hundredths) the target lies below what the baseline reaches.
    """

    base: Settings
    candidates: tuple[Candidate, ...]
    terms: tuple[Terms, ...] = (Terms("", {}),)
    exclude: tuple[Exclusion, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    loss_points: float = DEFAULT_LOSS

    @property
    def baseline(self) -> Candidate:
        """What all others are compared with."""
        return self.candidates[0]


@dataclass(frozen=True)
class PlannedRun:
    """One run: its folder's name, whose it is, and every setting that differs from the defaults."""

    name: str
    candidate: str
    terms: str
    seed: int
    settings: Settings
