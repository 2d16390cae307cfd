"""The geometry of shards: which elements of a tensor a rank, a file, a message or a codec has. One set of types.

A `Span` is a range of a vector, or of one dim of a tensor; several spans stand for their elements in that order. A
`Region` is what a shard holds of a tensor: spans along each dim. All of it is arithmetic; nothing here has elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Span = tuple[int, int]
"""First element and the one after the last."""
Spans = tuple[Span, ...]
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class FlatTensor:
    """A tensor that lies flattened, row-major, in a vector.

    Attributes:
        name: of the tensor, such as its parameter's.
        shape: of the tensor.
        span: where its elements lie in the vector.
    """

    name: str
    shape: tuple[int, ...]
    span: Span


@dataclass(frozen=True)
class Overlap:
    """Elements that two sequences of spans have in common: where they stand in each, counted along its spans."""

    first: int
    second: int
    length: int

    @property
    def in_first(self) -> slice:
        """Their place in the first sequence."""
        return slice(self.first, self.first + self.length)

    @property
    def in_second(self) -> slice:
        """Their place in the second sequence."""
        return slice(self.second, self.second + self.length)


def numel(spans: Iterable[Span]) -> int:
    """Return how many elements spans stand for."""
    return sum(stop - start for start, stop in spans)


def cut(span: Span, count: int) -> list[Span]:
    """Cut a span into `count` spans whose lengths differ by one at most; the longer ones first.

    >>> cut((0, 5), 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    start, stop = span
    short, longer = divmod(stop - start, count)
    bounds = [start + i * short + min(i, longer) for i in range(count + 1)]
    return list(itertools.pairwise(bounds))


def overlaps(first: Sequence[Span], second: Sequence[Span]) -> Iterator[Overlap]:
    """Yield what two sequences of spans have in common, in the order of the first one.

    >>> list(overlaps([(2, 6)], [(0, 3), (5, 9)]))
    [Overlap(first=0, second=2, length=1), Overlap(first=3, second=3, length=1)]
    """
    before_first = 0
    for start, stop in first:
        before_second = 0
        for low, high in second:
            begin, end = max(start, low), min(stop, high)
            if begin < end:
                yield Overlap(before_first + begin - start, before_second + begin - low, end - begin)
            before_second += high - low
        before_first += stop - start


def taken(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """Yield the spans of the elements that stand from `start` to `stop` along a sequence of spans."""
    before = 0
    for low, high in spans:
        begin, end = max(low, low + start - before), min(high, low + stop - before)
        if begin < end:
            yield begin, end
        before += high - low


def chunk(spans: Sequence[Span], groups: int, count: int, index: int) -> Spans:
    """Cut each of `groups` equal parts into `count` chunks as `torch.chunk` does, and return chunk `index` of each.

    >>> chunk([(0, 12)], groups=3, count=2, index=0)
    ((0, 2), (4, 6), (8, 10))

    Raises:
        ValueError: the elements do not divide into equal parts.
    """
    each, ragged = divmod(numel(spans), groups)
    if ragged:
        raise ValueError(f"{numel(spans)} elements do not divide into {groups} equal parts")
    size = math.ceil(each / count)
    joined: list[Span] = []
    for part in range(groups):
        begin, end = part * each + min(index * size, each), part * each + min((index + 1) * size, each)
        for start, stop in taken(spans, begin, end):
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
    return tuple(joined) or ((0, 0),)


@dataclass(frozen=True)
class Region:
    """The elements of a tensor that a shard holds: all at the crossings of some spans along each dim.

    Attributes:
        shape: of the whole tensor.
        spans: for each dim, which indices of the whole tensor the shard holds, in its own order.
    """

    shape: tuple[int, ...]
    spans: tuple[Spans, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Region:
        """Return the region of a tensor that is not split."""
        return Region(tuple(shape), tuple(((0, size),) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the shard."""
        return tuple(numel(spans) for spans in self.spans)

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return math.prod(self.local_shape)

    def blocks(self, other: Region) -> Iterator[tuple[Slices, Slices]]:
        """Yield the blocks that two shards of a tensor have in common: slices of this one, and of the other."""
        by_dim = [list(overlaps(mine, theirs)) for mine, theirs in zip(self.spans, other.spans, strict=True)]
        for dims in itertools.product(*by_dim):
            yield tuple(dim.in_first for dim in dims), tuple(dim.in_second for dim in dims)
