"""A run from its first step to the end of its last evaluation or checkpoint: how long it took, and what was no step.

These are the seconds that a user waits for a result, and by which runs are compared: whatever stops the steps counts.
Imports and reading the data before, and the report after, are the same work whatever the strategy: they are told apart
(`Summary.startup_s` and the waterfall).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from echelon.observe.phases import PAUSES
from echelon.records.kinds import Checkpoint, Evaluation, Pause, Start, Steps
from echelon.reporting.report.records import RunRecord

BEFORE_STEPS, OTHER = "start", "other"
_EVALUATION, _CHECKPOINT = PAUSES[:2]


@dataclass(frozen=True)
class WholeRun:
    """A run's time from the moment its ranks were ready for the first step.

    Attributes:
        spans: of each attempt, its first and last moment in unix seconds; what lies between two is the outage.
        steps_s: seconds of steps, those that a restart undid included; with `pauses` they are all of its seconds.
        pauses: seconds without steps by reason, the mean over the ranks: `start` (from ready to the first step), those
            of `PAUSES`, and `other`, which none of them accounts for (negative: counted twice).
    """

    spans: Sequence[tuple[float, float]]
    steps_s: float
    pauses: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(end - begin for begin, end in self.spans)

    def at(self, t: float) -> float:
        """Return how many of its seconds had passed at a unix time."""
        return sum(min(max(t - begin, 0.0), end - begin) for begin, end in self.spans)

    def shares(self, least: float = 0.0) -> dict[str, float]:
        """Return the share of each pause that takes more than `least` of the run, the greatest first."""
        known = {name: seconds / self.seconds for name, seconds in self.pauses.items() if self.seconds > 0}
        return {name: share for name, share in sorted(known.items(), key=lambda p: -p[1]) if share > least}


def whole_run_of(record: RunRecord) -> WholeRun | None:
    """Add up a run's time from its first step on; None where it has no step."""
    if not record.windows:
        return None
    spans = list(_spans(record))
    pauses = {BEFORE_STEPS: before_steps(record), **_paused(record, spans)}
    steps_s = sum(w.seconds for w in record.windows)
    rest_s = sum(end - begin for begin, end in spans) - steps_s - sum(pauses.values())
    return WholeRun(spans, steps_s, {**pauses, OTHER: rest_s})


def before_steps(record: RunRecord) -> float:
    """Return the seconds from where ranks were ready to the first step, of all attempts that took one."""
    seconds = 0.0
    for (begin, end), first in _firsts(record, list(_spans(record))):
        following = next((w for w in record.windows if first.t < w.t <= end), None)
        seconds += max(0.0, _ended(record, first, following) - _length_s(first) - begin)
    return seconds


def _spans(record: RunRecord) -> Iterator[tuple[float, float]]:
    """Yield first and last moments of the attempts that took a step, or evaluated what an earlier one had trained."""
    first = record.windows[0]
    starts = [start.t for start in record.of(Start)] or [first.t - first.seconds]
    ends = sorted(line.t for kind in (Steps, Evaluation, Pause, Checkpoint) for line in record.of(kind))
    steps = [line.t for line in (*record.windows, *record.of(Evaluation))]
    for begin, later in pairwise([*starts, float("inf")]):
        if not any(begin <= t < later for t in steps):
            continue
        window = next((w for w in record.windows if begin <= w.t < later), None)
        first_t = begin if window is None else window.t - _length_s(window)  # servers begin before the start is written
        yield min(begin, first_t), max(t for t in ends if begin <= t < later)


def _firsts(record: RunRecord, spans: Sequence[tuple[float, float]]) -> Iterator[tuple[tuple[float, float], Steps]]:
    for span in spans:
        first = next((w for w in record.windows if span[0] <= w.t <= span[1]), None)
        if first is not None:
            yield span, first


def _ended(record: RunRecord, window: Steps, following: Steps | None) -> float:
    """Return the moment at which a window's steps ended, which may be before its line: that is a part of recording it.

    The recording is a pause of the window that follows, and counts once.
    """
    if following is None or record.has_servers:
        return window.t
    return min(window.t, following.t - _length_s(following))


def _length_s(window: Steps) -> float:
    """Return the seconds between a window's begin and its line, pauses included."""
    return window.seconds + sum(_told([window]).values())


def rank_seconds(window: Steps, rank: int) -> float:
    """Return the seconds that a rank had for a window's steps: where servers are, each worker pauses by itself."""
    return _length_s(window) - (sum(window.pauses[rank]) if window.pauses else 0.0)


def _told(windows: Sequence[Steps]) -> dict[str, float]:
    """Add up the pauses that windows tell of, the mean over the ranks."""
    sums = dict.fromkeys(PAUSES, 0.0)
    for window in windows:
        for name, column in zip(window.pause_names, zip(*window.pauses, strict=True), strict=False):
            if name in sums:
                sums[name] += fmean(column)
    return sums


def _paused(record: RunRecord, spans: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return all pauses by name: what windows tell, and what came after an attempt's last one."""
    told = _told(record.windows)
    if not any(w.pauses for w in record.windows):
        evaluated_s = sum(e.seconds for e in record.of(Evaluation))
        return {**told, _EVALUATION: evaluated_s, _CHECKPOINT: sum(c.blocked_s for c in record.of(Checkpoint))}
    sums = dict(told)
    for begin, end in spans:
        last = max((w.t for w in record.windows if begin <= w.t <= end), default=begin)
        for pause in record.of(Pause):
            if last < pause.t <= end:
                sums[pause.name] = sums.get(pause.name, 0.0) + min(pause.seconds, pause.t - last)
    sums[_CHECKPOINT] += last_writing(record)
    return sums


def last_writing(record: RunRecord) -> float:
    """Return the seconds in which nothing was left but to write a checkpoint, of all attempts."""
    signs = sorted(line.t for kind in (Steps, Evaluation, Pause) for line in record.of(kind))
    return sum(end - max((t for t in signs if begin <= t <= end), default=end) for begin, end in _spans(record))
