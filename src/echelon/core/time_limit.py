"""A command's time: when training has to end so that what follows it still fits."""

from __future__ import annotations

import math

_CLOSING_S = 3.0  # connections and loaders end, the report is written, processes exit
_MARGIN = 1.25  # an evaluation may take this much longer than the one before


class TimeLimit:
    """Says when to stop training: an evaluation, a checkpoint and the report come after it, within the time.

    Args:
        ends_s: when the command is to have ended, by the caller's clock; infinity: never.
        evaluation_steps: training steps that take as long as an evaluation, until one was timed.
    """

    def __init__(self, ends_s: float, evaluation_steps: float) -> None:
        self._ends_s, self.evaluation_steps = ends_s, evaluation_steps
        self._pauses: dict[str, float] = {}
        self.step_s = 0.0

    def took(self, pause: str, seconds: float) -> None:
        """Note how long an evaluation, or a checkpoint, took the last time."""
        self._pauses[pause] = seconds

    def is_up(self, now_s: float) -> bool:
        """Whether another step could be one too many."""
        if math.isinf(self._ends_s):
            return False
        pauses = sum(self._pauses.values())
        if "evaluation" not in self._pauses:
            pauses += self.evaluation_steps * self.step_s
        return now_s + self.step_s + _MARGIN * pauses + _CLOSING_S >= self._ends_s
