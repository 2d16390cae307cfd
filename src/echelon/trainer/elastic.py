"""A run whose ranks change while it goes on: survivors of a death, and newcomers, agree on a step and go on from there.

What is agreed, and why each sample counts exactly once, is in `docs/decisions/elastic.md`. In short: all ranks apply
the same sums, and the sums of a step need every member; so survivors differ by at most one update. Those that lack it
get parameters and optimizer state from one that has it; those that have begun the next step return to before it; then
the same global batch is divided over the members that are there.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from echelon.checkpoint import broadcast_state
from echelon.core.errors import LEFT
from echelon.core.stop import StopFlag
from echelon.core.task import BestResult
from echelon.data.base import Batch
from echelon.records.decode import decode
from echelon.records.kinds import Number
from echelon.trainer.assemble import Rebuilder, rank_seed
from echelon.trainer.batches import EpochOrder, Resumption
from echelon.trainer.commit import Commit, Draws, replica_state, take_replica_state
from echelon.trainer.loop import TrainingRun, fit, regroupable
from echelon.trainer.membership import Membership, TermOver
from echelon.trainer.state import seed_everything
from echelon.trainer.step import StepResult
from echelon.trainer.world import LeftGroups, World, enter_term, leave_groups

_TOLD_BYTES = 2048  # of what each member tells the others first


@dataclass(frozen=True)
class _Member:
    """What a member tells the others of itself.

    Attributes:
        recorded: the last step in the record, as far as it knows.
        commit: None of a newcomer.
        part: samples that it had of a full batch, where parts follow speed; 0: it had none.
        spent_s: seconds of the steps since the record, as far as it was there.
        paths: of each size, where they were tried at the start: the text of `PathsFile`.
        draws_by_part: whether what layers draw depends on the part of a batch alone.
        tells_best: it is the first of those that are left: `best` and `best_loss` are of a checkpoint that is kept.
    """

    recorded: int
    leads: bool
    commit: Commit | None = None
    part: int = 0
    spent_s: float = 0.0
    paths: str = ""
    draws_by_part: bool = False
    tells_best: bool = False
    best: Number | None = None
    best_loss: Number | None = None


@dataclass(frozen=True)
class _Agreed:
    """What the members of a term agree on: `commit` of the member `source`, and the last step that is recorded."""

    commit: Commit
    source: int
    recorded: int
    behind: bool


class _WhileMember:
    """Batches of a member that looks before each whether others have come or gone, or it was asked to leave.

    It leaves where all have agreed, and no checkpoint is being written; others are let in where all have agreed.
    """

    def __init__(self, run: TrainingRun, batches: EpochOrder, membership: Membership) -> None:
        self._run, self._batches, self._membership = run, batches, membership
        self._leaves = False

    @property
    def status(self) -> str:
        """See `Batches`; `left` where this member leaves."""
        return LEFT if self._leaves else self._batches.status

    @status.setter
    def status(self, value: str) -> None:
        """Set it for the batches within, too."""
        self._batches.status = value

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches.

        Raises:
            TermOver: others have come.
        """
        for batch in self._batches:
            self._may_begin()
            if self._membership.has_news and self._must_go():
                return
            yield batch

    def _must_go(self) -> bool:
        """Whether this member was asked to leave, and can do so now.

        Raises:
            TermOver: others have come.
        """
        if self._membership.is_over() and (self._batches.agreed or self._membership.must_leave()):
            raise TermOver("others have come, or gone")
        may_leave = self._membership.may_leave() and self._batches.agreed
        self._leaves = may_leave and not self._run.saver.is_writing()
        return self._leaves

    def _may_begin(self) -> None:
        """Say that this process can go on without others, once all have agreed: until then, of a run that is resumed in
        the midst of a round, a death leads back to the checkpoint.
        """
        if not self._membership.has_begun and self._batches.commit is not None:
            self._membership.begin()

    def step_done(self, result: StepResult) -> None:
        """See `Batches`."""
        self._batches.step_done(result)


