"""Whether gradients go as they are or through a codec: by the seconds of steps either way, the same on all ranks.

One way is at home; the other one is visited now and then for a few steps, the more seldom the slower it was, so that
visits cost about a hundredth of the time; and at once where steps at home begin to take much more or less time than
they did. What decides are means over the ranks that ride in messages which are sent anyway.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from echelon.compression.rungs import Switch
from echelon.core.state_tree import StateView

_PLAIN, _CODED, _FLUSH = 0, 1, 2
"""Ways of a step; `_FLUSH`: through the codec, which leaves nothing out, before steps that go as they are."""
_NAMES = ("none", "coded")
_FIRST = 10
"""Steps at home before the first visit."""
_SKIPPED = (2, 6)
"""Steps of a visit that do not count: connections open, and rungs fall one by one."""
_VISIT = 6
"""Steps of a visit that do."""
_HOPELESS = 1.5
"""A visit ends early whose steps take so many times as long as at home."""
_GAIN = 1.02
"""Coded steps must be so many times as fast."""
_COST = 0.01
"""Share of the time that visits may cost."""
_LEAST_GAP = 60
_CHANGED = 1.4
"""The other way is visited at once when steps at home take so many times as long, or as short, as they did."""
_RECENT = 7


class LinkPace:
    """Decides which way the next step's gradients take; every rank calls it alike.

    Attributes:
        way: of the present step.
        tells_s: what this rank tells the others in it: seconds of its step before.
        switches: of the way at home, since they were last taken.
    """

    def __init__(self) -> None:
        self.way, self.tells_s = _PLAIN, 0.0
        self.switches: list[Switch] = []
        self._began_s: float | None = None
        self._ways: deque[int] = deque(maxlen=2)  # of the last steps but the present one
        self._home, self._visits, self._left = _PLAIN, False, _FIRST
        self._known = [0.0, 0.0]  # seconds of a step either way; 0: not known
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._passed = 0

    @property
    def is_plain(self) -> bool:
        """Whether the present step's gradients go as they are."""
        return self.way == _PLAIN

    @property
    def leaves_nothing(self) -> bool:
        """Whether the present step's codec is to leave nothing out."""
        return self.way == _FLUSH

    def begin(self, now_s: float, heard_s: float) -> None:
        """Begin a step.

        Args:
            now_s: moment.
            heard_s: mean over ranks of what they told in the step before; NaN: it was void.
        """
        if self._began_s is not None:
            self.tells_s = now_s - self._began_s
        self._began_s = now_s
        if self.way == _FLUSH:
            self.way = _PLAIN
        elif len(self._ways) == 2 and heard_s > 0 and self._ways[0] == self.way:
            self._hear(heard_s)
        self._ways.append(self.way)

    def _hear(self, seconds: float) -> None:
        """Take in what a step took that went the present way."""
        self._passed += 1
        if self._passed > _SKIPPED[self.way]:
            self._recent.append(seconds)
        if self._visits:
            self._judge_visit()
            return
        self._left -= 1
        if len(self._recent) < _RECENT:
            return
        now_s, known_s = median(self._recent), self._known[self._home]
        changed = known_s and not known_s / _CHANGED < now_s < known_s * _CHANGED
        if not known_s:
            self._known[self._home] = now_s
        if self._left <= 0 or changed:
            self._known[self._home] = now_s
            self._go(1 - self._home)
            self._visits = True

    def _judge_visit(self) -> None:
        home_s = self._known[self._home]
        if not self._recent:
            return
        there_s = median(self._recent)
        hopeless = len(self._recent) >= 3 and there_s > _HOPELESS * home_s
        if len(self._recent) < _VISIT and not hopeless:
            return
        self._known[1 - self._home] = there_s
        plain_s, coded_s = self._known
        better = _CODED if coded_s * _GAIN < plain_s else _PLAIN
        self._visits = False
        steps = _SKIPPED[1 - better] + _VISIT + 1
        lost = max(0.0, self._known[1 - better] / max(self._known[better], 1e-9) - 1)
        self._left = max(_LEAST_GAP, round(steps * lost / _COST))
        if better != self._home:
            reason = f"steps take {self._known[better]:.3g} s instead of {self._known[self._home]:.3g} s"
            self.switches.append(Switch("all vectors", _NAMES[self._home], _NAMES[better], reason))
            self._home = better
            self._recent.clear()
        else:
            self._go(self._home)

    def _go(self, way: int) -> None:
        if way == self.way:
            return
        self.way = _FLUSH if way == _PLAIN else _CODED
        self._passed = 0
        self._recent.clear()

    def state_dict(self) -> dict[str, float]:
        """Return what was decided and measured, as numbers of `codec_state`."""
        plain_s, coded_s = self._known
        values: dict[str, float] = {"home": self._home, "visits": self._visits, "left": self._left, "way": self.way}
        values |= {"plain_s": plain_s, "coded_s": coded_s}
        return {f"numbers.{key}/link": float(value) for key, value in values.items()}

    def load_state_dict(self, saved: StateView) -> None:
        """Take back what `state_dict` returned; what was measured lately is measured again."""
        end = "/link"
        values = {k.removeprefix("numbers.").removesuffix(end): v for k, v in saved.items() if k.endswith(end)}
        if not values:  # of a single process, which had nobody to send to
            return
        self._home, self._left, self.way = int(values["home"]), int(values["left"]), int(values["way"])
        self._visits, self._known = bool(values["visits"]), [values["plain_s"], values["coded_s"]]
