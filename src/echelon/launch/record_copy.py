"""The run's record on the voters that do not lead: the leader feeds it to them, line by line, as it grows.

A feed begins with the whole record; its lines are then those of one file, whatever was sealed meanwhile. The copy lies
beside the run's secret until its voter leads: then it becomes the record there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from echelon.records.segments import RECORD_FILE, all_segments, open_record

_CHUNK_BYTES = 96 << 10  # a message's header has 256 KB at most
_CONTINUED = b'"continued": true}'  # ends the first line of a file that follows one that was sealed


@dataclass(frozen=True)
class RecordChunk:
    """Whole lines of a feed from a position on, in bytes; `is_end`: there were no more."""

    feed: str
    position: int
    data: bytes
    is_end: bool


class RecordFeed:
    """Reads a folder's record for one voter."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path, self.name = folder, folder / RECORD_FILE, uuid4().hex
        self._position = 0
        self._chunk = RecordChunk(self.name, 0, b"", is_end=False)
        self._files: list[int] = []
        self._offset, self._is_first = 0, True
        self._open_after(0)

    def has_more(self) -> bool:
        """Whether there are lines that the voter is not known to have."""
        if self._chunk.data or not self._chunk.is_end or len(self._files) > 1:
            return True
        return not self._files or os.fstat(self._files[0]).st_size > self._offset or self._was_sealed()

    def chunk(self) -> RecordChunk:
        """Return the lines that the voter lacks, or as many as fit; the same until `take` is told of them."""
        if not self._chunk.data:
            data, is_end = self._read()
            self._chunk = RecordChunk(self.name, self._position, data, is_end)
        return self._chunk

    def take(self, feed: str, position: int) -> bool:
        """Take note of how far the voter is; returns whether this feed can go on there."""
        if (feed, position) == (self.name, self._position + len(self._chunk.data)):
            self._position = position
            self._chunk = RecordChunk(self.name, position, b"", self._chunk.is_end)
        return feed == self.name or self._position == 0

    def _read(self) -> tuple[bytes, bool]:
        """Return whole lines, and whether these are all there are now."""
        while True:
            if not self._files:
                self._open_after(0)
            if not self._files:
                return b"", True
            was_sealed = len(self._files) > 1 or self._was_sealed()  # before the file is read to its end
            data = os.pread(self._files[0], _CHUNK_BYTES, self._offset)
            whole = data[: data.rfind(b"\n") + 1]
            if not whole and len(data) == _CHUNK_BYTES:  # a line that is too long to be sent is left out
                self._offset += self._line_bytes()
                continue
            if not whole and not was_sealed:
                return b"", True
            if not whole:
                self._close_file()
                continue
            begins, self._offset = self._offset == 0, self._offset + len(whole)
            if begins and not self._is_first and whole.partition(b"\n")[0].endswith(_CONTINUED):
                whole = whole.partition(b"\n")[2]
            self._is_first = False
            if whole:
                return whole, len(data) < _CHUNK_BYTES and not was_sealed

    def _line_bytes(self) -> int:
        size, at = os.fstat(self._files[0]).st_size, self._offset
        while at < size:
            block = os.pread(self._files[0], _CHUNK_BYTES, at)
            if (end := block.find(b"\n")) >= 0:
                return at + end + 1 - self._offset
            at += len(block)
        return size - self._offset

    def _was_sealed(self) -> bool:
        with suppress(FileNotFoundError):
            return not os.path.samestat(self._path.stat(), os.fstat(self._files[-1]))
        return False

    def _close_file(self) -> None:
        if len(self._files) == 1:
            self._open_after(os.fstat(self._files[0]).st_ino)
        os.close(self._files.pop(0))
        self._offset = 0

    def _open_after(self, file_id: int) -> None:
        """Open the files that follow one; 0: all. One that was merged meanwhile is followed by the newest."""
        with open_record(self._folder) as files:
            ids = [file.file_id for file in files]
            after = ids.index(file_id) + 1 if file_id in ids else -1 if file_id else 0
            self._files += [os.dup(file.file.fileno()) for file in files[after:]]

    def close(self) -> None:
        """Read no more."""
        while self._files:
            os.close(self._files.pop())


class RecordCopy:
    """A voter's copy of the leader's record. A new feed replaces an older copy only once it is complete."""

    def __init__(self, folder: Path) -> None:
        """Take the folder where it lies."""
        self._path, self._coming = folder / "record-copy.jsonl", folder / "record-coming.jsonl"
        self.feed, self.position, self._is_complete = "", 0, False

    def take(self, chunk: RecordChunk) -> None:
        """Add lines, if they follow those that are there; `feed` and `position` tell."""
        if chunk.feed != self.feed:
            if chunk.position:
                return
            self.feed, self.position, self._is_complete = chunk.feed, 0, False
        if chunk.position != self.position:
            return
        if chunk.data or not self._is_complete:
            with (self._path if self._is_complete else self._coming).open("ab") as file:
                file.truncate(self.position)  # beyond it is what an older feed, or a write to a full disk, left
                file.write(chunk.data)
            self.position += len(chunk.data)
        if chunk.is_end and not self._is_complete:
            self._coming.replace(self._path)
            self._is_complete = True

    def become_record(self, folder: Path) -> bool:
        """Let the copy be the record of a run's folder from now on; returns whether there was one.

        What this machine had recorded lies beside the copy's place then. Who has the record open goes on in the new
        one.
        """
        self.feed, self.position = "", 0
        if not self._path.exists():
            return False
        record, before = folder / RECORD_FILE, self._path.with_name(f"record-before-{uuid4().hex[:8]}.jsonl")
        fd = os.open(record, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with suppress(OSError):  # a file system without locks: what is appended in this moment is lost
                fcntl.flock(fd, fcntl.LOCK_EX)
            shutil.copyfile(record, before)
            for segment in all_segments(folder):  # of a time when this machine led: the copy has all of it
                (folder / segment.name).unlink(missing_ok=True)
            self._path.replace(record)
        finally:
            os.close(fd)
        return True
