"""One look at a run, as plain values: what the terminal and the page show."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from echelon.core.units import format_seconds
from echelon.observe.phases import Phase
from echelon.records.going import is_held, is_local, read_launch
from echelon.reporting.live.state import Event, LiveRun, LiveState, Window

QUIET_S = 10.0  # a run that nobody holds, and whose ranks may live, is given up after so long a silence


@dataclass(frozen=True)
class RankView:
    """One rank: shares of its recent time by phase, and what it uses (None: not known). Units as in `Resources`."""

    rank: int
    host: str
    pid: int | None
    phases: dict[str, float]
    memory_bytes: float | None
    resources: dict[str, float | None]


@dataclass(frozen=True)
class Snapshot:
    """A run now. Shares are of 1, times in seconds; None: not known yet. `over`: nothing more will come."""

    name: str
    what: str
    status: str
    message: str
    over: bool
    quiet_s: float | None
    elapsed_s: float | None
    eta_s: float | None
    epoch: int
    epochs: int
    step: int
    total_steps: int
    loss: float | None
    train_top1: float | None
    top1: float | None
    best_top1: float | None
    samples_per_s: float | None
    step_s: float | None
    exposed: float | None
    wire_bytes_per_step: float | None
    attempts: int
    checkpoints: int
    torn: int
    ranks: list[RankView] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def done(self) -> float:
        """Share of the steps that are done."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 0.0


def look(run: LiveRun, now: float | None = None) -> Snapshot:
    """Summarise a run as it was last refreshed, at a unix time (default: the present)."""
    story, now = run.story, time.time() if now is None else now
    status, message, over = _status(run, now)
    windows = list(story.windows)
    seconds, steps = sum(w.seconds for w in windows), sum(len(w.losses) for w in windows)
    samples, step_s = sum(w.samples for w in windows), seconds / steps if steps and seconds else None
    correct = [w.correct for w in windows if w.correct is not None]
    quiet_s = None if over or story.last_t is None else max(0.0, now - story.last_t)
    return Snapshot(
        name=run.folder.resolve().name, what=_what(story), status=status, message=message, over=over, quiet_s=quiet_s,
        elapsed_s=_elapsed_s(run, now, over), eta_s=None if over else _eta_s(story, step_s),
        epoch=story.epoch + 1 if story.step else 0, epochs=int(story.start.get("epochs") or 0), step=story.step,
        total_steps=story.total_steps, loss=_mean([x for w in windows for x in w.losses]),
        train_top1=sum(correct) / samples if correct and samples else None, top1=story.top1, best_top1=story.best_top1,
        samples_per_s=samples / seconds if seconds else None, step_s=step_s, exposed=_exposed(windows),
        wire_bytes_per_step=sum(w.wire_bytes for w in windows) / steps if steps else None,
        attempts=story.attempts, checkpoints=story.checkpoints, torn=run.torn, ranks=_ranks(story, windows),
        events=list(story.events),
    )  # fmt: skip


def to_json(run: LiveRun, snapshot: Snapshot) -> dict[str, Any]:
    """Return what the page needs: the snapshot, and curves as lists of [step, value...]; NaN is null."""
    curves = {name: curve.points() for name, curve in run.story.curves().items()}
    values = {**asdict(snapshot), "done": snapshot.done, "curves": curves}
    found: dict[str, Any] = plain(values)
    return found


def plain(value: Any) -> Any:
    """Replace NaN and infinity by None, deeply: JSON has neither."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _status(run: LiveRun, now: float) -> tuple[str, str, bool]:
    """How the run stands, why, and whether that is its end."""
    story, launch = run.story, read_launch(run.folder)
    if run.version and not run.folder.is_dir():
        return "gone", "its folder was removed", True
    if story.end is not None and not _began_again(launch, story):
        return str(story.end.get("status") or "ended"), str(story.end.get("message") or ""), True
    if launch.get("ended"):
        return "ended", "its command ended, and did not record how", True
    said = [t for t in (story.last_t, _number(launch.get("launched_t"))) if t is not None]
    quiet_s = now - max(said) if said else 0.0
    nobody_holds = is_held(run.folder) is False and quiet_s > QUIET_S and is_local(story.start.get("hosts"))
    if nobody_holds or (run.deserted and not _began_again(launch, story)):
        return "gone", "its processes are gone, and did not record how it ended: it was killed", True
    if not story.start or _began_again(launch, story):
        return "starting", "its workers have not begun yet", False
    if quiet_s > max(30.0, 10 * story.windows[-1].seconds if story.windows else 0.0):
        return "quiet", f"nothing was recorded for {format_seconds(quiet_s)}", False
    return "running", "", False


def _began_again(launch: dict[str, Any], story: LiveState) -> bool:
    """Whether the command was given (again) after all that is recorded: a resumed run whose workers begin."""
    launched = _number(launch.get("launched_t"))
    return not launch.get("ended") and launched is not None and story.last_t is not None and launched > story.last_t


def _elapsed_s(run: LiveRun, now: float, over: bool) -> float | None:
    """Seconds since the last command; of a run that is over, until its last record."""
    begun = _number(read_launch(run.folder).get("launched_t")) or run.story.first_t
    if begun is None:
        return None
    ended = run.story.last_t if over else now
    return max(0.0, (ended or now) - begun)


def _eta_s(story: LiveState, step_s: float | None) -> float | None:
    """Seconds that the steps left take at the recent pace, evaluations between them included."""
    left = story.total_steps - story.step
    if step_s is None or left < 0:
        return None
    first, last = story.windows[0], story.windows[-1]
    pace = (last.t - first.t) / (last.step - first.step) if last.step > first.step else step_s
    return left * max(pace, 0.0)


def _exposed(windows: Sequence[Window]) -> float | None:
    """Share of recent time in which every rank waits for communication: that of the one that waits least."""
    per_rank = [_shares(windows, rank) for rank in range(len(windows[-1].phases))] if windows else []
    waits = [shares.get(Phase.COMMUNICATE, 0.0) for shares in per_rank if shares]
    return min(waits) if waits else None


def _shares(windows: Sequence[Window], rank: int) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for window in windows:
        if rank < len(window.phases):
            for name, value in zip(window.phase_names, window.phases[rank], strict=True):
                seconds[name] = seconds.get(name, 0.0) + value
    whole = sum(seconds.values())
    return {name: value / whole for name, value in seconds.items()} if whole > 0 else {}


def _ranks(story: LiveState, windows: Sequence[Window]) -> list[RankView]:
    n = max(len(windows[-1].phases) if windows else 0, len(story.resources), int(story.start.get("world_size") or 0))
    hosts, pids = _list(story.start.get("hosts"), n), _list(story.start.get("pids"), n)
    memory = _list(list(windows[-1].memory_bytes) if windows else None, n)
    used = [{k: _known(v) for k, v in asdict(r).items()} for r in story.resources]
    return [
        RankView(rank, str(hosts[rank] or ""), pids[rank], _shares(windows, rank), memory[rank], _at(used, rank))
        for rank in range(n)
    ]


def _at(rows: Sequence[dict[str, float | None]], rank: int) -> dict[str, float | None]:
    return rows[rank] if rank < len(rows) else {}


def _list(values: Any, n: int) -> list[Any]:
    return values if isinstance(values, list) and len(values) == n else [None] * n


def _what(story: LiveState) -> str:
    start = story.start
    if not start:
        return ""
    ranks = start.get("world_size")
    return f"{start.get('model')} on {start.get('data')}, {ranks} rank{'s' * (ranks != 1)}, {start.get('device')}"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
