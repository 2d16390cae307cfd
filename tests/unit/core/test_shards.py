"""The geometry of shards against lists of indices."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.shards import Region, Span, chunk, cut, numel, overlaps, taken

SPANS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=4).map(
    lambda pairs: [(start, start + length) for start, length in pairs]
)


def indices(spans: list[Span] | tuple[Span, ...]) -> list[int]:
    return list(chain.from_iterable(range(start, stop) for start, stop in spans))


@given(SPANS, SPANS)
def test_overlaps_are_the_equal_indices(first: list[Span], second: list[Span]) -> None:
    ours, theirs = indices(first), indices(second)
    pairs = [(b.first + i, b.second + i) for b in overlaps(first, second) for i in range(b.length)]
    assert sorted(pairs) == [(i, j) for i, a in enumerate(ours) for j, b in enumerate(theirs) if a == b]


@given(SPANS, st.integers(0, 20), st.integers(0, 20))
def test_taken_is_a_slice_of_the_indices(spans: list[Span], start: int, stop: int) -> None:
    assert indices(list(taken(spans, start, stop))) == indices(spans)[start:stop]


@given(SPANS, st.integers(1, 3), st.integers(1, 4))
def test_chunks_are_those_of_each_part(spans: list[Span], parts: int, count: int) -> None:
    every = indices(spans)
    if len(every) % parts:
        with pytest.raises(ValueError, match="equal parts"):
            chunk(spans, parts, count, 0)
        return
    each = len(every) // parts
    size = -(-each // count)
    for index in range(count):
        wanted = [i for p in range(parts) for i in every[p * each : (p + 1) * each][index * size : (index + 1) * size]]
        assert indices(chunk(spans, parts, count, index)) == wanted


def test_cut_covers_a_span() -> None:
    assert cut((3, 10), 3) == [(3, 6), (6, 8), (8, 10)]
    assert numel(cut((0, 2), 4)) == 2


def test_blocks_pair_the_same_elements() -> None:
    rows = Region((4, 6), (((0, 1), (3, 4)), ((0, 6),)))
    columns = Region((4, 6), (((0, 4),), ((1, 3),)))
    assert rows.local_shape == (2, 6) and columns.numel == 8
    assert list(rows.blocks(columns)) == [
        ((slice(0, 1), slice(1, 3)), (slice(0, 1), slice(0, 2))),
        ((slice(1, 2), slice(1, 3)), (slice(3, 4), slice(0, 2))),
    ]
    assert list(Region.whole(()).blocks(Region.whole(()))) == [((), ())]
