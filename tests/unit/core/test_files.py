"""Files on a disk that fills up, and how many may be open."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.core.files import scratch_folder, write_whole


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


HOLD = """
import time
from echelon.core.files import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    time.sleep(60)
"""


def test_folders_of_the_dead_are_removed_and_those_of_the_living_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [
        subprocess.Popen([sys.executable, "-c", HOLD], env={**os.environ, "TMPDIR": str(tmp_path)},
                         stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]  # fmt: skip
    dead, living = (Path(other.stdout.readline().strip()) for other in others if other.stdout)
    others[0].kill()
    others[0].wait()
    (tmp_path / "echelon-without-a-lock").mkdir()
    assert dead.exists() and living.exists()
    with scratch_folder() as folder:
        assert set(tmp_path.glob("echelon-*")) == {living, folder, tmp_path / "echelon-without-a-lock"}
        assert folder.stat().st_mode & 0o777 == 0o700
    others[1].kill()
    others[1].wait()
    assert not folder.exists() and living.exists()


@pytest.mark.parametrize("soft, hard, remark", [(256, 4096, ""), (256, 1024, "a process may open 1024 files here")])
def test_as_many_files_may_be_open_as_the_system_allows(soft: int, hard: int, remark: str) -> None:
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from echelon.core.files import allow_open_files\n"
        "print(allow_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE), sep='|')"
    )
    said, limits = subprocess.check_output([sys.executable, "-c", code], text=True).strip().split("|")
    assert said.startswith(remark) and bool(said) == bool(remark) and limits == str((hard, hard))
