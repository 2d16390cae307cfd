"""Checkpoints of a run: each rank writes its part, rank 0 the rest and the manifest over all; found again by all."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.checkpoint import (
    RANKS,
    WRITING,
    WRITING_PART,
    AlikeTensors,
    Arriving,
    BaseState,
    CheckpointStore,
    PartWriter,
    RankPart,
    Saved,
    StoredPart,
    broadcast_state,
    copy_state,
    merge,
    part_file,
    take_parts,
    whole,
)
from echelon.checkpoint.files import INCOMPLETE, chosen
from echelon.checkpoint.incomplete import Lacking
from echelon.core.errors import UserError
from echelon.core.figure import ReportSection
from echelon.core.files import write_atomic
from echelon.core.patience import Patience
from echelon.core.state_tree import StateView
from echelon.core.task import BestResult, Stagnation
from echelon.records.events import CheckpointRejected, StartedOver
from echelon.records.file import Recorder, newest
from echelon.records.kinds import Checkpoint
from echelon.sync.base import AGREED_FROM
from echelon.tasks.base import PendingSection, Task
from echelon.trainer.evaluate import EvaluationReport
from echelon.trainer.folder import CHECKPOINTS_FOLDER, locked
from echelon.trainer.own_disks import OwnDisks, away_ranks, complete_from_machines
from echelon.trainer.sharded_state import list_groups, model_parts, to_parts
from echelon.trainer.state import (
    SINCE,
    Cursor,
    Fingerprint,
    RunParts,
    agreed_state,
    frozen_state,
    is_agreed,
    is_same_tuning,
    layout_of,
    load_rank_state,
    load_shared_state,
    rank_state,
    saved_layout,
    shared_state,
    with_agreed,
)
from echelon.trainer.world import World

EVALUATION_FILE = "evaluation.json"
_POLL_S = 0.05


@dataclass(frozen=True)
class Captured:
    """A run's state as a tree of tensors and plain values.

    Attributes:
        arriving: files of parts that ranks write by themselves.
        base: what it leaves out, for it stays as it is; None: nothing.
    """

    tree: StateView
    arriving: Arriving | None = None
    base: BaseState | None = None


@dataclass(frozen=True)
class _Room:
    """Folders for the parts that ranks write of a checkpoint, and of its base where that is not written yet.

    Attributes:
        token: which names them.
        folder: on rank 0's disk.
    """

    token: int
    folder: Path
    of_base: Path | None


class WriterState(IntEnum):
    """What a rank's writers of checkpoints do; of several ranks the greatest counts."""

    IDLE = 0
    BUSY = 1
    FAILS = 2  # for now: it is tried again


class RunState(Protocol):
    """Where a run's state is: in its ranks, or in servers.

    Attributes:
        leads: whether this process writes it.
    """

    leads: bool

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent to bring it together."""

    def newest(self, store: CheckpointStore) -> tuple[int, StateView] | None:
        """Return the newest whole checkpoint that all see, and its step."""

    def load(self, state: StateView) -> Cursor:
        """Restore a checkpoint's state; returns how far it is."""

    def prepare(self, store: CheckpointStore, begins: bool) -> WriterState:
        """Return how all ranks' writers stand, to all alike.

        Args:
            begins: make ready what the next `captured` needs on the disk.

        Raises:
            UserError: what is being written failed for good.
        """

    def captured(self, cursor: Cursor, store: CheckpointStore) -> AbstractContextManager[Captured | None]:
        """Give the present state where it is written, None elsewhere; all ranks enter it together.

        Only when `prepare` has just said that all are idle: from here on no rank may fail for its disk.
        """

    def finish(self) -> None:
        """Wait until what ranks write by themselves is on disk."""

    def leave(self) -> None:
        """Have nothing to do any more with what other ranks write."""

    @property
    def is_writing(self) -> bool:
        """Whether this rank writes such."""


