"""Canonical Huffman coding of bytes, in lanes that are decoded side by side.

A stream of n symbols is cut into lanes of equal length, coded one after another without gaps; the bits that each lane
takes are sent (uint16), so that a decoder steps through all lanes at once, with one table look-up per step, in numpy.
Codes have at most 12 bits. The table is sent as 256 lengths of four bits; codes follow from them (canonical order).

Coded stream: 128 bytes of lengths, lane sizes in bits, then the bits, highest first, in big-endian 16-bit words.
Paper: Huffman 1952; canonical codes: Schwartz and Kallick 1964.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

MAX_BITS = 12
_TABLE_BYTES = 128
_PART = 1 << 18

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def lane_length(n: int) -> int:
    """Symbols per lane: about the root of n, so that neither steps nor lane sizes dominate; 128 to 1,024."""
    return 1 << min(max(round(n.bit_length() / 2), 7), 10)


def code_lengths(counts: Ints) -> Bytes:
    """Return the bits of each symbol's code, uint8 [256]; 0 for symbols that do not occur.

    Counts are halved until no code is longer than 12 bits, which costs little.
    """
    lengths = np.zeros(256, np.uint8)
    weights = counts.copy()
    while True:
        symbols = np.flatnonzero(weights)
        if symbols.size == 1:
            lengths[symbols] = 1
        if symbols.size <= 1:
            return lengths
        depths = _depths([int(w) for w in weights[symbols]])
        if max(depths) <= MAX_BITS:
            lengths[symbols] = depths
            return lengths
        weights[symbols] = weights[symbols] // 2 + 1


def _depths(weights: list[int]) -> list[int]:
    """Depth of each leaf in the Huffman tree of the weights; ties broken by order, so alike everywhere."""
    parents = [0] * (2 * len(weights) - 1)
    heap = [(w, i) for i, w in enumerate(weights)]
    heapq.heapify(heap)
    for node in range(len(weights), len(parents)):
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        parents[first[1]] = parents[second[1]] = node
        heapq.heappush(heap, (first[0] + second[0], node))
    depths = [0] * len(parents)
    for node in range(len(parents) - 2, -1, -1):
        depths[node] = depths[parents[node]] + 1
    return depths[: len(weights)]


def coded_size(counts: Ints, lengths: Bytes) -> int:
    """Bytes that `encode` returns for symbols with these counts."""
    n = int(counts.sum())
    lanes = -(-n // lane_length(n)) if n else 0
    return _TABLE_BYTES + 2 * lanes + 2 * (-(-int((counts * lengths).sum()) // 16))


def encode(symbols: Bytes, lengths: Bytes) -> Bytes:
    """Code symbols [n] with the given lengths into uint8 [coded_size]."""
    codes = _canonical(lengths)
    lane = lane_length(symbols.size)
    sizes, words, bits = [], [], 0
    carry = np.uint64(0)
    for start in range(0, symbols.size, _PART):
        part = symbols[start : start + _PART]
        width = lengths[part].astype(np.int64)
        ends = np.cumsum(width) + bits % 16
        sizes.append(np.add.reduceat(width, np.arange(0, part.size, lane)))
        filled = _place(codes[part], width, ends - width)
        filled[0] += carry
        bits += int(width.sum())
        whole = int(ends[-1]) // 16
        words.append(filled[:whole])
        carry = filled[whole]
    words.append(np.array([carry] if bits % 16 else [], np.uint64))
    nibbles = lengths[0::2] | lengths[1::2] << 4
    lanes = np.concatenate([*sizes, np.empty(0, np.int64)]).astype("<u2")
    return np.concatenate([nibbles, lanes.view(np.uint8), np.concatenate(words).astype(">u2").view(np.uint8)])


def _place(codes: Ints, width: Ints, starts: Ints) -> npt.NDArray[np.uint64]:
    """Write each code at its bit; returns 16-bit words. Bits are disjoint, so words are sums (exact in float64)."""
    word = starts >> 4
    spread = codes << (32 - width - (starts & 15))
    size = int(word[-1]) + 2
    high = np.bincount(word, weights=spread >> 16, minlength=size)
    low = np.bincount(word + 1, weights=spread & 0xFFFF, minlength=size)
    return (high + low).astype(np.uint64)


def _canonical(lengths: Bytes) -> Ints:
    """Return the code of each symbol: in order of (length, symbol), counting up."""
    codes = np.zeros(256, np.int64)
    code, previous = 0, 0
    for symbol in np.lexsort((np.arange(256), lengths)):
        length = int(lengths[symbol])
        if length == 0:
            continue
        code <<= length - previous
        codes[symbol], previous = code, length
        code += 1
    return codes


def decode(coded: Bytes, n: int) -> Bytes:
    """Undo `encode`: uint8 [n].

    Raises:
        ValueError: these bytes are no coded stream of n symbols (a damaged message).
    """
    if n == 0:
        return np.empty(0, np.uint8)
    lane = lane_length(n)
    lanes = -(-n // lane)
    body = _TABLE_BYTES + 2 * lanes
    if coded.size < body:
        raise ValueError("coded stream ends inside its table")
    table = _look_up(np.stack([coded[:_TABLE_BYTES] & 15, coded[:_TABLE_BYTES] >> 4], axis=1).reshape(-1))
    sizes = coded[_TABLE_BYTES:body].copy().view("<u2").astype(np.int64)
    if int(sizes.sum()) > 8 * (coded.size - body):
        raise ValueError("coded stream is shorter than its lanes")
    padded = np.concatenate([coded[body:], np.zeros(4, np.uint8)]).astype(np.int32)
    windows = padded[:-2] << 16 | padded[1:-1] << 8 | padded[2:]
    ends = np.cumsum(sizes)
    at = ends - sizes
    out = np.empty((lane, lanes), np.uint8)
    last = n - (lanes - 1) * lane
    for step in range(lane):
        if step == last:
            # The last lane is shorter and done: it must end here too.
            if at[-1] != ends[-1]:
                raise ValueError("coded stream is damaged: its last lane does not end where it should")
            at, ends = at[:-1], ends[:-1]
        found = table[windows[np.minimum(at >> 3, windows.size - 1)] >> (12 - (at & 7)) & 4095]
        out[step, : at.size] = found & 255
        at = at + (found >> 8)
    if not np.array_equal(at, ends):
        raise ValueError("coded stream is damaged: its lanes do not end where they should")
    return np.ascontiguousarray(out.T).reshape(-1)[:n]


def _look_up(lengths: Bytes) -> Ints:
    """Return for every 12 bits the symbol that they begin with and its length: symbol | length << 8."""
    used = lengths[lengths > 0].astype(np.int64)
    if used.size == 0 or used.max() > MAX_BITS or int((1 << (MAX_BITS - used)).sum()) > 1 << MAX_BITS:
        raise ValueError("coded stream has an impossible table")
    table = np.zeros(1 << MAX_BITS, np.int64)
    codes = _canonical(lengths)
    for symbol in np.flatnonzero(lengths):
        length = int(lengths[symbol])
        first = int(codes[symbol]) << (MAX_BITS - length)
        table[first : first + (1 << (MAX_BITS - length))] = symbol | length << 8
    return table
