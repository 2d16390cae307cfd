"""The metric that runs are compared by: its direction, what guessing gives, and how differences of it are said."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.core.task import Metric
from echelon.core.units import rounded
from echelon.records.before_tasks import primary_of
from echelon.study.intervals import Interval

CHANCE_SIGMAS = 3.0


@dataclass(frozen=True)
class PrimaryMetric(Metric):
    """The primary metric of a task, as candidates are compared by it.

    Differences of one in percent are said in points (hundredths), of other metrics in percent of the baseline's value.
    The label is the word for it in sentences.
    """

    @classmethod
    def of(cls, metric: Metric) -> PrimaryMetric:
        """Return a task's metric as candidates are compared by it."""
        return cls(metric.name, metric.direction, metric.noun or metric.title, metric.percent, metric.chance)

    @property
    def unit(self) -> str:
        """The unit of `gain`."""
        return "points" if self.percent else "%"

    def gain(self, value: float, baseline: float) -> float:
        """Return by how much a value is better than the baseline's, in `unit`; negative: it is worse."""
        difference = self.score(value) - self.score(baseline)
        return 100 * difference if self.percent else 100 * difference / max(abs(baseline), 1e-12)

    def target(self, worst: float, loss: float) -> float:
        """Return the value that is worse than `worst` by `loss`, a number of `unit`."""
        allowed = loss / 100 if self.percent else loss / 100 * abs(worst)
        return worst - allowed if self.direction == "max" else worst + allowed

    def variance(self, value: float, samples: int) -> float:
        """Return the variance of a share measured on so many samples; 0 for other metrics: theirs is not known."""
        return value * (1 - value) / samples if self.percent else 0.0

    def failure(self, value: float, baseline: float | None, samples: int) -> str:
        """Say in what way a final value shows that a run did not converge; empty: it does not, or nothing is known.

        It is no better than guessing (within 3 standard deviations of a guess on so many samples), or less than half
        as far from guessing as the baseline's.
        """
        chance = 0.0 if self.chance is None and self.percent and self.direction == "max" else self.chance
        if chance is None:
            return ""
        sigma = math.sqrt(self.variance(chance, samples)) if samples else 0.0
        if self.score(value) <= self.score(chance) + CHANCE_SIGMAS * sigma:
            return f"its {self.label} of {self.text(value, 1)} is that of guessing"
        if baseline is not None and self.score(value) < self.score(chance + (baseline - chance) / 2):
            side = "above" if self.direction == "max" else "below"
            return (
                f"its {self.label} of {self.text(value, 1)} is less than half as far {side} guessing as the baseline's "
                f"{self.text(baseline, 1)}"
            )
        return ""

    def text(self, value: float, digits: int = 2) -> str:
        """Write a value: a share in percent with so many digits, another to 4 significant ones."""
        return f"{value:.{digits}%}" if self.percent else f"{value:.4g}"

    def gain_text(self, gain: Interval) -> str:
        """Say a gain over the baseline at the end of the run, with its interval."""
        value, points = rounded(gain.value, 2), self.percent and self.direction == "max"
        low, high, bounds = gain.low, gain.high, ""
        if low is not None and high is not None:
            low, high = (low, high) if points or value >= 0 else (-high, -low)  # of what it is worse by
            bounds = f" ({rounded(low, 2):+.2f} to {rounded(high, 2):+.2f})"
        if points:
            return f"final {self.label} {value:+.2f} points{bounds}"
        if not value:
            return f"final {self.label} equal{bounds}"
        return f"final {self.label} {'better' if value > 0 else 'worse'} by {abs(value):.2f} {self.unit}{bounds}"

    def axis(self, digits: int) -> dict[str, str]:
        """Return the format of an axis' ticks."""
        return {"tickformat": f".{digits}%"} if self.percent else {}


UNRECORDED = PrimaryMetric.of(primary_of(None))
"""Of runs and tables that record no task."""
