"""Files that one process of a machine makes below the data's root, while the others wait for them."""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.core.errors import UserError

_BETWEEN_S = 0.1


@contextmanager
def locked(lock: Path, patience_s: float, busy: str, is_required: bool = True) -> Iterator[None]:
    """Hold a lock file, whose folder is made where it is not there.

    Args:
        patience_s: how long to wait for another process.
        busy: what is said when it still holds the lock then.
        is_required: refuse a folder that can only be read; else it is used without a lock, as all may be there.

    Raises:
        UserError: the folder cannot be written, or another process holds the lock too long.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        if not is_required and lock.parent.is_dir() and error.errno in (errno.EACCES, errno.EROFS):
            yield
            return
        raise UserError(f"--data-root: {lock.parent} cannot be written ({error.strerror})") from error
    with file:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(busy) from None
                time.sleep(_BETWEEN_S)
        yield