class ElasticLoop:
    """Takes one process through the terms of its run."""

    def __init__(self, rebuilder: Rebuilder, membership: Membership, stop: StopFlag) -> None:
        self._rebuilder, self._membership, self._stop = rebuilder, membership, stop
        self._left = LeftGroups()

    def fit(self, run: TrainingRun, batches: EpochOrder) -> tuple[str, EpochOrder]:
        """Train until there are no more batches, whoever comes or goes; returns how it ended, and the last batches.

        Raises:
            TimeoutError: peers were lost, and nobody said who left.
        """
        if self._membership.is_newcomer:
            self._membership.begin()
            batches = self._go_on(run, batches)
            self._membership.agree()
        else:
            batches.note(between=False)
        while True:
            self._left.let_go()  # not earlier: until here the batches of the term before have its groups, too
            try:
                status = fit(run, _WhileMember(run, batches, self._membership))
                if status == LEFT:
                    return status, batches
                if status != "completed":
                    self._membership.stop()
                    return status, batches
                if self._membership.close():
                    return status, batches
                logging.info("a newcomer was taken in before the last step: it gets what was trained")
            except Exception as error:
                if not self._membership.concerns(error):
                    raise
                logging.warning("in step %d the others were lost: %s", run.world.notes.step, error)
            run.world.notes.enter(None)  # what follows is no part of the step: it does not hang there
            batches = self._go_on(run, batches)

    def _go_on(self, run: TrainingRun, batches: EpochOrder) -> EpochOrder:
        """Enter the next term, and the ones after it while members are lost in that; returns the batches from there."""
        began = time.monotonic()
        while True:
            self._leave(run)
            term = self._membership.next_term()
            try:
                world = enter_term(self._rebuilder.resolved, self._membership, term, run.world)
                batches = self._agree(run, batches, world)
            except Exception as error:
                if not self._membership.concerns(error):
                    raise
                logging.warning("in term %d the others were lost: %s", term.number, error)
                continue
            took_s = time.monotonic() - began
            logging.info("term %d, rank %d of %d: %.3f s", term.number, world.rank, world.size, took_s)
            return batches

    def _leave(self, run: TrainingRun) -> None:
        """Leave the groups: whoever waits for this process in one of them gets an error."""
        self._membership.leave()
        self._left.hold()
        self._rebuilder.leave(run)
        for parameter in run.parts.model.parameters():
            parameter.grad = None
        gc.collect()  # what wrapped the model takes its hooks along
        leave_groups()

    def _agree(self, run: TrainingRun, batches: EpochOrder, world: World) -> EpochOrder:
        """Agree with the others of a term where the run is, get there, and build what depends on the ranks."""
        began = time.monotonic()
        members = _exchange(self._told(run, batches, world), world)
        agreed, survivors = _agreement(members), sum(member.commit is not None for member in members)
        own, sent, sync = batches.commit, 0, regroupable(run)
        if own is not None and own.step == agreed.commit.step and own.draws is not None:
            own.draws.restore(run)  # the next step may have begun
        lacks = own is not None and own.step < agreed.commit.step
        if not lacks:
            sync.settle_step(made=False)  # the source tells of codecs as they were before it
        if agreed.behind:
            sent = self._bring_up(run, own, agreed, world)
        if lacks:  # not earlier: if those who have made it die before, it is done again
            sync.settle_step(made=True)
        if own is None:
            self._rebuilder.take_paths(members[agreed.source].paths)
            seed_everything(rank_seed(self._rebuilder.seed, world.size * (self._membership.term + 1) + world.rank))
        commit, first = agreed.commit, members[0]
        if first.tells_best:
            commit = replace(commit, best=first.best, best_loss=first.best_loss)
        commit = replace(commit, draws=Draws.of(run) if commit.between else None)
        batches.commit = commit  # from here on this rank is where the others are, whatever follows
        run.saver.best, run.saver.stagnation = BestResult.of(commit.best, commit.best_loss), commit.stagnation
        run.saver.owes_evaluation, run.saver.evaluated_epochs = commit.owes_evaluation, commit.evaluated_epochs
        results = _completed(_since(batches, agreed.recorded, commit.step, world), world)
        shares = self._rebuilder.shares([member.part for member in members])
        by_part = members[agreed.source].draws_by_part
        cursor = replace(commit.cursor(), shares=shares, draws_by_part=by_part)
        dead = max(0, run.world.size - survivors)
        self._rebuilder.enter(run, world, cursor, sent)
        if commit.between:  # what a codec remembers is of other elements now
            commit = replace(commit, draws=Draws.of(run))
            batches.commit = commit
        self._rebuilder.tell(run, cursor, time.monotonic() - began, dead, sent)
        recorded = max(agreed.recorded, commit.step - len(results))  # of a round that is trained again, too
        resumption = Resumption(commit, recorded, results, batches.saved_s, max(m.spent_s for m in members))
        return EpochOrder(run, cursor, self._stop, resumption)

    def _told(self, run: TrainingRun, batches: EpochOrder, world: World) -> _Member:
        leads = run.world.leads
        commit = replace(batches.commit, draws=None) if batches.commit is not None else None  # draws are of one rank
        part = run.balance.sizes[run.world.rank] if run.balance is not None else 0
        recorded, paths = batches.recorded if leads else self._rebuilder.recorded(), self._rebuilder.paths
        told = _Member(recorded, leads, commit, part, batches.spent_s, paths, batches.draws_by_part)
        if world.rank or commit is None:
            return told
        best, best_loss = BestResult.numbers(run.saver.kept_best())
        return replace(told, tells_best=True, best=best, best_loss=best_loss)

    def _bring_up(self, run: TrainingRun, commit: Commit | None, agreed: _Agreed, world: World) -> int:
        """Give what all replicas share to those that lack it; returns the bytes that this rank sent."""
        mine = None
        if world.rank == agreed.source:
            mine = {**replica_state(run.parts), "sync": regroupable(run).shared_memory()}
        state, sent = broadcast_state(mine, agreed.source, world.group)
        if commit is None or commit.step < agreed.commit.step:
            averages = not self._rebuilder.resolved.sync.sums_in_backward  # buffers too
            take_replica_state(run.parts, state, with_buffers=commit is None or averages)
            regroupable(run).take_shared_memory(state["sync"])
        return sent


