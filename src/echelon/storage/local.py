"""A local folder as a store: objects are files, written under a hidden name and linked or renamed into place."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from uuid import uuid4

from echelon.storage.base import Store, StoredObject


class LocalStore(Store):
    """Files below a folder, which is made by the first that is written."""

    def __init__(self, folder: Path) -> None:
        """Take the folder."""
        self.folder, self.url = folder, str(folder)

    def put(self, key: str, data: bytes | Path) -> None:
        """Write a file, flushed to the disk, and rename it into place."""
        path = self.folder / key
        unfinished = self._written(path, data)
        try:
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def create(self, key: str, data: bytes) -> None:
        """Write a file and give it its name by a link, which fails where there is one.

        Raises:
            FileExistsError: there is one.
        """
        path = self.folder / key
        unfinished = self._written(path, data)
        try:
            os.link(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _written(self, path: Path, data: bytes | Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            with unfinished.open("wb") as file:
                if isinstance(data, Path):
                    with data.open("rb") as source:
                        shutil.copyfileobj(source, file, 1 << 20)
                else:
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        return unfinished

    def get(self, key: str) -> bytes:
        """Return a file's content."""
        return (self.folder / key).read_bytes()

    def fetch(self, key: str, path: Path) -> None:
        """Copy a file."""
        shutil.copyfile(self.folder / key, path)

    def list(self, prefix: str) -> list[StoredObject]:
        """Return the files below a folder, by name; hidden ones are unfinished, or somebody else's."""
        now = time.time()
        found = [path for path in (self.folder / prefix).rglob("*") if not path.name.startswith(".")]
        objects = []
        for path in found:
            try:
                status = path.stat()
            except FileNotFoundError:  # removed meanwhile
                continue
            if path.is_file():
                key = path.relative_to(self.folder).as_posix()
                objects.append(StoredObject(key, status.st_size, max(0.0, now - status.st_mtime)))
        return sorted(objects, key=lambda each: each.key)

    def delete(self, key: str) -> None:
        """Remove a file."""
        (self.folder / key).unlink(missing_ok=True)
