"""Paths as data: pieces, rounds and counts, without a process."""

from __future__ import annotations

import pytest

from echelon.collectives import build, names
from echelon.collectives.schedule import cut, sent_numel
from echelon.core.errors import UserError


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


def test_hierarchical_crosses_between_groups_with_one_part_of_the_vector() -> None:
    steps = build("hierarchical(group=4)").schedule(1, 8, 4000)
    across = [s for s in steps if s.send_to is not None and s.send_to // 4 != 0]
    assert sent_numel(across) == 1000  # 2 (m - 1) / m of a quarter, m = 2
    assert sent_numel(steps) - sent_numel(across) == 6000  # 2 (g - 1) / g of the whole, g = 4


def test_names_are_the_files() -> None:
    assert names() == ["auto", "halving_doubling", "hierarchical", "ring"]


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
