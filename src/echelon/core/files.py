"""Writing files so that a crash leaves the old one or the new one, whole."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from echelon.core.errors import UserError

_FEW_FILES = 2048
_MOST_FILES = (
    1 << 20
)  # some systems allow a thousand times that, and programs that close each possible one take minutes


def allow_open_files() -> str:
    """Raise how many files this process and its children may open to what the system allows them.

    Returns:
        a remark for the user where that is few; else empty.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted >= _FEW_FILES:
        return ""
    return f"a process may open {wanted} files here (ulimit -Hn): raise it for runs of many workers"


def is_full(error: OSError) -> bool:
    """Whether an error says that a disk, or one's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def full_disk_in_words(folder: Path, command: str = "echelon resume") -> Iterator[None]:
    """Turn the error of a full disk, while a run or a study writes to its folder, into words.

    Args:
        command: what continues it, given the folder.

    Raises:
        UserError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise UserError(
            f"{folder}: no space left on the disk; free some, then continue with `{command} {folder}`"
        ) from error


def write_whole(fd: int, data: bytes) -> None:
    """Write all of data, in one write where the system takes it at once.

    Raises:
        OSError: what kept the rest from being written; a disk that fills up takes a part first, and says nothing.
    """
    while data:
        data = data[os.write(fd, data) :]


def write_atomic(path: Path, text: str) -> None:
    """Write a text file under a temporary name, flush it to the disk, and rename it."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")  # machines that share a disk have the same process ids
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
