"""The checkpoints of one run: each is one folder that is there whole, or not at all."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from echelon.checkpoint import files
from echelon.checkpoint.files import CheckpointEntry, DamagedError, Manifest
from echelon.checkpoint.hashed_file import yield_to_training
from echelon.checkpoint.incomplete import (
    TREE_FILE,
    IncompleteCheckpoint,
    Lacking,
    incomplete_path,
    incompletes,
    superseded,
    write_lacking,
)
from echelon.checkpoint.parts import (
    RANKS,
    GivenUp,
    StoredPart,
    WrittenTensors,
    await_parts,
    check_complete,
    join_parts,
    mapped,
)
from echelon.checkpoint.staging import Staging
from echelon.checkpoint.tensors import TENSORS, read_tensors, write_tensors
from echelon.checkpoint.tree import flatten, slots, unflatten
from echelon.core.errors import UserError
from echelon.core.patience import Patience, may_pass
from echelon.core.state_tree import StateTree, StateView

WRITING = "checkpoint"
"""What patience with the disk calls it."""

_LOCK_DEADLINE_S = 10.0

R = TypeVar("R")

Complete = Callable[[StateView, Sequence[StoredPart]], StateView]
"""Makes the state that is saved of what was given and of the ranks' parts."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint on the disk.

    Attributes:
        blocked_s: how long the caller of `save` waited.
        total_s: from then until it was whole.
        reason: as given to `save`.
        alone_s: how long it would have taken without training beside; None: as long as it did.
    """

    step: int
    path: Path
    metric: float | None
    n_bytes: int
    blocked_s: float
    total_s: float
    reason: str = ""
    alone_s: float | None = None


@dataclass(frozen=True)
class _Job:
    step: int
    metric: float | None
    tree: Any
    tensors: dict[str, Tensor]
    started_s: float
    blocked_s: float
    arriving: Arriving | None
    reason: str
    left_out: Set[str] = frozenset()
    base: _Job | None = None  # not written yet


@dataclass(frozen=True)
class Arriving:
    """Files of parts that ranks write by themselves.

    Attributes:
        folder: where they appear.
        names: of the files, by rank.
        complete: is called in the writer's thread, maybe more than once; the ranks' own states are added after it.
        with_own: whether they are.
        written: tensors of the state that `save` is given which lie in these files: they are not written again.
        given_up: set when parts that are missing will not come.
        is_settled: set when all have come, or are given up.
        lacking: which parts lie on other machines: without them it is no checkpoint yet (`CheckpointStore.complete`).
    """

    folder: Path
    names: list[str]
    complete: Complete
    with_own: bool = True
    written: WrittenTensors = field(default_factory=WrittenTensors)
    given_up: threading.Event = field(default_factory=threading.Event)
    is_settled: threading.Event = field(default_factory=threading.Event)
    lacking: Lacking | None = None


@dataclass(frozen=True)
class BaseState:
    """What a checkpoint leaves out, for it stays as it is: written once beside the checkpoints, which name its hash.

    Attributes:
        names: of what it is; they are keys of the state's entries.
        state: with the same keys as in a whole state; None: the store has it already (`has_base`).
        arriving: parts of it that ranks write by themselves.
    """

    names: Set[str]
    state: StateView | None = None
    arriving: Arriving | None = None


class CheckpointStore:
    """Saves, finds and reads the checkpoints in `folder`.

    Reading never changes anything, so that any process may do it. The first `save` makes this process the writer:
    it takes the folder's lock (UserError when another process holds it) and removes what a killed writer left.

    Kept are the `keep` newest checkpoints and the one of the highest metric; the others are removed once the new one
    is on the disk. One of a later step than that just saved is of a run that was rolled back, and is removed too.

    `on_saved` is called from the writer's thread when `save` works in the background. `on_rejected` is told of each
    damaged checkpoint that was passed over and why; without it, this is logged as a warning.
    `deadline_s` bounds every wait for the background writer.

    With `patience` a save that the disk does not take now is tried again, in the background, until it is written; only
    when patience is over is it an error.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        on_saved: Callable[[Saved], None] | None = None,
        on_rejected: Callable[[Path, str], None] | None = None,
        deadline_s: float = 600.0,
        patience: Patience | None = None,
    ) -> None:
        if keep < 1:
            raise UserError(f"checkpoints to keep: {keep}: keep at least 1")
        self.folder = folder
        self.keep = keep
        self.deadline_s = deadline_s
        self._on_saved = on_saved
        self._on_rejected = on_rejected
        self._patience = patience
        self._in_turns = False
        self._lock: int | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._staging = Staging()
        self._base = ""
        self._left_out: Set[str] = frozenset()
        self._arriving: Arriving | None = None  # of the save that was begun last
        self._metric: float | None = None  # likewise; None also once it was given up
        self._coming: set[int] = set()  # tokens of what lacks parts, and is to be completed by this process
        self._changes = threading.Lock()  # of the folder: a checkpoint is completed in another thread than is saved in

    def has_base(self, names: Set[str]) -> bool:
        """Whether a base is there with all of these names: this store's, or where others save too, the newest one's."""
        if names and not self._base:
            for entry in files.entries(self.folder)[-1:]:
                with suppress(DamagedError, FileNotFoundError, UserError):  # then it is written anew
                    if files.read_manifest(entry).base:
                        self._read(entry, None)
        return bool(self._base) and names <= self._left_out

    def claim(self, in_turns: bool = False, takes_over: bool = False) -> None:
        """Become the writer of the folder, as the first `save` does by itself.

        Args:
            in_turns: other processes of the run save here too, as workers of a parameter server do: the lock is given
                back once the next checkpoint is written, and one that another holds is a disk that takes nothing now.
            takes_over: with `in_turns`, from whom had the turn before and does not answer; what it still writes when it
                wakes is given up.

        Raises:
            UserError: this process may not be it.
            OSError: the disk fails, or another writer has its turn, for now; only with patience.
        """
        if self._lock is not None:
            return
        self._in_turns = in_turns
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._take(0.0 if in_turns else min(_LOCK_DEADLINE_S, self.deadline_s), takes_over)
            files.clean(self.folder)
        except BlockingIOError as error:
            if in_turns:
                raise
            raise UserError(
                f"{self.folder}: another run is saving its checkpoints here: give this one a folder of its own"
            ) from error
        except OSError as error:
            if self._patience is not None and may_pass(error):
                raise
            raise UserError(f"cannot keep checkpoints in {self.folder}: {error.strerror or error}") from error

    def _take(self, deadline_s: float, takes_over: bool) -> int:
        try:
            return files.lock(self.folder, deadline_s)
        except BlockingIOError:
            if not takes_over:
                raise
            return files.take_lock(self.folder)

    def save(
        self,
        step: int,
        state: StateView,
        *,
        metric: float | None = None,
        background: bool = True,
        arriving: Arriving | None = None,
        base: BaseState | None = None,
        reason: str = "",
    ) -> None:
        """Save `state` as the checkpoint of `step`; a higher `metric` is better (give a loss with a minus sign).

        Tensors are copied before this returns, but for those under `RANKS`, which have memory of their own (of
        `gather_rank_state`, `copy_state`) and belong to the store from now on. With `background` the rest happens in a
        thread, and what it raises is raised by the next `save` or `wait`. A save that still runs is waited for. Files
        that are `arriving` are waited for in the background, and become part of the checkpoint: the state has no
        `RANKS` then. What the state leaves out is in its `base`. `on_saved` is told the `reason`.
        Raises UserError when the disk is full or the folder cannot be written, TimeoutError when the one before is
        not done after `deadline_s`, TypeError for a value that a checkpoint cannot hold.
        """
        started_s = time.monotonic()
        if step < 0:
            raise ValueError(f"step {step}: steps count from 0")
        self.wait()
        self._insist(self.claim)
        if base is None:
            self._base, self._left_out = "", frozenset()
        tree, staged = _staged(state, arriving, self._staging)
        of_base = None
        if base is not None and base.state is not None:
            of_base = _Job(
                0, None, *_staged(base.state, base.arriving, Staging()), started_s, 0.0, base.arriving, reason
            )
        blocked_s = time.monotonic() - started_s
        job = _Job(
            step,
            _finite(metric),
            tree,
            staged,
            started_s,
            blocked_s,
            arriving,
            reason,
            frozenset() if base is None else base.names,
            of_base,
        )
        self._arriving, self._metric = arriving, job.metric
        if arriving is not None and arriving.lacking is not None:
            self._coming.add(arriving.lacking.token)  # not in the thread, which may come to it after giving up
        # Not a daemon: an interpreter that ends normally finishes the checkpoint first.
        self._thread = threading.Thread(target=self._run, args=(job, background), name="echelon-checkpoint")
        self._thread.start()
        if not background:
            self.wait()

    def room_for_parts(self, token: int, of_base: bool = False) -> Path:
        """Make the folder where ranks put their parts of the checkpoint that comes next; removed if it never comes.

        It becomes the checkpoint, or its base. Raises as `claim` does.
        """
        self.wait()
        self.claim()
        folder = self.parts_folder(token, of_base)
        folder.mkdir(exist_ok=True)
        return folder

    def parts_folder(self, token: int, of_base: bool = False) -> Path:
        """Return the folder of `room_for_parts`, for ranks that only know the token."""
        return files.temporary(self.folder / f"{'base' if of_base else 'parts'}-{token:016x}")

    def give_up_arriving(self) -> None:
        """Give up checkpoints that wait for parts: a rank that was to write one is gone, or has another number.

        One whose parts are all there is written to its end. What lies on other machines stays there.
        """
        self._coming.clear()
        if self._arriving is not None:
            self._arriving.given_up.set()

    def keeps(self, metric: float) -> bool:
        """Whether a checkpoint with a metric is on the disk, or will be: one that waits for lost ranks is given up."""
        self.give_up_arriving()
        self._join_where_given_up()
        return self._metric_under_way == metric or any(
            known == metric for known, _ in files.scored(files.entries(self.folder))
        )

    def _join_where_given_up(self) -> None:
        """Wait until the writer knows whether all parts have come."""
        arriving, thread = self._arriving, self._thread
        while arriving is not None and thread is not None and thread.is_alive() and not arriving.is_settled.is_set():
            arriving.is_settled.wait(0.05)  # looks whether the writer has ended otherwise

    @property
    def _metric_under_way(self) -> float | None:
        return self._metric if self.is_writing else None

    @property
    def is_writing(self) -> bool:
        """Whether the background writer has not finished, or waits for the disk."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def _deadline_s(self) -> float:
        return self.deadline_s + (self._patience.limit_s if self._patience is not None else 0.0)

    def wait(self) -> None:
        """Wait for the background writer and raise what it raised.

        Raises:
            TimeoutError: it is not done after `deadline_s`, and what patience adds.
        """
        if self._thread is not None:
            self._thread.join(self._deadline_s)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"a checkpoint in {self.folder} is not written after {self._deadline_s:g} s: is its disk stuck?"
                )
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the background writer, then let another process write here."""
        try:
            self.wait()
        finally:
            if self._thread is None:
                self._staging.clear()
                self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            files.unlock(self._lock)
            self._lock = None

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint by its name, whole or not; None where there is none."""
        return max((entry.step for entry in files.entries(self.folder)), default=None)

    def newest(self, rank: int | None = None) -> tuple[int, StateView] | None:
        """Return step and state of the newest checkpoint that is whole, or None where none was ever saved.

        Every byte is compared with its checksum; a damaged checkpoint is reported and the one before it is used.
        With `rank`, of the parts in `state["ranks"]` only that rank's is read.
        Raises UserError when there are checkpoints and all are damaged: starting over would remove them.
        """
        return self._first_whole(list(reversed(files.entries(self.folder))), rank)

    def best(self, rank: int | None = None) -> tuple[int, StateView] | None:
        """Return step and state of the whole checkpoint with the highest metric, or None where none has a metric."""
        scored = sorted(files.scored(files.entries(self.folder)), reverse=True)
        return self._first_whole([entry for _, entry in scored], rank)

    def newest_base(self) -> StateView | None:
        """Return what the newest checkpoint leaves out; None: there is none, or it leaves nothing out.

        Raises:
            UserError: it cannot be read.
        """
        for entry in files.entries(self.folder)[-1:]:
            for base in files.bases_of([entry]):
                try:
                    return _read(base, None)[0]
                except DamagedError as error:
                    raise files.without_base(entry, base, error) from error
        return None

    def load(self, path: Path, rank: int | None = None) -> StateView:
        """Return the state of the checkpoint at `path`. Raises UserError when it is none, or a damaged one."""
        entry = next((entry for entry in files.entries(path.parent) if entry.path.name == path.name), None)
        if entry is None:
            raise UserError(f"{path} is no checkpoint: give one of the folders named step-...")
        try:
            return self._read(entry, rank)
        except DamagedError as error:
            raise files.damaged(path, error) from error

    def _first_whole(self, candidates: list[CheckpointEntry], rank: int | None) -> tuple[int, StateView] | None:
        for entry in candidates:
            try:
                return entry.step, self._read(entry, rank)
            except DamagedError as error:
                self.reject(entry.path, str(error))
        if candidates:
            raise files.none_whole(self.folder, len(candidates))
        return None

    def _read(self, entry: CheckpointEntry, rank: int | None) -> StateView:
        state, manifest = _read(entry, rank)
        self._base, base = manifest.base, files.base_of(entry, manifest)
        if base is None:
            return state
        try:
            held, _ = _read(base, None)
        except (DamagedError, FileNotFoundError, NotADirectoryError) as error:
            raise files.without_base(entry, base, error) from error
        self._left_out = _inner_names(held) - _inner_names(state)
        return _overlaid(held, state)

    def reject(self, path: Path, reason: str) -> None:
        """Tell of a checkpoint that is not used."""
        if self._on_rejected is not None:
            self._on_rejected(path, reason)
        else:
            logging.getLogger(__name__).warning("checkpoint %s is not used: %s", path, reason)

    def coming(self) -> list[IncompleteCheckpoint]:
        """Return what this process saved and lacks parts, from old to new. Raises OSError."""
        return [each for each in incompletes(self.folder) if each.lacking.token in self._coming]

    def adopt(self, incomplete: IncompleteCheckpoint) -> None:
        """Go on with what another process saved and lacks parts: they are here, or on their way."""
        self._coming.add(incomplete.lacking.token)

    def complete(self, incomplete: IncompleteCheckpoint, complete: Complete, brought_s: float = 0.0) -> None:
        """Make a checkpoint of one whose parts have all come; any thread may call it, one at a time.

        Args:
            brought_s: for how long the link to them was used.

        Raises:
            DamagedError: what is here of it is not what was written.
            UserError: the disk takes nothing for longer than patience lasts.
        """
        lacking, begun_s = incomplete.lacking, time.monotonic()
        self._insist(self.claim)
        with self._changes:
            target, manifest = self._insist(lambda: self._write_complete(incomplete, complete))
            self._insist(lambda: files.remove(incomplete.path))
            self._insist(lambda: self._prune(target, manifest))
        self._coming.discard(lacking.token)
        if self._on_saved is not None:
            total_s = max(0.0, time.time() - lacking.saved_t)
            alone_s = brought_s + time.monotonic() - begun_s
            saved = Saved(
                incomplete.step, target.path, manifest.metric, manifest.n_bytes, lacking.blocked_s, total_s,
                lacking.reason, alone_s,
            )  # fmt: skip
            self._on_saved(saved)

    def _write_complete(self, incomplete: IncompleteCheckpoint, complete: Complete) -> tuple[CheckpointEntry, Manifest]:
        """Write the whole checkpoint beside what lacks parts, which stays; of what ranks wrote it has links."""
        incomplete.check()
        folder = self.parts_folder(incomplete.lacking.token)
        arriving = Arriving(folder, incomplete.link_parts(folder), complete)
        tree = json.loads((incomplete.path / TREE_FILE).read_bytes())
        tensors = read_tensors(incomplete.path, (slot for slot in slots(tree) if not slot.file))
        job = _Job(incomplete.step, incomplete.metric, tree, tensors, 0.0, 0.0, arriving, incomplete.lacking.reason)
        target = files.free_entry(self.folder, job.step)
        return target, self._write_folder(job, target.path, incomplete.base)[0]

    def _run(self, job: _Job, background: bool) -> None:
        if background:
            yield_to_training()
        try:
            with self._changes:
                self._save(job, background)
        except GivenUp as given_up:
            logging.getLogger(__name__).warning("the checkpoint of step %d is given up: %s", job.step, given_up)
            if job.arriving is not None:
                files.remove(job.arriving.folder)
            if self._in_turns:
                self._unlock()
        except OSError as error:
            jobs = (job,) if job.base is None else (job, job.base)
            need = sum(tensor.nbytes for each in jobs for tensor in each.tensors.values())
            self._failure = files.in_words(error, self.folder, job.step, need)
        except BaseException as error:  # noqa: BLE001 - kept for `wait`, which raises it where it can be handled
            self._failure = error

    def _save(self, job: _Job, background: bool) -> None:
        if job.base is not None:
            of_base = job.base
            self._base, self._left_out = self._insist(lambda: self._write_base(of_base)), job.left_out
        lacking = None if job.arriving is None else job.arriving.lacking
        target, manifest = self._insist(lambda: self._write(job))
        self._insist(
            lambda: self._prune(target, manifest) if lacking is None else self._drop_incomplete(job.step, set())
        )
        if self._in_turns:
            self._unlock()
        total_s = time.monotonic() - job.started_s
        if self._on_saved is not None and lacking is None:
            blocked_s = job.blocked_s if background else total_s
            self._on_saved(Saved(job.step, target.path, job.metric, manifest.n_bytes, blocked_s, total_s, job.reason))

    def _insist(self, action: Callable[[], R]) -> R:
        def in_turn() -> R:
            """Act; it is no fault of the disk where another worker has taken the turn, and cleaned up here."""
            try:
                return action()
            except OSError:
                self._check_turn()
                raise

        return in_turn() if self._patience is None else self._patience.insist(WRITING, in_turn)

    def _check_turn(self) -> None:
        """Give a checkpoint up whose writer did not answer for so long that another worker has taken its turn."""
        if self._in_turns and self._lock is not None and not files.has_lock(self.folder, self._lock):
            raise GivenUp("another worker has taken the turn of this one, which did not answer")

    def _write(self, job: _Job) -> tuple[CheckpointEntry, Manifest]:
        """Write a checkpoint whole, or leave nothing but the parts that ranks have written."""
        if job.left_out and not self._base:
            raise ValueError("a checkpoint that leaves something out needs its base")
        target = files.free_entry(self.folder, job.step)
        if job.arriving is not None and job.arriving.lacking is not None:
            target = replace(target, path=incomplete_path(self.folder, job.step, job.arriving.lacking.token))
        return target, self._write_folder(job, target.path, self._base if job.left_out else "")[0]

    def _write_base(self, job: _Job) -> str:
        """Write a base whole, where it is not there already; returns the SHA-256 of its manifest."""
        found: list[str] = []

        def under_its_sum(unfinished: Path) -> Path:
            """Return the folder that a base becomes; its own where there is one, which is the same."""
            found.append(files.manifest_sum(unfinished))
            return files.base_entry(self.folder, found[-1]).path

        self._write_folder(job, files.base_entry(self.folder, "new").path, "", under_its_sum)
        files.sync(self.folder)
        return found[-1]

    def _write_folder(
        self, job: _Job, target: Path, base: str, named: Callable[[Path], Path] | None = None
    ) -> tuple[Manifest, Path]:
        """Write a folder of tensors, tree and manifest whole, or leave nothing but the parts that ranks have written.

        Args:
            base: of which the manifest tells.
            named: says what it is called, once it is written.
        """
        unfinished = files.temporary(target) if job.arriving is None else job.arriving.folder
        parts = [] if job.arriving is None else job.arriving.names
        tree, tensors = job.tree, job.tensors
        lacking = None if job.arriving is None else job.arriving.lacking
        if job.arriving is not None:
            try:
                await_parts(unfinished, parts, self._deadline_s, job.arriving.given_up)
            except GivenUp:
                self._metric = None
                raise
            finally:
                job.arriving.is_settled.set()
            if lacking is None:
                tree, tensors = _with_parts(job, job.arriving)
        else:
            unfinished.mkdir(exist_ok=True)
        try:
            sums = files.noted_sums(unfinished, parts)
            files.empty(unfinished, but=parts)
            sums[TENSORS] = write_tensors(unfinished, tensors)
            files.write_durable(unfinished / TREE_FILE, json.dumps(tree).encode())
            if lacking is not None:
                stood = replace(lacking, reason=job.reason, blocked_s=job.blocked_s, saved_t=time.time())
                write_lacking(unfinished, stood)
            manifest = files.seal(unfinished, job.step, job.metric, base, sums)
            target = target if named is None else named(unfinished)
            self._check_turn()
            if named is not None and target.exists():
                files.replace_damaged(target, unfinished)  # the same one, of a process that came before
            else:
                unfinished.rename(target)
        except BaseException:
            with suppress(OSError):  # gives a full disk its room back; what is left is removed by the next try
                files.empty(unfinished, but=parts)
                if not parts:
                    unfinished.rmdir()
            self._check_turn()  # who has taken it has removed what was written
            raise
        return manifest, target

    def _prune(self, new: CheckpointEntry, manifest: Manifest) -> None:
        """Remove what is neither among the newest nor the best, what the new one replaces, and bases of no other."""
        files.sync(self.folder)
        present = files.entries(self.folder)
        self._check_turn()  # after the look: what others save from now on is not in it
        older = [entry for entry in present if entry.step < new.step]
        again = [entry for entry in present if entry.step == new.step and entry != new and manifest.metric is None]
        scored = files.scored([*older, *again])
        if manifest.metric is not None:
            scored.append((manifest.metric, new))
        kept = {*[*older, new][-self.keep :], *(entry for _, entry in sorted(scored)[-1:])}
        for entry in present:
            if entry not in kept:
                files.remove(entry.path)
        if not self._in_turns:  # else other processes may be about to name theirs
            own = files.base_entry(self.folder, self._base).path
            for path in files.unnamed_bases(self.folder):
                if path != own:
                    files.remove(path)
        self._drop_incomplete(new.step, self._coming)

    def _drop_incomplete(self, saved_step: int, later: Set[int]) -> None:
        """Remove what lacks parts and is needed no more.

        Args:
            saved_step: of what was just saved: of later steps is what was rolled back, but for
            later: tokens of what was saved after it.
        """
        files.sync(self.folder)
        present = incompletes(self.folder)
        undone = [each for each in present if each.step > saved_step and each.lacking.token not in later]
        present = [each for each in present if each not in undone]
        for each in [*undone, *superseded(present, self.newest_step() or 0, self._coming)]:
            files.remove(each.path)
            self._coming.discard(each.lacking.token)


def _with_parts(job: _Job, arriving: Arriving) -> tuple[StateTree, dict[str, Tensor]]:
    """Return a save's tree and tensors, completed from what the ranks have written."""
    written = WrittenTensors()
    parts = [StoredPart(arriving.folder / name, written) for name in arriving.names]
    given = unflatten(job.tree, {**job.tensors, **mapped(arriving.folder, job.tree, written)})
    tree, tensors = written.refer(*flatten(arriving.complete(given, parts)))
    if not arriving.with_own:
        return tree, tensors
    check_complete(parts)
    return {"dict": [*tree["dict"], [RANKS, {"dict": [part.own_tree for part in parts]}]]}, tensors


