"""Split replicas when a process is killed: the others save what all had trained, and the group starts again from there.

No rank updates before all have the sums of a step (`UpdateGate`). So of the survivors, some may have made an update
while the others hold its gradients: those make it now. If none has made it, the step is done again. Each piece of the
model that a replica is cut into is then whole as of one step, and a survivor that has it, or a copy of it, writes it to
a checkpoint. The argument is in `docs/decisions/elastic.md`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from echelon.checkpoint import (
    AlikeTensors,
    Arriving,
    CheckpointStore,
    PartWriter,
    RankPart,
    StoredPart,
    merge,
    part_file,
    take_parts,
)
from echelon.core.errors import RESCUED
from echelon.core.patience import Patience
from echelon.core.state_tree import StateTree, StateView
from echelon.core.task import BestResult
from echelon.parallel.local_shards import LocalShard
from echelon.records.decode import decode
from echelon.records.file import Recorder, newest
from echelon.records.kinds import Steps
from echelon.sync.base import Rescuable
from echelon.tasks.base import SAMPLE
from echelon.trainer.batches import EpochOrder
from echelon.trainer.commit import Commit
from echelon.trainer.loop import TrainingRun, fit
from echelon.trainer.membership import Membership, TermStore
from echelon.trainer.saving import Captured, WriterState, stand_by, writer_state
from echelon.trainer.second_copy import SecondCopy, share_regions
from echelon.trainer.sharded_state import list_groups, to_parts
from echelon.trainer.state import COMMON, SINCE, Cursor, RunParts, layout_of, rank_state, shared_state
from echelon.trainer.world import leave_groups

REASON = "rescue"
"""Of checkpoints that survivors save."""

_PART = "part of a checkpoint of survivors"
T = TypeVar("T")


class CannotSave(RuntimeError):
    """The survivors do not have all that was trained."""


@dataclass(frozen=True)
class _StepSums:
    """What a rank knows of a step, as `StepResult` has it."""

    step: int
    loss: float
    score: float
    samples: int
    global_units: int


@dataclass(frozen=True)
class _Told:
    """What a survivor tells the others of itself.

    Attributes:
        rank: in the group that lost one.
        recorded: the last step in the record, as far as it knows; `leads`: it wrote it.
        step: the last one that it has noted as done.
        holds: it has all sums of the step after that.
        made: it has made its update of the step after that.
        copies: the rank whose state it has a copy of; -1: none.
    """

    rank: int
    recorded: int
    leads: bool
    step: int
    holds: bool
    made: bool
    copies: int = -1


@dataclass(frozen=True)
class _Known:
    """What a survivor knows once all are at the same step.

    Attributes:
        commit: how far it is.
        counts: its samples enter sums; others may have had the same ones.
        steps: that are not in the record.
        sent: bytes by group of parameters; `others`: those for anything else.
    """

    commit: Commit
    counts: bool
    seconds: float
    steps: Sequence[_StepSums]
    sent: Mapping[str, float]
    others: int


class _Table:
    """What the survivors tell each other, by the store of their term."""

    def __init__(self, store: dist.Store, check_term: Callable[[], None], place: int, size: int) -> None:
        self._store, self.check_term, self.place, self.size = store, check_term, place, size

    @property
    def leads(self) -> bool:
        """Whether this is the first of the survivors, which writes what is written once."""
        return self.place == 0

    def exchange(self, kind: type[T], value: T) -> list[T]:
        """Return what each survivor tells, in their order."""
        name = kind.__name__
        self._store.set(f"{name}/{self.place}", json.dumps(asdict(value)))  # type: ignore[call-overload]
        texts = (self._store.get(f"{name}/{place}") for place in range(self.size))
        return [decode(kind, json.loads(text)) for text in texts]

    def hear(self, name: str, text: str) -> str:
        """Return what the first survivor says."""
        if self.leads:
            self._store.set(name, text)
        return self._store.get(name).decode()


class RescueLoop:
    """Takes a process of split replicas through its steps, and saves with the others when some are killed."""

    def __init__(self, path: Path, membership: Membership, stop_s: float) -> None:
        """Take the run's folder; `stop_s`: how long a survivor is waited for."""
        self._path, self._membership, self._stop_s = path, membership, stop_s

    def fit(self, run: TrainingRun, batches: EpochOrder) -> str:
        """Train until there are no more batches; returns how it ended: `rescued` where others were killed.

        Raises:
            TimeoutError: peers were lost, and nobody said who left.
        """
        batches.note(between=False)
        self._membership.begin()
        try:
            status = fit(run, batches)
        except Exception as error:
            if not self._membership.concerns(error):
                raise
            logging.warning("in step %d the others were lost: %s", run.world.notes.step, error)
        else:
            self._membership.stop()
            return status
        run.world.notes.enter(None)  # what follows is no part of the step: it does not hang there
        self._save(run, batches)
        return RESCUED

    def _save(self, run: TrainingRun, batches: EpochOrder) -> None:
        """Save what was trained, with those that are left, whoever else dies meanwhile."""
        began = time.monotonic()
        while True:
            self._membership.leave()
            leave_groups()
            term = self._membership.next_term()
            store = TermStore(
                self._membership.meeting_of(term, self._membership.led_by(term, run.world.meeting)),
                self._membership.check_term,
                timedelta(seconds=self._stop_s),
            )
            place, size = term.members.index(self._membership.member), len(term.members)
            table = _Table(store, self._membership.check_term, place, size)
            try:
                _Rescue(run, batches, table, self._path).save()
            except CannotSave as error:
                logging.warning("nothing is saved after the death of others: %s", error)
            except Exception as error:
                if not self._membership.concerns(error):
                    raise
                logging.warning("in term %d the others were lost: %s", term.number, error)
                continue
            logging.info("term %d: saved, %.3f s", term.number, time.monotonic() - began)
            self._membership.stop()
            return


