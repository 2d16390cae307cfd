"""The cache of data at URLs: what was brought to this machine once is kept there, up to a limit.

Each URL has a folder of the cache with its files as they lie in the store, and a note of the size and the tag (ETag)
that the store gave each of them. Whoever opens the data asks the store for both first: what differs is brought again.
A data set stays while a process uses it; of the others the one whose last use is longest ago goes first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.units import format_bytes
from echelon.data.cache import locked
from echelon.data.url_objects import PATIENCE_S, UrlObjects, all_done, tell
from echelon.storage.base import StoredObject
from echelon.storage.url import check_url

FOLDER = "urls"  # below the data's root
_HELD, _FILES, _LOCK, _USED = "held.json", "files", ".lock", ".used"
_FORMAT = 1
_SLOWEST = 64 << 10  # bytes a second, as the storage's deadlines have it
_TOLD_S = 30.0


def local_path(config: DataConfig) -> Path:
    """Bring the data at the URL that a description names to this machine; returns where it lies there.

    Raises:
        UserError: it is not there, is neither tar shards nor a table, has no room, or its store cannot be used.
    """
    return _brought(UrlObjects(check_url(config.source)), config)


def local_files(url: str, endings: tuple[str, ...], config: DataConfig) -> Path:
    """Bring the files at a URL that end in one of some ways; returns the file, or the folder with them.

    Args:
        config: whose cache they are kept in.

    Raises:
        UserError: there are none, there is no room, or the store cannot be used.
    """
    return _brought(UrlObjects(check_url(url), endings), config)


def _brought(objects: UrlObjects, config: DataConfig) -> Path:
    return _Entry.of(objects, Path(config.root).expanduser() / FOLDER).bring(objects, config.cache_limit_bytes)


def check_there(url: str) -> None:
    """Refuse a URL at which there is no data; nothing is brought.

    Raises:
        UserError: says why.
    """
    UrlObjects(check_url(url)).listed()


@dataclass(frozen=True)
class CachedData:
    """A data set in the cache.

    Attributes:
        url: where it is from.
        path: its folder.
        n_bytes: that it takes.
        age_s: how long ago it was used last.
        is_used: by a process, now.
    """

    url: str
    path: Path
    n_bytes: int
    age_s: float
    is_used: bool


def cached(place: Path) -> list[CachedData] | None:
    """Return what a cache of data holds, that whose last use is longest ago first; None: the folder is no cache.

    Args:
        place: the data's root, or the folder in it.
    """
    cache = next((each for each in (place, place / FOLDER) if (each / _LOCK).is_file()), None)
    if cache is None:
        return None
    found = []
    for entry in _entries(cache):
        with entry.unused() as is_unused:
            found.append(CachedData(entry.url, entry.folder, entry.size, entry.age_s, not is_unused))
    return found


def remove_cached(path: Path) -> None:
    """Remove a data set from its cache.

    Raises:
        UserError: a process uses it.
    """
    entry = _Entry(path)
    with entry.unused() as is_unused:
        if not is_unused:
            raise UserError(f"{path}: a process uses it")
        shutil.rmtree(path)


@dataclass(frozen=True)
class _Note:
    """What is kept of a data set: the size and tag of each file by key, and the bytes that all of them take."""

    url: str
    n_bytes: int
    files: Mapping[str, Sequence[int | str]]
    format: int = _FORMAT


@dataclass(frozen=True)
class _Entry:
    """The folder of a URL. Its locks lie beside it, so that removing it removes no lock that somebody waits for."""

    folder: Path
    asked: str = ""

    @classmethod
    def of(cls, objects: UrlObjects, cache: Path) -> _Entry:
        """Return the entry of what is at a URL, which may not be there yet."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", PurePosixPath(objects.url).name).strip("-.") or "data"
        # other files of the same folder are another entry; a file is itself whoever wants it
        what = objects.url if objects.is_file else " ".join([objects.url, *objects.endings])
        return cls(cache / f"{name}-{hashlib.sha256(what.encode()).hexdigest()[:12]}", objects.url)

    @property
    def url(self) -> str:
        """Where it is from."""
        return self.asked or self._note().url

    @property
    def size(self) -> int:
        """Bytes that it takes, or will take once all of it is here."""
        return self._note().n_bytes

    @property
    def age_s(self) -> float:
        """How long ago it was used last."""
        used = self._beside(_USED)
        return max(0.0, time.time() - used.stat().st_mtime) if used.exists() else 0.0

    def _beside(self, suffix: str) -> Path:
        return self.folder.with_name(self.folder.name + suffix)

    def _note(self) -> _Note:
        try:
            note = _Note(**json.loads((self.folder / _HELD).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # nothing is here that is known to be whole
            return _Note(self.asked, 0, {})
        return note if note.format == _FORMAT else _Note(note.url, note.n_bytes, {})

    def bring(self, objects: UrlObjects, limit: float) -> Path:
        """Make the folder the same as the URL, and keep it while this process lives; returns where the data lies.

        Raises:
            UserError: see `local_path`.
        """
        wanted = objects.listed()
        n_bytes = sum(each.n_bytes for each in wanted.values())
        busy = f"data {self.url}: another process has been bringing it to {self.folder} for too long"
        with locked(self._beside(_LOCK), PATIENCE_S + n_bytes / _SLOWEST, busy):
            self._use()
            kept = {key: file for key, file in self._note().files.items() if self._is_whole(key, file, wanted)}
            missing = [each for key, each in wanted.items() if key not in kept]
            if missing or set(kept) != set(self._note().files):
                self._make_room(_Note(self.url, n_bytes, kept), sum(each.n_bytes for each in missing), limit)
                self._remove_others(kept)
                self._download(objects, missing, kept, n_bytes)
        files = self.folder / _FILES
        return files / next(iter(wanted)) if objects.is_file and len(wanted) == 1 else files

    def _is_whole(self, key: str, file: Sequence[int | str], wanted: Mapping[str, StoredObject]) -> bool:
        """Whether a file is what the store has now."""
        path, there = self.folder / _FILES / key, wanted.get(key)
        if there is None or [there.n_bytes, there.tag] != list(file):
            return False
        return path.is_file() and path.stat().st_size == there.n_bytes

    def _use(self) -> None:
        """Say that this process uses it, until it ends; processes that it forks do, too."""
        used = self._beside(_USED)
        if used not in _in_use:
            file = used.open("w")
            fcntl.flock(file, fcntl.LOCK_SH)
            _in_use[used] = file
        os.utime(used)

    @contextmanager
    def unused(self) -> Iterator[bool]:
        """Tell whether no process uses it, and if so, let none begin to while the block runs."""
        with self._beside(_LOCK).open("w") as lock, self._beside(_USED).open("a") as used:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _make_room(self, note: _Note, missing: int, limit: float) -> None:
        """Remove data sets that nobody uses until this one is within the limit, and note what it will take.

        Args:
            missing: bytes of it that are not here.

        Raises:
            UserError: there is no room within the limit, or on the disk.
        """
        cache, n_bytes = self.folder.parent, note.n_bytes
        size = format_bytes(n_bytes)
        if n_bytes > limit:
            raise UserError(
                f"data {self.url}: it has {size}, and --data-cache-limit keeps {format_bytes(limit)} at most: raise it"
            )
        with locked(cache / _LOCK, PATIENCE_S, f"data {cache}: another process holds it for too long"):
            (cache / ".gitignore").write_text("*\n")  # it travels nowhere with the working folder
            others = [each for each in _entries(cache) if each.folder != self.folder]
            taken = n_bytes + sum(each.size for each in others)
            for other in others:
                if taken <= limit:
                    break
                with other.unused() as is_unused:
                    if is_unused:
                        taken -= other.size
                        shutil.rmtree(other.folder)
            if taken > limit:
                raise UserError(
                    f"data {self.url}: it has {size}, and of the {format_bytes(limit)} of --data-cache-limit other "
                    f"processes use {format_bytes(taken - n_bytes)}: raise it, or wait for them"
                )
            free = shutil.disk_usage(cache).free
            if missing > free:
                raise UserError(
                    f"data {self.url}: {format_bytes(missing)} of it are to be brought, and the disk of {cache} has "
                    f"{format_bytes(free)} free: name another with --data-root"
                )
            self._write(note)

    def _write(self, note: _Note) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / _HELD, json.dumps(asdict(note)))

    def _remove_others(self, kept: Mapping[str, object]) -> None:
        """Remove files that are not, or no longer, those of the store, and unfinished ones."""
        files = self.folder / _FILES
        for path in [each for each in files.rglob("*") if each.is_file()]:
            if path.relative_to(files).as_posix() not in kept:
                path.unlink()

    def _download(
        self,
        objects: UrlObjects,
        missing: Sequence[StoredObject],
        kept: dict[str, Sequence[int | str]],
        n_bytes: int,
    ) -> None:
        if missing:
            count, size = len(missing), format_bytes(sum(each.n_bytes for each in missing))
            tell(f"{self.url}: {count} file{'s' if count > 1 else ''}, {size}: brought to {self.folder}")
        done, told_s = 0, time.monotonic()
        for got in all_done(missing, lambda each: objects.fetch(each, self.folder / _FILES / each.key)):
            kept[got.key] = [got.n_bytes, got.tag]
            self._write(_Note(self.url, n_bytes, kept))
            done += got.n_bytes
            if time.monotonic() - told_s > _TOLD_S:
                told_s = time.monotonic()
                tell(f"{self.url}: {format_bytes(done)} are here")


_in_use: dict[Path, IO[str]] = {}
"""Files whose shared lock says that this process uses a data set. Who reads shards may do so as long as it lives."""


def _entries(cache: Path) -> list[_Entry]:
    """Return what a cache holds, that whose last use is longest ago first."""
    found = [_Entry(each.parent) for each in cache.glob(f"*/{_HELD}")]
    return sorted(found, key=lambda each: -each.age_s)
