"""The controller of an adaptive codec: how lossy the next messages of one vector may be.

Codecs stand on a ladder, from whole to the fewest bits. The relative error of a message is |x - decoded|^2 / |x|^2,
where x is what was to be encoded. While the running mean of a rung stays below the target the next rung is tried;
where it exceeds the target the vector goes back, and lossier rungs are left alone for a while. A decision follows
from these numbers alone, so that ranks that are told the same errors decide alike, and holds from the second message
after it on.
"""

from __future__ import annotations

from dataclasses import dataclass

_SETTLED = 2
"""Measured messages of a rung after which it is left: the first ones still carry what the rung before left out."""
_FAR = 2.0
"""Times the target: a rung of such an error is left at once."""
_WINDOW = 16
"""Measured messages that the running mean covers."""
_RETRY = 32
"""Measured messages for which a rung that was too lossy is not tried again."""
_SKIP = 2
"""Beyond a rung that was too lossy so many from the last good one are tried: what a gradient's tails spoil for levels
between its extremes they make easier for a choice of elements."""
MEASURED_EVERY = 2
"""Messages from one whose error is measured to the next."""


@dataclass(frozen=True)
class Switch:
    """A vector's codec changes.

    Attributes:
        vector: its name.
        old, new: specs.
        reason: in words.
    """

    vector: str
    old: str
    new: str
    reason: str


@dataclass(frozen=True)
class RungControl:
    """Decides for one vector, in one direction; its memory is some entries of `State.numbers`.

    Attributes:
        error: target of the running mean of relative errors, above 0 and below 1.
        rungs: specs, the most exact first.
        side: what its entries' names begin with.
    """

    error: float
    rungs: tuple[str, ...]
    side: str = ""

    def start(self, rung: int) -> dict[str, float]:
        """Return the entries before the first message."""
        values = {"rung": rung, "next": rung, "good": rung, "aim": rung + 1, "mean": 0, "seen": 0, "wait": 0}
        return {self.side + key: float(value) for key, value in values.items()}

    def rung(self, numbers: dict[str, float]) -> int:
        """Return the rung of the next message."""
        return int(numbers[self.side + "rung"])

    def entries(self, numbers: dict[str, float]) -> dict[str, float]:
        """Return this controller's entries."""
        return {key: numbers[key] for key in self.start(0)}

    def passed(self, numbers: dict[str, float], vector: str, relative: float | None) -> Switch | None:
        """Note that a message has passed; returns the switch where the message after the next one has another rung.

        Args:
            numbers: entries, changed in place.
            relative: the message's relative error; None: it was not measured.
        """
        side = self.side
        rung, coming = int(numbers[side + "rung"]), int(numbers[side + "next"])
        numbers[side + "rung"] = float(coming)
        if coming != rung:
            numbers |= {side + "mean": 0.0, side + "seen": 0.0}
            return None
        if relative is None:
            return None
        seen = numbers[side + "seen"] + 1.0
        mean = numbers[side + "mean"]
        mean += (relative - mean) / min(seen, float(_WINDOW))
        wait = max(0.0, numbers[side + "wait"] - 1.0)
        numbers |= {side + "seen": seen, side + "mean": mean, side + "wait": wait}
        return self._decide(numbers, vector, rung)

    def _decide(self, numbers: dict[str, float], vector: str, rung: int) -> Switch | None:
        mean, settled = numbers[self.side + "mean"], numbers[self.side + "seen"] >= _SETTLED
        good, aim, wait = (int(numbers[self.side + key]) for key in ("good", "aim", "wait"))
        to = rung
        if mean > self.error and rung > 0 and (settled or mean > _FAR * self.error):
            to = good if rung > good else rung - 1
            skips = good < rung < good + _SKIP and rung + 1 < len(self.rungs)
            good, aim, wait = to, rung + 1 if skips else to + 1, 0 if skips else _RETRY
        elif settled and mean <= self.error:
            if rung > good:
                good, aim, wait = rung, rung + 1, 0
            to = aim if wait == 0 and aim < len(self.rungs) else rung
        values = {"good": good, "aim": aim, "wait": wait, "next": to}
        numbers |= {self.side + key: float(value) for key, value in values.items()}
        if to == rung:
            return None
        reason = f"its error {mean:.3g} is {'above' if mean > self.error else 'below'} {self.error:g}"
        return Switch(vector, self.rungs[rung], self.rungs[to], reason)