class _Rescue:
    """The survivors of one term."""

    def __init__(self, run: TrainingRun, batches: EpochOrder, table: _Table, path: Path) -> None:
        self._run, self._batches, self._table, self._path = run, batches, table, path

    def save(self) -> None:
        """Agree on a step, get there, and save.

        Raises:
            CannotSave: a piece of the model, or an update, is lost.
        """
        run, table = self._run, self._table
        members = table.exchange(_Told, self._told())
        step = _agreed_step(members)
        written = _written(members, run)
        self._go_to(step)
        known = table.exchange(_Known, self._known(_last_recorded(members)))
        agreed = max((member.commit for member in known), key=lambda commit: commit.place)
        run.saver.best, run.saver.stagnation = BestResult.of(agreed.best, agreed.best_loss), agreed.stagnation
        run.saver.owes_evaluation, run.saver.evaluated_epochs = agreed.owes_evaluation, agreed.evaluated_epochs
        if table.leads:  # who writes what the checkpoint says of it
            run.saver.best = run.saver.kept_best()
        record = run.progress.record
        if table.leads and not run.world.leads:
            record = Recorder(self._path, patience_s=record.patience.limit_s)
        if table.leads:
            self._write_steps(record, agreed, known)
            record.flush()
            self._batches.recorded = agreed.step  # where another dies and all begin again
        run.saver.go_on(_SurvivorsState(run, table, written, record.patience), record, 0)
        shares, by_part = self._batches.shares, self._batches.draws_by_part
        run.saver.save(replace(agreed.cursor(), shares=shares, draws_by_part=by_part), REASON, last=True)
        run.saver.settle()
        table.hear("saved", "yes")
        record.flush()

    def _told(self) -> _Told:
        run, update, commit = self._run, self._run.parts.update, self._batches.commit
        assert commit is not None and update is not None and update.gate is not None
        copies = run.copy.rank if run.copy is not None else -1
        gate, world = update.gate, run.world
        return _Told(world.rank, self._recorded(), world.leads, commit.step, gate.holds, gate.made, copies)

    def _recorded(self) -> int:
        if self._run.world.leads:
            return self._batches.recorded
        return next((window.step for window in newest(self._path, Steps)), 0)

    def _go_to(self, step: int) -> None:
        """Make the update that others have made: this rank has its gradients. Or return to before the next step."""
        run, commit = self._run, self._batches.commit
        assert commit is not None and run.parts.update is not None and run.parts.update.gate is not None
        if isinstance(run.parts.sync, Rescuable):
            run.parts.sync.break_off(made=commit.step != step)
        if commit.step == step:
            if commit.draws is not None:
                commit.draws.restore(run)
            return
        assert run.step.result is not None
        gate = run.parts.update.gate
        if gate.holds:
            run.parts.update.apply()
        if run.parts.ema:
            run.parts.ema.update(run.parts.local_model)
        self._batches.update_made(run.step.result)
        gate.made = False

    def _known(self, recorded: int) -> _Known:
        run, commit = self._run, self._batches.commit
        assert commit is not None
        steps = [
            _StepSums(step, float(r.loss), float(r.score), r.samples, r.global_units)
            for step, r in self._batches.history
            if recorded < step <= commit.step
        ]
        sent, others = run.traffic.since_last(run.parts.sync.bytes_sent(), run.other_bytes_sent)
        counts, spent_s = run.world.counts, self._batches.spent_s
        return _Known(replace(commit, draws=None), counts, spent_s, steps, dict(sent), others)

    def _write_steps(self, record: Recorder, commit: Commit, known: Sequence[_Known]) -> None:
        """Record the steps that no line tells of yet, as far as the survivors know them."""
        counting = [member for member in known if member.counts]
        parts = self._run.world.data_size if self._run.task.unit != SAMPLE else 0
        sums = [total for step in _unrecorded_steps(counting) if (total := _whole(step, counting, parts)) is not None]
        if not sums:
            return
        by_group: dict[str, float] = {}
        for member in known:
            for group, n_bytes in member.sent.items():
                by_group[group] = by_group.get(group, 0) + n_bytes
        score = sum(total.score for total in sums) if self._run.task.score_label else None
        record.write(
            Steps(
                step=commit.step, losses=[total.loss for total in sums], seconds=max(m.seconds for m in known),
                epoch=commit.epoch, correct=None if score is None else round(score),
                samples=sum(total.samples for total in sums), lr=self._run.schedule.lr,
                wire_bytes=sum(by_group.values()), wire_bytes_by_group=by_group,
                other_wire_bytes=sum(member.others for member in known),
            )
        )  # fmt: skip


