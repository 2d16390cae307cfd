"""The objects of data at a URL: which they are, and how one comes here, whole, from a store that may be away."""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeVar

from echelon.core.errors import UserError
from echelon.core.patience import FIRST_PAUSE_S, LONGEST_PAUSE_S, may_pass
from echelon.core.units import format_seconds
from echelon.data.file_names import TABLES, is_tar
from echelon.storage.base import Store, StoreAway, StoredObject, refused_in_words
from echelon.storage.url import open_store

PATIENCE_S = 120.0  # for one object's request, while the store is away
_PARTS = ("train", "val", "valid", "validation", "test")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_FILES = 100_000
_AT_ONCE = 8  # requests
_WITHOUT_LISTING = ("http", "https")

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class UrlObjects:
    """The objects of data at a URL.

    Attributes:
        url: of one file, of several by a range of numbers, or of a folder.
        endings: of the files that are wanted, wherever they lie below a folder; empty: those of a data set, which are
            tar shards, else tables.
    """

    url: str
    endings: tuple[str, ...] = ()

    @property
    def is_file(self) -> bool:
        """Whether the URL names a file, or several by a range of numbers, and no folder."""
        name = PurePosixPath(self.url).name.lower()
        return name.endswith(self.endings or TABLES) or (not self.endings and is_tar(name))

    @cached_property
    def _store(self) -> Store:
        """The store below whose URL the objects have their keys."""
        place = self.url.rpartition("/")[0] if self.is_file else self.url
        if place.endswith(":/"):
            raise UserError(f"data {self.url}: it names no object: write it as s3://BUCKET/NAME")
        return open_store(place)

    def listed(self) -> dict[str, StoredObject]:
        """Return the objects, by key.

        Raises:
            UserError: there are none.
        """
        wanted = self._named() if self.is_file else self._below()
        for each in wanted.values():
            if not each.n_bytes:
                raise UserError(f"data {self.url}: {each.key} is empty, or its server does not say how long it is")
        return wanted

    def _named(self) -> dict[str, StoredObject]:
        names = _expanded(self.url)
        if len(names) > 1 and not self.endings and not is_tar(self.url):
            raise UserError(
                f"data {self.url}: a range of numbers is for tar shards; a table is one file, or train.csv, ..."
            )
        found = {each.key: each for each in all_done(names, self._stat)}
        return {name: found[name] for name in names}

    def _below(self) -> dict[str, StoredObject]:
        if self.url.startswith(tuple(f"{each}://" for each in _WITHOUT_LISTING)):
            example = f"/1{self.endings[0]}" if self.endings else "/train-{000..063}.tar"
            raise UserError(f"data {self.url}: a web server lists nothing: name files, such as {self.url}{example}")
        there = _patiently(self.url, lambda: self._store.list(""))
        if self.endings:
            wanted = {each.key: each for each in there if _is_plain(each.key, self.endings)}
            if not wanted:
                raise UserError(f"data {self.url}: there are no files that end in {', '.join(self.endings)}")
            return wanted
        there = [each for each in there if _is_of_data(each.key)]
        shards = [each for each in there if is_tar(each.key)]
        wanted = {each.key: each for each in shards or there}
        if not shards and "train" not in [PurePosixPath(key).stem for key in wanted]:
            raise UserError(
                f"data {self.url}: there are no tar shards, and no train.csv or the like: these are what is read by "
                "URL; copy other data to a folder"
            )
        return wanted

    def _stat(self, key: str) -> StoredObject:
        try:
            return _patiently(self.url, lambda: self._store.stat(key))
        except FileNotFoundError:
            raise UserError(f"data {self.url}: there is no {key} at {self._store.url}") from None

    def fetch(self, wanted: StoredObject, path: Path) -> StoredObject:
        """Bring an object, which appears whole; returns it.

        Raises:
            UserError: it is gone, or another one than was listed.
        """
        unfinished = path.with_name(f".{path.name}.unfinished")

        def fetch() -> None:
            """Bring all of it."""
            path.parent.mkdir(parents=True, exist_ok=True)
            self._store.fetch(wanted.key, unfinished)
            if (size := unfinished.stat().st_size) != wanted.n_bytes:
                raise StoreAway(f"{wanted.key} has {wanted.n_bytes} bytes, and {size} came")

        try:
            _patiently(self.url, fetch)
            if self._stat(wanted.key).tag != wanted.tag:
                raise UserError(f"data {self.url}: {wanted.key} was changed while it was read: start again")
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
        except FileNotFoundError:
            raise UserError(f"data {self.url}: {wanted.key} is gone since it was listed") from None
        finally:
            unfinished.unlink(missing_ok=True)
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
    return is_tar(name) or (not above and path.suffix.lower() in TABLES and path.stem in _PARTS)


def _is_plain(key: str, endings: tuple[str, ...]) -> bool:
    """Whether a key is that of a file with a wanted ending, none of whose folders is hidden, or leads elsewhere."""
    return key.lower().endswith(endings) and all(part and not part.startswith(".") for part in key.split("/"))


def _patiently(url: str, action: Callable[[], R]) -> R:
    """Return what a request of a store returns, which is tried again while the store is away.

    Raises:
        FileNotFoundError: there is no such object.
        UserError: the store refuses, or was away for too long.
    """
    ends_s, pause_s, told = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S, False
    while True:
        try:
            return action()
        except FileNotFoundError:
            raise
        except OSError as error:
            if not may_pass(error) or time.monotonic() > ends_s:
                raise refused_in_words(f"data {url}", error) from error
            if not told:
                tell(f"{url}: {error.strerror or error}; it is tried again for {format_seconds(PATIENCE_S)}")
            told = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def all_done(items: Sequence[T], work: Callable[[T], StoredObject]) -> Iterator[StoredObject]:
    """Yield what comes of items, a few at a time, as they are done; what one raises is raised, and ends the others.

    Threads are daemons: a command that is stopped does not wait for a request.
    """
    waiting, results = queue.SimpleQueue[T](), queue.SimpleQueue[StoredObject | BaseException]()
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


def tell(text: str) -> None:
    """Say something on standard error, from whatever process."""
    print(f"echelon: {text}", file=sys.stderr, flush=True)
