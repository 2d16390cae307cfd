"""What a run's record says so far, kept up to date from what is added to it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echelon.config import load_run_config
from echelon.core.errors import UserError
from echelon.core.task import BEFORE_TASKS, TaskFacts
from echelon.records.events import Event, SharesDealt
from echelon.records.file import Detail, RecordReader
from echelon.records.going import is_deserted
from echelon.records.kinds import Checkpoint, End, Evaluation, RankResources, Record, Resources, Start, Steps

RECENT_S = 10.0
MOST_EVENTS = 50
BAD = ("worker_died", "hang", "rank_failed", "role_failed", "refused", "diverged", "failed")


@dataclass(frozen=True)
class TimelineEntry:
    """Something that happened at a moment (unix seconds); `bad` when it is a failure."""

    t: float
    name: str
    message: str
    bad: bool


class Curve:
    """Points (x, y...) in the order of x: at most `limit`, neighbours are averaged when there are more.

    >>> curve = Curve(2)
    >>> for x in (1, 2, 3, 4, 5): curve.add(x, [2.0 * x])
    >>> curve.points()
    [[4, 5.0], [5, 10.0]]
    """

    def __init__(self, limit: int = 400) -> None:
        self._limit, self._merged = limit, 1
        self._points: list[tuple[float, list[float], int]] = []

    def add(self, x: float, y: Sequence[float]) -> None:
        """Add a point to the right; a different number of values begins the curve anew."""
        values = list(y)
        if self._points and len(self._points[-1][1]) != len(values):
            self.clear()
        if self._points and self._points[-1][2] < self._merged:
            self._points[-1] = _mean(self._points[-1], (x, values, 1))
        else:
            self._points.append((x, values, 1))
        if len(self._points) > self._limit:
            halves = zip(self._points[::2], self._points[1::2])
            odd = self._points[-1:] if len(self._points) % 2 else []
            self._points = [*(_mean(a, b) for a, b in halves), *odd]
            self._merged *= 2

    def forget_after(self, x: float) -> None:
        """Drop what lies beyond a place."""
        while self._points and self._points[-1][0] > x:
            self._points.pop()

    def clear(self) -> None:
        """Drop all."""
        self._points, self._merged = [], 1

    def points(self) -> list[list[float]]:
        """Return one list [x, y...] per point."""
        return [[x, *y] for x, y, _ in self._points]


def _mean(a: tuple[float, list[float], int], b: tuple[float, list[float], int]) -> tuple[float, list[float], int]:
    n = a[2] + b[2]
    return b[0], [(p * a[2] + q * b[2]) / n for p, q in zip(a[1], b[1])], n


@dataclass
class LiveState:
    """All that was read; curves have optimizer steps as x. `values` are (step, primary metric) of the evaluations.

    `shares`: samples of each rank's part of a full batch; empty: they are equal.
    """

    start: Start | None = None
    attempts: int = 0
    shares: Sequence[int] = ()
    total_steps: int = 0
    epoch: int = 0
    step: int = 0
    windows: deque[Steps] = field(default_factory=deque)
    values: list[tuple[int, float]] = field(default_factory=list)
    evaluations: int = 0
    checkpoints: int = 0
    events: deque[TimelineEntry] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    resources: list[RankResources] = field(default_factory=list)
    end: End | None = None
    first_t: float | None = None
    last_t: float | None = None
    loss_curve: Curve = field(default_factory=Curve)
    value_curve: Curve = field(default_factory=Curve)
    rate_curve: Curve = field(default_factory=Curve)
    cpu_curve: Curve = field(default_factory=Curve)
    gpu_curve: Curve = field(default_factory=Curve)
    memory_curve: Curve = field(default_factory=Curve)

    @property
    def task(self) -> TaskFacts:
        """What is learnt."""
        return self.start.task if self.start else BEFORE_TASKS

    @property
    def value(self) -> float | None:
        """The newest evaluation's primary metric."""
        return self.values[-1][1] if self.values else None

    @property
    def best(self) -> float | None:
        """The best primary metric of all evaluations."""
        best: float | None = None
        for _, value in self.values:
            best = value if self.task.primary.better(value, best) else best
        return best

    def curves(self) -> dict[str, Curve]:
        """All curves by name; memory in GB."""
        return {
            "loss": self.loss_curve, "value": self.value_curve, "rate": self.rate_curve, "cpu": self.cpu_curve,
            "gpu": self.gpu_curve, "memory": self.memory_curve,
        }  # fmt: skip


