"""What a study is: candidates, the terms under which they are compared, seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from echelon.config import RunConfig
from echelon.launch.places import PlaceChoice

Settings = Mapping[str, str]
Exclusion = Mapping[str, list[str]]

COMPLETED = "completed"  # status of a run that came to its end
DEFAULT_LOSS = 0.5
BASELINE_TIME = "baseline"  # equal time is what the baseline takes


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


class Stage(StrEnum):
    """What a run of a study is for; the values stand in its table."""

    RATES = "learning rates"
    EPOCHS = ""
    TIME = "equal time"


@dataclass(frozen=True)
class Choices:
    """What a study chose by measuring, written into its `study.yaml`: going on with it chooses nothing anew.

    Attributes:
        rates: learning rates, by the candidate's label.
        seconds: of equal time, by the label of the terms.
        epochs: that end in that time, by the labels of the terms and of the candidate; 0: not one does.
    """

    rates: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    epochs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Description of a study. The first candidate is the baseline.

    Attributes:
        base: settings of every run, by dotted name.
        exclude: a candidate is not run under terms with which it matches every setting of one of these.
        loss_points: how many points (hundredths) of the primary metric the target lies below what the baseline reaches.
        tune_lr: whether each candidate first looks for its own learning rate, in short runs.
        equal_time: after how many seconds candidates are compared too: a time such as `60s`, `baseline`, or empty.
        choices: what it has measured of these.
    """

    base: Settings
    candidates: tuple[Candidate, ...]
    terms: tuple[Terms, ...] = (Terms("", {}),)
    exclude: tuple[Exclusion, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    loss_points: float = DEFAULT_LOSS
    tune_lr: bool = False
    equal_time: str = ""
    choices: Choices = Choices()

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
    stage: Stage = Stage.EPOCHS

    @property
    def place(self) -> PlaceChoice:
        """Where it runs."""
        return PlaceChoice(self.settings.get("launch.on", RunConfig().launch.on))

    @property
    def title(self) -> str:
        """The candidate, the terms where they vary, and what the run is for where that is not the comparison itself."""
        stage = f", {self.stage}" if self.stage else ""
        return f"{self.candidate} [{self.terms}]{stage}" if self.terms else f"{self.candidate}{stage}"