def _exchange(member: _Member, world: World) -> list[_Member]:
    """Return what each member tells."""
    if world.group is None:
        return [member]
    text = json.dumps(asdict(member)).encode()
    if len(text) > _TOLD_BYTES:
        raise ValueError(f"{len(text)} bytes are too many to tell the others")
    row = torch.frombuffer(bytearray(text.ljust(_TOLD_BYTES)), dtype=torch.uint8).to(world.device)
    rows = [torch.empty_like(row) for _ in range(world.size)]
    dist.all_gather(rows, row, group=world.group)
    return [decode(_Member, json.loads(bytes(each.cpu().numpy()))) for each in rows]


def _agreement(members: Sequence[_Member]) -> _Agreed:
    """Return where the run is: where the member is that is furthest.

    Raises:
        TermOver: nobody has begun.
    """
    commits = {rank: member.commit for rank, member in enumerate(members) if member.commit is not None}
    if not commits:
        raise TermOver("no member has begun")
    source = max(commits, key=lambda rank: (commits[rank].place, -rank))
    commit = commits[source]
    behind = any(member.commit is None or member.commit.step < commit.step for member in members)
    leaders = [member.recorded for member in members if member.leads]
    recorded = max(leaders or [members[0].recorded])  # else by what is in the record where the first one goes on
    return _Agreed(commit, source, recorded, behind)


def _since(batches: EpochOrder, recorded: int, step: int, world: World) -> list[StepResult]:
    """Return what this rank knows of the steps after the last recorded one; nothing of those it had no part in."""
    known = dict(batches.history)
    zero = torch.zeros((), device=world.device)
    return [known.get(each, StepResult(zero, zero.clone(), 0, 0, 0)) for each in range(recorded + 1, step + 1)]


def _completed(results: Sequence[StepResult], world: World) -> list[StepResult]:
    """Return this member's part, about as large as others', of results that stand for whole batches.

    In the sums over the members those of the dead are missing: they are scaled. Whoever dies before they are recorded,
    the others know as much of these steps as they do, newcomers included. Steps at the beginning of which no member
    knows anything are left out.
    """
    if not results:
        return []
    known = [[float(r.units), float(r.samples), r.loss.item(), r.score.item()] for r in results]
    sums = torch.tensor(known, dtype=torch.float64, device=world.device)
    of_batches = torch.tensor([r.global_units for r in results], device=world.device)
    if world.group is not None:
        dist.all_reduce(sums, group=world.group)
        dist.all_reduce(of_batches, dist.ReduceOp.MAX, group=world.group)
    rows = [
        _KnownSums(units, samples, loss, score, total)
        for (units, samples, loss, score), total in zip(sums.tolist(), of_batches.tolist(), strict=True)
    ]
    first = next((i for i, row in enumerate(rows) if row.units), len(rows))
    return [_member_part(result, row, world) for result, row in zip(results[first:], rows[first:], strict=True)]


class _KnownSums(NamedTuple):
    """What all members know of a step together, and the units of its batch."""

    units: float
    samples: float
    loss: float
    score: float
    batch_units: int


def _member_part(result: StepResult, sums: _KnownSums, world: World) -> StepResult:
    """Return this member's part of a step."""
    scale = sums.batch_units / sums.units if sums.units else 0.0

    def portion(total: int) -> int:
        """Return this member's part of a number."""
        return total * (world.rank + 1) // world.size - total * world.rank // world.size

    units = portion(sums.batch_units)
    share = scale * units / max(1, sums.batch_units)
    both = torch.tensor([sums.loss, sums.score], dtype=torch.float64, device=world.device) * share
    samples = portion(round(sums.samples * scale))
    return replace(result, loss=both[0], score=both[1], samples=samples, units=units, global_units=sums.batch_units)