class LiveRun:
    """A run's folder, watched. `refresh` reads what is new; `state` is what is known.

    `deserted`: its launcher and its ranks have died, and `state` holds the last that they recorded.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 0
        self.state = LiveState()
        self.deserted = False
        self._reader = RecordReader(folder, detail=Detail.SAMPLED)

    @property
    def torn(self) -> int:
        """Whole lines of the record that are none of its entries, and rows within entries that cannot be read."""
        return self._reader.torn + self._reader.unreadable + self._reader.unreadable_rows

    def refresh(self) -> bool:
        """Read what was added; returns whether anything was."""
        added = self._read()
        start = self.state.start
        self.deserted = is_deserted(self.folder, start)
        if self.deserted:  # what the dead recorded just before their end may have been missed
            added = self._read() or added
            self.deserted = self.state.start is start
        return added

    def _read(self) -> bool:
        replaced, records = self._reader.read()
        if replaced:
            self.state = LiveState()
        for record in records:
            self._take(record)
        if replaced or records:
            self.version += 1
        return bool(replaced or records)

    def _take(self, record: Record) -> None:
        state = self.state
        match record:
            case Start():
                self._start(record)
            case Steps():
                _steps(state, record)
            case Evaluation():
                _evaluation(state, record)
            case Checkpoint():
                state.checkpoints += 1
            case End():
                state.end = record
                message = f"{record.status}: {record.message}" if record.message else record.status
                state.events.append(TimelineEntry(record.t, "end", message, record.status in BAD))
            case Event():
                if isinstance(record, SharesDealt):
                    state.shares = record.sizes
                state.events.append(
                    TimelineEntry(record.t, record.name, record.message or record.name, record.name in BAD)
                )
            case Resources():
                _resources(state, record)
        state.first_t = record.t if state.first_t is None else state.first_t
        state.last_t = record.t

    def _start(self, start: Start) -> None:
        """A group of ranks began, or began again: what lies beyond its first step is undone."""
        state, step, most = self.state, start.start_step, most_steps(self.folder)
        steps, ranks = start.steps_per_epoch * start.epochs, start.world_size
        state.start, state.end, state.attempts = start, None, state.attempts + 1
        state.total_steps = min(steps, most) if most else steps
        state.step, state.epoch, state.shares = step, start.start_epoch, start.shares
        state.windows.clear()
        state.resources = []
        state.values = [(at, value) for at, value in state.values if at <= step]
        for curve in state.curves().values():
            curve.forget_after(step)
        state.events.append(
            TimelineEntry(start.t, "start", f"{ranks} rank{'s' * (ranks != 1)} began at step {step}", False)
        )


def _steps(state: LiveState, window: Steps) -> None:
    state.step, state.epoch = window.step, window.epoch
    state.windows.append(window)
    while len(state.windows) > 1 and state.windows[0].t < window.t - RECENT_S:
        state.windows.popleft()
    state.loss_curve.add(window.step, [window.mean_loss])
    if window.seconds > 0:
        state.rate_curve.add(window.step, [window.samples_per_s])


def _evaluation(state: LiveState, evaluation: Evaluation) -> None:
    state.evaluations += 1
    value = evaluation.metrics.get(state.task.primary.name)
    if value is None or not math.isfinite(value):
        return
    state.values.append((evaluation.step, value))
    state.value_curve.add(evaluation.step, [value])


def _resources(state: LiveState, record: Resources) -> None:
    latest = record.by_rank()
    before = state.resources if len(state.resources) == len(latest) else latest
    state.resources = [old if math.isnan(new.rss_bytes) else new for old, new in zip(before, latest, strict=True)]
    step = record.step or state.step
    _add_known(state.cpu_curve, step, [x.cpu_percent for x in state.resources])
    _add_known(state.gpu_curve, step, [x.gpu_percent for x in state.resources])
    _add_known(state.memory_curve, step, [(x.rss_bytes + x.loaders_rss_bytes) / 1e9 for x in state.resources])


def _add_known(curve: Curve, step: int, values: Sequence[float]) -> None:
    if values and not any(math.isnan(v) for v in values):
        curve.add(step, values)


def most_steps(folder: Path) -> int:
    """Return the run's `max_steps`; 0: none, or its description cannot be read (then the epochs count)."""
    try:
        return load_run_config(folder / "config.yaml").training.max_steps
    except UserError:
        return 0
