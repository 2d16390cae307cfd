"""Windows of steps merged into one line: sums and extremes are exact, quantiles are known within 1%.

Quantiles come from counts of values in buckets whose bounds grow by 2%, as DDSketch has them (Masson, Rim & Lee 2019,
arXiv 1908.10693): any number of them merges by adding up, and JSON holds them as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from echelon.records.kinds import Resources, Steps, Waits

MOST_LOSSES = 8  # of a merged line
_GROWTH = 1.02
_LEAST = 1e-9  # what is smaller counts as this


@dataclass(frozen=True)
class Tally:
    """What the windows of a merged line said beyond the sums that the line holds under the names of a window.

    Attributes:
        windows: how many.
        steps: in all of them; `losses` are means of neighbouring steps.
        loss_sum: of the `finite_steps`, whose least and greatest loss are `loss_min` and `loss_max`.
        nonfinite_step: the first step whose loss is not finite.
        step_s: how many windows had a mean step time in each bucket.
        slowest: in how many windows each rank had the most work of its own.
        hidden_s: of communication behind backward, of all ranks.
        waits_by_window, waits_by_step: None where some window did not tell.
    """

    windows: int
    steps: int
    finite_steps: int = 0
    loss_sum: float = 0.0
    loss_min: float | None = None
    loss_max: float | None = None
    nonfinite_step: int | None = None
    step_s: Mapping[str, int] = field(default_factory=dict)
    slowest: Sequence[int] = ()
    hidden_s: float = 0.0
    waits_by_window: Waits | None = None
    waits_by_step: Waits | None = None


@dataclass(frozen=True)
class MergedSteps(Steps):
    """Consecutive windows of one attempt as one line; fields of a window hold sums, `memory_bytes` the greatest."""

    tally: Tally = field(kw_only=True)

    @property
    def count(self) -> int:
        """Number of steps."""
        return self.tally.steps

    @property
    def windows(self) -> int:
        """How many windows it was."""
        return self.tally.windows

    @property
    def mean_loss(self) -> float:
        """Mean over the steps whose loss is finite."""
        return self.tally.loss_sum / self.tally.finite_steps if self.tally.finite_steps else math.nan

    @property
    def nonfinite_step(self) -> int | None:
        """The first step whose loss is not finite."""
        return self.tally.nonfinite_step

    def loss_points(self) -> Iterator[tuple[int, float, int]]:
        """Yield the last steps of equal runs of neighbours, their mean losses, and how many steps each stands for."""
        before = 0
        for i, loss in enumerate(self.losses, start=1):
            until = self.count * i // len(self.losses)
            yield self.step - self.count + until, loss, until - before
            before = until

    def step_times(self) -> list[float]:
        """Return the mean seconds of a step of each window, within 1%, in no order."""
        return [_middle(int(bucket)) for bucket, windows in self.tally.step_s.items() for _ in range(windows)]

    def slowest_ranks(self) -> Sequence[int]:
        """Return in how many windows each rank had the most work of its own."""
        return self.tally.slowest

    def waits_by_window(self) -> Waits | None:
        """Return the waits of the windows."""
        return self.tally.waits_by_window

    def waits_by_step(self) -> Waits | None:
        """Return the waits of the steps."""
        return self.tally.waits_by_step

    @property
    def hidden_s(self) -> float:
        """Seconds of communication behind backward, of all ranks."""
        return self.tally.hidden_s


def are_alike(a: Steps, b: Steps) -> bool:
    """Whether two windows have the same columns, so that they can be merged."""
    return _columns(a) == _columns(b)


def _columns(w: Steps) -> tuple[object, ...]:
    rows = (w.phases, w.pauses, w.memory_bytes, w.gc_s, w.comm_busy_s, w.comm_spread_s)
    return (*w.phase_names, *w.pause_names, *map(len, rows), w.correct is None, w.density is None, w.lr is None)


def merge(windows: Sequence[Steps]) -> Steps:
    """Merge consecutive windows of the same columns; a single one stays as it is."""
    if len(windows) == 1:
        return windows[0]
    last, tally = windows[-1], _tally(windows)
    groups: Counter[str] = Counter()
    for window in windows:
        groups.update(window.wire_bytes_by_group)
    densities = [(w.density, w.count) for w in windows if w.density is not None]
    corrects = [w.correct for w in windows if w.correct is not None]
    return MergedSteps(
        t=last.t,
        epoch=last.epoch,
        step=last.step,
        losses=_loss_means(windows, tally.steps),
        correct=sum(corrects) if corrects else None,
        samples=sum(w.samples for w in windows),
        lr=last.lr,
        seconds=_sum(w.seconds for w in windows),
        phase_names=last.phase_names,
        phases=_table_sum([w.phases for w in windows]),
        wire_bytes=_sum(w.wire_bytes for w in windows),
        wire_bytes_by_group=groups,
        other_wire_bytes=_sum(w.other_wire_bytes for w in windows),
        density=sum(share * n for share, n in densities) / tally.steps if densities else None,
        memory_bytes=[max(column) for column in zip(*(w.memory_bytes for w in windows), strict=True)],
        gc_s=_row_sum([w.gc_s for w in windows]),
        comm_busy_s=_row_sum([w.comm_busy_s for w in windows]),
        comm_spread_s=_row_sum([w.comm_spread_s for w in windows]),
        pause_names=last.pause_names,
        pauses=_table_sum([w.pauses for w in windows]),
        tally=tally,
    )


def mean_resources(samples: Sequence[Resources]) -> Resources:
    """Return the means of samples of the same ranks and columns, as of the last; null where none is known."""
    last = samples[-1]
    ranks = [
        [_mean([v for v in values if v is not None and math.isfinite(v)]) for values in zip(*rows, strict=True)]
        for rows in zip(*(s.ranks for s in samples), strict=True)
    ]
    return Resources(last.names, ranks, last.step, t=last.t)


def _tally(windows: Sequence[Steps]) -> Tally:
    step_s: Counter[str] = Counter()
    finite = [_finite_losses(w) for w in windows]
    known = [f for f in finite if f[0]]
    by_window, by_step = [w.waits_by_window() for w in windows], [w.waits_by_step() for w in windows]
    for window in windows:
        step_s.update(_buckets(window))
    return Tally(
        windows=sum(w.windows for w in windows),
        steps=sum(w.count for w in windows),
        finite_steps=sum(n for n, *_ in known),
        loss_sum=math.fsum(total for _, total, _, _ in known),
        loss_min=min((least for *_, least, _ in known), default=None),
        loss_max=max((most for *_, most in known), default=None),
        nonfinite_step=next((w.nonfinite_step for w in windows if w.nonfinite_step is not None), None),
        step_s=step_s,
        slowest=[sum(column) for column in zip(*(w.slowest_ranks() for w in windows), strict=True)],
        hidden_s=_sum(w.hidden_s for w in windows),
        waits_by_window=_waits(by_window),
        waits_by_step=_waits(by_step),
    )


def _finite_losses(w: Steps) -> tuple[int, float, float, float]:
    """Return how many finite losses a line has, their sum, the least and the greatest."""
    if isinstance(w, MergedSteps):
        t = w.tally
        return t.finite_steps, t.loss_sum, _or_nan(t.loss_min), _or_nan(t.loss_max)
    losses = [loss for loss in w.losses if math.isfinite(loss)]
    return len(losses), sum(losses), min(losses, default=math.nan), max(losses, default=math.nan)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _waits(of_windows: Sequence[Waits | None]) -> Waits | None:
    known = [waits for waits in of_windows if waits is not None]
    return Waits.sum(known) if len(known) == len(of_windows) else None


def _buckets(w: Steps) -> Mapping[str, int]:
    return w.tally.step_s if isinstance(w, MergedSteps) else {str(_bucket(w.seconds / w.count)): 1}


def _bucket(value: float) -> int:
    return math.ceil(math.log(max(value, _LEAST)) / math.log(_GROWTH))


def _middle(bucket: int) -> float:
    """Return the value that is within 1% of all in a bucket."""
    return 2 * _GROWTH**bucket / (_GROWTH + 1)


def _loss_means(windows: Sequence[Steps], steps: int) -> list[float]:
    """Return the means of a few runs of neighbouring steps of about the same length, NaN where none is finite."""
    sums, counts, passed = [0.0] * MOST_LOSSES, [0] * MOST_LOSSES, 0
    for window in windows:
        for _, loss, n in window.loss_points():
            place = min(passed * MOST_LOSSES // steps, MOST_LOSSES - 1)
            passed += n
            if math.isfinite(loss):
                sums[place] += loss * n
                counts[place] += n
    return [s / n if n else math.nan for s, n in zip(sums, counts, strict=True)][: max(1, min(steps, MOST_LOSSES))]


def _sum(values: Iterable[float]) -> float:
    """Add up seconds, to the nanosecond, or bytes."""
    return round(math.fsum(values), 9)


def _row_sum(rows: Sequence[Sequence[float]]) -> list[float]:
    return [_sum(column) for column in zip(*rows, strict=True)]


def _table_sum(tables: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    return [_row_sum(rows) for rows in zip(*tables, strict=True)]


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 1) if values else None