def _agreed_step(members: Sequence[_Told]) -> int:
    """Return the step at which the survivors are, once those that hold gradients have made the update others have.

    Raises:
        CannotSave: one of them cannot get there.
    """
    step = max(member.step + member.made for member in members)
    for member in members:
        behind = step - member.step
        if behind > 1 or (behind and not (member.holds or member.made)):
            raise CannotSave(f"rank {member.rank} has no gradients of step {step}, which others have made")
    return step


def _last_recorded(members: Sequence[_Told]) -> int:
    leaders = [member.recorded for member in members if member.leads]
    return max(leaders or [member.recorded for member in members])  # else by what a dead one has written


@dataclass(frozen=True)
class _Written:
    """What this survivor writes.

    Attributes:
        ranks: all whose parts are written, by whomever.
        is_source: it writes its piece of the model.
        copy: what it writes in a dead neighbour's place; None: nothing.
        dead: ranks that had the piece that it writes: what their codecs had alike with its own, it writes for them.
        is_broken: a rank of its replica died: of its own codec it writes no more than that, either. What a replica's
            ranks have several times must be remembered alike.
    """

    ranks: Sequence[int]
    is_source: bool
    copy: SecondCopy | None
    dead: Sequence[int]
    is_broken: bool


def _written(members: Sequence[_Told], run: TrainingRun) -> _Written:
    """Divide what is written among the survivors: of those that have a piece of the model, the first writes it.

    Raises:
        CannotSave: nobody has a piece, or a copy of it.
    """
    split = run.parts.split
    assert run.world.placement is not None and split is not None
    divided = split.pieces.divided is not None
    pieces = run.world.size if divided else run.world.placement.layout.model_size  # consecutive ranks are a replica
    ranks = [member.rank for member in members]
    first = {rank % pieces: rank for rank in sorted(ranks, reverse=True)}
    copied = {member.copies for member in members} - set(ranks)
    if missing := set(range(pieces)) - first.keys() - copied:
        raise CannotSave(f"no other has what rank {min(missing)} of a replica had")
    lost = sorted(each for each in copied if each >= 0)
    writes = run.copy if run.copy is not None and run.copy.rank in lost else None
    gone = [rank for rank in range(run.world.size) if rank not in ranks and rank not in lost]
    sync = run.parts.sync
    has_codec = isinstance(sync, Rescuable) and bool(sync.common_state())
    encoded = [rank for rank in gone if has_codec and rank % pieces in first]
    dead = [rank for rank in encoded if first[rank % pieces] == run.world.rank]
    is_broken = any(rank // pieces == run.world.rank // pieces for rank in encoded)
    return _Written([*ranks, *lost, *encoded], run.world.rank in first.values(), writes, dead, is_broken)


def _unrecorded_steps(members: Sequence[_Known]) -> list[int]:
    return sorted({known.step for member in members for known in member.steps})


def _whole(step: int, members: Sequence[_Known], data_size: int) -> _StepSums | None:
    """Return what stands for the whole batch of a step: the sums of those that know it, scaled by what is missing.

    Args:
        data_size: parts that a batch is cut into, where losses are no means over samples; 0: they are.
    """
    known = [each for member in members for each in member.steps if each.step == step]
    samples = sum(each.samples for each in known)
    if not samples:
        return None
    units = known[0].global_units
    scale = data_size / len(known) if data_size else units / samples
    loss, score = (scale * sum(values) for values in ([e.loss for e in known], [e.score for e in known]))
    return _StepSums(step, loss, score, round(scale * samples), units)


class _SurvivorsState:
    """The state of a run that some of its ranks hold, for one checkpoint (see `RunState`)."""

    bytes_sent = 0

    @property
    def is_writing(self) -> bool:
        """Whether this survivor writes what it has."""
        return self._writer.is_writing

    def __init__(self, run: TrainingRun, table: _Table, written: _Written, patience: Patience) -> None:
        """Take what this survivor writes."""
        self._run, self._table, self._written, self._patience = run, table, written, patience
        self.leads = table.leads
        self._writer, self._token = PartWriter(patience=patience), 0

    def newest(self, store: CheckpointStore) -> None:
        """Return nothing: the next start reads it."""

    def load(self, state: StateView) -> Cursor:
        """Refuse: the next start reads it."""
        raise RuntimeError("survivors read no checkpoint")

    def prepare(self, store: CheckpointStore, begins: bool) -> WriterState:
        """Return how this rank's writers stand; the first survivor makes room where the ranks' parts are to be."""
        self._table.check_term()  # who is lost writes no part
        if not self._writer.is_writing:
            self._writer.wait()
        own = writer_state(self._writer.is_writing, self._patience, _PART)
        return max(own, stand_by(store, self._patience, self._make_room if begins else None)) if self.leads else own

    def _make_room(self, store: CheckpointStore) -> None:
        store.claim()
        self._token = self._token or time.time_ns()
        store.room_for_parts(self._token)

    @contextmanager
    def captured(self, cursor: Cursor, store: CheckpointStore) -> Iterator[Captured | None]:
        """Write this rank's part; gives, on the first survivor, what is saved with the parts of all."""
        run, written = self._run, self._written
        folder = store.parts_folder(int(self._table.hear("room", str(self._token))))
        parts = {run.world.rank: self._part(run.world.rank, run.parts, cursor, self._own_regions())}
        if (copy := written.copy) is not None:
            parts[copy.rank] = self._part(copy.rank, copy.parts(run.parts), cursor, copy.regions())
        if written.dead:
            state = {COMMON: self._common_state()}
            parts |= {rank: RankPart.of(rank, state, {}, {}, AlikeTensors()) for rank in written.dead}
        self._writer.write({folder / part_file(rank): part for rank, part in parts.items()})
        if not self.leads:
            yield None
            return
        about: StateView = {
            "world_size": run.world.size, "layout": layout_of(run.world), SINCE: run.parts.since,
        }  # fmt: skip
        yield Captured(about, Arriving(folder, [part_file(each) for each in written.ranks], _joined))

    def _own_regions(self) -> Mapping[str, LocalShard]:
        """Return what this rank has, with what it writes of it."""
        split, writes = self._run.parts.split, self._written.is_source
        assert split is not None
        if (divided := split.pieces.divided) is not None:
            return share_regions(split.pieces, divided, self._run.world.rank, with_buffers=self.leads)
        return {n: replace(region, writes=region.is_first and writes) for n, region in split.pieces.regions.items()}

    def _part(self, rank: int, run_parts: RunParts, cursor: Cursor, regions: Mapping[str, LocalShard]) -> RankPart:
        """Return what is written of a rank: of a dead one, what it had alike with others."""
        assert run_parts.split is not None
        told = to_parts(shared_state(run_parts, cursor), run_parts.split.pieces, regions)
        shared, shards = take_parts(told, part_file(rank))
        world = self._run.world
        own = dict(rank_state(run_parts, world)) if rank == world.rank else {}
        if rank != world.rank or self._written.is_broken:
            own.pop("sync", None)
            own |= {COMMON: common} if (common := self._common_state()) else {}
        return RankPart.of(rank, own, shared, shards, AlikeTensors())

    def _common_state(self) -> StateView:
        sync = self._run.parts.sync
        return sync.common_state() if isinstance(sync, Rescuable) else {}

    def leave(self) -> None:
        """Do nothing: no other machine's disk has a part of it."""

    def finish(self) -> None:
        """Wait until what this rank writes is on disk."""
        self._writer.wait()


def _joined(state: StateView, stored: Sequence[StoredPart]) -> StateTree:
    """Return the state that is saved, of what the survivors' parts hold together."""
    return {**list_groups(merge([part.shared() for part in stored])), **state}
