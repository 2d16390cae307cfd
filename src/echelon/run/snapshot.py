"""What of a run's folder another machine needs to continue it, held as it is at one moment while it is sent.

Held are hard links to files that never change, and copies of those that do, in a hidden folder of the run: training
goes on and removes its older checkpoints meanwhile.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from echelon.checkpoint.files import CheckpointEntry, DamagedError, base_of, bases_of, entries, read_manifest, scored
from echelon.observe.loggers.base import IDS_FOLDER
from echelon.records.segments import RECORD_FILE, open_record
from echelon.storage.archive import sha256_of
from echelon.trainer.folder import CHECKPOINTS_FOLDER

HOLD_FOLDER = ".mirror"
_LAST_FOLDERS = ("tensorboard",)
_TRIES = 5


@dataclass(frozen=True)
class Snapshot:
    """Files by their name in the run's folder, each where it is held; the step of the newest checkpoint."""

    files: Mapping[str, Path]
    step: int | None

    @property
    def label(self) -> str:
        """What a version of it is called."""
        return f"step {self.step}" if self.step is not None else "no checkpoint"


class Hashes:
    """SHA-256 of files, computed once for files that do not change."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], str] = {}

    def of(self, snapshot: Snapshot) -> dict[str, tuple[Path, str]]:
        """Return each file with its hash."""
        known, self._known = self._known, {}
        result = {}
        for name, path in snapshot.files.items():
            status = path.stat()
            identity = (name, status.st_size, status.st_mtime_ns)
            sha256 = known.get(identity) or sha256_of(path)
            result[name] = (path, sha256)
            self._known[identity] = sha256
        return result


def wanted_checkpoints(folder: Path, sent: frozenset[str] = frozenset()) -> list[CheckpointEntry]:
    """Return the checkpoints that are worth sending: the newest, the best, and those that were sent before."""
    present = entries(folder / CHECKPOINTS_FOLDER)
    with_metric = scored(present)
    best = max(with_metric)[1] if with_metric else None
    return [entry for entry in present if entry in (present[-1], best) or entry.path.name in sent]


@contextmanager
def held(folder: Path, sent: frozenset[str] = frozenset(), last: bool = False) -> Iterator[Snapshot]:
    """Hold a run's files for as long as the block takes.

    Args:
        sent: names of checkpoints that were sent before.
        last: the run has ended: its curves and all its checkpoints.

    Raises:
        OSError: the disk fails.
        UserError: with `last`: what the newest checkpoint leaves out is missing.
    """
    hold = folder / HOLD_FOLDER
    release(folder)
    try:
        for left in reversed(range(_TRIES)):
            hold.mkdir()
            try:
                snapshot = _take(folder, hold, sent, last)
            except FileNotFoundError:  # removed by who keeps the newest
                if not left:
                    raise
            else:
                newest = entries(folder / CHECKPOINTS_FOLDER)[-1:]
                if not left or (newest[0].step if newest else None) == snapshot.step:
                    break  # else there is a new checkpoint, and the record may know it already
            release(folder)
        yield snapshot
    finally:
        release(folder)


def release(folder: Path) -> None:
    """Remove what is held, or was left by a process that was killed."""
    shutil.rmtree(folder / HOLD_FOLDER, ignore_errors=True)


def _take(folder: Path, hold: Path, sent: frozenset[str], last: bool) -> Snapshot:
    files: dict[str, Path] = {}
    record = hold / "record"
    record.mkdir()
    with open_record(folder) as opened:  # before the checkpoints: it knows of none that is not there
        for each in opened:
            name = each.segment.name if each.segment is not None else RECORD_FILE
            with (record / name).open("wb") as copy:
                shutil.copyfileobj(each.file, copy)
            files[name] = record / name
    chosen = entries(folder / CHECKPOINTS_FOLDER) if last else wanted_checkpoints(folder, sent)
    if last:
        for entry in chosen[-1:]:
            with suppress(DamagedError):  # which is sent as it is: the one before it is used
                base_of(entry, read_manifest(entry))
    for entry in (*chosen, *bases_of(chosen)):
        for path in entry.path.iterdir():
            files[f"{CHECKPOINTS_FOLDER}/{entry.path.name}/{path.name}"] = _link(path, hold / entry.path.name)
    for path in _small_files(folder, last):
        name = path.relative_to(folder).as_posix()
        if "\\" in name:  # no archive is read that has such a name: elsewhere it would lead out of the folder
            continue
        files[name] = _copy(path, hold / "files" / name)
    return Snapshot(files, chosen[-1].step if chosen else None)


def _small_files(folder: Path, last: bool) -> Iterator[Path]:
    for path in folder.iterdir():
        if _is_plain(path) and not path.name.startswith("record"):
            yield path
    for name in (IDS_FOLDER, *(_LAST_FOLDERS if last else ())):
        yield from (path for path in (folder / name).rglob("*") if _is_plain(path))


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and not path.name.startswith(".")


def _link(path: Path, into: Path) -> Path:
    into.mkdir(exist_ok=True)
    try:
        os.link(path, into / path.name)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without hard links
        shutil.copyfile(path, into / path.name)
    return into / path.name


def _copy(path: Path, to: Path) -> Path:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)
    return to
