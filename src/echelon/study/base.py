"""What a study is: candidates, the terms under which they are compared, seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Settings = Mapping[str, str]
Exclusion = Mapping[str, list[str]]

COMPLETED = "completed"  # status of a run that came to its end
DEFAULT_LOSS = 0.5


@dataclass(frozen=True)
class Candidate:
    """One way of training: its settings by dotted name, added to the study's own, and a label as one writes them."""

    label: str
    settings: Settings


@dataclass(frozen=True)
class Terms:
    """Settings that candidates are compared under, such as a link; the label is empty where there is one set only."""

    label: str
    settings: Settings


@dataclass(frozen=True)
class Study:
    """Description of a study. The first candidate is the baseline.

    Attributes:
        base: settings of every run, by dotted name.
        exclude: a candidate is not run under terms with which it matches every setting of one of these.
        loss_points: how many points (hundredths) of the primary metric the target lies below what the baseline reaches.
    """

    base: Settings
    candidates: tuple[Candidate, ...]
    terms: tuple[Terms, ...] = (Terms("", {}),)
    exclude: tuple[Exclusion, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    loss_points: float = DEFAULT_LOSS

    @property
    def baseline(self) -> Candidate:
        """The candidate that all others are compared with."""
        return self.candidates[0]


@dataclass(frozen=True)
class PlannedRun:
    """One run: its folder's name, its candidate, terms and seed, and every setting that differs from the defaults."""

    name: str
    candidate: str
    terms: str
    seed: int
    settings: Settings

    @property
    def title(self) -> str:
        """The candidate, and the terms where they vary."""
        return f"{self.candidate} [{self.terms}]" if self.terms else self.candidate
