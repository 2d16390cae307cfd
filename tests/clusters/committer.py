"""A process that commits versions to a URL until it is killed: python -m tests.clusters.committer URL FOLDER."""

import hashlib
import os
import sys
from pathlib import Path

from echelon.storage.archive import Archive, ArchiveWriter, honours_conditions
from echelon.storage.url import open_store

PARTS, PART_BYTES = 4, 100_000


def commit_one(writer: ArchiveWriter, folder: Path, number: int) -> None:
    """Commit a version whose parts all say which it is."""
    files = {}
    for i in range(PARTS):
        content = number.to_bytes(8, "big") + os.urandom(PART_BYTES)
        path = folder / f"part{i}"
        path.write_bytes(content)
        files[f"checkpoints/part{i}"] = (path, hashlib.sha256(content).hexdigest())
    writer.commit(files, f"step {number}")


def begin(url: str) -> ArchiveWriter:
    """Become the writer at a URL."""
    store = open_store(url)
    archive = Archive(store)
    writer = ArchiveWriter(archive, honours_conditions(store))
    writer.claim(archive.newest())
    return writer


if __name__ == "__main__":
    own = begin(sys.argv[1])
    print("begun", flush=True)
    step = int(own.last.label.split()[1]) if own.last is not None and own.last.label else 0
    while True:
        step += 1
        commit_one(own, Path(sys.argv[2]), step)
