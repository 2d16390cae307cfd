"""Settings that biased codecs share: first and last messages that are (nearly) whole, and momentum in the worker."""

from __future__ import annotations

from dataclasses import replace

from echelon.compression.base import NEVER, Codec, WholeSteps

WARMUP_SHARE = 0.05
FINISH_SHARE = 0.02
"""Of a run's messages, at its start and at its end: what `Eased` codecs leave out unless told otherwise."""


def share_of(messages: int, share: float) -> int:
    """Return a share of so many messages, at least one of them; 0 of none."""
    return max(1, round(share * messages)) if messages else 0


class Eased(Codec):
    """A biased codec that a run begins and ends without; a frozen dataclass with these fields.

    In the first and the last messages of a run eight bits an element travel (bf16 where messages are summed), and the
    error memory stays empty: early gradients are large and late ones small, and neither should wait for others.

    Attributes:
        warmup_steps: messages of a tensor before the codec itself encodes; 0: none, None: a share of the run's.
        finish_steps: messages at the end that it leaves out; 0: none, None: a share of the run's.
    """

    warmup_steps: int | None
    finish_steps: int | None

    def for_run(self, messages: int) -> Codec:
        """Return the codec with shares of so many messages in place of what is left out."""
        if not self.biased:
            return self
        first = share_of(messages, WARMUP_SHARE) if self.warmup_steps is None else self.warmup_steps
        last = share_of(messages, FINISH_SHARE) if self.finish_steps is None else self.finish_steps
        eased: Codec = replace(self, warmup_steps=first, finish_steps=last)  # type: ignore[type-var]
        return eased

    def without_whole_start(self) -> Codec:
        """Return it without whole messages at the start, where nobody has set how many there are."""
        changed: Codec = replace(self, warmup_steps=0) if self.warmup_steps is None else self  # type: ignore[type-var]
        return changed

    def length_notes(self, messages: int) -> list[str]:
        """Say which messages are whole, and whether what is left out comes too late in so short a run."""
        whole = self.whole_steps(messages)
        parts = [f"the {name} {count}" for name, count in (("first", whole.first), ("last", whole.last)) if count]
        notes = []
        if parts and messages:
            form = "bf16" if self.linear else "int8"
            notes.append(
                f"{' and '.join(parts)} of {messages} messages are {form} (warmup_steps=0, finish_steps=0: none)"
            )
        if self.biased and 0 < messages < self.fewest_messages:
            notes.append(
                f"what it leaves out comes late: a run of {messages} messages, fewer than {self.fewest_messages}, may "
                "lose accuracy; int8 does not"
            )
        return notes

    @property
    def fewest_messages(self) -> int:
        """Messages of a tensor from which on error feedback has made up for what is left out."""
        return 20

    def whole_steps(self, messages: int) -> WholeSteps:
        """Return the first and last messages; none where the length of the run is not known."""
        return WholeSteps(self.warmup_steps or 0, self.finish_steps or 0, messages) if self.biased else NEVER


class CorrectsMomentum(Codec):
    """A codec whose worker applies momentum before it encodes; a frozen dataclass with these fields.

    Attributes:
        momentum: its coefficient; 0: none, None: not settled yet.
        nesterov: whether it has Nesterov's form; None: not settled yet.
    """

    momentum: float | None
    nesterov: bool | None

    @property
    def absorbs_momentum(self) -> float | None:
        """`momentum`, where it is above 0."""
        return self.momentum or None

    @property
    def looks_ahead(self) -> bool:
        """Whether momentum has Nesterov's form: `nesterov`."""
        return bool(self.nesterov)