def _staged(state: StateView, arriving: Arriving | None, staging: Staging) -> tuple[Any, dict[str, Tensor]]:
    """Return a state's tree and copies of its tensors, but for those under `RANKS` and those that lie in a part."""
    tree, tensors = flatten(state)
    if arriving is not None:
        tree, tensors = arriving.written.refer(tree, tensors)
    ready = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{RANKS}.")}
    return tree, ready | staging.copy({name: tensor for name, tensor in tensors.items() if name not in ready})


def _inner_names(state: StateView) -> set[str]:
    return {name for entry in state.values() if isinstance(entry, Mapping) for name in entry}


def _overlaid(base: StateView, state: StateView) -> StateView:
    """Return a base with what a checkpoint has in place of it, key by key."""
    both = {key: _overlaid(base[key], state[key]) for key in base if isinstance(state.get(key), Mapping)}
    return {**base, **state, **both}


def _read(entry: CheckpointEntry, rank: int | None) -> tuple[StateView, Manifest]:
    """Return the state in a folder, and its manifest."""
    try:
        manifest = files.verify(entry)
        tree = json.loads((entry.path / TREE_FILE).read_bytes())
        if rank is not None:
            tree = _only_rank(tree, rank)
        state = unflatten(tree, read_tensors(entry.path, slots(tree)))
    except OSError as error:
        if error.errno not in files.READ_ERRORS_OF_DAMAGE:
            raise
        raise DamagedError(f"it cannot be read: {error}") from error
    if not isinstance(state, Mapping):
        raise DamagedError(f"it holds a {type(state).__name__}, not a state")
    joined: StateView = join_parts(state, entry.path)
    return joined, manifest


def _only_rank(tree: StateTree, rank: int) -> StateTree:
    def of_rank(key: Any, value: Any) -> Any:
        """Return an encoded item of the tree; of those that differ by rank only this rank's."""
        return {"dict": [item for item in value["dict"] if item[0] == rank]} if key == RANKS else value

    return {"dict": [[key, of_rank(key, value)] for key, value in tree["dict"]]}


def _finite(metric: float | None) -> float | None:
    return None if metric is None or not math.isfinite(metric) else float(metric)