class RanksState:
    """State that ranks hold: each writes its own in a part of the checkpoint, and nothing of it goes over a link.

    What the replicas agree on is told from their parts, once these are on the disk, by rank 0's writer. Where machines
    have disks of their own, the parts come to rank 0's disk beside training (`OwnDisks`).
    """

    def __init__(self, run_parts: RunParts, world: World, patience: Patience) -> None:
        """Take the parts of a run; `patience` is this rank's, with the disk."""
        self._parts, self._world, self.leads, self._patience = run_parts, world, world.leads, patience
        self._writer = PartWriter(patience=patience)
        self._token: int | None = None  # of the room made for the ranks' next parts
        self._away: tuple[int, ...] | None = None  # who does not see rank 0's disk; None: not known yet
        self._disks: OwnDisks | None = None
        self._bytes_before = 0  # sent
        self.draws_go_on = False
        """Whether this rank's random generators go on from where a checkpoint has them."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent to bring the state together."""
        return self._bytes_before + (self._disks.sent_bytes if self._disks is not None else 0)

    @property
    def is_writing(self) -> bool:
        """Whether this rank writes its part of a checkpoint."""
        return self._writer.is_writing

    def newest(self, store: CheckpointStore) -> tuple[int, StateView] | None:
        """Return the newest whole checkpoint, with what this rank alone had, or all ranks' where the layout is another.

        One that lacks parts on rank 0's disk is whole if its machines are here. Machines that do not see that disk are
        sent what it has.

        Raises:
            UserError: another machine has a newer one, or none is whole and one lacks parts that are not here.
        """
        brought = complete_from_machines(store, self._world, self._completed, self._patience)
        self._bytes_before += brought.sent_bytes
        found = store.newest(rank=self._world.rank)
        if found is not None and saved_layout(found[1]) != layout_of(self._world):
            found = store.newest()  # what other ranks had is merged
        steps = self._steps_of_all(-1 if found is None else found[0])
        newest = list(map(max, steps, self._steps_of_all(brought.hidden_step)))
        if steps[0] < max(newest):
            seen = ", ".join("none" if step < 0 else f"step {step}" for step in newest)
            raise UserError(
                f"the ranks see different checkpoints in {store.folder.parent} ({seen}): begin with the machine that "
                "has the newest one, or put --run on storage that all machines share"
            )
        if len(set(steps)) == 1:
            return found
        everything = store.newest() if self.leads else None
        state, n_bytes = broadcast_state(everything[1] if everything else None, 0, self._world.group)
        self._bytes_before += n_bytes
        # tensors of their own: some, as generators' states, may not be views of what came
        return found if steps[self._world.rank] == steps[0] else (steps[0], copy_state(state))

    def load(self, state: StateView) -> Cursor:
        """Restore what all ranks share, and this rank's own."""
        cursor = load_shared_state(self._parts, state)
        same_tuning = is_same_tuning(self._parts, state)
        self.draws_go_on = load_rank_state(self._parts, self._world, saved_layout(state), state[RANKS], same_tuning)
        return cursor

    @contextmanager
    def captured(self, cursor: Cursor, store: CheckpointStore) -> Iterator[Captured | None]:
        """Give on rank 0 the state that the replicas agree on; each rank's own is written beside it."""
        about: StateView = {
            "world_size": self._world.size, "layout": layout_of(self._world), SINCE: self._parts.since,
        }  # fmt: skip
        local = rank_state(self._parts, self._world)
        base = self._base(store) if self.leads and self._parts.split is None else None
        if self._world.group is None and self._parts.split is None:
            with agreed_state(self._parts, cursor) as state:
                whole_state = {**state, **about, RANKS: {0: copy_state(local)}}
                yield Captured(whole_state, base=base) if self.leads else None
            return
        room = self._room(store)
        folder, away = room.folder, self._disks.away if self._disks is not None else ()
        names = [part_file(rank) for rank in range(self._world.size) if rank not in away]
        arriving = Arriving(folder, names, self._completed, lacking=self._lacking(room))
        if self._parts.split is not None:
            local = _with_own_memory(local)  # the pieces are about to hold what the replicas agree on
            with agreed_state(self._parts, cursor) as state:
                shards = to_parts(state, self._parts.split.pieces)
                self._write_parts({folder: (local, shards), **self._frozen_parts(room)})
                yield Captured(about, arriving, self._base_of_parts(room)) if self.leads else None
            return
        part, rank = self._write_part(room, local), self._world.rank
        if not self.leads:
            yield None
        elif is_agreed(self._parts):
            written = part.written(rank, {"optimizer"})  # the model has other values in the block
            with agreed_state(self._parts, cursor) as state:
                yield Captured(
                    {**state, **about}, replace(arriving, complete=lambda state, _: state, written=written), base
                )
        else:
            here = replace(arriving, written=part.written(rank))
            yield Captured({**shared_state(self._parts, cursor), **about}, here, base)

    def _base(self, store: CheckpointStore) -> BaseState | None:
        """Return what checkpoints leave out, to be written where the store has not got it."""
        if not self._parts.frozen:
            return None
        known = store.has_base(self._parts.frozen)
        return BaseState(self._parts.frozen, None if known else frozen_state(self._parts))

    def _frozen_parts(self, room: _Room) -> dict[Path, tuple[StateView, StateView]]:
        """Return what this rank writes of what checkpoints leave out, by folder; nothing where it is written."""
        if room.of_base is None or self._parts.split is None:
            return {}
        shards = model_parts(frozen_state(self._parts)["model"], self._parts.split.pieces)
        return {room.of_base: ({}, {"model": shards})}

    def _base_of_parts(self, room: _Room) -> BaseState | None:
        if not self._parts.frozen:
            return None
        if room.of_base is None:
            return BaseState(self._parts.frozen)
        names = [part_file(rank) for rank in range(self._world.size)]

        def joined(_: StateView, stored: Sequence[StoredPart]) -> StateView:
            """Return what the ranks' parts hold together."""
            return dict(merge([part.shared() for part in stored]))

        return BaseState(self._parts.frozen, {}, Arriving(room.of_base, names, joined, with_own=False))

    @property
    def _writes_parts(self) -> bool:
        return self._parts.split is not None or self._world.group is not None

    def _room(self, store: CheckpointStore) -> _Room:
        """Return the folders for the ranks' parts; at first all ranks find out who does not see them.

        Raises:
            UserError: one does not, and the model is split.
        """
        token, with_base = self._agree_on_token(store)
        folder = store.parts_folder(token)
        if self._away is None:
            self._away = away_ranks(folder.is_dir(), self._world) if self._world.group is not None else ()
        if self._away and self._parts.split is not None:
            raise UserError(
                f"all ranks write parts of a checkpoint in {store.folder}, for the model is split: put --run on "
                "storage that all machines share"
            )
        if self._away and self._disks is None:
            self._disks = OwnDisks(self._world, self._away, store, self._completed, self._patience)
        return _Room(token, folder, store.parts_folder(token, of_base=True) if with_base else None)

    def _lacking(self, room: _Room) -> Lacking | None:
        """Return what a checkpoint lacks on rank 0's disk; None: nothing."""
        if self._disks is None:
            return None
        return Lacking(room.token, self._world.size, self._disks.away, is_agreed(self._parts))

    def _write_part(self, room: _Room, local: StateView) -> RankPart:
        """Write what this rank alone has where it stands: to rank 0's disk, or to that of its own machine."""
        if self._disks is None or not self._disks.is_away:
            return self._write_parts({room.folder: (local, {})})[room.folder]
        part = replace(self._part_of(local, {}, {}), is_read_soon=True)
        self._writer.write({self._disks.part_path(room.token): part})
        return part

    def _write_parts(self, states: Mapping[Path, tuple[StateView, StateView]]) -> dict[Path, RankPart]:
        """Write to each folder what this rank alone has, and what it says beside it, with its shards of the model.

        What the ranks that hold the same piece have alike is written by one of them.
        """
        file = part_file(self._world.rank)
        parts = {folder: self._part_of(own, *take_parts(beside, file)) for folder, (own, beside) in states.items()}
        self._writer.write({folder / file: part for folder, part in parts.items()})
        return parts

    def _part_of(self, local: StateView, shared: StateView, shards: Mapping[str, Tensor]) -> RankPart:
        """Return what this rank writes; what others have alike is not written where it would have to travel."""
        alike = self._parts.sync.alike(local["sync"]) if "sync" in local else []
        writers = [rank for rank in self._world.replica_ranks if rank not in (self._away or ())]
        part = RankPart.of(self._world.rank, local, shared, shards, AlikeTensors(alike, writers))
        return replace(part, is_read_soon=self._parts.sync.has_replica_state)

    def _completed(self, state: StateView, stored: Sequence[StoredPart]) -> StateView:
        """Return the state that rank 0 saves, with what the replicas agree on; called by the writer's thread."""
        if self._parts.split is not None:
            return {**list_groups(merge([part.shared() for part in stored])), **state}
        return with_agreed(self._parts, state, [part.own(AGREED_FROM) for part in stored])

    def finish(self) -> None:
        """Wait until this rank's parts are on disk; called when nothing that it has to do with them is left elsewhere.

        Raises:
            UserError: the disk is full, or cannot be written.
        """
        self._writer.wait()
        disks = self._disks
        self.leave()
        if disks is not None:
            disks.close()

    def leave(self) -> None:
        """Let what other machines have of checkpoints stay there: other ranks go on than these."""
        if self._disks is not None:
            self._bytes_before, disks, self._disks = self.bytes_sent, self._disks, None
            disks.end()

    def prepare(self, store: CheckpointStore, begins: bool) -> WriterState:
        """Return how all ranks' writers stand, to all alike; all ranks call it together.

        Args:
            begins: make room for the ranks' parts.

        Raises:
            UserError: what is being written failed for good.
        """
        if not self._writer.is_writing:
            self._writer.wait()  # raises what it failed for
        own = writer_state(self._writer.is_writing, self._patience, WRITING_PART)
        if self.leads:
            own = max(own, stand_by(store, self._patience, self._make_room if begins else None))
        is_saved = own is WriterState.IDLE  # else it is not known yet what has to come
        if self._disks is not None and is_saved and not self._disks.is_idle(hurries=not begins):
            own = WriterState.BUSY
        if self._world.group is None:
            return own
        worst = torch.tensor([own], device=self._world.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._world.group)
        return WriterState(int(worst))

    def _make_room(self, store: CheckpointStore) -> None:
        store.claim()
        if self._writes_parts and self._token is None:
            token = int(torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(time.time_ns())))
            store.room_for_parts(token)
            if self._needs_room_for_base(store):
                store.room_for_parts(token, of_base=True)
            self._token = token

    def _needs_room_for_base(self, store: CheckpointStore) -> bool:
        frozen = self._parts.frozen
        return self._parts.split is not None and bool(frozen) and not store.has_base(frozen)

    def _agree_on_token(self, store: CheckpointStore) -> tuple[int, bool]:
        """Return the name under which there is room for the ranks' parts, and whether for those of the base too."""
        agreed = torch.tensor([self._token or 0, int(self._needs_room_for_base(store))])
        self._token = None
        if self._world.group is not None:
            agreed = agreed.to(self._world.device)
            dist.broadcast(agreed, 0, group=self._world.group)
        token, with_base = agreed.tolist()
        return token, bool(with_base)

    def _steps_of_all(self, step: int) -> list[int]:
        """Return the step of the checkpoint that each rank sees; -1: of one that sees none."""
        if self._world.group is None:
            return [step]
        steps = torch.full((self._world.size,), 0, dtype=torch.int64, device=self._world.device)
        steps[self._world.rank] = step
        dist.all_reduce(steps, group=self._world.group)
        return [int(each) for each in steps.tolist()]


