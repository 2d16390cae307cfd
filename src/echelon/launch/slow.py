"""Finds the process that slows all others down without hanging: looked at a few times, it is the one that works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from echelon.core.units import format_seconds
from echelon.launch.culprit import Living, Observed
from echelon.observe.notes import SERVING, Note

LOOKS = 8
AGREEING = 7  # looks that must blame the same process
BETWEEN_S = 0.61  # looks; no round number, for steps may be of one
FIRST_S = 8.0  # after training began
AGAIN_S = 600.0
UNSURE = 5  # looks that blame the same process, and there is another round soon: on busy cores some miss it
SOON_S = 8.0
MOST_UNSURE = 3  # such rounds
RATE_S = 5.0  # over which steps are counted
TIMES_SLOWER = 5.0  # than before, and it is looked at
TIMES_RARER = 10.0  # than those of the others, and a process that nobody waits for is slow


@dataclass(frozen=True)
class Slow:
    """A process that makes the others wait.

    Attributes:
        looks, of_looks: how often it worked while all others waited.
        changes: share of the others' changes of activity that it made, where nobody waits for anybody.
        step_s, before_s: what a step takes, and took before; 0: not known.
    """

    process: Living
    activity: str
    step: int
    line: str
    looks: int
    of_looks: int
    changes: float
    step_s: float
    before_s: float

    def sentence(self) -> str:
        """Say who it is, in what, and by how much."""
        who = f"{self.process} (pid {self.process.pid} on {self.process.host})"
        if self.looks >= AGREEING:
            text = f"{who} makes all others wait: at {self.looks} of {self.of_looks} looks it alone worked"
        else:
            text = f"{who} is slow: it does {self.changes:.1%} of what each of the others does"
        line = f" ({self.line})" if self.line else ""
        took = f"; a step takes {format_seconds(self.step_s)}" if self.step_s else ""
        before = f", before {format_seconds(self.before_s)}" if self.step_s and self.before_s else ""
        return f"{text}, mostly in {self.activity}{line}, at step {self.step}{took}{before}"


@dataclass
class _Round:
    """Some looks, one after the other."""

    began: Mapping[str, int]  # changes by name
    blamed: list[Observed] = field(default_factory=list)
    looks: int = 0


class SlowWatch:
    """Decides when to look, and what the looks say. Pure: time and what was seen come in as arguments.

    A round of looks begins some seconds after training has, when steps have become five times slower than they were,
    and every ten minutes; and soon after one whose looks mostly agree, but too few of them.
    """

    def __init__(self, independent: bool) -> None:
        """`independent`: processes go on without each other, so that who is slow need not make anybody wait."""
        self._independent = independent
        self._round: _Round | None = None
        self._next_round_s = self._next_look_s = 0.0
        self._counted: tuple[float, int] | None = None  # when steps were counted last, and the step
        self._step_s = self._best_s = 0.0
        self._told: Living | None = None
        self._unsure = 0  # rounds in a row

    def wants_look(self, notes: Mapping[str, Note], now_s: float) -> bool:
        """Whether all processes are to be observed now."""
        working = [note for note in notes.values() if note.activity != SERVING]
        if len(working) < 2 or min(note.step for note in working) < 3:
            self._round, self._counted, self._next_round_s = None, None, now_s + FIRST_S
            return False
        self._count_steps(max(note.step for note in working), now_s)
        if self._round is None and now_s >= self._next_round_s:
            self._round = _Round({name: note.changes for name, note in notes.items()})
        return self._round is not None and now_s >= self._next_look_s

    def _count_steps(self, step: int, now_s: float) -> None:
        if self._counted is None or step < self._counted[1]:
            self._counted, self._best_s = (now_s, step), 0.0
            return
        since, before = self._counted
        if now_s - since < RATE_S or step == before:
            return
        self._step_s, self._counted = (now_s - since) / (step - before), (now_s, step)
        if self._best_s and self._step_s > TIMES_SLOWER * self._best_s and self._told is None:
            self._next_round_s = min(self._next_round_s, now_s)
        self._best_s = min(self._best_s or self._step_s, self._step_s)

    def looked(self, observed: Sequence[Observed], now_s: float) -> Slow | None:
        """Take what was seen; returns who is slow, once, when enough looks agree."""
        assert self._round is not None
        working = [o for o in observed if o.note.activity != SERVING]
        acting = [o for o in working if not o.waits]
        self._round.looks += 1
        self._next_look_s = now_s + BETWEEN_S
        if len(acting) == 1 and len(working) > 1:
            self._round.blamed.append(acting[0])
        if self._round.looks < LOOKS:
            return None
        slow = self._verdict(self._round, working)
        unsure = slow is None and _most_blamed(self._round)[1] >= UNSURE and self._unsure < MOST_UNSURE
        self._unsure = self._unsure + 1 if unsure else 0
        self._round, self._next_round_s = None, now_s + (SOON_S if unsure else AGAIN_S)
        is_new = slow is not None and slow.process != self._told
        self._told = slow.process if slow is not None else None
        return slow if is_new else None

    def _verdict(self, looks: _Round, last: Sequence[Observed]) -> Slow | None:
        process, count = _most_blamed(looks)
        if process is not None and count >= AGREEING:
            return self._about([o for o in looks.blamed if o.process == process], looks, 0.0)
        if not self._independent:
            return None
        made = {o.process: o.note.changes - looks.began.get(o.process.name, o.note.changes) for o in last}
        for o in last:
            usual = median(count for process, count in made.items() if process != o.process)
            if usual > TIMES_RARER and made[o.process] * TIMES_RARER < usual:
                return self._about([o], looks, made[o.process] / usual)
        return None

    def _about(self, seen: Sequence[Observed], looks: _Round, changes: float) -> Slow:
        line, _ = Counter(o.line for o in seen).most_common(1)[0]
        activity, _ = Counter(o.note.activity for o in seen).most_common(1)[0]
        last = seen[-1]
        agreeing = 0 if changes else len(seen)
        return Slow(
            last.process, activity, last.note.step, line, agreeing, looks.looks, changes, self._step_s,
            self._best_s if self._best_s * TIMES_SLOWER < self._step_s else 0.0,
        )  # fmt: skip


def _most_blamed(looks: _Round) -> tuple[Living | None, int]:
    """Return the process that most looks blame, and how many do."""
    counts = Counter(o.process for o in looks.blamed)
    return counts.most_common(1)[0] if counts else (None, 0)
