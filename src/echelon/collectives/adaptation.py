"""What adaptive codecs agree on in an all-reduce: notes that ride in its messages, and decisions that follow from them.

A sender's note is [|x|^2, |x - decoded|^2, s]: of the chunk that it has encoded (-1: not measured), and what this rank
has to tell all others (seconds). An owner's note adds up the senders' and has the same of the sum that it sends back,
and the mean of s. Everyone hears all owners' notes, so everyone decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.compression.base import Codec, State
from echelon.compression.codecs.adaptive import BACK
from echelon.compression.rungs import Switch

SENT, RETURNED = 3, 5
"""Numbers in a sender's note and in an owner's."""
WHOLE = 0
"""The rung that leaves nothing out."""


class Adaptation:
    """Chooses the rungs of one vector, on the way to owners and on the way back.

    Attributes:
        tells_s: what this rank tells all others with its next messages.
        heard_s: the ranks' mean of it, after a sum; NaN where it was void.
        is_whole: the next sums leave nothing out, whatever the controllers say, and empty the error memories.
        switches: since they were last taken.
    """

    def __init__(self, codec: Codec, states: Sequence[State], vector: str) -> None:
        out, back = codec.control(), codec.control(BACK)
        assert out is not None and back is not None, "the codec does not adapt"
        self._out, self._back, self._states, self._vector = out, back, states, vector
        self.tells_s = 0.0
        self.heard_s = float("nan")
        self.is_whole = False
        self.switches: list[Switch] = []

    def pinned(self, sends: Codec, sends_back: Codec) -> tuple[Codec, Codec]:
        """Return what encodes and decodes the next sum, both ways."""
        if self.is_whole:
            return sends.pinned(WHOLE), sends_back.pinned(WHOLE)
        numbers = self._states[0].numbers
        return sends.pinned(self._out.rung(numbers)), sends_back.pinned(self._back.rung(numbers))

    def note(self, state: State | None) -> list[float]:
        """Return a sender's note on what a state has just encoded; None: nothing usable."""
        energy, lost = _measured(state)
        return [energy, lost, self.tells_s]

    def owner_note(self, notes: Sequence[Sequence[float]], relay: State | None) -> list[float]:
        """Return an owner's note on all senders' notes, in their order, and on what it has encoded itself."""
        energies, losses = [n[0] for n in notes], [n[1] for n in notes]
        measured = bool(notes) and min(losses) >= 0
        energy, lost = _measured(relay)
        seconds = sum(n[2] for n in notes) / max(len(notes), 1)
        return [sum(energies), sum(losses) if measured else -1.0, energy, lost, seconds]

    def decide(self, notes: Sequence[Sequence[float]]) -> None:
        """Hear all owners' notes, in the order of owners; all states of the vector remember what was decided."""
        self.heard_s = sum(n[4] for n in notes) / len(notes) if notes else float("nan")
        if self.is_whole:
            return
        numbers = dict(self._states[0].numbers)
        out = self._out.passed(numbers, self._vector, _relative([(n[0], n[1]) for n in notes]))
        back = self._back.passed(numbers, f"{self._vector}, back", _relative([(n[2], n[3]) for n in notes]))
        self.switches += [switch for switch in (out, back) if switch is not None]
        decided = self._out.entries(numbers) | self._back.entries(numbers)
        for state in self._states:
            state.numbers |= decided


def with_note(body: Tensor, note: Sequence[float]) -> Tensor:
    """Put a note before a message's body: uint8, 1-D, like the result."""
    head = torch.tensor(note, dtype=torch.float64).view(torch.uint8).to(body.device)
    return torch.cat([head, body])


def split_note(body: Tensor, count: int) -> tuple[list[float], Tensor]:
    """Return the note of so many numbers, and the body after it, of a uint8 1-D message."""
    head = body[: 8 * count].cpu().clone().view(torch.float64)
    return head.tolist(), body[8 * count :]


def _measured(state: State | None) -> tuple[float, float]:
    if state is None:
        return 0.0, -1.0
    return float(state.numbers["energy"]), float(state.numbers["lost"])


def _relative(pairs: Sequence[tuple[float, float]]) -> float | None:
    energy = sum(e for e, _ in pairs)
    if not pairs or min(lost for _, lost in pairs) < 0 or energy <= 0:
        return None
    return sum(lost for _, lost in pairs) / energy
