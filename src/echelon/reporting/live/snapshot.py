"""One look at a run, as plain values: what the terminal and the page show."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from echelon.core.json_values import JsonObject, finite_object
from echelon.core.units import format_seconds
from echelon.observe.phases import Phase, phase_share
from echelon.records.going import Launch, is_held, is_local, read_launch
from echelon.records.kinds import RankResources, Start, Steps
from echelon.reporting.live.state import LiveRun, LiveState, TimelineEntry

T = TypeVar("T")
D = TypeVar("D")

QUIET_S = 10.0  # a run that nobody holds, and whose ranks may live, is given up after so long a silence


@dataclass(frozen=True)
class RankView:
    """One rank: shares of its recent time by phase, and what it uses of its machine.

    `samples`: its part of a full batch; None: parts are equal.
    """

    rank: int
    host: str
    pid: int | None
    phases: dict[str, float]
    memory_bytes: float | None
    resources: RankResources
    samples: int | None = None


@dataclass(frozen=True)
class RunView:
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
    metric: str
    score_label: str
    train_score: float | None
    value: float | None
    best: float | None
    samples_per_s: float | None
    step_s: float | None
    communication: float | None
    wire_bytes_per_step: float | None
    attempts: int
    checkpoints: int
    torn: int
    ranks: list[RankView] = field(default_factory=list)
    events: list[TimelineEntry] = field(default_factory=list)

    @property
    def done(self) -> float:
        """Share of the steps that are done."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 0.0


def look(run: LiveRun, now: float | None = None) -> RunView:
    """Summarise a run as it was last refreshed, at a unix time (default: the present)."""
    state, now = run.state, time.time() if now is None else now
    status, message, over = _status(run, now)
    windows, of_epoch = _steady(state), [w for w in state.windows if w.epoch == state.windows[-1].epoch]
    seconds, steps = sum(w.seconds for w in windows), sum(w.count for w in windows)
    samples, step_s = sum(w.samples for w in windows), seconds / steps if steps and seconds else None
    correct = [w.correct for w in of_epoch if w.correct is not None]
    quiet_s = None if over or state.last_t is None else max(0.0, now - state.last_t)
    return RunView(
        name=run.folder.resolve().name, what=_what(state), status=status, message=message, over=over, quiet_s=quiet_s,
        elapsed_s=_elapsed_s(run, now, over), eta_s=None if over else _eta_s(state, step_s),
        epoch=state.epoch + 1 if state.step else 0, epochs=state.start.epochs if state.start else 0, step=state.step,
        total_steps=state.total_steps, loss=_mean([x for w in of_epoch for x in w.losses]),
        metric=state.task.primary.title, score_label=state.task.score_label,
        train_score=sum(correct) / max(1, sum(w.samples for w in of_epoch)) if correct else None, value=state.value,
        best=state.best,
        samples_per_s=samples / seconds if seconds else None, step_s=step_s, communication=_communication(windows),
        wire_bytes_per_step=_sent_per_step(state, windows),
        attempts=state.attempts, checkpoints=state.checkpoints, torn=run.torn, ranks=_ranks(state, windows),
        events=list(state.events),
    )  # fmt: skip


def _sent_per_step(state: LiveState, windows: Sequence[Steps]) -> float | None:
    """Return the bytes that a step sends; None: not known, as where all that is sent is inside a replica."""
    steps, sent = sum(w.count for w in windows), sum(w.wire_bytes for w in windows)
    inside = state.start is not None and state.start.splits_model
    return sent / steps if steps and (sent or not inside) else None


def _steady(state: LiveState) -> list[Steps]:
    """Return the windows of the last seconds; an attempt's first one, which has its warm-up, only where it is alone."""
    begun = state.start.start_step if state.start else 0
    return [w for w in state.windows if w.step - w.count > begun] or list(state.windows)


def to_json(run: LiveRun, snapshot: RunView) -> JsonObject:
    """Return what the page needs: the snapshot, and curves as lists of [step, value...]; NaN is null."""
    curves = {name: curve.points() for name, curve in run.state.curves().items()}
    return finite_object({**asdict(snapshot), "done": snapshot.done, "curves": curves})


