"""Windows of steps merged into one line: sums and extremes are exact, quantiles are known within 1%.

Quantiles come from counts of values in buckets whose bounds grow by 2%, as DDSketch has them (Masson, Rim & Lee 2019,
arXiv 1908.10693): any number of them merges by adding up, and JSON holds them as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from echelon.records.kinds import COMMUNICATE, Resources, Steps, Waits

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
        phases=_table_sums([w.phases for w in windows]),
        wire_bytes=_sum(w.wire_bytes for w in windows),
        wire_bytes_by_group=groups,
        other_wire_bytes=_sum(w.other_wire_bytes for w in windows),
        density=sum(share * n for share, n in densities) / tally.steps if densities else None,
        memory_bytes=np.array([w.memory_bytes for w in windows]).max(axis=0, initial=0.0).tolist(),
        gc_s=_column_sums([w.gc_s for w in windows]),
        comm_busy_s=_column_sums([w.comm_busy_s for w in windows]),
        comm_spread_s=_column_sums([w.comm_spread_s for w in windows]),
        pause_names=last.pause_names,
        pauses=_table_sums([w.pauses for w in windows]),
        tally=tally,
    )


def mean_resources(samples: Sequence[Resources]) -> Resources:
    """Return the means of samples of the same ranks and columns, as of the last; null where none is known."""
    last = samples[-1]
    flat = list(chain.from_iterable(chain.from_iterable(s.ranks for s in samples)))  # fast: null becomes NaN at once
    values = np.array(flat, dtype=np.float64).reshape(len(samples), len(last.ranks), len(last.names))
    known = np.isfinite(values)
    counts = known.sum(axis=0)
    means = np.where(known, values, 0.0).sum(axis=0) / np.maximum(counts, 1)
    ranks = [
        [round(mean, 1) if n else None for mean, n in zip(*row, strict=True)]
        for row in zip(means.tolist(), counts.tolist(), strict=True)
    ]
    return Resources(last.names, ranks, last.step, t=last.t)


def _tally(windows: Sequence[Steps]) -> Tally:
    merged = [w.tally for w in windows if isinstance(w, MergedSteps)]
    single = [w for w in windows if not isinstance(w, MergedSteps)]
    known = [t for t in (*merged, *([_tally_of_single(single)] if single else [])) if t.windows]
    finite = [t for t in known if t.finite_steps]
    step_s: Counter[str] = Counter()
    for tally in known:
        step_s.update(tally.step_s)
    return Tally(
        windows=sum(t.windows for t in known),
        steps=sum(t.steps for t in known),
        finite_steps=sum(t.finite_steps for t in finite),
        loss_sum=math.fsum(t.loss_sum for t in finite),
        loss_min=min((t.loss_min for t in finite if t.loss_min is not None), default=None),
        loss_max=max((t.loss_max for t in finite if t.loss_max is not None), default=None),
        nonfinite_step=next((w.nonfinite_step for w in windows if w.nonfinite_step is not None), None),
        step_s=step_s,
        slowest=[sum(column) for column in zip(*(t.slowest for t in known), strict=True)],
        hidden_s=_sum(t.hidden_s for t in known),
        waits_by_window=_waits([t.waits_by_window for t in known]),
        waits_by_step=_waits([t.waits_by_step for t in known]),
    )


def _tally_of_single(windows: Sequence[Steps]) -> Tally:
    """Return what windows of the same columns, none of which was merged, say together."""
    phases = _cube([w.phases for w in windows])  # (windows, ranks, phases)
    names, ranks = windows[-1].phase_names, len(windows[-1].phases)
    losses = np.concatenate([w.losses for w in windows])
    finite = losses[np.isfinite(losses)]
    work = [i for i, name in enumerate(names) if name != COMMUNICATE]
    slowest = np.bincount(phases[:, :, work].sum(axis=2).argmax(axis=1), minlength=ranks).tolist() if ranks else []
    by_window, hidden_s = None, 0.0
    if COMMUNICATE in names and ranks:
        waits = phases[:, :, names.index(COMMUNICATE)]
        by_window = _waits_of(waits)
        busy = np.array([w.comm_busy_s for w in windows]).sum(axis=1)
        hidden_s = float(np.maximum(0.0, busy - waits.sum(axis=1)).sum())
    by_step = None
    if ranks and all(len(w.waits) == ranks for w in windows):
        by_step = _waits_of(np.concatenate([_cube([w.waits])[0] for w in windows], axis=1).T)
    return Tally(
        windows=len(windows),
        steps=len(losses),
        finite_steps=len(finite),
        loss_sum=math.fsum(finite),
        loss_min=float(finite.min()) if len(finite) else None,
        loss_max=float(finite.max()) if len(finite) else None,
        step_s=Counter(str(_bucket(w.seconds / w.count)) for w in windows),
        slowest=slowest,
        hidden_s=hidden_s,
        waits_by_window=by_window,
        waits_by_step=by_step,
    )


def _waits_of(columns: NDArray[np.float64]) -> Waits:
    """Add up waits (steps or windows, ranks), as `Waits.of` does."""
    critical = np.bincount(columns.argmin(axis=1), minlength=columns.shape[1])
    return Waits(len(columns), float(columns.sum()), float(columns.min(axis=1).sum()), critical.tolist())


def _waits(of_windows: Sequence[Waits | None]) -> Waits | None:
    known = [waits for waits in of_windows if waits is not None]
    return Waits.sum(known) if len(known) == len(of_windows) else None


def _bucket(value: float) -> int:
    return math.ceil(math.log(max(value, _LEAST)) / math.log(_GROWTH))


def _middle(bucket: int) -> float:
    """Return the value that is within 1% of all in a bucket."""
    return 2 * _GROWTH**bucket / (_GROWTH + 1)


def _loss_means(windows: Sequence[Steps], steps: int) -> list[float]:
    """Return the means of a few runs of neighbouring steps of about the same length, NaN where none is finite."""
    runs = max(1, min(steps, MOST_LOSSES))
    points = [_points(w) for w in windows]
    losses, counts = (np.concatenate(column) for column in zip(*points, strict=True))
    places = np.minimum((np.cumsum(counts) - counts) * runs // steps, runs - 1).astype(np.intp)
    finite = np.isfinite(losses)
    places, losses, counts = places[finite], losses[finite], counts[finite]
    sums = np.bincount(places, losses * counts, runs)
    weights = np.bincount(places, counts, runs)
    means: list[float] = np.divide(sums, weights, out=np.full(runs, math.nan), where=weights > 0).tolist()
    return means


def _points(w: Steps) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return losses, and for how many steps each stands."""
    if isinstance(w, MergedSteps):
        known = [(loss, n) for _, loss, n in w.loss_points()]
        losses, counts = np.array(known, dtype=np.float64).reshape(-1, 2).T
        return losses, counts
    return np.array(w.losses, dtype=np.float64), np.ones(len(w.losses))


def _sum(values: Iterable[float]) -> float:
    """Add up seconds, to the nanosecond, or bytes."""
    return round(math.fsum(values), 9)


def _column_sums(rows: Sequence[Sequence[float]]) -> list[float]:
    """Add up rows of the same columns."""
    sums: list[float] = np.round(np.array(rows).sum(axis=0), 9).tolist()
    return sums


def _table_sums(tables: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Add up tables of the same rows and columns."""
    sums: list[list[float]] = np.round(_cube(tables).sum(axis=0), 9).tolist()
    return sums


def _cube(tables: Sequence[Sequence[Sequence[float]]]) -> NDArray[np.float64]:
    """Return tables of the same shape as an array (tables, rows, columns), in a third of the time of `np.array`."""
    rows = len(tables[0])
    values = np.fromiter(chain.from_iterable(chain.from_iterable(tables)), np.float64)
    return values.reshape(len(tables), rows, len(tables[0][0]) if rows else 0)
