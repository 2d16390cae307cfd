"""The compressed all-reduce for codecs whose payloads cannot be summed.

With N ranks, rank j owns chunk j of a vector:

1. every rank encodes each chunk (with error feedback where the codec has it) and sends it to its owner;
2. the owner decodes, sums in the order of ranks, encodes the sum again (a second error feedback) and sends it to all;
3. everyone decodes the same bytes, the owner too, so that all ranks hold the same bits.

A rank sends 2 (N - 1) / N of the encoded vector, as little as a ring of plain all-reduce does. The two-sided scheme is
that of 1-bit SGD (Seide et al. 2014) and of DoubleSqueeze (Tang et al. 2019, arXiv:1905.05957).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from echelon.collectives.adaptation import RETURNED, SENT, Adaptation, split_note, with_note
from echelon.collectives.messages import HEADER_BYTES, Mailbox, seal, unsealed
from echelon.compression.base import Codec, Meta, NonFiniteError, State
from echelon.core.shards import Span, cut


@dataclass(frozen=True)
class CodecShard:
    """A codec's state and the elements of the vector that it stands for.

    Attributes:
        holders: ranks that hold a state of the same role for these elements; their memories count as a sum.
        role: `sent` for what this rank sends to owners, `relay` for the sum that it sends back.
    """

    state: State
    span: Span
    holders: int
    role: str = "sent"


class DeviceTimes:
    """How long messages between GPUs were under way: events in the stream, read once they have happened.

    Args:
        make_event: returns an event that can be recorded in the present stream, asked, and compared with a later one.
    """

    def __init__(self, make_event: Callable[[], torch.cuda.Event]) -> None:
        self._make_event = make_event
        self._open: deque[tuple[Codec, int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def mark(self) -> torch.cuda.Event:
        """Record an event at this place in the stream."""
        event = self._make_event()
        event.record()
        return event

    def exchanged(self, codec: Codec, n_bytes: int, began: torch.cuda.Event) -> None:
        """Note that a codec's messages have been queued since an event."""
        self._open.append((codec, n_bytes, began, self.mark()))

    def settle(self) -> None:
        """Tell codecs of what is over by now; waits for nothing."""
        while self._open and self._open[0][3].query():
            codec, n_bytes, began, ended = self._open.popleft()
            codec.transferred(n_bytes, began.elapsed_time(ended) / 1e3)


