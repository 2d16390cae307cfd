"""A run's copy at a URL, kept beside training: a thread of the command that runs it sends each new checkpoint.

Ranks take no part in it. A store that is away is tried again, and said once; training goes on. What one process leaves
there another continues (`echelon resume URL`), and of two that write only one goes on.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.patience import DiskNotice, Patience, may_pass, print_notice
from echelon.core.stop import StopFlag
from echelon.core.units import format_bytes, format_seconds
from echelon.launch.places.cluster import MIRRORED_FILE
from echelon.records.decode import decode
from echelon.records.events import DiskFails, DiskWorks, Event
from echelon.records.file import Recorder
from echelon.run.machine import say
from echelon.run.snapshot import Hashes, held, release, wanted_checkpoints
from echelon.storage.archive import (
    Archive,
    ArchiveWriter,
    DamagedArchive,
    ForeignWriter,
    Version,
    honours_conditions,
)
from echelon.storage.base import StoreAway, refused_in_words
from echelon.storage.url import absolute, open_store
from echelon.trainer.folder import CHECKPOINTS_FOLDER

_WHAT = "checkpoint"
_LOOK_S = 0.5
_WAKES_S = 5.0  # in which a thread that is told of the end begins to send
_STOPPED_S = 60.0  # for the last checkpoint, once a signal has stopped the run


@dataclass(frozen=True)
class MirrorState:
    """What a run's folder has in common with its copy at a URL: the version that it was last the same as.

    Attributes:
        writes_as: the id of this folder's own writer; empty: it has none, what is there was brought. Files of earlier
            versions have a `writer`, who may be another folder's: it is not read.
    """

    url: str = ""
    writes_as: str = ""
    number: int = 0
    sha256: str = ""

    def is_at(self, newest: Version) -> bool:
        """Whether nobody else wrote there since; this writer may have, and died before it noted that."""
        return newest.sha256 == self.sha256 or (self.writes_as != "" and newest.writer == self.writes_as)


def read_state(folder: Path, url: str) -> MirrorState:
    """Return what a folder has in common with a URL."""
    return next((state for state in _states(folder) if state.url == absolute(url)), MirrorState())


def write_state(folder: Path, url: str, version: Version | None, writer: str = "") -> None:
    """Note that a folder is the same as a version at a URL; None: it is about to become so.

    Args:
        writer: the id of the folder's own writer; empty: it has none, and who wrote the version may go on.
    """
    url = absolute(url)
    others = [state for state in _states(folder) if state.url != url]
    same = MirrorState(url) if version is None else MirrorState(url, writer, version.number, version.sha256)
    states = [*others, same]
    write_atomic(folder / MIRRORED_FILE, json.dumps([asdict(state) for state in states]))


def _states(folder: Path) -> list[MirrorState]:
    try:
        states = [decode(MirrorState, values) for values in json.loads((folder / MIRRORED_FILE).read_bytes())]
        return [replace(state, url=absolute(state.url)) for state in states]
    except (FileNotFoundError, ValueError, TypeError, AttributeError, KeyError):
        return []


def begin_writing(folder: Path, url: str, codec: str, tell: Callable[[str], None] = say) -> ArchiveWriter:
    """Become the writer of a run's copy.

    Raises:
        UserError: the store cannot be used, holds something else, or was written by others since.
    """
    try:
        store = open_store(url)
        honours = honours_conditions(store)
        archive = Archive(store)
        newest = archive.newest()
        if newest is not None and newest.parts and not read_state(folder, url).is_at(newest):
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest.t))
            raise UserError(
                f"{url} holds another run, or was continued elsewhere ({newest.label}, by {newest.host} at {when}): "
                f"continue that with `echelon resume {url}`, or choose another place"
            )
        writer = ArchiveWriter(archive, honours, codec)
        if newest is not None and newest.parts:  # noted before: the answer to the claim may be lost
            write_state(folder, url, newest, writer.id)
        write_state(folder, url, writer.claim(newest), writer.id)
    except OSError as error:
        raise refused_in_words(url, error) from error
    if not honours:
        tell(f"{url} ignores conditions: a second writer would be detected at the next checkpoint, not prevented")
    return writer


class Mirror:
    """Sends what is new in a run's folder to a URL, in a thread, until it is closed.

    Attributes:
        failure: what ended the thread: another writer, or, where the URL is the run's home, a store that was away for
            longer than patience lasts.
    """

    def __init__(self, folder: Path, writer: ArchiveWriter, url: str, patience: Patience) -> None:
        """Take a run's folder and the writer of its copy; the thread ends when `patience` with the store is over."""
        self._folder, self._writer, self._url, self._patience = folder, writer, url, patience
        self._hashes = Hashes()
        self._sent: frozenset[str] = frozenset()
        self._seen: list[str] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echelon-mirror", daemon=True)
        self.failure: Exception | None = None
        self.versions = 0
        self._is_sending = False

    def start(self) -> None:
        """Begin to look for checkpoints."""
        self._thread.start()

    def check(self) -> None:
        """Raise what the thread ended with."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            try:
                names = [entry.path.name for entry in wanted_checkpoints(self._folder, self._sent)]
                if names and names != self._seen:
                    self._attempt(lambda names=names: self._push(names))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - kept for `check`, which raises it where it can be handled
                self.failure = error
                return

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Send once, unless it is too early; rights that are lost may be given back, so they are tried again too."""

        def passing() -> None:
            """Send."""
            try:
                action()
            except OSError as error:
                raise error if may_pass(error) else StoreAway(error.strerror or str(error)) from error
            except DamagedArchive as damage:
                raise StoreAway(str(damage)) from damage

        self._is_sending = True  # for as long as the store takes it, whoever waits
        try:
            return self._patience.attempt(_WHAT, passing)
        finally:
            self._is_sending = False

    def _push(self, seen: list[str], last: bool = False) -> None:
        with held(self._folder, self._sent, last) as snapshot:
            version = self._writer.commit(self._hashes.of(snapshot), snapshot.label)
        write_state(self._folder, self._url, version, self._writer.id)
        self._seen, self.versions = seen, self.versions + 1
        self._sent = frozenset(
            PurePosixPath(name).parts[1] for name in snapshot.files if name.startswith(CHECKPOINTS_FOLDER + "/")
        )

    def close(self, wait_s: float, stop: StopFlag) -> str:
        """Send what the run leaves, its report too; waits for a store that is away, until a signal comes.

        Returns:
            why it could not be sent; empty: it was.
        """
        self._over.set()
        begun_s, signals, said = time.monotonic(), stop.count, list[str]()
        last = threading.Thread(target=lambda: said.append(self._pushed_last()), name="echelon-mirror-end", daemon=True)
        for thread in (self._thread, last):  # one upload may take hours, and no signal ends it
            if thread is last:
                if self.failure is not None:
                    return str(self.failure)
                last.start()
            while thread.is_alive():
                thread.join(_LOOK_S)
                passed_s = time.monotonic() - begun_s
                idle = passed_s > wait_s if signals else passed_s > max(wait_s, _WAKES_S) and not self._is_sending
                if thread.is_alive() and (idle or stop.count > signals):
                    return f"the store did not take it for {format_seconds(passed_s)}"
        return said[0] if said else "sending it failed"

    def _pushed_last(self) -> str:
        """Send what the run leaves, until the store takes it; returns why it cannot."""
        while True:
            try:
                if self._attempt(lambda: self._push([], last=True)):
                    return ""
            except UserError as error:
                return str(error)
            time.sleep(_LOOK_S)

    def sent(self) -> str:
        """Return what was sent, in words."""
        return f"{self._url} has this run: {self.versions} versions, {format_bytes(self._writer.sent_bytes)} sent"


