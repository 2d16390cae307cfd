"""A checkpoint's folder on disk: durable files, a manifest of checksums, names, and the writer's lock.

`manifest.sha256` is in the format of the sha256sum tool and covers `manifest.json`, which covers every other file:
any changed, missing or added byte shows.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echelon.core.errors import UserError
from echelon.core.files import open_plain

MANIFEST = "manifest.json"
MANIFEST_SUM = "manifest.sha256"
FORMAT = 1
FORMAT_ON_BASE = 2  # what is left out of a checkpoint lies in its base
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
INCOMPLETE = "incomplete-"
"""What the names of checkpoints begin with that lack parts."""

_INCOMPLETE_NAME = re.compile(INCOMPLETE + r"(\d{8,})-[0-9a-f]{16}")
_TEMPORARY = ".tmp-"
_BASE = "base-"
_DOOMED = ".old-"
_LOCK = ".lock"
_SUM = ".sha256"
_SHA256 = re.compile("[0-9a-f]{64}")
_POLL_S = 0.05
_QUICK_BYTES = 1 << 30  # are compared in a second or two
READ_ERRORS_OF_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
"""Errors of reading that say something about a checkpoint; others (too many open files, no permission) do not."""


class DamagedError(Exception):
    """A checkpoint on disk is not what was written: says what differs."""


@dataclass(frozen=True, order=True)
class CheckpointEntry:
    """One checkpoint in a folder. `revision` counts saves of the same step; entries sort from old to new."""

    step: int
    revision: int
    path: Path


@dataclass(frozen=True)
class FileSum:
    """What a manifest says of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's manifest says of it; `n_bytes` is the size of all its files but the manifest's own two.

    Attributes:
        base: SHA-256 of the manifest of the base, which holds what the checkpoint leaves out; empty: nothing.
    """

    step: int
    metric: float | None
    n_bytes: int
    base: str = ""


def entries(folder: Path) -> list[CheckpointEntry]:
    """List the checkpoints in `folder` from old to new, by name alone; none when it does not exist."""
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(CheckpointEntry(int(match[1]), int(match[2] or 1), path) for match, path in found if match)


def chosen(folder: Path, checkpoint: str) -> list[CheckpointEntry]:
    """Return the checkpoints in `folder` that may be meant, from old to new: all for the best, else one.

    Args:
        checkpoint: `best`, `newest`, or the number of a step.

    Raises:
        UserError: there is none.
    """
    known = {str(entry.step): entry for entry in entries(folder)}
    if checkpoint == "best":
        if not known:
            raise UserError(f"{folder.parent} holds no whole checkpoint to evaluate")
        return entries(folder)
    if not known or checkpoint not in ("newest", *known):
        names = ", ".join(["best", "newest", *known])
        raise UserError(f"--checkpoint {checkpoint}: {folder.parent} has {names if known else 'no checkpoint'}")
    return [known[next(reversed(known)) if checkpoint == "newest" else checkpoint]]


def check_whole(folder: Path, checkpoint: str) -> None:
    """Refuse damaged checkpoints before anything is started for them: the one that is meant, or all of which one is.

    Of large ones names, sizes and manifests alone are looked at: whoever loads them compares every byte.

    Args:
        checkpoint: as of `chosen`.

    Raises:
        UserError: there is none, or none that is whole.
    """
    candidates = chosen(folder, checkpoint)
    for entry in reversed(candidates):
        if (damage := _damage(entry)) is None:
            return
        if checkpoint != "best":
            raise damaged(entry.path, damage)
    raise none_whole(folder, len(candidates))


def _damage(entry: CheckpointEntry) -> DamagedError | None:
    try:
        manifest = verify(entry, _QUICK_BYTES)
    except DamagedError as error:
        return error
    except OSError as error:
        return DamagedError(f"it cannot be read: {error}") if error.errno in READ_ERRORS_OF_DAMAGE else None
    base = base_of(entry, manifest)
    if base is not None:
        try:
            verify(base, _QUICK_BYTES)
        except (DamagedError, FileNotFoundError, NotADirectoryError) as error:
            raise without_base(entry, base, error) from error
    return None


def base_of(entry: CheckpointEntry, manifest: Manifest) -> CheckpointEntry | None:
    """Return the base that a checkpoint needs, by its manifest alone; None: it leaves nothing out.

    Raises:
        UserError: it is missing, or another one's.
        OSError: the disk fails.
    """
    if not manifest.base:
        return None
    base = base_entry(entry.path.parent, manifest.base)
    try:
        if manifest_sum(base.path) != manifest.base:
            raise DamagedError("its manifest is another one's")
    except (DamagedError, FileNotFoundError, NotADirectoryError) as error:
        raise without_base(entry, base, error) from error
    return base


def none_whole(folder: Path, tried: int) -> UserError:
    """Return the refusal of a folder whose checkpoints are all damaged."""
    return UserError(
        f"{folder}: no checkpoint here is whole ({tried} tried): "
        f"move the folder away to start over, or put a good copy in its place"
    )


def damaged(path: Path, reason: Exception) -> UserError:
    """Return the refusal of a damaged checkpoint that was asked for by its name."""
    return UserError(f"the checkpoint {path} is damaged: {reason}; use the one before it")


def without_base(entry: CheckpointEntry, base: CheckpointEntry, reason: Exception) -> UserError:
    """Return the refusal of a checkpoint whose base cannot be read."""
    what = "is damaged" if base.path.is_dir() else "is missing"
    return UserError(
        f"{base.path} {what} ({reason}): it holds what {entry.path.name} left out, for it stays as it is; put a "
        "good copy in its place, or start over with --from-scratch"
    )


def free_entry(folder: Path, step: int) -> CheckpointEntry:
    """Return the entry under which `step` can be saved beside what is there already."""
    revision = max((entry.revision for entry in entries(folder) if entry.step == step), default=0) + 1
    return CheckpointEntry(step, revision, folder / (f"step-{step:08d}" + (f".{revision}" if revision > 1 else "")))


def base_entry(folder: Path, base: str) -> CheckpointEntry:
    """Return the entry of the base whose manifest has this SHA-256."""
    return CheckpointEntry(0, 1, folder / f"{_BASE}{base[:16]}")


def is_base(name: str) -> bool:
    """Whether a folder beside checkpoints is, by its name, a base of theirs."""
    return name.startswith(_BASE)


def bases_of(chosen: Sequence[CheckpointEntry]) -> list[CheckpointEntry]:
    """Return the bases that checkpoints need beside themselves, each once; of damaged ones none. Raises OSError."""
    found: dict[Path, CheckpointEntry] = {}
    for entry in chosen:
        with contextlib.suppress(DamagedError, FileNotFoundError):
            if base := read_manifest(entry).base:
                at = base_entry(entry.path.parent, base)
                found[at.path] = at
    return [base for base in found.values() if base.path.is_dir()]


def incomplete_entries(folder: Path) -> list[CheckpointEntry]:
    """List the checkpoints in a folder that lack parts, by name alone; none when it does not exist."""
    if not folder.is_dir():
        return []
    found = ((_INCOMPLETE_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(CheckpointEntry(int(match[1]), 1, path) for match, path in found if match)


def unnamed_bases(folder: Path) -> list[Path]:
    """Return the bases that no checkpoint beside them names; none where one cannot be read, which may name any.

    Raises:
        OSError: the disk fails.
    """
    present = entries(folder)
    try:
        named = {base_entry(folder, read_manifest(each).base).path for each in present + incomplete_entries(folder)}
    except DamagedError:
        return []
    return [path for path in folder.iterdir() if is_base(path.name) and path not in named] if present else []


def temporary(target: Path) -> Path:
    """Return the hidden name under which `target` is written before it is renamed."""
    return target.with_name(_TEMPORARY + target.name)


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a checkpoint: out of sight in one step, so that a kill midway leaves no half of one. Raises OSError."""
    doomed = path.with_name(_DOOMED + path.name)
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def replace_damaged(target: Path, same: Path) -> None:
    """Put a folder in the place of one that was the same, where that is not whole; else remove it. Raises OSError."""
    try:
        verify(CheckpointEntry(0, 1, target))
    except DamagedError:
        remove(target)
        same.rename(target)
    else:
        shutil.rmtree(same)


