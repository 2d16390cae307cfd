"""Members that are stopped (SIGSTOP) while the others of their group could go on without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.launch.culprit import Hang, Living, Observed, find_hang
from echelon.launch.process import is_debugged
from echelon.observe.notes import Note

LOOK_S = 0.25
LEAST_S = 2.0
TIMES_LONGEST = 3.0


class SilenceWatch:
    """Finds processes that have been stopped for longer than their own rhythm allows.

    What counts is how long this watch has seen a process stopped, not how old its last note is: where a terminal stops
    the whole job and lets it go on, the launcher may wake first.
    """

    def __init__(self, is_silent: Callable[[str], bool], most_s: float) -> None:
        """Prepare.

        Args:
            is_silent: whether a process, by its name, lives but does not run.
            most_s: for how long one waits at most, however slow the steps are.
        """
        self._is_silent, self._most_s = is_silent, most_s
        self._since_s: dict[tuple[str, int], float] = {}  # by name and pid: when it was first seen stopped
        self._looked_s = 0.0

    def look(
        self,
        living: Sequence[Living],
        note_of: Callable[[Living], Note | None],
        longest_s: dict[str, float],
        now: float,
    ) -> list[Hang]:
        """Return who has been stopped for longer than three times the longest of its activities, and than 2 s.

        Who looks at a process with a debugger has the time of --timeout.

        Args:
            living: all processes that run.
            note_of: returns what a process wrote last.
            longest_s: by name, the longest activity of its steps so far; who has none yet is not judged.
            now: by `time.monotonic`; looks that follow the last one in less than 0.25 s do nothing.
        """
        if now - self._looked_s < LOOK_S:
            return []
        if now - self._looked_s > LEAST_S / 2:  # nobody has looked: this process may have been stopped as well
            self._since_s.clear()
        self._looked_s = now
        stopped = {(p.name, p.pid): p for p in living if self._is_silent(p.name) and not is_debugged(p.pid)}
        self._since_s = {key: self._since_s.get(key, now) for key in stopped}
        found = []
        for key, process in stopped.items():
            note, longest, still_s = note_of(process), longest_s.get(process.name, 0.0), now - self._since_s[key]
            if note is None or not longest or still_s < self._deadline_s(longest):
                continue
            hang = find_hang([Observed(process, note, still_s, is_stopped=True)], now, 0.0)
            found += [hang] if hang is not None else []
        return found

    def _deadline_s(self, longest_s: float) -> float:
        return min(max(LEAST_S, TIMES_LONGEST * longest_s), self._most_s)
