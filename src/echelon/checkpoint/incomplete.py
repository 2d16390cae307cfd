"""Checkpoints whose other parts lie on the disks of other machines: what rank 0 has of them until all have come.

    checkpoints/incomplete-00000123-0f3a.../   sealed like a checkpoint, but for what is in `arrived`
      model-00001-of-00001.safetensors, tree.json, part-00000.safetensors
      lacking.json                             which parts lie elsewhere
      arrived/part-00001.json                  what is known of a part: where it lies, its size and its SHA-256
      arrived/part-00001.safetensors           the part, once it has come

It is durable as soon as its folder has this name, and becomes a checkpoint once all parts have come. A run that is
started again on the same machines has all parts, and goes on from it as well.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.checkpoint import files
from echelon.checkpoint.files import INCOMPLETE, CheckpointEntry, DamagedError
from echelon.checkpoint.parts import part_file
from echelon.checkpoint.tree import unflatten
from echelon.core.files import write_atomic
from echelon.messages.plain import Malformed, from_plain, to_plain

TREE_FILE = "tree.json"
LACKING_FILE = "lacking.json"
ARRIVED = "arrived"


@dataclass(frozen=True)
class Lacking:
    """Which parts of a checkpoint lie on the disks of other machines than rank 0's.

    Attributes:
        token: names the parts on those disks.
        ranks: of the run.
        away: whose parts they are.
        is_agreed: what is here has what the replicas agree on; else that is told from their parts.
        reason: why it was saved.
        blocked_s: how long its ranks stood still for it.
        saved_t: when, in unix seconds.
    """

    token: int
    ranks: int
    away: tuple[int, ...]
    is_agreed: bool
    reason: str = ""
    blocked_s: float = 0.0
    saved_t: float = 0.0


@dataclass(frozen=True)
class PartNote:
    """What is known of a part that lies elsewhere."""

    host: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class IncompleteCheckpoint:
    """A checkpoint that lacks parts, as its folder tells."""

    path: Path
    step: int
    metric: float | None
    base: str
    lacking: Lacking

    def arrived(self, rank: int) -> Path:
        """Return where the part of a rank on another machine is put, once it has come whole."""
        return self.path / ARRIVED / part_file(rank)

    @property
    def missing(self) -> list[int]:
        """The ranks whose parts have not come."""
        return [rank for rank in self.lacking.away if not self.arrived(rank).exists()]

    @property
    def can_come(self) -> bool:
        """Whether it is known of all parts that have not come where they lie: else no start can complete it."""
        return self.notes().keys() >= set(self.missing)

    def note(self, rank: int, note: PartNote) -> None:
        """Keep what is known of a part. Raises OSError."""
        self.arrived(rank).parent.mkdir(exist_ok=True)
        write_atomic(self.arrived(rank).with_suffix(".json"), json.dumps(to_plain(note)))

    def notes(self) -> dict[int, PartNote]:
        """Return what is known of parts that lie elsewhere, by rank; without all of it nobody can tell them apart."""
        found = {}
        for rank in self.lacking.away:
            with suppress(FileNotFoundError, ValueError):  # it was not written yet: the part was not, either
                found[rank] = from_plain(PartNote, json.loads(self.arrived(rank).with_suffix(".json").read_bytes()))
        return found

    def check(self) -> None:
        """Compare what is here with its checksums, but for parts that have come. Raises DamagedError, OSError."""
        files.verify(self._entry, beside={ARRIVED})

    def entry(self, key: str) -> Any:
        """Return an entry of the state that has no tensors. Raises OSError, KeyError, ValueError."""
        tree = json.loads((self.path / TREE_FILE).read_bytes())
        return unflatten(dict(tree["dict"])[key], {})

    def drop_changed(self) -> list[int]:
        """Remove parts that have come and are not what their ranks wrote; returns whose they were. Raises OSError."""
        notes = self.notes()
        here = [rank for rank in self.lacking.away if self.arrived(rank).exists()]
        changed = [r for r in here if r not in notes or files.sha256_of(self.arrived(r)) != notes[r].sha256]
        for rank in changed:
            self.arrived(rank).unlink()
        return changed

    def sums(self) -> dict[str, str]:
        """Return the SHA-256 of the ranks' files that are here, by name. Raises DamagedError, OSError."""
        here = files.file_sums(self._entry)
        known = {part_file(rank): note.sha256 for rank, note in self.notes().items()}
        return known | {name: file.sha256 for name, file in here.items() if name in self._names}

    def link_parts(self, folder: Path) -> list[str]:
        """Make a folder with all parts and what is known of their sums; returns the parts' names. Raises OSError."""
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        sums = self.sums()
        for rank, name in enumerate(self._names):
            source = self.arrived(rank) if rank in self.lacking.away else self.path / name
            _link(source, folder / name)
            if name in sums:
                files.note_sum(folder / name, sums[name])
        return self._names

    @property
    def _names(self) -> list[str]:
        return [part_file(rank) for rank in range(self.lacking.ranks)]

    @property
    def _entry(self) -> CheckpointEntry:
        return CheckpointEntry(self.step, 1, self.path)