def _status(run: LiveRun, now: float) -> tuple[str, str, bool]:
    """How the run stands, why, and whether that is its end."""
    state, launch = run.state, read_launch(run.folder)
    if run.version and not run.folder.is_dir():
        return "gone", "its folder was removed", True
    if state.end is not None and not _began_again(launch, state):
        return state.end.status, state.end.message, True
    if launch.ended:
        return "ended", "its command ended, and did not record how", True
    said = [t for t in (state.last_t, launch.launched_t) if t is not None]
    quiet_s = now - max(said) if said else 0.0
    nobody_holds = is_held(run.folder) is False and quiet_s > QUIET_S and is_local(state.start, launch)
    if nobody_holds or (run.deserted and not _began_again(launch, state)):
        return "gone", "its processes are gone, and did not record how it ended: it was killed", True
    if state.start is None or _began_again(launch, state):
        return "starting", "its workers have not begun yet", False
    if quiet_s > max(30.0, 10 * state.windows[-1].seconds if state.windows else 0.0):
        return "quiet", f"nothing was recorded for {format_seconds(quiet_s)}", False
    return "running", "", False


def _began_again(launch: Launch, state: LiveState) -> bool:
    """Whether the command was given (again) after all that is recorded: a resumed run whose workers begin."""
    launched = launch.launched_t
    return not launch.ended and launched is not None and state.last_t is not None and launched > state.last_t


def _elapsed_s(run: LiveRun, now: float, over: bool) -> float | None:
    """Seconds since the last command; of a run that is over, until its last record."""
    begun = read_launch(run.folder).launched_t or run.state.first_t
    if begun is None:
        return None
    ended = run.state.last_t if over else now
    return max(0.0, (ended or now) - begun)


def _eta_s(state: LiveState, step_s: float | None) -> float | None:
    """Seconds that the steps left take at the recent pace, evaluations between them included."""
    left = state.total_steps - state.step
    if step_s is None or left < 0:
        return None
    first, last = state.windows[0], state.windows[-1]
    pace = (last.t - first.t) / (last.step - first.step) if last.step > first.step else step_s
    return left * max(pace, 0.0)


def _communication(windows: Sequence[Steps]) -> float | None:
    """Share of the recent steps' time, the mean of the ranks."""
    if not windows or not windows[-1].phases:
        return None
    return phase_share(
        sum(w.mean_phases().get(Phase.COMMUNICATE, 0.0) for w in windows), sum(w.seconds for w in windows)
    )


def _shares(windows: Sequence[Steps], rank: int) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for window in windows:
        if rank < len(window.phases):
            for name, value in zip(window.phase_names, window.phases[rank], strict=True):
                seconds[name] = seconds.get(name, 0.0) + value
    steps_s = sum(window.seconds for window in windows)
    return {name: phase_share(value, steps_s) for name, value in seconds.items()} if any(seconds.values()) else {}


def _ranks(state: LiveState, windows: Sequence[Steps]) -> list[RankView]:
    start = state.start or Start()
    n = max(len(windows[-1].phases) if windows else 0, len(state.resources), start.world_size)
    hosts, pids = _of_ranks(start.hosts, n, ""), _of_ranks(start.pids, n, None)
    memory = _of_ranks(windows[-1].memory_bytes if windows else (), n, None)
    parts = _of_ranks(state.shares, n, None)
    resources = [*state.resources, *(RankResources() for _ in range(n - len(state.resources)))]
    return [
        RankView(rank, hosts[rank], pids[rank], _shares(windows, rank), memory[rank], resources[rank], parts[rank])
        for rank in range(n)
    ]


def _of_ranks(values: Sequence[T], n: int, unknown: D) -> Sequence[T | D]:
    """Return one value per rank, or `unknown` for all where there are others than `n`."""
    return values if len(values) == n else [unknown] * n


def _what(state: LiveState) -> str:
    start = state.start
    if start is None:
        return ""
    ranks = start.world_size
    return f"{start.model} on {start.data}, {ranks} rank{'s' * (ranks != 1)}, {start.device}"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
