"""Versions of a set of files in a store, atomic without renames: parts first, then a manifest with their hashes.

Manifests are numbered 1, 2, 3, ... Each names the hash of the one before it, and is written on the condition that its
number is free, so that of two writers exactly one goes on. A part is named by its hash: no writer replaces another's,
and what did not change is not sent again. Manifests stay for good (they are small), so a number that was taken is never
free again; parts that neither of the last two manifests names are removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from uuid import uuid4

from echelon.core.errors import UserError
from echelon.storage.base import Store
from echelon.storage.codec import NO_CODEC, compressed, decompressed, suffix_of

FORMAT = 1
MANIFESTS, DATA = "manifests/", "data/"
_NAME = re.compile(re.escape(MANIFESTS) + r"(\d{8,})\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DamagedArchive(Exception):
    """What lies in a store is not what was written: says what differs."""


class ForeignWriter(UserError):
    """Another process writes here: this one stops."""


@dataclass(frozen=True)
class Part:
    """One file of a version: its name, size and hash, and how it is stored.

    Attributes:
        sha256: of its content, in hex.
        stored_bytes: in the store, as `codec` left it.
    """

    name: str
    bytes: int
    sha256: str
    codec: str = NO_CODEC
    stored_bytes: int = 0

    @property
    def key(self) -> str:
        """Of its object."""
        return f"{DATA}{self.sha256}-{PurePosixPath(self.name).name}{suffix_of(self.codec)}"


@dataclass(frozen=True)
class Version:
    """A manifest: what was there at one moment.

    Attributes:
        number: from 1.
        predecessor: SHA-256 of the manifest before it; empty for the first.
        term: how many writers there have been, this one counted.
        writer: an identifier of its own for each start of a writer.
        label: what the writer calls it.
        t: when it was written, in unix seconds, by the writer's clock.
        sha256: of the manifest itself.
    """

    number: int
    predecessor: str
    term: int
    writer: str
    host: str
    t: float
    label: str
    parts: tuple[Part, ...]
    sha256: str = field(default="", compare=False)

    def encoded(self) -> bytes:
        """Return it as its object's content."""
        values = {name: value for name, value in asdict(self).items() if name != "sha256"}
        return json.dumps({"format": FORMAT, **values}, indent=1).encode()

    @property
    def keys(self) -> frozenset[str]:
        """Of its parts' objects."""
        return frozenset(part.key for part in self.parts)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its parts in the store."""
        return sum({part.key: part.stored_bytes for part in self.parts}.values())


@dataclass(frozen=True)
class Tip:
    """The highest number that a manifest has, and its hash; 0 and empty: there is none."""

    number: int = 0
    sha256: str = ""


def key_of(number: int) -> str:
    """Return the key of a manifest."""
    return f"{MANIFESTS}{number:08d}.json"


class Archive:
    """Reads the versions in a store. All methods raise OSError where the store is away."""

    def __init__(self, store: Store) -> None:
        """Take the store; nothing is asked of it yet."""
        self.store = store

    def numbers(self) -> list[int]:
        """Return the numbers of the manifests, ascending."""
        matches = (_NAME.fullmatch(each.key) for each in self.store.list(MANIFESTS))
        return sorted(int(match[1]) for match in matches if match)

    def read(self, number: int) -> Version:
        """Return a version.

        Raises:
            DamagedArchive: its manifest is gone, or not what one is.
            UserError: it is of a later format.
        """
        try:
            data = self.store.get(key_of(number))
        except FileNotFoundError:
            raise DamagedArchive(f"manifest {number} is gone") from None
        version = _decoded(data, f"manifest {number}")
        if version.number != number:
            raise DamagedArchive(f"manifest {number} says that it is number {version.number}")
        return version

    def tip(self) -> Tip:
        """Return the highest number that is taken, damaged or not, and the hash of what has it."""
        numbers = self.numbers()
        if not numbers:
            return Tip()
        return Tip(numbers[-1], hashlib.sha256(self.store.get(key_of(numbers[-1]))).hexdigest())

    def newest(self) -> Version | None:
        """Return the newest version whose manifest is whole; None where there is none."""
        return next((each for each in self.versions() if isinstance(each, Version)), None)

    def versions(self) -> Iterator[Version | DamagedArchive]:
        """Yield the versions from the newest on; in the place of a damaged one what is wrong with it."""
        for number in reversed(self.numbers()):
            try:
                yield self.read(number)
            except DamagedArchive as damage:
                yield damage

    def fetch(self, part: Part, path: Path) -> None:
        """Write a part to a file, which appears whole.

        Raises:
            DamagedArchive: it is gone, or was changed after it was written; then there is no file.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        stored, plain = path.with_name(f".{path.name}.stored"), path.with_name(f".{path.name}.plain")
        try:
            self.store.fetch(part.key, stored)
            decompressed(stored, plain, part.codec)
            _check(part, plain)
            plain.replace(path)
        except FileNotFoundError:
            raise DamagedArchive(f"{part.name}: {part.key} is gone") from None
        except ValueError as error:
            raise DamagedArchive(f"{part.name}: {part.key} cannot be decompressed: {error}") from error
        finally:
            stored.unlink(missing_ok=True)
            plain.unlink(missing_ok=True)