def incomplete_path(folder: Path, step: int, token: int) -> Path:
    """Return where a checkpoint lies that lacks parts."""
    return folder / f"{INCOMPLETE}{step:08d}-{token:016x}"


def write_lacking(folder: Path, lacking: Lacking) -> None:
    """Write into a folder that is about to be sealed which parts it lacks. Raises OSError."""
    files.write_durable(folder / LACKING_FILE, json.dumps(to_plain(lacking)).encode())


def incompletes(folder: Path) -> list[IncompleteCheckpoint]:
    """Return the checkpoints in a folder that lack parts, from old to new; no damaged ones. Raises OSError."""
    found = []
    for entry in files.incomplete_entries(folder):
        with suppress(DamagedError, FileNotFoundError, Malformed, ValueError):
            manifest = files.read_manifest(entry)
            lacking = from_plain(Lacking, json.loads((entry.path / LACKING_FILE).read_bytes()))
            found.append(IncompleteCheckpoint(entry.path, manifest.step, manifest.metric, manifest.base, lacking))
    return sorted(found, key=lambda incomplete: (incomplete.step, incomplete.lacking.saved_t))


def superseded(
    present: Sequence[IncompleteCheckpoint], whole_step: int, tokens: Set[int]
) -> list[IncompleteCheckpoint]:
    """Return what nobody needs any more of checkpoints that lack parts, given from old to new.

    Needed are, of those that go on to be completed, the oldest, whose parts may be on their way, the newest, and the
    one of the highest metric.

    Args:
        whole_step: of the newest checkpoint that is whole.
        tokens: of those that go on to be completed; others are of a process that has ended.
    """
    coming = [each for each in present if each.lacking.token in tokens]
    needed = [*coming[:1], *coming[-1:], *sorted((c for c in coming if c.metric is not None), key=_metric)[-1:]]
    stale = [each for each in present if each.lacking.token not in tokens and each.step <= whole_step]
    return [*stale, *(each for each in coming if each not in needed)]


def _metric(incomplete: IncompleteCheckpoint) -> float:
    assert incomplete.metric is not None
    return incomplete.metric


class HomeParts:
    """Parts that a rank has written to the disk of its own machine, which rank 0 does not see.

    They lie in `parts` of the run's folder there, as `<token>-part-00001.safetensors`.
    """

    def __init__(self, run_folder: Path, rank: int) -> None:
        """Take the run's folder on this machine."""
        self.folder, self.rank = run_folder / "parts", rank

    def path(self, token: int, rank: int | None = None) -> Path:
        """Return where the part of this rank lies, or that of another one of its machine."""
        return self.folder / f"{token:016x}-{part_file(self.rank if rank is None else rank)}"

    def is_there(self, token: int, rank: int, note: PartNote) -> bool:
        """Whether a part is here, byte for byte. Raises OSError."""
        path = self.path(token, rank)
        if not path.is_file() or path.stat().st_size != note.n_bytes:
            return False
        return files.sha256_of(path) == note.sha256

    def keep_only(self, tokens: Set[int], of_all: bool = False) -> None:
        """Remove parts of other tokens: this rank's, or all on this machine's disk. Raises OSError."""
        of_ranks = "part-*" if of_all else Path(part_file(self.rank)).stem
        wanted = {self.path(token).name.partition("-")[0] for token in tokens}
        for path in self.folder.glob(f"*-{of_ranks}.*"):
            if path.name.partition("-")[0] not in wanted:
                path.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without hard links
        shutil.copyfile(source, target)