def writer_state(is_writing: bool, patience: Patience, what: str) -> WriterState:
    """Return what a writer does whose troubles with the disk are known by a name."""
    if not is_writing:
        return WriterState.IDLE
    return WriterState.FAILS if patience.fails(what) else WriterState.BUSY


def stand_by(
    store: CheckpointStore, patience: Patience, prepare: Callable[[CheckpointStore], None] | None
) -> WriterState:
    """Return what the writer of a store does; where it is idle, prepare the next checkpoint, if there is one.

    Raises:
        UserError: the last save failed for good, or nothing can be saved here.
    """
    if not store.is_writing:
        store.wait()  # raises what it failed for
        ready = prepare is None or patience.attempt(WRITING, lambda: prepare(store))
        return WriterState.IDLE if ready else WriterState.FAILS
    return writer_state(True, patience, WRITING)


class Saver:
    """Writes and reads the checkpoints of one run.

    A checkpoint that the disk does not take now is kept and tried again in the background while training goes on; what
    is due meanwhile is postponed, on all ranks alike.

    Attributes:
        folder: of the run.
        best: the best result so far.
        stagnation: how many evaluations in a row gave no better one (see `count_evaluation`).
        owes_evaluation: the one that an epoch's end was to have waits for the replicas' next agreement.
        evaluated_epochs: epochs whose evaluation is recorded, as far as ranks that go on when others die know.
        write_s: how long it took to write the last checkpoint, or would have taken without training beside.
        passed_over: what is wrong with checkpoints that `restore` found damaged.
        on_saved: is told of each checkpoint on the disk, by the thread that wrote it.
    """

    def __init__(self, folder: Path, keep: int, state: RunState, record: Recorder, fingerprint: Fingerprint) -> None:
        """Take a run's folder; `record` is told of what is saved, by the process that leads."""
        self.folder, self._state, self._record, self._fingerprint = folder, state, record, fingerprint
        self._patience = record.patience
        self._store = CheckpointStore(
            folder / CHECKPOINTS_FOLDER, keep, self._saved, self._rejected, patience=self._patience
        )
        self._last_step, self._bytes_before = -1, 0
        self._postponed = self._has_saved = False
        self._evaluation = ""  # not on the disk yet
        self._shown: _ShownEvaluation | None = None
        self.passed_over: list[str] = []
        self.best: BestResult | None = None
        self._best_before: BestResult | None = None  # when this process had saved none
        self._bests: list[tuple[float, BestResult]] = []  # what best checkpoints were saved with, from old to new
        self.on_saved: Callable[[Checkpoint], None] | None = None
        self.stagnation = Stagnation()
        self.owes_evaluation = False
        self.evaluated_epochs = 0
        self.write_s = 0.0

    def go_on(self, state: RunState, record: Recorder, recovery_bytes: int) -> None:
        """Go on with other ranks: what these had begun to save and cannot finish is given up.

        Args:
            state: where the run's state is from now on.
            record: is told of what is saved.
            recovery_bytes: that this rank sent to bring others where it is.
        """
        self._store.give_up_arriving()
        self._shown = None  # it is on the disk without what was on its way
        self._state.leave()
        self._bytes_before += self._state.bytes_sent + recovery_bytes
        self._state, self._record = state, record
        self._last_step = -1  # the last one may have been given up: of all ranks, one alone would know

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent to bring the state together."""
        return self._bytes_before + self._state.bytes_sent

    def is_writing(self) -> bool:
        """Whether this rank writes a checkpoint, or its part of one."""
        return self._store.is_writing or self._state.is_writing

    def kept_best(self) -> BestResult | None:
        """Return the best result whose checkpoint is on the disk, or will be: what waits for lost ranks is given up."""
        if not self._bests or self._store.keeps(self._bests[-1][0]):
            return self.best
        return next((result for score, result in reversed(self._bests) if self._store.keeps(score)), self._best_before)

    def save(self, cursor: Cursor, reason: str, metric: float | None = None, last: bool = False) -> bool:
        """Write a checkpoint in the background; all ranks call it after the same step.

        Args:
            last: wait for a disk that takes nothing, as long as patience lasts.

        Returns:
            Whether it is being written: not while the disk takes nothing. It is then due again (`is_due`).

        Raises:
            UserError: the disk has taken nothing for longer than patience lasts.
        """
        if cursor.step == self._last_step and metric is None:
            return True
        self._postponed = not self._wait_for_writers(for_disk=last)
        if self._postponed:
            return False
        self._has_saved = True
        with self._state.captured(cursor, self._store) as captured:
            if captured is not None:
                tree = {**captured.tree, "fingerprint": asdict(self._fingerprint), **self._results()}
                self._store.save(
                    cursor.step, tree, metric=metric, arriving=captured.arriving, base=captured.base, reason=reason
                )
        self._last_step = cursor.step
        return True

    def postpone(self) -> None:
        """Let a checkpoint be due as soon as one can be made: nothing of what others have saved is on this disk."""
        self._postponed = True

    def _results(self) -> StateView:
        """Return what checkpoints hold of the evaluations so far."""
        value, loss = BestResult.numbers(self.best)
        evaluations = {"stagnation": asdict(self.stagnation), "owes": self.owes_evaluation}
        return {"best": value, "best_loss": loss, **evaluations}

    def _wait_for_writers(self, for_disk: bool, begins: bool = True) -> bool:
        """Wait until no rank writes; returns at once, and False, where a disk takes nothing and is not waited for."""
        while (state := self._state.prepare(self._store, begins)) is not WriterState.IDLE:
            if state is WriterState.FAILS and not for_disk:
                return False
            time.sleep(_POLL_S)
        return True

    def is_due(self) -> bool:
        """Whether a postponed checkpoint can be tried again, as far as this process knows; called now and then.

        Raises:
            UserError: the disk has taken nothing for longer than patience lasts.
        """
        self._write_evaluation()
        if not self._store.is_writing:
            self._store.wait()  # raises what it failed for
        return self._postponed and not self._patience.waits(WRITING) and not self._store.is_writing

    def is_best(self, report: EvaluationReport, task: Task) -> bool:
        """Whether an evaluation is better than all before: by the primary metric, of equal ones by the loss."""
        result = _result_of(report, task)
        return result is not None and result.improves(self.best, task.primary)

    def consider_best(self, cursor: Cursor, report: EvaluationReport, task: Task, last: bool = False) -> bool:
        """Keep a checkpoint, and what reports show of the evaluation, when that is the best so far (see `is_best`).

        All ranks call it together. While the disk takes nothing, it is not kept, and counts for nothing.

        Args:
            last: wait for a disk that takes nothing, as long as patience lasts.

        Returns:
            Whether it is the best, and kept.
        """
        result = _result_of(report, task)
        if result is None or not self.is_best(report, task):
            return False
        best_before, self.best = self.best, result
        score, is_saved = task.primary.score(result.value), False
        try:
            is_saved = self.save(cursor, "best", metric=score, last=last)
        finally:
            if not is_saved:  # the disk takes nothing, or others were lost
                self.best = best_before
        if not is_saved:
            return False
        if not self._bests:
            self._best_before = best_before
        self._bests.append((score, result))
        if self._shown is not None:
            self._shown.pending.result()  # replaced by this one
            self._shown = None
        pending = report.collect()
        detail: Mapping[str, Any] = {}
        sections: Sequence[ReportSection] = []
        if self._state.leads:
            place = {"epoch": cursor.epoch, "step": cursor.step}
            detail = {"metrics": report.metrics, **report.result.detail, **place}
            sections = [*task.report_sections(report.result), *([report.section] if report.section else [])]
            self._evaluation = _evaluation_text(detail, sections)
        if pending is not None:
            self._shown = _ShownEvaluation(pending, detail, sections)
        self._write_evaluation()
        return True

    def count_evaluation(self, report: EvaluationReport, task: Task, delta: float) -> None:
        """Count an evaluation that was due, before it is saved: whether it is better by more than `delta`."""
        self.stagnation = self.stagnation.after(report.metrics[task.primary.name], task.primary, delta)

    def _write_evaluation(self, waits: bool = False) -> None:
        """Write what reports show of the best evaluation, once without and once with what comes from other ranks.

        Args:
            waits: for what is on its way.
        """
        if self._shown is not None and (waits or self._shown.pending.is_complete):
            shown, self._shown = self._shown, None
            section = shown.pending.result()
            if self._state.leads and section is not None:
                self._evaluation = _evaluation_text(shown.detail, [*shown.sections, section])
        path = self.folder / EVALUATION_FILE
        if self._evaluation and self._patience.attempt(path.name, lambda: write_atomic(path, self._evaluation)):
            self._evaluation = ""

    def restore(self) -> Cursor | None:
        """Restore the newest whole checkpoint that any rank sees; None when there is none.

        Raises:
            UserError: the checkpoint is of another run, or older than the newest that the record knows, or not all
                machines see it.
        """
        if self._state.leads:
            check_not_behind(self.folder, self._store.newest_step())
        found = self._state.newest(self._store)
        if found is None:
            return None
        step, state = found
        self._fingerprint.check(state["fingerprint"])
        self.best = BestResult.of(state["best"], state.get("best_loss"))  # of older ones the loss is not known
        self._last_step = step
        if "stagnation" in state:
            self.stagnation = Stagnation(**state["stagnation"])
        self.owes_evaluation = bool(state.get("owes"))
        return self._state.load(state)

    def settle(self) -> None:
        """Wait until all ranks' checkpoints are on disk; all call it together.

        Raises:
            UserError: the disk has taken nothing for longer than patience lasts, or cannot be written.
        """
        self._wait_for_writers(for_disk=True, begins=False)
        self._state.finish()

    def restore_into(self, state: RunState) -> Cursor | None:
        """Go on with another state, restored from the newest checkpoint; see `restore`."""
        self._state = state
        return self.restore()

    def finish(self) -> None:
        """Wait until everything is on disk; all ranks that saved call it together.

        Raises:
            UserError: the disk has taken nothing for longer than patience lasts, or cannot be written.
        """
        if self._has_saved:
            self._wait_for_writers(for_disk=True, begins=False)
        self._state.finish()
        self._store.close()
        self._write_evaluation(waits=True)
        while self._evaluation:
            self._write_evaluation()
            time.sleep(_POLL_S)

    def _saved(self, saved: Saved) -> None:
        """Record a checkpoint that is on the disk; called from the thread that wrote it."""
        self.write_s = saved.total_s if saved.alone_s is None else saved.alone_s
        line = Checkpoint(saved.step, saved.blocked_s, saved.total_s, saved.n_bytes, str(saved.path), saved.reason)
        self._record.write(line)
        if self.on_saved is not None:
            self.on_saved(line)

    def _rejected(self, path: Path, reason: str) -> None:
        message = _passed_over(path, reason)
        if message not in self.passed_over:
            self.passed_over.append(message)
            self._record.write(CheckpointRejected(message, str(path), reason))


def _passed_over(path: Path, reason: str) -> str:
    what = "lacks parts" if path.name.startswith(INCOMPLETE) else "is damaged"
    return f"checkpoint {path.name} {what} and was passed over: {reason}"


def check_not_behind(folder: Path, present: int | None) -> None:
    """Refuse to train again what a run's record says was saved: its checkpoint was removed, or lies elsewhere.

    Args:
        present: step of the newest checkpoint that is there; None: there is none.

    Raises:
        UserError: says which is missing.
    """
    saved = last_saved(folder)
    if saved is None or (present is not None and present >= saved):
        return
    newest = "there is none" if present is None else f"the newest one is of step {present}"
    raise UserError(
        f"{folder / CHECKPOINTS_FOLDER}: a checkpoint of step {saved} was saved here, and {newest}: put it back, "
        "or start over with --from-scratch"
    )


def last_saved(folder: Path) -> int | None:
    """Return the step of the last checkpoint that a run's record says was saved, since it last started over."""
    last = next(newest(folder, Checkpoint, StartedOver), None)
    return last.step if isinstance(last, Checkpoint) else None


