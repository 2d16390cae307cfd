"""`--profile`: torch's profiler over a few steps of each rank, and one trace of all ranks that Perfetto opens.

Before and after these steps nothing is measured and nothing is slower.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from echelon.observe.phases import Phase, PhaseClock, WrappedClock

if TYPE_CHECKING:
    import torch

PROFILE_FOLDER = "profile"
TRACE_FILE = "trace.json.gz"
WARM_UP = 5  # steps before: the first ones allocate, compile and connect
_PID_ROOM = 10_000  # process ids of a rank in the trace of all ranks


class TracedClock(WrappedClock):
    """A phase clock that marks steps and their phases in the profiler's trace while there is one."""

    def __init__(self, clock: PhaseClock) -> None:
        super().__init__(clock)
        self._phase: Phase | None = None
        self._marks: dict[str, torch.profiler.record_function] = {}
        self._is_traced = False

    def enter(self, phase: Phase | None) -> None:
        """Begin a phase now, or a pause."""
        super().enter(phase)
        self._phase = phase
        if self._is_traced:
            self._end("phase")
            self._begin_phase()

    def begin_step(self, number: int) -> None:
        """Mark what comes until the next call as a step."""
        self._is_traced = True
        self._end("phase", "step")
        self._begin("step", f"step {number}")
        self._begin_phase()

    def end_steps(self) -> None:
        """Mark nothing more."""
        self._end("phase", "step")
        self._is_traced = False

    def _begin_phase(self) -> None:
        if self._phase is not None:
            self._begin("phase", f"phase: {self._phase}")

    def _begin(self, what: str, name: str) -> None:
        import torch

        self._marks[what] = torch.profiler.record_function(name)
        self._marks[what].__enter__()

    def _end(self, *whats: str) -> None:
        for what in whats:
            if (mark := self._marks.pop(what, None)) is not None:
                mark.__exit__(None, None, None)


class StepProfiler:
    """Profiles some steps of this process, after a few others.

    Args:
        steps: how many.
        file: of this rank's trace, which appears when it is complete.
        clock: whose phases are marked.
    """

    def __init__(self, steps: int, file: Path, clock: TracedClock) -> None:
        self._steps, self._file, self._clock = steps, file, clock
        self._done = 0
        self._profile: torch.profiler.profile | None = None

    def step_done(self) -> bool:
        """Count a step; whether the profiler is to be switched now, on or off, in a pause between steps."""
        self._done += 1
        if self._profile is not None and self._done < WARM_UP + self._steps:
            self._clock.begin_step(self._done + 1)
        return self._done in (WARM_UP, WARM_UP + self._steps)

    def switch(self) -> None:
        """Begin to profile, or write the trace."""
        if self._profile is not None:
            self.close()
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells the terminal of devices that are not there
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()
        self._clock.begin_step(self._done + 1)

    def close(self) -> None:
        """Write the trace of a profile that goes on; does nothing otherwise."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        self._clock.end_steps()
        profile.stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._file.with_suffix(".unfinished")
        profile.export_chrome_trace(str(unfinished))
        unfinished.rename(self._file)


class TraceEvent(TypedDict, total=False):
    """What is read of an event of a trace (Chrome's trace event format); `ts` is in microseconds."""

    name: str
    ph: str
    pid: int | str
    ts: float
    id: int | str
    args: dict[str, object]


def rank_trace(folder: Path, rank: int) -> Path:
    """Return where a rank writes its part of a run's trace."""
    return folder / PROFILE_FOLDER / f"rank{rank:05d}.json"


def merge_traces(folder: Path) -> str:
    """Put the ranks' new traces of a run into one; returns what to say of it, empty where there are none."""
    parts = sorted((folder / PROFILE_FOLDER).glob("rank*.json"))
    if not parts:
        return ""
    merged = folder / PROFILE_FOLDER / TRACE_FILE
    events: list[TraceEvent] = []
    base_ns: int | None = None
    for part in parts:
        trace, rank = json.loads(part.read_text()), int(part.stem.removeprefix("rank"))
        begins_ns = trace.get("baseTimeNanoseconds", 0)
        base_ns = begins_ns if base_ns is None else base_ns
        events += _of_rank(trace["traceEvents"], rank, (begins_ns - base_ns) / 1e3)
    text = json.dumps({"displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns, "traceEvents": events})
    unfinished = merged.with_suffix(".unfinished")
    unfinished.write_bytes(gzip.compress(text.encode(), 6))
    unfinished.replace(merged)
    for part in parts:
        part.unlink()
    ranks = f"{len(parts)} rank{'s' * (len(parts) != 1)}"
    return f"profiler trace of {ranks}: {merged}; open it at https://ui.perfetto.dev"


def _of_rank(events: list[TraceEvent], rank: int, shift_us: float) -> Iterator[TraceEvent]:
    """Give a rank's events with ids of its own: process ids, and those of the arrows between events."""
    numbers: dict[object, int] = {}
    for event in events:
        pid = numbers.setdefault(event.get("pid"), rank * _PID_ROOM + len(numbers))
        changed: TraceEvent = {**event, "pid": pid}
        if "ts" in event:
            changed["ts"] = event["ts"] + shift_us
        if event.get("ph") in ("s", "t", "f") and "id" in event:
            changed["id"] = f"{rank}.{event['id']}"
        if event.get("ph") == "M" and event.get("name") == "process_name":
            changed["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
        yield changed