@dataclass(frozen=True)
class MirrorTerms:
    """How a run is copied: where to, how its files are stored, for how long a store may be away.

    Attributes:
        is_home: the copy is the run's only lasting place: it ends where that is away for too long.
        stop_s: how long a stop may take.
    """

    url: str
    codec: str
    patience_s: float
    is_home: bool = False
    stop_s: float = math.inf

    def last_s(self, stop: StopFlag) -> float:
        """Return for how long a store that is away is waited for at the run's end."""
        return max(0.0, min(self.patience_s, _STOPPED_S, stop.left_s(self.stop_s))) if stop else self.patience_s


@contextmanager
def mirrored(path: Path, terms: MirrorTerms, record: Recorder, stop: StopFlag) -> Iterator[Mirror]:
    """Keep a copy of a run's folder at a URL while the block runs; what it leaves is sent at the end.

    Raises:
        UserError: the store cannot be used; or, at the end, the run's home lacks its last state.
        ForeignWriter: another process writes there.
    """
    url, writer = terms.url, begin_writing(path, terms.url, terms.codec)

    def tell(notice: DiskNotice) -> None:
        """Say and record that the store is away, or back."""
        print_notice(notice)
        if notice.seconds is None:
            record.write(DiskFails(notice.message, notice.what, notice.reason))
        else:
            record.write(DiskWorks(notice.message, notice.what, notice.reason, notice.seconds))

    mirror = Mirror(path, writer, url, Patience(url, terms.patience_s if terms.is_home else math.inf, tell))
    mirror.start()
    lacking = ""
    try:
        yield mirror
    finally:
        record.flush()
        lacking = mirror.close(terms.last_s(stop), stop)
        release(path)
        if not lacking:
            record.write(Event(mirror.sent(), name="mirror"))
        elif not isinstance(mirror.failure, ForeignWriter):
            say(f"{url} lacks the end of this run ({lacking}): `echelon copy {path} {url}` sends it")
    if isinstance(mirror.failure, ForeignWriter):
        raise mirror.failure
    if lacking and terms.is_home:
        raise UserError(f"{url}: the last state of the run is not there, but in {path}: {lacking}")