def start_over(folder: Path, shared: bool = False) -> None:
    """Let a run start from its beginning: its checkpoints are put aside, under another name.

    Args:
        shared: commands of other machines may wait for this one with the folder in common.

    Raises:
        UserError: it goes on.
    """
    checkpoints = folder / CHECKPOINTS_FOLDER
    message = "starting over (--from-scratch)"
    with locked(folder, shared=shared):
        if checkpoints.exists():
            numbers = itertools.count(1)
            aside = next(path for n in numbers if not (path := folder / f"{CHECKPOINTS_FOLDER}-before-{n}").exists())
            checkpoints.rename(aside)
            message += f"; the checkpoints so far are in {aside.name}/"
        record = Recorder(folder)
        record.write(StartedOver(message))
        record.close()


@dataclass(frozen=True)
class _ShownEvaluation:
    """What reports show of an evaluation, some of which is on its way.

    Attributes:
        pending: what comes from other ranks.
        detail, sections: what is there, on the rank that writes it.
    """

    pending: PendingSection
    detail: Mapping[str, Any]
    sections: Sequence[ReportSection]


def _result_of(report: EvaluationReport, task: Task) -> BestResult | None:
    """Return what an evaluation is judged by; None: its primary metric is not defined."""
    return BestResult.of(report.metrics[task.primary.name], report.loss)


