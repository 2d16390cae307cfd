"""A run whose home is a URL: its local copy on this machine, brought there from the URL to be continued."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from echelon.checkpoint.files import CheckpointEntry, DamagedError, entries, is_base, verify
from echelon.config import RunConfig
from echelon.core.errors import UserError, naming
from echelon.core.files import write_atomic
from echelon.records.events import StartedOver
from echelon.records.file import newest
from echelon.records.kinds import Checkpoint
from echelon.run.machine import say
from echelon.storage.url import absolute, check_url, is_url
from echelon.trainer.folder import CONFIG_FILE

if TYPE_CHECKING:
    from echelon.storage.archive import Archive, Part, Version

_CHECKPOINTS = "checkpoints"
_SEGMENTS = "record-*.jsonl"
_TRIES = 5  # of bringing a run that goes on


class _MovedOn(Exception):
    """A part of a version is gone, for its run went on meanwhile."""


def local_copy(url: str) -> Path:
    """Return the folder on this machine of the run at a URL: below the user's cache folder, XDG_CACHE_HOME."""
    url = url.rstrip("/")
    name = PurePosixPath(url).name or "run"
    return local_copies() / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def local_copies() -> Path:
    """Return the folder on this machine of all runs that live at URLs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "echelon" / "runs"


def folder_of(run: str) -> Path:
    """Return the folder on this machine of a run that is named by its folder or its URL."""
    return local_copy(run) if is_url(run) else Path(run)


def at_home(config: RunConfig) -> RunConfig:
    """Return the description of a run whose `--run` is a URL as that of its local copy, which is mirrored there.

    A folder for the mirror is made absolute: it is the same one wherever the run is resumed.

    Raises:
        UserError: it names a mirror too, or the URL cannot be recorded.
    """
    if not is_url(config.run):
        mirror = config.checkpoint.mirror
        with naming("--mirror"):
            mirror = check_url(mirror) if is_url(mirror) else absolute(mirror) if mirror else ""
        return replace(config, checkpoint=replace(config.checkpoint, mirror=mirror))
    with naming("--run"):
        url = check_url(config.run)
    mirror = mirror_at_home(url, config.checkpoint.mirror or None)
    return replace(config, run=str(local_copy(url)), checkpoint=replace(config.checkpoint, mirror=mirror))


def mirror_at_home(url: str, asked: object) -> str:
    """Return where a run that lives at a URL is mirrored, which is there.

    Args:
        asked: the mirror that its user names; None: none.

    Raises:
        UserError: it is another one.
    """
    if asked is not None and str(asked).rstrip("/") != url:
        raise UserError(
            f"--mirror {asked}: the run is kept at {url} already: leave --mirror out; `echelon copy {url} URL` copies "
            "it elsewhere"
        )
    return url


def home_of(config: RunConfig) -> str:
    """Return the URL at which a run lives whose folder is named; empty: it lives in that folder."""
    url = config.checkpoint.mirror
    return url if url and Path(config.run).absolute() == local_copy(url).absolute() else ""


def check_free(url: str) -> None:
    """Refuse a URL at which a new run is to live and another one does.

    Raises:
        UserError: there is one, or the URL cannot be reached.
    """
    if _newest(url) is not None:
        raise UserError(f"{url} holds a run: continue it with `echelon resume {url}`, or choose another place")


def _newest(url: str) -> Version | None:
    """Return the newest version at a URL that holds something; None: nothing was sent there yet.

    Raises:
        UserError: it cannot be reached.
    """
    from echelon.storage.archive import Archive
    from echelon.storage.base import refused_in_words
    from echelon.storage.url import open_store

    try:
        newest = Archive(open_store(url)).newest()
    except OSError as error:
        raise refused_in_words(url, error) from error
    return newest if newest is not None and newest.parts else None


def refresh(url: str, folder: Path) -> None:
    """Make the folder of a run that lives at a URL the same as its newest version there, where others wrote it.

    How the run was described for this start stays. A URL where nothing was sent yet changes nothing.

    Raises:
        UserError: it cannot be reached, or is not whole.
    """
    from echelon.records.going import LAUNCH_FILE

    if _newest(url) is None:
        return
    described = {name: (folder / name).read_bytes() for name in (CONFIG_FILE, LAUNCH_FILE)}
    bring(url, folder)
    for name, content in described.items():
        write_atomic(folder / name, content.decode())


def bring(url: str, folder: Path | None = None, tell: Callable[[str], None] = say) -> Path:
    """Make a folder of this machine the same as the newest whole version of a run at a URL; returns the folder.

    What is there already is not sent again; where nobody else wrote at the URL since this folder did, it stays as it
    is, for it may be newer. What is damaged at the URL is named, and the version before it is used.

    Raises:
        UserError: there is no run at the URL, none is whole, or it cannot be reached; or a run goes on in the folder.
    """
    from echelon.storage.archive import Archive
    from echelon.storage.base import refused_in_words
    from echelon.storage.url import open_store
    from echelon.trainer.folder import locked

    folder = local_copy(url) if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    archive = Archive(open_store(url))
    with locked(folder, shared=False):
        try:
            for left in reversed(range(_TRIES)):
                with suppress(_MovedOn):
                    _bring(archive, url, folder, tell, is_last=not left)
                    break
        except OSError as error:
            raise refused_in_words(url, error) from error
    return folder


def _bring(archive: Archive, url: str, folder: Path, tell: Callable[[str], None], is_last: bool) -> None:
    """Make a folder the same as the newest whole version in an archive.

    Args:
        is_last: where the run goes on meanwhile, an older version is used instead.

    Raises:
        _MovedOn: it goes on, and has removed a part.
        UserError: no version is whole.
    """
    from echelon.run.mirror import read_state, write_state
    from echelon.storage.archive import DamagedArchive

    damaged, first, begun_with = False, None, archive.numbers()[-1:]

    def check_newest() -> None:
        """Raise where there is a newer version now."""
        if not is_last and archive.numbers()[-1:] != begun_with:
            raise _MovedOn

    for version in archive.versions():
        if isinstance(version, DamagedArchive):
            tell(f"{url}: {version}; the one before it is used")
            damaged = True
            continue
        names = {part.name for part in version.parts}
        if CONFIG_FILE not in names:
            continue  # a writer has begun, and sent nothing
        first = first or version
        is_here = (folder / CONFIG_FILE).exists() and read_state(folder, url).is_at(version)
        if is_here and not damaged:
            return
        if not read_state(folder, url).url:
            write_state(folder, url, None)  # what a kill leaves here is taken up again
        try:
            _fetch_version(archive, version, folder, lambda text: tell(f"{url}: {text}"), check_newest)
        except DamagedArchive as damage:
            tell(f"{url}: manifest {version.number}: {damage}; the one before it is used")
            damaged = True
            continue
        write_state(folder, url, first)
        return
    raise UserError(f"{url} holds no run{' that is whole: see `echelon verify`' if damaged else ''}")


def _fetch_version(
    archive: Archive, version: Version, folder: Path, tell: Callable[[str], None], on_damage: Callable[[], None]
) -> None:
    """Bring the files of a version, and remove what belongs to another history.

    A damaged file of a checkpoint leaves that one damaged, which the run passes over in favour of the one before.

    Raises:
        DamagedArchive: another file is damaged or gone.
    """
    from echelon.storage.archive import DamagedArchive

    wanted = {part.name: part for part in version.parts}
    for part in sorted(version.parts, key=_order):
        try:
            fetch_part(archive, part, folder)
        except DamagedArchive as damage:
            on_damage()
            if not part.name.startswith(f"{_CHECKPOINTS}/"):
                raise
            tell(f"{damage}: the checkpoint before it is used")
            (folder / part.name).parent.mkdir(parents=True, exist_ok=True)
    _remove_others(folder, wanted)


def fetch_part(archive: Archive, part: Part, folder: Path) -> None:
    """Bring one file, unless it is there.

    Raises:
        DamagedArchive: it is damaged or gone.
    """
    from echelon.storage.archive import is_there

    if not is_there(part, folder / part.name):
        archive.fetch(part, folder / part.name)


def _order(part: Part) -> tuple[bool, bool, str]:
    """Bring the description last, by which a folder is a run, and the record after the checkpoints that it names."""
    return part.name == CONFIG_FILE, not part.name.startswith(_CHECKPOINTS), part.name


def _remove_others(folder: Path, wanted: Iterable[str]) -> None:
    names = set(wanted)
    checkpoints = {PurePosixPath(name).parts[1] for name in names if name.startswith(f"{_CHECKPOINTS}/")}
    for entry in entries(folder / _CHECKPOINTS):
        if entry.path.name not in checkpoints:
            shutil.rmtree(entry.path)
    for checkpoint in checkpoints:  # one of the same step, of another history, may have other files
        for path in (folder / _CHECKPOINTS / checkpoint).rglob("*"):
            if path.is_file() and path.relative_to(folder).as_posix() not in names:
                path.unlink()
    for path in folder.glob(_SEGMENTS):
        if path.name not in names:
            path.unlink()


def _is_wanted(folder: Path, name: str, newest_step: int, last_step: float) -> bool:
    """Whether a checkpoint is newer than a step and not of before the run started over, or a base is not whole here."""
    if not is_base(name):
        return newest_step < int(name.partition("-")[2].partition(".")[0]) <= last_step
    try:
        verify(CheckpointEntry(0, 1, folder / _CHECKPOINTS / name))
    except (DamagedError, OSError):
        return True
    return False


def mend(folder: Path, url: str, tell: Callable[[str], None]) -> None:
    """Bring checkpoints that are newer than the newest whole one of a folder from its copy at a URL.

    Nothing is done where others wrote at the URL since. A store that is away is said: the folder is used as it is.
    """
    saved = next(newest(folder, Checkpoint, StartedOver), None)
    if isinstance(saved, StartedOver):
        return  # what the URL has is of before
    last = saved.step if isinstance(saved, Checkpoint) else math.inf
    from echelon.run.mirror import read_state
    from echelon.storage.archive import Archive, DamagedArchive
    from echelon.storage.url import open_store

    whole = -1
    for entry in reversed(entries(folder / _CHECKPOINTS)):
        try:
            whole = verify(entry).step
            break
        except (DamagedError, OSError) as error:
            tell(f"checkpoint {entry.path.name} is damaged: {error}")
    archive = Archive(open_store(url))
    try:
        version = archive.newest()
        if version is None or not read_state(folder, url).is_at(version):
            return
        parts = [part for part in version.parts if part.name.startswith(f"{_CHECKPOINTS}/")]
        for name in sorted({PurePosixPath(part.name).parts[1] for part in parts}):
            if _is_wanted(folder, name, whole, last):
                shutil.rmtree(folder / _CHECKPOINTS / name, ignore_errors=True)
                for part in (part for part in parts if PurePosixPath(part.name).parts[1] == name):
                    fetch_part(archive, part, folder)
                tell(f"{'what checkpoints leave out' if is_base(name) else 'checkpoint'} {name} is taken from {url}")
    except DamagedArchive as damage:
        tell(f"{url}: {damage}: its checkpoint is damaged too")
    except OSError as error:
        tell(f"{url} cannot be read ({error.strerror or error}): the checkpoints of {folder} are used as they are")
