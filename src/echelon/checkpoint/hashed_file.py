"""A large file in one pass: its SHA-256 is taken of what is written, and the disk works meanwhile.

Left to itself the kernel collects gigabytes in its cache before it writes: the disk rests while hashes are computed,
and `fsync` waits in the end. Its cache then has the checkpoint in place of the training data. So each stretch goes to
the disk as soon as it is complete, and what has arrived there leaves the cache.
"""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_CHUNK_BYTES = 8 << 20  # what is hashed is still in the processor's cache, and the GIL is free meanwhile
_CACHED_BYTES = 64 << 20  # until then the disk has taken what was sent: files that are no larger stay in the cache
_NICENESS = 3  # half the share of a thread of training; 19 would leave a checkpoint unwritten for minutes


class HashedFile:
    """A file that is durable once it is finished, and its SHA-256 known; to be used in a `with`.

    Raises OSError wherever the disk fails.
    """

    def __init__(self, path: Path, is_read_soon: bool = False) -> None:
        """Begin a file, in place of one that is there.

        Args:
            is_read_soon: leave what is on the disk in the cache too.
        """
        self._file = path.open("wb")
        self._sha256 = hashlib.sha256()
        self._sent_bytes = 0
        self._drops = not is_read_soon
        self.n_bytes = 0

    def __enter__(self) -> HashedFile:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the file."""
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            self._file.write(chunk)
            self.n_bytes += len(chunk)
            if self.n_bytes - self._sent_bytes >= _CHUNK_BYTES:
                self._send()
            self._sha256.update(chunk)

    def finish(self) -> str:
        """Wait until all is on the disk; returns the SHA-256 of the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._drops:
            self._advise(0, self.n_bytes - _CACHED_BYTES)
        return self._sha256.hexdigest()

    def _send(self) -> None:
        """Let the disk begin with what is complete."""
        self._file.flush()
        self._advise(self._sent_bytes, self.n_bytes - self._sent_bytes)
        self._sent_bytes = self.n_bytes
        if self._drops:
            self._advise(self.n_bytes - 2 * _CACHED_BYTES, _CACHED_BYTES)

    def _advise(self, start: int, length: int) -> None:
        """Say that a stretch is not needed: the kernel begins to write what is not on the disk, and drops what is."""
        if start + length > 0 and hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # a file system that takes no advice writes at the fsync, which tells what fails
                os.posix_fadvise(self._file.fileno(), max(start, 0), length + min(start, 0), os.POSIX_FADV_DONTNEED)


def yield_to_training() -> None:
    """Let the calling thread compute where training leaves a processor idle, rather than in its place."""
    thread = threading.get_native_id()
    with suppress(OSError):  # some sandboxes have no priorities of threads
        niceness = min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
