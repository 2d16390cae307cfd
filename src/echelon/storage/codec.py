"""How a file is stored: as it is, or compressed where that makes it smaller."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_CODEC, ZSTD = "none", "zstd"
CODECS = (NO_CODEC, ZSTD)
_SUFFIXES = {NO_CODEC: "", ZSTD: ".zst"}
_BLOCK_BYTES = 1 << 20


def suffix_of(codec: str) -> str:
    """Return what a codec adds to a file's name.

    Raises:
        ValueError: it is unknown.
    """
    if codec not in _SUFFIXES:
        raise ValueError(f"unknown codec {codec!r}")
    return _SUFFIXES[codec]


@contextmanager
def compressed(path: Path, codec: str) -> Iterator[tuple[Path, str]]:
    """Give a file as it is stored, and the codec it is stored with: none where that is no larger."""
    if codec == NO_CODEC:
        yield path, NO_CODEC
        return
    import pyarrow

    smaller = path.with_name(f".{path.name}.{codec}")
    try:
        with (
            path.open("rb") as source,
            smaller.open("wb") as target,
            pyarrow.CompressedOutputStream(target, codec) as stream,
        ):
            shutil.copyfileobj(source, stream, _BLOCK_BYTES)
        pays = smaller.stat().st_size < path.stat().st_size
        yield (smaller, codec) if pays else (path, NO_CODEC)
    finally:
        smaller.unlink(missing_ok=True)


def decompressed(stored: Path, plain: Path, codec: str) -> None:
    """Write a stored file's content to `plain`; may move it there.

    Raises:
        ValueError: it is not what the codec writes.
        OSError: this machine's disk fails.
    """
    if codec == NO_CODEC:
        stored.replace(plain)
        return
    import pyarrow

    try:
        with stored.open("rb") as source, plain.open("wb") as target:
            shutil.copyfileobj(pyarrow.CompressedInputStream(source, codec), target, _BLOCK_BYTES)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the files: the codec's own have none
            raise
        raise ValueError(str(error)) from error
