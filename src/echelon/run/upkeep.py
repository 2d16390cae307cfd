"""What is done to runs that do not go on, in a folder or at a URL: copied, verified, cleaned; data's cache, too."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.checkpoint.files import CheckpointEntry, DamagedError, base_of, bases_of, entries, unnamed_bases, verify
from echelon.config import load_run_config
from echelon.core.errors import UserError
from echelon.core.files import scratch_folder
from echelon.core.units import format_seconds
from echelon.records.events import StartedOver
from echelon.records.file import newest
from echelon.records.going import LOCK_FILE
from echelon.records.kinds import Checkpoint
from echelon.run.home import bring, local_copy
from echelon.run.mirror import begin_writing, read_state, write_state
from echelon.run.snapshot import HOLD_FOLDER, Hashes, held
from echelon.storage.archive import DATA, Archive, DamagedArchive, Part, Version, key_of
from echelon.storage.base import refused_in_words
from echelon.storage.url import check_url, is_url, open_store
from echelon.trainer.folder import CHECKPOINTS_FOLDER, CONFIG_FILE, check_is_run, locked

if TYPE_CHECKING:
    from echelon.data.by_url import CachedData

_PROBES = "probe/"
_OLD_S = 3600.0  # a part that no manifest names may be of one that is just being written
_LONGEST_S = 7 * 86400.0  # no upload takes longer


@dataclass(frozen=True)
class Finding:
    """One thing that was verified; `damage` is empty where it is whole."""

    name: str
    n_bytes: int
    damage: str = ""


@dataclass(frozen=True)
class Removable:
    """Something that may go: its path or key, its size, and why nobody needs it."""

    name: str
    n_bytes: int
    why: str


def copy_run(source: str, target: str, codec: str = "none") -> str:
    """Copy a run between a folder and a URL, or two URLs; returns what was done, in words.

    Raises:
        UserError: there is no run at the source, it goes on, or the target holds something else.
    """
    if is_url(source):
        at = check_url(source)
        folder = bring(at, local_copy(at) if is_url(target) else _free(Path(target), at))
        if not is_url(target):
            return f"{source} is in {folder}"
    else:
        folder = Path(source)
    if not is_url(target):
        raise UserError(f"copy {source} {target}: one of them is to be a URL; write file:///FOLDER for a folder")
    url = check_url(target)
    check_is_run(folder)
    with locked(folder, shared=False):
        writer = begin_writing(folder, url, codec)
        try:
            with held(folder, last=True) as snapshot:
                version = writer.commit(Hashes().of(snapshot), snapshot.label)
        except OSError as error:
            raise refused_in_words(url, error) from error
        write_state(folder, url, version, writer.id)
    return f"{url} has {source} ({version.label}): {len(version.parts)} files, {writer.sent_bytes} bytes sent"


def _free(folder: Path, url: str) -> Path:
    """Return a folder that a run at a URL may be copied into.

    Raises:
        UserError: something else is in it.
    """
    is_empty = not folder.exists() or all(path.name == LOCK_FILE for path in folder.iterdir())
    if not is_empty and not read_state(folder, url).url:
        what = "holds another run" if (folder / CONFIG_FILE).exists() else "is not empty, and holds no run of this URL"
        raise UserError(f"{folder} {what}: name a new folder")
    return folder


def findings(place: str) -> Iterator[Finding]:
    """Compare every byte of a run's checkpoints, or of what lies at a URL, with its hash; yields as it goes.

    Raises:
        UserError: there is nothing, or the store cannot be read.
    """
    if is_url(place):
        try:
            yield from _stored_findings(Archive(open_store(place)))
        except OSError as error:
            raise refused_in_words(place, error) from error
        return
    folder = Path(place)
    check_is_run(folder)
    saved = next(newest(folder, Checkpoint, StartedOver), None)  # before the look: a run may go on to save
    checkpoints = entries(folder / CHECKPOINTS_FOLDER)
    for entry in (*checkpoints, *bases_of(checkpoints)):
        yield Finding(entry.path.name, _size(entry.path), _damage(entry))
    present = max((entry.step for entry in checkpoints), default=-1)
    if isinstance(saved, Checkpoint) and saved.step > present:
        if load_run_config(folder / CONFIG_FILE).optimizer.lr_find:  # such a run's checkpoints go at its end
            return
        yield Finding(f"checkpoint of step {saved.step}", 0, "the record says that it was saved, and it is not there")


def _damage(entry: CheckpointEntry) -> str:
    """Return what is wrong with a checkpoint, or with a base itself; empty: nothing."""
    try:
        manifest = verify(entry)
    except (DamagedError, OSError) as error:
        return str(error)
    try:
        base_of(entry, manifest)
    except (UserError, OSError) as error:
        return str(error)
    return ""


def _stored_findings(archive: Archive) -> Iterator[Finding]:
    numbers = archive.numbers()
    if not numbers:
        raise UserError(f"{archive.store.url} holds no run")
    versions: list[Version] = []
    for number in numbers:
        try:
            versions.append(archive.read(number))
        except DamagedArchive as damage:
            yield Finding(f"manifest {number}", 0, str(damage))
    for before, after in pairwise(versions):
        if after.number == before.number + 1 and after.predecessor != before.sha256:
            yield Finding(
                f"manifest {after.number}", 0, f"it does not follow the manifest {before.number} that is there"
            )
    yield Finding(f"manifests 1 to {numbers[-1]}", 0, "" if len(versions) == numbers[-1] else "some are missing")
    parts = {part.key: part for version in versions[-2:] for part in version.parts}
    with scratch_folder() as scratch:
        for part in sorted(parts.values(), key=lambda each: each.name):
            yield _verified(archive, part, scratch / "part")


def _verified(archive: Archive, part: Part, path: Path) -> Finding:
    try:
        archive.fetch(part, path)
    except DamagedArchive as damage:
        return Finding(part.name, part.stored_bytes, str(damage))
    path.unlink()
    return Finding(part.name, part.stored_bytes)


def removables(place: str) -> tuple[int, list[Removable]]:
    """Return how many bytes a run, or a cache of data from URLs, takes, and what of it may go.

    Raises:
        UserError: there is neither, or the store cannot be read.
    """
    if not is_url(place) and (data := _cached(place)) is not None:
        why = "from {}, last used {} ago"
        may_go = [
            Removable(str(each.path), each.n_bytes, why.format(each.url, format_seconds(each.age_s)))
            for each in data
            if not each.is_used
        ]
        return sum(each.n_bytes for each in data), may_go
    if not is_url(place):
        folder = Path(place)
        check_is_run(folder)
        found = [
            (path, "checkpoints from before --from-scratch") for path in folder.glob(f"{CHECKPOINTS_FOLDER}-before-*")
        ]
        unfinished = "left by a process that was killed"
        found += [(path, unfinished) for path in (folder / CHECKPOINTS_FOLDER).glob(".*-*")]
        found += [(path, unfinished) for path in folder.glob(HOLD_FOLDER)]
        found += [(path, "no checkpoint names it") for path in unnamed_bases(folder / CHECKPOINTS_FOLDER)]
        return _size(folder), [Removable(str(path), _size(path), why) for path, why in found]
    try:
        archive = Archive(open_store(place))
        numbers, objects = archive.numbers(), archive.store.list(DATA)
        if not numbers:
            raise UserError(f"{place} holds no run")
        versions = [each for _, each in zip(range(2), archive.versions(), strict=False)]
        if not all(isinstance(each, Version) for each in versions):
            raise UserError(f"{place}: one of the last two manifests is damaged: nothing is removed here")
        named = {key for each in versions if isinstance(each, Version) for key in each.keys}
        unused = [each for each in objects if each.key not in named] + archive.store.list(_PROBES)
        newest_s = archive.store.stat(key_of(numbers[-1])).age_s
    except OSError as error:
        raise refused_in_words(place, error) from error
    least_s = math.inf if newest_s is None else max(_OLD_S, min(newest_s, _LONGEST_S))  # newer: an upload may go on
    old = [each for each in unused if each.age_s is not None and each.age_s > least_s]
    why = "no manifest in use names it, and it is older than an hour and than the newest one, or than a week"
    return sum(each.n_bytes for each in objects), [Removable(each.key, each.n_bytes, why) for each in old]


def _cached(place: str) -> list[CachedData] | None:
    """Return the data of URLs that a folder keeps; None: it keeps none, or is a run's."""
    if (Path(place) / CONFIG_FILE).exists():
        return None
    from echelon.data.by_url import cached  # its room imports torch

    return cached(Path(place))


def remove(place: str, what: list[Removable]) -> None:
    """Remove what `removables` found.

    Raises:
        UserError: a run goes on there, or it cannot be removed.
    """
    try:
        if is_url(place):
            store = open_store(place)
            for each in what:
                store.delete(each.name)
            return
        if _cached(place) is not None:
            from echelon.data.by_url import remove_cached

            for each in what:
                remove_cached(Path(each.name))
            return
        with locked(Path(place), shared=False):
            for each in what:
                path = Path(each.name)
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        raise refused_in_words(place, error) from error


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())
