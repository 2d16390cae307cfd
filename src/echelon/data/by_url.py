"""Data at a URL: tar shards and tables, brought to this machine once and kept there, up to a limit.

Each URL has a folder of the cache with its files as they lie in the store, and a note of the size and the tag (ETag)
that the store gave each of them. Whoever opens the data asks the store for both first: what differs is brought again.
A data set stays while a process uses it; of the others the one whose last use is longest ago goes first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TypeVar

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.patience import FIRST_PAUSE_S, LONGEST_PAUSE_S, may_pass
from echelon.core.units import bytes_for, format_bytes, format_seconds
from echelon.data.cache import locked
from echelon.data.table_files import SUFFIXES
from echelon.data.tar_index import is_tar
from echelon.storage.base import Store, StoreAway, StoredObject, refused_in_words
from echelon.storage.url import check_url, open_store

FOLDER = "urls"  # below the data's root
_HELD, _FILES, _LOCK, _USED = "held.json", "files", ".lock", ".used"
_FORMAT = 1
_PARTS = ("train", "val", "valid", "validation", "test")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_FILES = 100_000
_AT_ONCE = 8  # requests
_PATIENCE_S = 120.0  # for one object's request, while the store is away
_SLOWEST = 64 << 10  # bytes a second, as the storage's deadlines have it
_TOLD_S = 30.0
_WITHOUT_LISTING = ("http", "https")

R = TypeVar("R")


def local_path(config: DataConfig) -> Path:
    """Bring the data at the URL that a description names to this machine; returns where it lies there.

    Raises:
        UserError: it is not there, is neither tar shards nor a table, has no room, or its store cannot be used.
    """
    url = check_url(config.source)
    limit = bytes_for("--data-cache-limit")(config.cache_limit)
    return _Entry.of(url, Path(config.root).expanduser() / FOLDER).bring(limit)


def check_there(url: str) -> None:
    """Refuse a URL at which there is no data; nothing is brought.

    Raises:
        UserError: says why.
    """
    _listed(check_url(url))


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
    def of(cls, url: str, cache: Path) -> _Entry:
        """Return the entry of a URL, which may not be there yet."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", PurePosixPath(url).name).strip("-.") or "data"
        return cls(cache / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}", url)

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

    def bring(self, limit: float) -> Path:
        """Make the folder the same as the URL, and keep it while this process lives; returns where the data lies.

        Raises:
            UserError: see `local_path`.
        """
        wanted = _listed(self.url)
        n_bytes = sum(each.n_bytes for each in wanted.values())
        busy = f"data {self.url}: another process has been bringing it to {self.folder} for too long"
        with locked(self._beside(_LOCK), _PATIENCE_S + n_bytes / _SLOWEST, busy):
            self._use()
            kept = {key: file for key, file in self._note().files.items() if self._is_whole(key, file, wanted)}
            missing = [each for key, each in wanted.items() if key not in kept]
            if missing or set(kept) != set(self._note().files):
                self._make_room(_Note(self.url, n_bytes, kept), sum(each.n_bytes for each in missing), limit)
                self._remove_others(kept)
                self._download(missing, kept, n_bytes)
        files = self.folder / _FILES
        return files / next(iter(wanted)) if _is_file(self.url) and len(wanted) == 1 else files

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
        with locked(cache / _LOCK, _PATIENCE_S, f"data {cache}: another process holds it for too long"):
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

    def _download(self, missing: Sequence[StoredObject], kept: dict[str, Sequence[int | str]], n_bytes: int) -> None:
        if missing:
            count, size = len(missing), format_bytes(sum(each.n_bytes for each in missing))
            _tell(f"{self.url}: {count} file{'s' if count > 1 else ''}, {size}: brought to {self.folder}")
        store, done, told_s = _store_of(self.url), 0, time.monotonic()
        for got in _all_done(missing, lambda each: _fetched(self.url, store, each, self.folder / _FILES / each.key)):
            kept[got.key] = [got.n_bytes, got.tag]
            self._write(_Note(self.url, n_bytes, kept))
            done += got.n_bytes
            if time.monotonic() - told_s > _TOLD_S:
                told_s = time.monotonic()
                _tell(f"{self.url}: {format_bytes(done)} are here")


_in_use: dict[Path, IO[str]] = {}
"""Files whose shared lock says that this process uses a data set. Who reads shards may do so as long as it lives."""


def _entries(cache: Path) -> list[_Entry]:
    """Return what a cache holds, that whose last use is longest ago first."""
    found = [_Entry(each.parent) for each in cache.glob(f"*/{_HELD}")]
    return sorted(found, key=lambda each: -each.age_s)


def _is_file(url: str) -> bool:
    """Whether a URL names a file, or several by a range of numbers, and no folder."""
    name = PurePosixPath(url).name.lower()
    return name.endswith(SUFFIXES) or is_tar(name)


def _store_of(url: str) -> Store:
    """Return the store below whose URL the data's objects have their keys."""
    place = url.rpartition("/")[0] if _is_file(url) else url
    if place.endswith(":/"):
        raise UserError(f"data {url}: it names no object: write it as s3://BUCKET/NAME")
    return open_store(place)


