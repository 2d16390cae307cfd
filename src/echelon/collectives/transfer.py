"""Runs a schedule between real processes: segments travel as soon as what they hold is summed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.schedule import PathStep
from echelon.collectives.wire import framing_bytes
from echelon.core.shards import Span, cut

ONE_WAY_BYTES = 1024 * 1024
"""Bytes up to which a span is one message where ranks send in one direction: over loopback the number of messages is
what counts, and a link has nothing to wait for but the sum of a message."""
PAIRED_BYTES = 512 * 1024
"""The same where two ranks send to each other: longer messages fill a direction's queue while the other one waits."""
LONGEST_BYTES = 1024 * 1024
"""Most bytes of a message: its memory stays in the cache."""
RECEIVE_WINDOWS_BYTES = (64 * 1024, 128 * 1024)
"""The receive windows that TCP on Linux begins with. The last bytes of a message that is a little longer wait for the
receiver to announce more, which it delays by up to 40 ms (RFC 1122, 4.2.3.2); much longer ones make it widen the
window, and shorter ones fit. A message's header is enough to make it a little longer."""
WINDOW_MARGIN_BYTES = 4 * 1024
"""A span is cut into more messages where they would come so near to such a window."""
SEGMENTS = 3
"""Messages that a span is cut into where they are long enough, so that a round begins before the last one ended."""
WINDOW = 8
"""Receives posted at once: enough that the link never waits for us, little enough memory to stay in the cache."""


class PeerLostError(RuntimeError):
    """A rank did not answer before the group's timeout, or its connection broke."""


@dataclass(frozen=True)
class _Segment:
    """A part of a step's span that travels as one message; `after`: the last receipt it depends on, -1 for none."""

    peer: int
    round: int
    span: Span
    after: int = -1


@dataclass(frozen=True)
class _Receipt:
    segment: _Segment
    add: bool


@dataclass(frozen=True)
class Plan:
    """One rank's part of a schedule as messages: worked out once for vectors of one length, carried out often."""

    steps: Sequence[PathStep]
    receipts: Sequence[_Receipt]
    sends: Sequence[_Segment]


def make_plan(steps: Sequence[PathStep], element_size: int) -> Plan:
    """Cut the steps of one rank into messages of elements of so many bytes."""
    return Plan(steps, _ordered_receipts(steps, element_size), _ordered_sends(steps, element_size))


def planned_bytes(plan: Plan, element_size: int) -> int:
    """Return the bytes that `run_plan` sends over gloo."""
    return sum(_length(s.span) * element_size + framing_bytes(1, on_gpu=False) for s in plan.sends)


def run_plan(flat: Tensor, plan: Plan, group: dist.ProcessGroup) -> int:
    """Carry out this rank's steps on a contiguous 1-D tensor, in place; returns the bytes sent.

    Every rank of the group must call it with its own steps of the same schedule.

    Raises:
        PeerLostError: a rank did not answer before the group's timeout.
    """
    if not plan.steps:
        return 0
    try:
        return _run_stepwise(flat, plan.steps, group) if flat.is_cuda else _Pipeline(flat, plan, group).run()
    except PeerLostError:
        raise
    except RuntimeError as error:  # a connection that is known to be broken refuses at once
        raise PeerLostError(f"rank {group.rank()} of the group lost a rank that it sums with: {error}") from error


def run_schedule(flat: Tensor, steps: Sequence[PathStep], group: dist.ProcessGroup) -> int:
    """Plan and carry out this rank's steps on a 1-D tensor (see `run_plan`)."""
    return run_plan(flat, make_plan(steps, flat.element_size()), group)


