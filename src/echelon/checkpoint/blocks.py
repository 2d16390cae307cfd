"""A rank's part as blocks that travel by themselves: only those that are new, each coded where that makes it smaller.

The file's start, with its names, and its tensors are cut separately: a start that grows by a digit moves no block.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

BLOCK_BYTES = 16 << 10  # holds a link of 10 Mbit/s for 13 ms: what steps send waits no longer
DIGEST_BYTES = 16
_MOST_LISTED = 2 << 20  # digests are sent as one frame: those of larger parts are of larger blocks
_LENGTH = struct.Struct("<Q")
_ELEMENT_BYTES = 4  # whose bytes are coded apart: exponents are alike, mantissas are noise
_CODEC = "zstd"


@dataclass(frozen=True)
class BlockList:
    """How a part of so many bytes is cut.

    Attributes:
        start_bytes: of what comes before the tensors.
        digests: one after the other, of `DIGEST_BYTES` each.
    """

    n_bytes: int
    start_bytes: int
    digests: bytes

    def __len__(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    @property
    def block_bytes(self) -> int:
        """How large a block is, but for the last ones of the start and of the tensors."""
        return _block_bytes(self.n_bytes)

    def digest(self, number: int) -> bytes:
        """Return the digest of a block."""
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def span(self, number: int) -> tuple[int, int]:
        """Return where a block begins and ends in the file."""
        size = self.block_bytes
        in_start = -(-self.start_bytes // size)
        if number < in_start:
            begin, limit = number * size, self.start_bytes
        else:
            begin, limit = self.start_bytes + (number - in_start) * size, self.n_bytes
        return begin, min(limit, begin + size)

    def is_sound(self) -> bool:
        """Whether there are as many digests as blocks."""
        if not 0 < self.start_bytes <= self.n_bytes:
            return False
        return len(self.digests) == DIGEST_BYTES * _count(self.n_bytes, self.start_bytes)


def _block_bytes(n_bytes: int) -> int:
    size = BLOCK_BYTES
    while n_bytes > _MOST_LISTED * size:
        size *= 2
    return size


def _count(n_bytes: int, start_bytes: int) -> int:
    size = _block_bytes(n_bytes)
    return -(-start_bytes // size) + -(-(n_bytes - start_bytes) // size)


def digest_of(block: bytes) -> bytes:
    """Return what a block is known by."""
    return blake2b(block, digest_size=DIGEST_BYTES).digest()


def blocks_of(path: Path) -> BlockList:
    """Cut a safetensors file. Raises OSError; ValueError: it is none."""
    n_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(_LENGTH.size)
        if len(length) < _LENGTH.size:
            raise ValueError(f"{path} is no safetensors file")
        start_bytes = _LENGTH.size + _LENGTH.unpack(length)[0]
        if start_bytes > n_bytes:
            raise ValueError(f"{path} is no safetensors file")
        file.seek(0)
        cut, digests = BlockList(n_bytes, start_bytes, b""), []
        for number in range(_count(n_bytes, start_bytes)):
            begin, end = cut.span(number)
            digests.append(digest_of(file.read(end - begin)))
    return replace(cut, digests=b"".join(digests))


@dataclass(frozen=True)
class KnownBlocks:
    """Blocks of a part that came before, by their digests: those that are in the next one as well do not travel."""

    path: Path | None = None
    spans: Mapping[bytes, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> KnownBlocks:
        """Return the blocks of a file; none where it is gone or cannot be read."""
        try:
            listed = blocks_of(path)
        except (OSError, ValueError):
            return cls()
        return cls(path, {listed.digest(number): listed.span(number) for number in range(len(listed))})

    def read(self, digest: bytes) -> bytes | None:
        """Return a block, or None where it is not there any more."""
        span = self.spans.get(digest)
        if span is None or self.path is None:
            return None
        try:
            with self.path.open("rb") as file:
                file.seek(span[0])
                block = file.read(span[1] - span[0])
        except OSError:
            return None
        return block if digest_of(block) == digest else None


def load_codec() -> None:
    """Import what codes blocks; a thread had better not: a process that is forked meanwhile would wait without end."""
    import pyarrow  # noqa: F401


def coded(block: bytes) -> tuple[bytes, bool]:
    """Return what travels for a block, and whether that is coded."""
    import pyarrow

    smaller: bytes = pyarrow.compress(_apart(block), codec=_CODEC, asbytes=True)
    return (smaller, True) if len(smaller) < len(block) else (block, False)


def decoded(data: bytes, is_coded: bool, n_bytes: int) -> bytes:
    """Return the block of `coded`, of so many bytes. Raises ValueError: it is none."""
    if not is_coded:
        return data
    import pyarrow

    try:
        return _together(pyarrow.decompress(data, decompressed_size=n_bytes, codec=_CODEC, asbytes=True))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(str(error)) from error


def _apart(block: bytes) -> bytes:
    """Return all first bytes of elements, then all second ones, and so on; what is left over at the end."""
    whole_bytes = len(block) - len(block) % _ELEMENT_BYTES
    elements = np.frombuffer(block, np.uint8, whole_bytes).reshape(-1, _ELEMENT_BYTES)
    return elements.T.tobytes() + block[whole_bytes:]


def _together(block: bytes) -> bytes:
    whole_bytes = len(block) - len(block) % _ELEMENT_BYTES
    elements = np.frombuffer(block, np.uint8, whole_bytes).reshape(_ELEMENT_BYTES, -1)
    return elements.T.tobytes() + block[whole_bytes:]
