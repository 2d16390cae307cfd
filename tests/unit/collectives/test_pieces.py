"""Messages in pieces: both ends cut alike, whatever each measured; only a slow link has its messages cut."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from echelon.collectives.messages import PIECE_BYTES, MessageCutter, seal

LONG = 3 * PIECE_BYTES
SLOW_S, FAST_S = LONG / 1e6, LONG / 1e9


def _exchange(ends: list[MessageCutter], seconds: list[float], places: list[int]) -> None:
    """Pass a message from each end to the other ones among `places`, and check that they cut alike."""
    sent = {me: {place: seal(torch.zeros(LONG, dtype=torch.uint8), True) for place in places if place != me}
            for me in places}  # fmt: skip
    for me in places:
        ends[me].tell(sent[me])
    for me in places:
        received: dict[int, Tensor] = {other: sent[other][me] for other in places if other != me}
        for other, message in received.items():
            assert ends[me].of_incoming(other, message.nbytes) == ends[other].of_outgoing(me, message.nbytes)
    for me in places:
        ends[me].passed(sent[me], {other: sent[other][me] for other in places if other != me}, seconds[me])


def test_both_ends_cut_alike_whatever_each_measures_and_whoever_is_left_out() -> None:
    choose, ends = random.Random(0), [MessageCutter() for _ in range(4)]
    for _ in range(200):
        places = sorted(choose.sample(range(4), choose.choice((2, 3, 4))))
        _exchange(ends, [choose.choice((SLOW_S, FAST_S)) for _ in ends], places)


def test_messages_are_cut_over_a_slow_link_and_whole_over_a_fast_one() -> None:
    ends = [MessageCutter(), MessageCutter()]
    assert len(ends[0].of_outgoing(1, LONG)) == 1, "nothing was measured yet"
    for _ in range(2):
        _exchange(ends, [SLOW_S, SLOW_S], [0, 1])
    assert ends[0].of_outgoing(1, LONG) == [(i * PIECE_BYTES, (i + 1) * PIECE_BYTES) for i in range(3)]
    for _ in range(2):
        _exchange(ends, [FAST_S, FAST_S], [0, 1])
    assert len(ends[0].of_outgoing(1, LONG)) == 1
    assert ends[0].of_outgoing(1, 0) == []


def test_waiting_for_a_late_rank_is_no_slow_link() -> None:
    ends = [MessageCutter(), MessageCutter()]
    _exchange(ends, [FAST_S, FAST_S], [0, 1])
    for _ in range(7):
        _exchange(ends, [SLOW_S, SLOW_S], [0, 1])
    assert len(ends[0].of_outgoing(1, LONG)) == 1
