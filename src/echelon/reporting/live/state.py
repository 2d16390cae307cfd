"""What a run's record says so far, kept up to date from what is added to it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from echelon.observe.resources import KIND as RESOURCES
from echelon.observe.resources import Resources, resources_of
from echelon.records.going import is_deserted
from echelon.reporting.live.follow import Curve, Follower, Json

RECENT_S = 10.0
MOST_EVENTS = 50
BAD = ("worker_died", "rank_failed", "role_failed", "refused", "failed")


@dataclass(frozen=True)
class Window:
    """Some steps reported together; `phases` holds seconds per rank and phase."""

    t: float
    step: int
    losses: tuple[float, ...]
    correct: float | None
    samples: int
    seconds: float
    phase_names: tuple[str, ...]
    phases: tuple[tuple[float, ...], ...]
    wire_bytes: float
    memory_bytes: tuple[float, ...]


@dataclass(frozen=True)
class Event:
    """Something that happened at a moment (unix seconds); `bad` when it is a failure."""

    t: float
    name: str
    message: str
    bad: bool


@dataclass
class LiveState:
    """All that was read; curves have optimizer steps as x."""

    start: Json = field(default_factory=dict)
    attempts: int = 0
    total_steps: int = 0
    epoch: int = 0
    step: int = 0
    windows: deque[Window] = field(default_factory=deque)
    top1: float | None = None
    best_top1: float | None = None
    evaluations: int = 0
    checkpoints: int = 0
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    resources: list[Resources] = field(default_factory=list)
    end: Json | None = None
    first_t: float | None = None
    last_t: float | None = None
    unreadable: int = 0
    loss_curve: Curve = field(default_factory=Curve)
    top1_curve: Curve = field(default_factory=Curve)
    rate_curve: Curve = field(default_factory=Curve)
    cpu_curve: Curve = field(default_factory=Curve)
    gpu_curve: Curve = field(default_factory=Curve)
    memory_curve: Curve = field(default_factory=Curve)

    def curves(self) -> dict[str, Curve]:
        """All curves by name; memory in GB."""
        return {
            "loss": self.loss_curve, "top1": self.top1_curve, "rate": self.rate_curve, "cpu": self.cpu_curve,
            "gpu": self.gpu_curve, "memory": self.memory_curve,
        }  # fmt: skip


class LiveRun:
    """A run's folder, watched. `refresh` reads what is new; `story` is what is known.

    `deserted`: its launcher and its ranks have died, and `story` holds the last that they said.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 0
        self.story = LiveState()
        self.deserted = False
        self._follower = Follower(folder)

    @property
    def torn(self) -> int:
        """Whole lines of the record that are none of its entries."""
        return self._follower.torn + self.story.unreadable

    def refresh(self) -> bool:
        """Read what was added; returns whether anything was."""
        added = self._read()
        start = self.story.start
        self.deserted = is_deserted(self.folder, start)
        if self.deserted:  # what the dead said just before their end may have been missed
            added = self._read() or added
            self.deserted = self.story.start is start
        return added

    def _read(self) -> bool:
        anew, records = self._follower.read()
        if anew:
            self.story = LiveState()
        for record in records:
            try:
                self._take(record)
            except (KeyError, TypeError, ValueError, AttributeError):
                self.story.unreadable += 1
        if anew or records:
            self.version += 1
        return bool(anew or records)

    def _take(self, record: Json) -> None:
        story, t = self.story, _finite(record["t"])
        match record["kind"]:
            case "start":
                self._start(record, t)
            case "steps":
                _window(story, record, t)
            case "evaluation":
                _evaluation(story, record)
            case "checkpoint":
                story.checkpoints += 1
            case "end":
                story.end = record
                status = str(record.get("status"))
                story.events.append(Event(t, "end", _sentence(status, record), status in BAD))
            case "event":
                name = str(record["name"])
                story.events.append(Event(t, name, str(record.get("message") or name), name in BAD))
            case kind if kind == RESOURCES:
                _resources(story, record)
        story.first_t = t if story.first_t is None else story.first_t
        story.last_t = t

    def _start(self, record: Json, t: float) -> None:
        """A group of ranks began, or began again: what lies beyond its first step is undone."""
        story = self.story
        steps = int(record["steps_per_epoch"]) * int(record["epochs"])
        step, most = int(record.get("start_step") or 0), _max_steps(self.folder)
        story.start, story.end, story.attempts = record, None, story.attempts + 1
        story.total_steps = min(steps, most) if most else steps
        story.step, story.epoch = step, int(record.get("start_epoch") or 0)
        story.windows.clear()
        story.resources = []
        for curve in story.curves().values():
            curve.forget_after(step)
        ranks = record.get("world_size")
        story.events.append(Event(t, "start", f"{ranks} rank{'s' * (ranks != 1)} began at step {step}", False))


def _sentence(status: str, record: Json) -> str:
    message = str(record.get("message") or "")
    return f"{status}: {message}" if message else status


def _window(story: LiveState, r: Json, t: float) -> None:
    losses = tuple(float("nan") if x is None else float(x) for x in r["losses"])
    names = tuple(str(n) for n in r.get("phase_names") or ())
    phases = tuple(tuple(_finite(s) for s in rank) for rank in r.get("phases") or ())
    if not losses or any(len(rank) != len(names) for rank in phases):
        raise ValueError("not a window of steps")
    correct = None if r.get("correct") is None else float(r["correct"])
    memory = tuple(float(b) for b in r.get("memory_bytes") or ())
    window = Window(
        t, int(r["step"]), losses, correct, int(r.get("samples") or 0), _finite(r["seconds"]), names, phases,
        float(r.get("wire_bytes") or 0), memory,
    )  # fmt: skip
    story.step, story.epoch = window.step, int(r.get("epoch") or 0)
    story.windows.append(window)
    while len(story.windows) > 1 and story.windows[0].t < t - RECENT_S:
        story.windows.popleft()
    story.loss_curve.add(window.step, [sum(losses) / len(losses)])
    if window.seconds > 0:
        story.rate_curve.add(window.step, [window.samples / window.seconds])


def _evaluation(story: LiveState, r: Json) -> None:
    story.evaluations += 1
    value = r["metrics"].get("top1")
    if value is None:
        return
    story.top1 = _finite(value)
    story.best_top1 = max(story.top1, story.best_top1 or 0.0)
    story.top1_curve.add(int(r["step"]), [story.top1])


def _resources(story: LiveState, r: Json) -> None:
    found = resources_of(r)
    if found is None:
        raise ValueError("not a sample of resources")
    before = story.resources if len(story.resources) == len(found[1]) else found[1]
    story.resources = [old if math.isnan(new.rss_bytes) else new for old, new in zip(before, found[1], strict=True)]
    step = int(r.get("step") or story.step)
    _add_known(story.cpu_curve, step, [x.cpu_percent for x in story.resources])
    _add_known(story.gpu_curve, step, [x.gpu_percent for x in story.resources])
    _add_known(story.memory_curve, step, [(x.rss_bytes + x.loaders_rss_bytes) / 1e9 for x in story.resources])


def _add_known(curve: Curve, step: int, values: Sequence[float]) -> None:
    if values and not any(math.isnan(v) for v in values):
        curve.add(step, values)


def _max_steps(folder: Path) -> int:
    """Return the run's `max_steps`; 0: none, or its description cannot be read (then the epochs count)."""
    try:
        described: Any = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return int(described["training"]["max_steps"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return 0


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number
