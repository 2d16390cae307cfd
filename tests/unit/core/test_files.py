"""Files on a disk that fills up."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.core.files import write_whole


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """Let this process write no file beyond a size: as a full disk does, the system takes a part, then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_cannot_be_written_whole_is_an_error(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        write_whole(fd, b"fits\n")
        with files_of_at_most(8), pytest.raises(OSError, match="too large"):
            write_whole(fd, b"does not fit\n")
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"fits\ndoe"