class _Pipeline:
    """For a backend whose messages need no order between each other (gloo): WINDOW receives are always posted.

    A segment of round k + 1 leaves when the segment of round k that it depends on has been summed, so the link is
    never idle between rounds. Sums are made in the order of the schedule: the bits do not depend on arrival.
    """

    def __init__(self, flat: Tensor, plan: Plan, group: dist.ProcessGroup) -> None:
        self._flat = flat
        self._group = group
        self._receipts, self._sends = plan.receipts, plan.sends
        longest = max((_length(r.segment.span) for r in self._receipts if r.add), default=0)
        self._scratch = [torch.empty(longest, dtype=flat.dtype) for _ in range(min(WINDOW, len(self._receipts)))]

    def run(self) -> int:
        """Send, receive and sum all segments; returns the bytes sent."""
        waiting = list(self._sends[::-1])
        under_way: list[tuple[_Segment, dist.Work]] = []
        arrivals = deque(self._post(n) for n in range(min(WINDOW, len(self._receipts))))
        sent = self._send_ready(waiting, -1, under_way)
        for number, receipt in enumerate(self._receipts):
            work, data = arrivals.popleft()
            self._wait(receipt.segment, work)
            if receipt.add:
                self._flat[slice(*receipt.segment.span)].add_(data)
            sent += self._send_ready(waiting, number, under_way)
            if number + WINDOW < len(self._receipts):
                arrivals.append(self._post(number + WINDOW))
        for segment, work in under_way:
            self._wait(segment, work)
        return sent

    def _post(self, number: int) -> tuple[dist.Work, Tensor]:
        """Post the receive of one segment; its scratch memory was last used WINDOW receipts ago."""
        receipt = self._receipts[number]
        segment = receipt.segment
        if receipt.add:
            data = self._scratch[number % WINDOW][: _length(segment.span)]
        else:
            data = self._flat[slice(*segment.span)]
        return self._group.recv([data], segment.peer, segment.round), data

    def _send_ready(self, waiting: list[_Segment], arrived: int, under_way: list[tuple[_Segment, dist.Work]]) -> int:
        sent = 0
        while waiting and waiting[-1].after <= arrived:
            segment = waiting.pop()
            data = self._flat[slice(*segment.span)]
            under_way.append((segment, self._group.send([data], segment.peer, segment.round)))
            sent += data.nbytes + framing_bytes(1, on_gpu=False)
        return sent

    def _wait(self, segment: _Segment, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self._group.rank()} of the group lost rank {segment.peer} in round {segment.round}: {error}"
            ) from error


def _length(span: Span) -> int:
    return span[1] - span[0]


def _is_paired(step: PathStep) -> bool:
    """Whether two ranks send to each other; both of them say the same."""
    return step.send_to is not None and step.send_to == step.recv_from


def _segments(span: Span, element_size: int, paired: bool) -> list[Span]:
    """Cut a span into messages; sender and receiver know the span, so both cut it alike."""
    bytes_ = _length(span) * element_size
    least = PAIRED_BYTES if paired else ONE_WAY_BYTES
    parts = max(-(-bytes_ // LONGEST_BYTES), min(SEGMENTS, bytes_ // least), 1)
    while any(abs(bytes_ - window * parts) < WINDOW_MARGIN_BYTES * parts for window in RECEIVE_WINDOWS_BYTES):
        parts += 1
    return [part for part in cut(span, parts) if part[0] < part[1]]


def _ordered_receipts(steps: Sequence[PathStep], element_size: int) -> list[_Receipt]:
    """Return all messages to receive, in the order in which they are summed."""
    return [
        _Receipt(_Segment(s.recv_from, s.round, part), s.add)
        for s in sorted(steps, key=lambda s: s.round)
        if s.recv_from is not None
        for part in _segments(s.recv, element_size, _is_paired(s))
    ]


def _ordered_sends(steps: Sequence[PathStep], element_size: int) -> list[_Segment]:
    """Return all messages to send, each after the receipts it depends on and after those before it.

    Keeping one order costs nothing (a span is received and sent on front to back) and lets messages of a round
    between two ranks match in the order they were sent.

    Two ranks that send to each other in a round do so message by message: the next one leaves when the last one has
    been answered. Sent at once, the data of one direction stands before the other's acknowledgements on the link, the
    direction with the smaller window starves (Zhang, Shenker and Clark 1991), and all later rounds wait for it.
    """
    received: list[Span] = []
    after = -1
    sends: list[_Segment] = []
    for step in sorted(steps, key=lambda s: s.round):
        paired = _is_paired(step)
        came = _segments(step.recv, element_size, paired) if step.recv_from is not None else []
        if step.send_to is not None:
            for number, part in enumerate(_segments(step.send, element_size, paired)):
                needs = (n for n, span in enumerate(received) if span[0] < part[1] and part[0] < span[1])
                answered = len(received) - 1 + min(number, len(came)) if paired and number else -1
                after = max(after, max(needs, default=-1), answered)
                sends.append(_Segment(step.send_to, step.round, part, after))
        received += came
    return sends


def _run_stepwise(flat: Tensor, steps: Sequence[PathStep], group: dist.ProcessGroup) -> int:
    """For a backend that runs messages in the order of one stream (NCCL): one group of messages per round."""
    sent = 0
    for step in sorted(steps, key=lambda s: s.round):
        operations = []
        out, into = flat[slice(*step.send)], flat[slice(*step.recv)]
        data = torch.empty_like(into) if step.add else into
        if step.send_to is not None and out.numel():
            operations.append(dist.P2POp(dist.isend, out, group=group, group_peer=step.send_to))
            sent += out.nbytes
        if step.recv_from is not None and into.numel():
            operations.append(dist.P2POp(dist.irecv, data, group=group, group_peer=step.recv_from))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        if step.add:
            into.add_(data)
    return sent
