"""Thinning a record: windows of steps are merged, counters keep what tells their growth, the others stay whole.

What a report computes comes out the same: sums and extremes are exact, quantiles within 1%. A restart undoes steps,
so windows are merged neither over a start nor over a step to which a later start went back; the first window of an
attempt, which warms up, stays alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from echelon.records.events import (
    BadImageSkipped,
    CannotGoOn,
    DataGrew,
    Event,
    HangSeen,
    LossNotFinite,
    MachineLeft,
    PeriodChanged,
    RankFailed,
    Refusal,
    Restarted,
    Resumed,
    RoleFailed,
    SharesDealt,
    WorkerDied,
)
from echelon.records.kinds import (
    End,
    EntropyCoding,
    Pause,
    PipelineStep,
    Record,
    Resources,
    ServerWindow,
    SlowStep,
    Start,
    Steps,
    WorkerWindow,
)
from echelon.records.merged import are_alike, mean_resources, merge

MOST_SLOW_STEPS = 50
MOST_PIPELINE_STEPS = 8
MOST_EVENTS = 20  # of one name, one by one
_WHOLE = (
    DataGrew,
    WorkerDied,
    Restarted,
    RankFailed,
    RoleFailed,
    Refusal,
    CannotGoOn,
    Resumed,
    MachineLeft,
    HangSeen,
    SharesDealt,
    PeriodChanged,
)
_Counters = WorkerWindow | ServerWindow | EntropyCoding


def thinned(records: Iterable[Record], windows: int, fan: int, restarts: Sequence[int]) -> Iterator[Record]:
    """Yield records in order, thinned.

    Args:
        records: in the order written.
        windows: at most so many become one line.
        fan: of so many lines of counters one stays.
        restarts: steps that starts of the whole record began at, ascending.
    """
    thinner = _Thinner(windows, fan, restarts)
    for record in records:
        yield from thinner.take(record)
    yield from thinner.finish()


class _Thinner:
    def __init__(self, windows: int, fan: int, restarts: Sequence[int]) -> None:
        self._windows, self._fan, self._restarts = windows, fan, restarts
        self._group: list[Steps] = []
        self._group_windows = 0
        self._alone = False  # the next window is an attempt's first
        self._resources: list[Resources] = []
        self._pauses: list[Pause] = []
        self._slow: list[SlowStep] = []
        self._pipeline: deque[PipelineStep] = deque(maxlen=MOST_PIPELINE_STEPS)
        self._counters: dict[tuple[type[Record], str], tuple[_Counters, int]] = {}
        self._events: dict[str, list[Event]] = {}

    def take(self, record: Record) -> Iterator[Record]:
        """Take the next record; yields those that are settled."""
        match record:
            case Steps():
                yield from self._take_window(record)
            case Resources():
                if self._resources and not _are_alike(self._resources[-1], record):
                    yield from self._end_resources()
                self._resources.append(record)
            case Pause():
                self._pauses.append(record)
            case SlowStep():
                self._take_slow(record)
            case PipelineStep():
                self._pipeline.append(record)
            case WorkerWindow() | ServerWindow() | EntropyCoding():
                yield from self._take_counters(record)
            case Event() if not isinstance(record, _WHOLE):
                yield from self._take_event(record)
            case _:
                if isinstance(record, Start | End | WorkerDied):
                    yield from self._end_group()
                    yield from self._pauses
                    self._pauses.clear()
                self._alone = self._alone or isinstance(record, Start)
                yield record

    def finish(self) -> Iterator[Record]:
        """Yield what is left."""
        yield from self._end_group()
        yield from self._end_resources()
        yield from self._pauses
        yield from self._pipeline
        yield from sorted(self._slow, key=lambda slow: slow.t)
        for counters, _ in self._counters.values():
            yield counters
        for events in self._events.values():
            if len(events) > MOST_EVENTS:
                yield events[-1]

    def _take_window(self, window: Steps) -> Iterator[Record]:
        if window.pauses:
            self._pauses.clear()  # it tells of them itself
        if self._group and not self._goes_with(window):
            yield from self._end_group()
        self._group.append(window)
        self._group_windows += window.windows
        if self._alone or self._group_windows >= self._windows:
            yield from self._end_group()
        self._alone = False

    def _goes_with(self, window: Steps) -> bool:
        before = self._group[-1]
        place = bisect_left(self._restarts, before.step)
        undone_from = self._restarts[place] if place < len(self._restarts) else window.step
        return (
            before.step < window.step <= undone_from
            and self._group_windows + window.windows <= self._windows
            and are_alike(before, window)
        )

    def _end_group(self) -> Iterator[Record]:
        if self._group:
            yield merge(self._group)
            yield from self._end_resources()
        self._group, self._group_windows = [], 0

    def _end_resources(self) -> Iterator[Record]:
        if self._resources:
            yield mean_resources(self._resources)
        self._resources = []

    def _take_slow(self, slow: SlowStep) -> None:
        window = next((w for w in reversed(self._group) if w.step - w.count < slow.step <= w.step), None)
        if window is not None and slow.waited_for is None:
            slow = replace(slow, waited_for=slow.critical_rank(window))
        self._slow = sorted([*self._slow, slow], key=lambda s: -s.seconds)[:MOST_SLOW_STEPS]

    def _take_counters(self, record: _Counters) -> Iterator[Record]:
        """Hold the last of each series; it is passed over where the next one has counted on."""
        series = (type(record), record.name if isinstance(record, ServerWindow) else "")
        before, passed = self._counters.get(series, (None, 0))
        if before is not None and (passed + 1 >= self._fan or not _counts_on(before, record)):
            yield before
            passed = -1
        self._counters[series] = (record, passed + 1)

    def _take_event(self, event: Event) -> Iterator[Record]:
        """Yield the first of each name; of the others one stays, which says how many there were."""
        events = self._events.setdefault(event.name, [])
        if len(events) < MOST_EVENTS:
            events.append(event)
            yield event
        elif len(events) == MOST_EVENTS:
            events.append(event)
        else:
            events[-1] = _one_more(events[-1], event)


def _one_more(before: Event, event: Event) -> Event:
    if isinstance(before, BadImageSkipped | LossNotFinite) and isinstance(event, type(before)):
        return replace(event, count=before.count + event.count, more=before.more + event.more + 1)
    return replace(event, more=before.more + event.more + 1)


def _are_alike(a: Resources, b: Resources) -> bool:
    return a.names == b.names and len(a.ranks) == len(b.ranks)


def _counts_on(before: _Counters, after: _Counters) -> bool:
    """Whether the counters of one line go on in the next: nothing began anew, and nobody left."""
    if isinstance(before, ServerWindow) and isinstance(after, ServerWindow):
        return before.life == after.life and before.updates <= after.updates and before.seconds <= after.seconds
    if isinstance(before, WorkerWindow) and isinstance(after, WorkerWindow):
        values = dict(_flat(after))
        return all(value <= values.get(name, -1.0) for name, value in _flat(before))
    return True


def _flat(window: WorkerWindow) -> Iterator[tuple[tuple[str, ...], float]]:
    counters = (
        ("clock", window.clocks), ("sent", window.sent_bytes), ("received", window.received_bytes),
        ("overlapped", window.overlapped_s),
    )  # fmt: skip
    for name, counts in counters:
        for worker, value in counts.items():
            yield (name, worker), value
    for worker, causes in window.waited_s.items():
        for cause, value in causes.items():
            yield ("waited", worker, cause), value