def empty(folder: Path, but: Sequence[str] = ()) -> None:
    """Remove all files of a folder but those named. Raises OSError."""
    for path in folder.iterdir():
        if path.name not in but:
            path.unlink()


def clean(folder: Path) -> None:
    """Remove what a killed writer left behind. Only for the process that holds the lock."""
    for path in folder.iterdir():
        if path.name.startswith((_TEMPORARY, _DOOMED)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def lock(folder: Path, deadline_s: float) -> int:
    """Take the writer's lock of `folder` and return its open file; the kernel frees it when the process ends.

    Raises BlockingIOError when another process still holds it after `deadline_s` seconds.
    """
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    end = time.monotonic() + deadline_s
    while True:
        try:
            # A record lock, not flock: a forked data worker that outlives its killed parent must not keep it.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except (BlockingIOError, PermissionError):
            if time.monotonic() > end:
                os.close(handle)
                raise BlockingIOError(errno.EAGAIN, "another process is saving its checkpoints here") from None
            time.sleep(_POLL_S)


def take_lock(folder: Path) -> int:
    """Take the writer's lock from a process that does not answer; it finds that it `has_lock` no more."""
    (folder / _LOCK).unlink(missing_ok=True)
    return lock(folder, 0.0)


def has_lock(folder: Path, handle: int) -> bool:
    """Whether a lock that was taken is still the folder's: no other process has taken it since."""
    try:
        return os.path.samestat((folder / _LOCK).stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def unlock(handle: int) -> None:
    """Give back the lock of `lock`."""
    os.close(handle)


def note_sum(path: Path, sha256: str) -> None:
    """Leave the SHA-256 of a file that is about to appear beside it, for who seals the folder. Raises OSError."""
    path.with_suffix(_SUM).write_text(sha256)


def noted_sums(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return what `note_sum` has left of some files in a folder, as far as it did. Raises OSError."""
    found = {name: (folder / name).with_suffix(_SUM) for name in names}
    read = {name: path.read_text() for name, path in found.items() if path.exists()}
    return {name: sha256 for name, sha256 in read.items() if _SHA256.fullmatch(sha256)}


def seal(
    folder: Path, step: int, metric: float | None, base: str = "", known: Mapping[str, str] | None = None
) -> Manifest:
    """Write the manifest of all files in `folder` and wait until everything is on the disk.

    Args:
        known: SHA-256 of files, by those who wrote them; the others are read.

    Raises:
        OSError: the disk fails.
    """
    files: dict[str, FileSum] = {}
    for path in sorted(folder.iterdir()):
        sync(path)
        files[path.name] = FileSum(path.stat().st_size, (known or {}).get(path.name) or sha256_of(path))
    sums = {name: asdict(file) for name, file in files.items()}
    body: dict[str, object] = {"format": FORMAT, "step": step, "metric": None if metric is None else repr(metric)}
    if base:
        body |= {"format": FORMAT_ON_BASE, "base": base}
    body["files"] = sums
    write_durable(folder / MANIFEST, json.dumps(body, indent=1).encode())
    write_durable(folder / MANIFEST_SUM, _sum_line(folder / MANIFEST))
    sync(folder)
    return Manifest(step, metric, sum(file.bytes for file in files.values()), base)


def manifest_sum(folder: Path) -> str:
    """Return the SHA-256 of a folder's manifest, which covers all that is in it. Raises OSError."""
    return sha256_of(folder / MANIFEST)


def write_durable(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def verify(entry: CheckpointEntry, most_bytes: float = math.inf, beside: Set[str] = frozenset()) -> Manifest:
    """Compare every byte of a checkpoint with its checksums. Raises DamagedError, or OSError on a failing disk.

    Args:
        most_bytes: of a larger checkpoint the contents are not compared.
        beside: names in its folder that do not belong to it.
    """
    manifest, files = _read_manifest(entry)
    present = {path.name for path in entry.path.iterdir()} - {MANIFEST, MANIFEST_SUM} - beside
    if present != files.keys():
        missing, added = sorted(files.keys() - present), sorted(present - files.keys())
        raise DamagedError(f"missing files {missing}, files that do not belong there {added}")
    for name, expected in files.items():
        path = entry.path / name
        size = path.stat().st_size
        if not path.is_file() or size != expected.bytes:
            raise DamagedError(f"{name} has {size} bytes, not {expected.bytes}: it was cut or overwritten")
        if manifest.n_bytes <= most_bytes and sha256_of(path) != expected.sha256:
            raise DamagedError(f"the checksum of {name} does not match: its contents changed after it was written")
    return manifest


def read_manifest(entry: CheckpointEntry) -> Manifest:
    """Read a checkpoint's manifest alone, verified by its own checksum. Raises DamagedError, OSError."""
    return _read_manifest(entry)[0]


def file_sums(entry: CheckpointEntry) -> dict[str, FileSum]:
    """Return what a checkpoint's manifest says of its files, by name. Raises DamagedError, OSError."""
    return _read_manifest(entry)[1]


def scored(present: Sequence[CheckpointEntry]) -> list[tuple[float, CheckpointEntry]]:
    """Return the checkpoints that have a metric, each with it; of damaged ones none. Raises OSError."""
    found = []
    for entry in present:
        with contextlib.suppress(DamagedError, FileNotFoundError):  # reported when it is the one to be read
            if (metric := read_manifest(entry).metric) is not None:
                found.append((metric, entry))
    return found


def _read_manifest(entry: CheckpointEntry) -> tuple[Manifest, dict[str, FileSum]]:
    try:
        if _read(entry.path / MANIFEST_SUM) != _sum_line(entry.path / MANIFEST):
            raise DamagedError(f"the checksum of {MANIFEST} does not match {MANIFEST_SUM}")
        body = json.loads(_read(entry.path / MANIFEST))
    except (FileNotFoundError, NotADirectoryError, UserError, ValueError, RecursionError) as error:
        raise DamagedError(f"no readable manifest: {error}") from error
    try:
        return _manifest_of(entry, body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # its checksum is right: somebody wrote it so
        raise DamagedError(f"no readable manifest: {error!r}") from error


def _manifest_of(entry: CheckpointEntry, body: Any) -> tuple[Manifest, dict[str, FileSum]]:
    if body["format"] not in (FORMAT, FORMAT_ON_BASE):
        raise UserError(
            f"{entry.path} has checkpoint format {body['format']}, this version of echelon reads {FORMAT_ON_BASE}: "
            f"use the version that wrote it"
        )
    if body["step"] != entry.step:
        raise DamagedError(f"it was written at step {body['step']}, not {entry.step}: the folder was renamed")
    metric = None if body["metric"] is None else float(body["metric"])
    files = {name: FileSum(file["bytes"], file["sha256"]) for name, file in body["files"].items()}
    return Manifest(body["step"], metric, sum(file.bytes for file in files.values()), body.get("base", "")), files


def _read(path: Path) -> bytes:
    with open_plain(path) as file:
        return file.read()


def _sum_line(path: Path) -> bytes:
    return f"{sha256_of(path)}  {path.name}\n".encode()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises OSError."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def in_words(error: OSError, folder: Path, step: int, n_bytes: int) -> UserError:
    """Say why the checkpoint of a step, of so many bytes, could not be written; a full disk with what it needs."""
    words = f"cannot write the checkpoint of step {step} in {folder}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(folder).free
        words = (
            f"the disk of {folder} is full: the checkpoint of step {step} needs {n_bytes} bytes and {free} are free; "
            f"the checkpoints before it are whole: free some space and resume"
        )
    said = UserError(words)
    said.__cause__ = error
    return said
