"""Writing files so that a crash leaves the old one or the new one, whole."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import DEFAULT_BUFFER_SIZE, BufferedReader, FileIO
from pathlib import Path
from uuid import uuid4

from echelon.core.errors import UserError

DATA_FILE = "data.json"  # what a run keeps of its data

_SCRATCH, _OWNED = "echelon-", ".owned"
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


def open_plain(path: Path, buffer_bytes: int = DEFAULT_BUFFER_SIZE) -> BufferedReader:
    """Open a file to read, which nothing else may be: of a pipe one would wait for a writer that never comes.

    Raises:
        FileNotFoundError: it is not there.
        UserError: it is a folder, a pipe or a device, or a link that leads in a circle.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UserError(f"{path} cannot be read: it is no plain file")
    return BufferedReader(FileIO(fd), buffer_bytes)


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


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder on this machine's temporary disk that this user alone can enter, and remove it at the end.

    A process that is killed leaves its own: those go here first, whose owners hold their locks no more.
    """
    _remove_deserted(Path(tempfile.gettempdir()))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        fd = os.open(folder / _OWNED, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _locked(fd) or not os.fstat(fd).st_nlink:  # removed by who looked before it was locked
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return
        finally:
            os.close(fd)


def _remove_deserted(temporary: Path) -> None:
    for lock in temporary.glob(f"{_SCRATCH}*/{_OWNED}"):
        try:
            if lock.parent.is_symlink() or lock.parent.stat().st_uid != os.geteuid():
                continue
            fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone meanwhile
            continue
        try:
            if _locked(fd):
                shutil.rmtree(lock.parent, ignore_errors=True)
        finally:
            os.close(fd)


def _locked(fd: int) -> bool:
    """Lock a file unless another process has; returns whether that was done."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
