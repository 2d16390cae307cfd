"""Paths as data: pieces, rounds and counts, without a process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echelon.collectives import build, names
from echelon.collectives.registry import examples
from echelon.collectives.schedule import PathStep
from echelon.collectives.transfer import Plan, make_plan
from echelon.core.errors import UserError
from echelon.core.shards import cut

LONGEST_BYTES = 1 << 20
SCHEDULED = [spec for specs in examples().values() for spec in specs[:2] if not build(spec).by_backend]
"""Paths with a schedule of their own: the first two examples of each."""


def sent_numel(steps: list[PathStep]) -> int:
    """Return the elements that a schedule makes its rank send."""
    return sum(s.send[1] - s.send[0] for s in steps if s.send_to is not None)


def test_cut_covers_without_gaps() -> None:
    assert cut((3, 10), 3) == [(3, 6), (6, 8), (8, 10)]
    assert cut((0, 2), 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_a_ring_sends_the_least_in_2n_minus_2_rounds(size: int) -> None:
    steps = build("ring").schedule(0, size, 1000 * size)
    assert len({s.round for s in steps}) == 2 * (size - 1)
    assert sent_numel(steps) == 2 * (size - 1) * 1000


@pytest.mark.parametrize(("size", "rounds"), [(2, 2), (4, 4), (8, 6)])
def test_halving_doubling_needs_2_log_n_rounds(size: int, rounds: int) -> None:
    steps = build("halving_doubling").schedule(1, size, 1000 * size)
    assert len({s.round for s in steps}) == rounds
    assert sent_numel(steps) == 2 * (size - 1) * 1000


@pytest.mark.parametrize("size", [2, 4, 5])
def test_of_a_direct_exchange_no_more_than_two_messages_follow_each_other(size: int) -> None:
    steps = build("direct").schedule(1, size, 1000 * size)
    assert sent_numel(steps) == 2 * (size - 1) * 1000
    pieces = [step for step in make_plan(steps, 4).sends if step.round < size - 1]
    assert len(pieces) == size - 1 and all(segment.after == -1 for segment in pieces), "a piece waits for another"


def test_hierarchical_crosses_between_groups_with_one_part_of_the_vector() -> None:
    steps = build("hierarchical(group=4)").schedule(1, 8, 4000)
    across = [s for s in steps if s.send_to is not None and s.send_to // 4 != 0]
    assert sent_numel(across) == 1000  # 2 (m - 1) / m of a quarter, m = 2
    assert sent_numel(steps) - sent_numel(across) == 6000  # 2 (g - 1) / g of the whole, g = 4


def _run_in_one_process(plans: list[Plan], vectors: list[Tensor]) -> None:
    """Carry out the plans of all ranks together: whoever can go on does; nobody ever waits for ever."""
    size = len(plans)
    mail: dict[tuple[int, int, int], list[Tensor]] = {}
    sent, came = [0] * size, [0] * size
    going = True
    while going:
        going = False
        for rank, plan in enumerate(plans):
            while sent[rank] < len(plan.sends) and plan.sends[sent[rank]].after < came[rank]:
                segment = plan.sends[sent[rank]]
                mail.setdefault((rank, segment.peer, segment.round), []).append(
                    vectors[rank][slice(*segment.span)].clone()
                )
                sent[rank], going = sent[rank] + 1, True
            if came[rank] < len(plan.receipts):
                receipt = plan.receipts[came[rank]]
                if box := mail.get((receipt.segment.peer, rank, receipt.segment.round)):
                    into = vectors[rank][slice(*receipt.segment.span)]
                    into.copy_(into + box.pop(0) if receipt.add else box.pop(0))
                    came[rank], going = came[rank] + 1, True
    assert sent == [len(p.sends) for p in plans], "a message never left"
    assert came == [len(p.receipts) for p in plans], "a message never came"


@pytest.mark.parametrize("path", SCHEDULED)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("numel", [1, 7, 1001, 400_003])
def test_messages_never_wait_for_each_other_and_give_the_sum(path: str, size: int, numel: int) -> None:
    vectors = [torch.full((numel,), float(2**rank)) for rank in range(size)]
    plans = [make_plan(build(path).schedule(rank, size, numel), 4) for rank in range(size)]
    _run_in_one_process(plans, vectors)
    assert all((v == 2**size - 1).all() for v in vectors)


def test_two_ranks_that_send_to_each_other_take_turns() -> None:
    plan = make_plan(build("halving_doubling").schedule(0, 2, 1_000_000), 4)
    first_round = [s.after for s in plan.sends if s.round == 1]
    assert len(first_round) > 1
    assert first_round == list(range(-1, len(first_round) - 1))


@pytest.mark.parametrize("path", [spec for spec in SCHEDULED if spec != "hierarchical(group=3)"])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_no_message_is_about_as_long_as_a_receive_window(path: str, size: int) -> None:
    for kilobytes in (*range(0, 3000, 16), 4096, 65536):
        sends = make_plan(build(path).schedule(0, size, kilobytes * 256), 4).sends
        lengths = {4 * (s.span[1] - s.span[0]) for s in sends}
        assert not [n for n in lengths for window in (1 << 16, 1 << 17) if abs(n - window) < 4000], (kilobytes, lengths)
        assert max(lengths, default=0) <= LONGEST_BYTES


def test_names_are_the_files() -> None:
    assert set(names()) >= {"backend", "direct", "halving_doubling", "hierarchical", "ring"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rign", "did you mean ring"),
        ("hierarchical", "group"),
        ("hierarchical(group=0)", "at least 1"),
        ("ring(chunks=3)", "no settings|unnamed|no setting"),
    ],
)
def test_bad_specs_are_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(text)