class CompressedAllReduce:
    """Sums one vector over some ranks with a non-linear codec; keeps that vector's states.

    Attributes:
        shards: the states, for snapshots and checkpoints.
        adaptation: of a codec that adapts; else None.
    """

    def __init__(self, codec: Codec, mailbox: Mailbox, like: Tensor, name: str, seed: int) -> None:
        self._codec, self._relay, self._mailbox = codec, codec.relay(), mailbox
        self._sends, self._sends_back = self._codec, self._relay  # at the present step
        self._times = DeviceTimes(partial(torch.cuda.Event, enable_timing=True)) if like.is_cuda else None
        self._chunks = cut((0, like.numel()), mailbox.size)
        me = mailbox.ring.index
        flat = like.view(-1)
        self._states = [
            codec.init_state(f"{name}.{j}", flat[slice(*span)], seed, me) for j, span in enumerate(self._chunks)
        ]
        self._relay_state = self._relay.init_state(f"{name}.{me}.relay", flat[slice(*self._chunks[me])], seed, me)
        self.shards = [CodecShard(s, span, mailbox.size) for s, span in zip(self._states, self._chunks, strict=True)]
        self.shards.append(CodecShard(self._relay_state, self._chunks[me], 1, "relay"))
        adapts = codec.control() is not None
        self.adaptation = Adaptation(codec, [*self._states, self._relay_state], name) if adapts else None
        self._notes: list[list[float]] = []  # of senders

    def sum_(self, flat: Tensor, divisor: int = 1) -> int:
        """Sum a contiguous 1-D tensor in place, divided by `divisor`; returns the bytes sent.

        Where any rank's values are not finite the result is NaN in the chunks concerned, on every rank.

        Raises:
            PeerLostError: a rank did not answer before the group's timeout.
        """
        step = max(state.step for state in self._states)
        self._sends, self._sends_back = self._codec.at(step), self._relay.at(step)
        if self.adaptation is not None:
            self._sends, self._sends_back = self.adaptation.pinned(self._sends, self._sends_back)
        bodies, usable = self._encode(flat, step)
        total, sent = self._collect(flat, bodies, usable)
        return sent + self._spread(flat, total, divisor)

    def _encode(self, flat: Tensor, step: int) -> tuple[list[Tensor], bool]:
        """Encode each chunk; if one cannot be, none is usable: all ranks must learn that this sum is void."""
        chunks = [flat[slice(*chunk)] for chunk in self._chunks]
        filled = [j for j, chunk in enumerate(chunks) if chunk.numel()]
        try:
            payloads = self._sends.compress_parts([chunks[j] for j in filled], [self._states[j] for j in filled])
            made = {j: self._sends.to_bytes(payload) for j, payload in zip(filled, payloads, strict=True)}
            return [made[j] if j in made else _void(self._sends, chunk) for j, chunk in enumerate(chunks)], True
        except NonFiniteError:
            for state in self._states:  # ranks count alike
                state.numbers["step"] = step + 1
            return [_void(self._sends, chunk) for chunk in chunks], False

    def _collect(self, flat: Tensor, bodies: list[Tensor], usable: bool) -> tuple[Tensor | None, int]:
        """Send each chunk to its owner; return the sum of the own chunk (None: void) and the bytes sent."""
        me = self._mailbox.ring.index
        own = flat[slice(*self._chunks[me])]
        bodies = self._noted(bodies, usable)
        outgoing = {j: seal(bodies[j], usable) for j in self._mailbox.others() if self._numel(j)}
        senders = self._mailbox.others() if own.numel() else []
        messages, sent = self._exchange(self._sends, outgoing, dict.fromkeys(senders, own.numel()))
        parts = unsealed(messages) | {me: (bodies[me], usable)}
        parts = self._without_notes(parts)
        if not all(good for _, good in parts.values()):
            return None, sent
        total = torch.zeros_like(own)
        if own.numel():
            meta = Meta.of(own)
            bodies = [parts[j][0] for j in range(self._mailbox.size)]
            self._sends.add_parts(total, self._sends.from_bytes_parts(bodies, [meta] * len(bodies)))
        return total, sent

    def _noted(self, bodies: list[Tensor], usable: bool) -> list[Tensor]:
        """Put this rank's notes before what it sends, where the codec adapts."""
        if self.adaptation is None:
            return bodies
        states = self._states if usable else [None] * len(bodies)
        return [with_note(b, self.adaptation.note(s)) for b, s in zip(bodies, states, strict=True)]

    def _without_notes(self, received: dict[int, tuple[Tensor, bool]]) -> dict[int, tuple[Tensor, bool]]:
        """Take the senders' notes from before what they sent, where the codec adapts."""
        if self.adaptation is None:
            return received
        opened = {j: (*split_note(received[j][0], SENT), received[j][1]) for j in sorted(received)}
        self._notes = [note for note, _, _ in opened.values()] if self._numel(self._mailbox.ring.index) else []
        return {j: (body, good) for j, (_, body, good) in opened.items()}

    def _spread(self, flat: Tensor, total: Tensor | None, divisor: int) -> int:
        """Send the own chunk's sum to all and decode everyone's into `flat`; returns the bytes sent."""
        me = self._mailbox.ring.index
        message = self._encode_total(flat[slice(*self._chunks[me])], total, divisor)
        others = self._mailbox.others()
        outgoing = dict.fromkeys(others, message) if self._numel(me) else {}
        messages, sent = self._exchange(
            self._sends_back, outgoing, {j: self._numel(j) for j in others if self._numel(j)}
        )
        messages[me] = message
        notes, bodies, chunks = [], [], []
        for j, (body, usable) in unsealed({j: messages[j] for j in range(len(self._chunks)) if self._numel(j)}).items():
            if self.adaptation is not None:
                note, body = split_note(body, RETURNED)
                notes.append(note)
            chunk = flat[slice(*self._chunks[j])]
            if usable:
                bodies.append(body)
                chunks.append(chunk)
            else:
                chunk.fill_(torch.nan)
        if bodies:
            payloads = self._sends_back.from_bytes_parts(bodies, [Meta.of(chunk) for chunk in chunks])
            self._sends_back.extract_parts(payloads, chunks)
        if self.adaptation is not None:
            self.adaptation.decide(notes)
        return sent

    def _encode_total(self, chunk: Tensor, total: Tensor | None, divisor: int) -> Tensor:
        if total is None or not chunk.numel():
            return self._void_total(chunk)
        if divisor != 1 and not self._sends.direction:
            total.div_(divisor)
        try:
            body = self._sends_back.to_bytes(self._sends_back.compress(total, self._relay_state))
        except NonFiniteError:
            return self._void_total(chunk)
        if self.adaptation is not None:
            body = with_note(body, self.adaptation.owner_note(self._notes, self._relay_state))
        return seal(body, usable=True)

    def _void_total(self, chunk: Tensor) -> Tensor:
        body = _void(self._sends_back, chunk)
        if self.adaptation is not None and chunk.numel():
            body = with_note(body, self.adaptation.owner_note(self._notes, None))
        return seal(body, usable=False)

    def _exchange(
        self, codec: Codec, outgoing: dict[int, Tensor], numels: dict[int, int]
    ) -> tuple[dict[int, Tensor], int]:
        """Exchange sealed messages; `numels`: elements that each sender's stands for. Also returns the bytes sent."""
        sizes = {j: codec.n_bytes(numel) for j, numel in numels.items()}
        note = 0 if self.adaptation is None else 8 * (SENT if codec is self._sends else RETURNED)
        known = {j: size + note + HEADER_BYTES for j, size in sizes.items() if size is not None}
        # A codec's sizes are known for all tensors or for none: every rank decides alike.
        lengths, announced = (known, 0) if codec.n_bytes(1) is not None else self._mailbox.announce(outgoing, sizes)
        times = self._times if codec.asks_for_times else None
        began, queued = time.perf_counter(), times.mark() if times is not None else None
        messages, sent = self._mailbox.exchange(outgoing, lengths)
        n_bytes = max(sent, sum(lengths.values()))
        if times is not None and queued is not None:
            times.exchanged(codec, n_bytes, queued)
            times.settle()
        elif self._times is None:
            codec.transferred(n_bytes, time.perf_counter() - began)
        return messages, announced + sent

    def _numel(self, place: int) -> int:
        return self._chunks[place][1] - self._chunks[place][0]


def _void(codec: Codec, chunk: Tensor) -> Tensor:
    """A body that says nothing, as long as a real one where that length is known."""
    size = codec.n_bytes(chunk.numel()) if chunk.numel() else 0
    return torch.zeros(size or 0, dtype=torch.uint8, device=chunk.device)