def _listed(url: str) -> dict[str, StoredObject]:
    """Return the objects of the data at a URL, by key: those of tar shards, else of tables.

    Raises:
        UserError: there are none.
    """
    store = _store_of(url)
    if _is_file(url):
        names = _expanded(url)
        if len(names) > 1 and not is_tar(url):
            raise UserError(f"data {url}: a range of numbers is for tar shards; a table is one file, or train.csv, ...")
        found = {each.key: each for each in _all_done(names, lambda name: _stat(url, store, name))}
        wanted = {name: found[name] for name in names}
    elif url.startswith(tuple(f"{each}://" for each in _WITHOUT_LISTING)):
        raise UserError(f"data {url}: a web server lists nothing: name files, such as {url}/train-{{000..063}}.tar")
    else:
        there = [each for each in _patiently(url, lambda: store.list("")) if _is_of_data(each.key)]
        shards = [each for each in there if is_tar(each.key)]
        wanted = {each.key: each for each in shards or there}
        if not shards and "train" not in [PurePosixPath(key).stem for key in wanted]:
            raise UserError(
                f"data {url}: there are no tar shards, and no train.csv or the like: these are what is read by URL; "
                "copy other data to a folder"
            )
    for each in wanted.values():
        if not each.n_bytes:
            raise UserError(f"data {url}: {each.key} is empty, or its server does not say how long it is")
    return wanted


def _expanded(url: str) -> list[str]:
    """Return the names that the last part of a URL is written for: `train-{000..063}.tar` for 64 of them.

    Raises:
        UserError: a range is none.
    """
    names = [PurePosixPath(url).name]
    while match := _RANGE.search(names[0]):
        first, last = int(match[1]), int(match[2])
        if last < first or (last - first + 1) * len(names) > _MOST_FILES:
            raise UserError(f"data {url}: {match[0]} is no range of numbers, or too long a one")
        numbers = [f"{number:0{len(match[1])}}" for number in range(first, last + 1)]
        names = [_RANGE.sub(number, name, count=1) for name in names for number in numbers]
    return names


def _is_of_data(key: str) -> bool:
    """Whether a key is a shard's or a table's of a folder, or of a part's folder in it."""
    *above, name = key.split("/")
    if above not in [[], *([part] for part in _PARTS)] or name.startswith("."):
        return False
    path = PurePosixPath(name)
    return is_tar(name) or (not above and path.suffix.lower() in SUFFIXES and path.stem in _PARTS)


def _stat(url: str, store: Store, key: str) -> StoredObject:
    try:
        return _patiently(url, lambda: store.stat(key))
    except FileNotFoundError:
        raise UserError(f"data {url}: there is no {key} at {store.url}") from None


def _fetched(url: str, store: Store, wanted: StoredObject, path: Path) -> StoredObject:
    """Bring an object, which appears whole; returns it.

    Raises:
        UserError: it is gone, or another one than was listed.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")

    def fetch() -> None:
        """Bring all of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        store.fetch(wanted.key, unfinished)
        if (size := unfinished.stat().st_size) != wanted.n_bytes:
            raise StoreAway(f"{wanted.key} has {wanted.n_bytes} bytes, and {size} came")

    try:
        _patiently(url, fetch)
        if _stat(url, store, wanted.key).tag != wanted.tag:
            raise UserError(f"data {url}: {wanted.key} was changed while it was read: start again")
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except FileNotFoundError:
        raise UserError(f"data {url}: {wanted.key} is gone since it was listed") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return wanted


def _patiently(url: str, action: Callable[[], R]) -> R:
    """Return what a request of a store returns, which is tried again while the store is away.

    Raises:
        FileNotFoundError: there is no such object.
        UserError: the store refuses, or was away for too long.
    """
    ends_s, pause_s, told = time.monotonic() + _PATIENCE_S, FIRST_PAUSE_S, False
    while True:
        try:
            return action()
        except FileNotFoundError:
            raise
        except OSError as error:
            if not may_pass(error) or time.monotonic() > ends_s:
                raise refused_in_words(f"data {url}", error) from error
            if not told:
                _tell(f"{url}: {error.strerror or error}; it is tried again for {format_seconds(_PATIENCE_S)}")
            told = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _all_done(items: Sequence[R], work: Callable[[R], StoredObject]) -> Iterator[StoredObject]:
    """Yield what comes of items, a few at a time, as they are done; what one raises is raised, and ends the others.

    Threads are daemons: a command that is stopped does not wait for a request.
    """
    waiting, results = queue.SimpleQueue[R](), queue.SimpleQueue[StoredObject | BaseException]()
    for item in items:
        waiting.put(item)
    over = threading.Event()

    def run() -> None:
        """Take items until there are none."""
        while not over.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results.put(work(item))
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                results.put(error)

    for _ in range(min(_AT_ONCE, len(items))):
        threading.Thread(target=run, daemon=True).start()
    try:
        for _ in items:
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        over.set()


def _tell(text: str) -> None:
    print(f"echelon: {text}", file=sys.stderr, flush=True)
