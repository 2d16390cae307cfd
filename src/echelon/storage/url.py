"""From a URL, or a folder's name, to a store; a folder is one by itself, any other needs a package of its kind."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from echelon.core.errors import UserError
from echelon.storage.base import Store, StoredObject

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LOCAL = ("file", "local")


def is_url(text: str) -> bool:
    """Whether a text is a URL, and no folder's name.

    >>> is_url("s3://bucket/runs/a"), is_url("runs/a")
    (True, False)
    """
    return _URL.match(text) is not None


def check_url(text: str) -> str:
    """Return a URL without its last slash.

    Raises:
        UserError: it holds credentials, or options, or names nothing, or another machine's folder; it never says what
            the credentials are.
    """
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise UserError(f"this is no URL ({error}): write it as s3://BUCKET/NAME") from None
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "@" in parts.netloc and parts.scheme not in ("abfs", "abfss", "az"):
        raise UserError(f"{shown}: a URL is recorded: leave credentials out of it, they belong in the environment")
    if parts.password is not None or parts.query or parts.fragment:
        raise UserError(f"{shown}: a URL is recorded: leave out what follows ? and #, keys belong in the environment")
    if not (parts.netloc + parts.path).strip("/"):
        raise UserError(f"{shown} names no place: write it as s3://BUCKET/NAME")
    if parts.scheme in _LOCAL and parts.netloc not in ("", "localhost"):
        raise UserError(f"{shown}: {parts.netloc} would be another machine: write {parts.scheme}:///FOLDER, absolute")
    return text.rstrip("/")


def absolute(place: str) -> str:
    """Return a URL without its last slash, or the absolute name of a folder: the same in every working folder.

    >>> absolute("s3://bucket/a/"), absolute("/data/a")
    ('s3://bucket/a', '/data/a')
    """
    return place.rstrip("/") if is_url(place) else str(Path(place).expanduser().absolute())


def folder_of_url(url: str) -> Path | None:
    """Return the folder or file of this machine that a URL names; None: it lies elsewhere.

    >>> folder_of_url("file:///data/a%20b"), folder_of_url("s3://bucket/a")
    (PosixPath('/data/a b'), None)
    """
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme in _LOCAL else None


def open_store(place: str) -> Store:
    """Return the store at a URL or in a folder; nothing is asked of it yet.

    Raises:
        UserError: the URL cannot be used, or a package for it is not installed.
    """
    if not is_url(place):
        return LocalStore(Path(place))
    url = check_url(place)
    if (folder := folder_of_url(url)) is not None:
        return LocalStore(folder)
    from echelon.storage.remote import RemoteStore

    return RemoteStore(url)


@contextmanager
def _flushed(path: Path) -> Iterator[BinaryIO]:
    """Open a file that is not there, and flush what is written to the disk; nothing of it is left where that fails.

    Raises:
        FileExistsError: it is there.
    """
    with path.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


class LocalStore(Store):
    """Files below a folder, which is made by the first; they are written under a hidden name, and linked or renamed."""

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
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOENT, errno.ENOSPC, errno.EDQUOT):
                raise
            with _flushed(path) as file:  # a disk without links
                file.write(data)
        finally:
            unfinished.unlink(missing_ok=True)

    def _written(self, path: Path, data: bytes | Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
        with _flushed(unfinished) as file:
            if isinstance(data, Path):
                with data.open("rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
            else:
                file.write(data)
        return unfinished

    def get(self, key: str) -> bytes:
        """Return a file's content."""
        return (self.folder / key).read_bytes()

    def fetch(self, key: str, path: Path) -> None:
        """Copy a file."""
        shutil.copyfile(self.folder / key, path)

    def stat(self, key: str) -> StoredObject:
        """Return a file's size and age."""
        found = (self.folder / key).stat()
        if stat.S_ISDIR(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "it is a folder", key)
        return StoredObject(key, found.st_size, max(0.0, time.time() - found.st_mtime), str(found.st_mtime_ns))

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
                age_s = max(0.0, now - status.st_mtime)
                objects.append(StoredObject(key, status.st_size, age_s, str(status.st_mtime_ns)))
        return sorted(objects, key=lambda each: each.key)

    def delete(self, key: str) -> None:
        """Remove a file."""
        (self.folder / key).unlink(missing_ok=True)