def is_there(part: Part, path: Path) -> bool:
    """Whether a file is what a part holds."""
    return path.is_file() and path.stat().st_size == part.bytes and sha256_of(path) == part.sha256


def _check(part: Part, path: Path) -> None:
    size = path.stat().st_size
    if size != part.bytes:
        raise DamagedArchive(f"{part.name}: {part.key} has {size} bytes, not {part.bytes}")
    if sha256_of(path) != part.sha256:
        raise DamagedArchive(f"{part.name}: the checksum of {part.key} does not match: its contents changed")


def _decoded(data: bytes, what: str) -> Version:
    try:
        values = json.loads(data)
        if (form := values.pop("format")) != FORMAT:
            raise UserError(f"{what} has format {form}, this version of echelon reads {FORMAT}")
        parts = tuple(_part(each) for each in values.pop("parts"))
        return Version(**values, parts=parts, sha256=hashlib.sha256(data).hexdigest())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedArchive(f"{what} cannot be read: {error}") from error


def _part(values: Mapping[str, object]) -> Part:
    part = Part(**values)  # type: ignore[arg-type]
    name = PurePosixPath(part.name)
    if name.is_absolute() or ".." in name.parts or not name.parts or "\\" in part.name:
        raise ValueError(f"{part.name!r} is no name of a file in a folder")
    if not _SHA256.fullmatch(part.sha256):
        raise ValueError(f"{part.sha256!r} is no hash")
    return part


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ArchiveWriter:
    """The one writer of an archive.

    Attributes:
        last: the newest version, this writer's own.
        sent_bytes: of parts, so far.
    """

    def __init__(self, archive: Archive, honours_conditions: bool, codec: str = NO_CODEC) -> None:
        """Take an archive; `claim` begins.

        Args:
            honours_conditions: the store refuses to write a key that is not free, when asked to.
            codec: parts are stored with.
        """
        self._archive, self._store, self._codec = archive, archive.store, codec
        self._honours = honours_conditions
        self.id = uuid4().hex
        self.last: Version | None = None
        self._before: Version | None = None
        self._tip = Tip()
        self._known: dict[tuple[str, str], Part] = {}  # parts in the store, by name and hash
        self._removable: set[str] = set()
        self.sent_bytes = 0

    def claim(self, newest: Version | None) -> Version:
        """Become the writer after `newest`, by a manifest of the same parts: who wrote before cannot go on.

        Raises:
            ForeignWriter: another one was faster.
        """
        self.last, self._tip = newest, self._archive.tip()
        found = self._archive.newest()
        if found is not None and (newest is None or found.sha256 != newest.sha256):
            raise self._foreign(found)
        for part in newest.parts if newest is not None else ():
            self._known[part.name, part.sha256] = part
        term = 1 if newest is None else newest.term + 1
        label, parts = ("", ()) if newest is None else (newest.label, newest.parts)
        return self._write(term, label, parts)

    def commit(self, files: Mapping[str, tuple[Path, str]], label: str) -> Version:
        """Write a version: files by name, each with its SHA-256.

        May be called again when the store was away: what was sent is not sent again.

        Raises:
            ForeignWriter: another process writes here.
            OSError: the store is away, or refuses.
        """
        assert self.last is not None
        parts = tuple(self._sent(name, path, sha256) for name, (path, sha256) in sorted(files.items()))
        version = self._write(self.last.term, label, parts)
        self._remove_unused()
        return version

    def _sent(self, name: str, path: Path, sha256: str) -> Part:
        known = self._known.get((name, sha256))
        if known is not None:
            return known
        n_bytes = path.stat().st_size
        with compressed(path, self._codec) as (stored, codec):
            part = Part(name, n_bytes, sha256, codec, stored.stat().st_size)
            self._store.put(part.key, stored)
        self.sent_bytes += part.stored_bytes
        self._known[name, sha256] = part
        return part

    def _write(self, term: int, label: str, archived: Sequence[Part]) -> Version:
        """Write the next manifest; where an answer of the store was lost, one of this writer's may be there already.

        A number whose manifest was cut short, in a store whose objects do not appear at once, is passed over.
        """
        while True:
            host, now = socket.gethostname(), round(time.time(), 3)
            number, before = self._tip.number + 1, self._tip.sha256
            version = Version(number, before, term, self.id, host, now, label, tuple(archived))
            data = version.encoded()
            version = replace(version, sha256=hashlib.sha256(data).hexdigest())
            own = self._create(version, data)
            if own is None:
                continue
            self._before, self.last, self._tip = self.last, own, Tip(own.number, own.sha256)
            if own.sha256 == version.sha256:
                return own

    def _create(self, version: Version, data: bytes) -> Version | None:
        """Write a manifest; returns the one of this writer that has its number; None: a damaged one has.

        Raises:
            ForeignWriter: another writer's has, or a later number.
            DamagedArchive: a damaged one has, and cannot be passed over.
        """
        if not self._honours:
            self._look_for_others(version.number)
        try:
            self._store.create(key_of(version.number), data)
            if self._honours:
                return version
        except FileExistsError:
            pass
        try:
            there = self._archive.read(version.number)
        except DamagedArchive:
            tip, newest = self._archive.tip(), self._archive.newest()
            if tip.number < version.number or not self._honours:
                raise
            last = self.last.number if self.last is not None else 0
            if newest is not None and newest.number > last:  # the damaged one does not say whose it is
                raise self._foreign(newest) from None
            self._tip = tip
            return None
        if there.writer != self.id:
            raise self._foreign(there)
        return there

    def _look_for_others(self, number: int) -> None:
        """See whether another process wrote, where the store lets it: detection, not prevention."""
        if self.last is not None and self.last.writer == self.id:
            there = self._archive.read(self.last.number)
            if there.sha256 != self.last.sha256:
                raise self._foreign(there)
        try:
            there = self._archive.read(number)
        except DamagedArchive:
            return
        if there.writer != self.id:
            raise self._foreign(there)

    def _foreign(self, there: Version) -> ForeignWriter:
        return ForeignWriter(
            f"{self._store.url}: another process on {there.host} writes here (manifest {there.number}"
            f"{f', {there.label}' if there.label else ''}): this one stops; give each run a place of its own"
        )

    def _remove_unused(self) -> None:
        """Remove parts that neither of the last two versions names; what cannot be removed now is tried again."""
        assert self.last is not None
        kept = self.last.keys | (self._before.keys if self._before is not None else frozenset())
        unused = {identity: part for identity, part in self._known.items() if part.key not in kept}
        for identity in unused:
            del self._known[identity]
        self._removable = (self._removable | {part.key for part in unused.values()}) - kept
        for key in sorted(self._removable):
            try:
                self._store.delete(key)
            except OSError as error:
                logging.getLogger(__name__).warning("%s: %s is not removed: %s", self._store.url, key, error)
                return
            self._removable.discard(key)


def honours_conditions(store: Store) -> bool:
    """Whether a store refuses to write a key that is not free: tried on an object of its own, which is removed.

    Raises:
        OSError: the store cannot be written.
    """
    key = f"probe/{uuid4().hex}"
    try:
        store.create(key, b"1")
        try:
            store.create(key, b"2")
        except FileExistsError:
            return True
        return False
    finally:
        store.delete(key)