def _evaluation_text(detail: Mapping[str, Any], sections: Sequence[ReportSection]) -> str:
    return json.dumps({**detail, "sections": [asdict(section) for section in sections]})


def _with_own_memory(local: StateView) -> StateView:
    moved = ("model", "buffers")
    return {key: copy_state(value) if key in moved else value for key, value in local.items()}


def tensor_bytes(tree: object) -> int:
    """Add up the bytes of all tensors in a tree of dicts and lists."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    items = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return sum(map(tensor_bytes, items))


def state_of(folder: Path, checkpoint: str) -> StateView:
    """Read a checkpoint of a run: `best`, `newest`, or the one of a step.

    Raises:
        UserError: there is no such checkpoint, or it is not whole.
    """
    if checkpoint == "best":
        return best_state(folder)
    (entry,) = chosen(folder / CHECKPOINTS_FOLDER, checkpoint)
    state: StateView = whole(CheckpointStore(entry.path.parent, keep=1).load(entry.path))
    return state


def best_state(folder: Path) -> StateView:
    """Read the best checkpoint of a run, or the newest when none was evaluated; a damaged one is passed over and said.

    Raises:
        UserError: the run has no whole checkpoint.
    """
    rejected: dict[Path, str] = {}
    store = CheckpointStore(folder / CHECKPOINTS_FOLDER, keep=1, on_rejected=rejected.__setitem__)
    try:
        found = store.best() or store.newest()
    except UserError:  # of all that were evaluated
        found = store.newest()
    if found is None:
        raise UserError(f"{folder} holds no whole checkpoint to evaluate")
    for path, reason in rejected.items():  # the answer is that of another checkpoint than the run's best
        print(f"echelon: {_passed_over(path, reason)}", file=sys.stderr, flush=True)
    state: StateView = whole(found[1])
    return state
