"""Batches in an epoch's order, divided over the ranks: all of them step, record, evaluate and save together."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from echelon.core.stop import StopFlag
from echelon.core.time_limit import TimeLimit
from echelon.data.base import Batch
from echelon.observe.garbage import GarbageClock
from echelon.observe.phases import CALLBACKS, RECORDING, Phase
from echelon.records.events import CodecSwitched, PeriodChanged
from echelon.records.kinds import EARLY_STOP, MAX_TIME, EntropyCoding
from echelon.sync.averaging.period import PeriodChange
from echelon.sync.base import Agreement
from echelon.trainer.balance import Deal
from echelon.trainer.commit import Commit, KeptDraws, Noted
from echelon.trainer.evaluate import EvaluationReport
from echelon.trainer.loop import TrainingRun, evaluate_agreed, regroupable
from echelon.trainer.progress import record_pipeline
from echelon.trainer.slow_steps import SlowSteps
from echelon.trainer.state import Cursor, seed_layers
from echelon.trainer.step import StepResult
from echelon.trainer.window import MOST_STEPS, ClosedWindow, Window, WindowEnd, WindowTraffic, Wishes


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on whose ranks have changed.

    Attributes:
        commit: what is done.
        recorded: the last step that a record tells of.
        results: of the steps since then, as far as this rank's samples tell.
        saved_s: when the last checkpoint was begun, by `time.monotonic`.
        spent_s: seconds that the steps of `results` took.
    """

    commit: Commit
    recorded: int
    results: Sequence[StepResult]
    saved_s: float
    spent_s: float


class EpochOrder:
    """This rank's part of each global batch from a cursor to the run's end; the cursor moves with the steps.

    Attributes:
        status: `completed`, or `stopped` once a rank was asked to stop.
        reason: why it completed before its last step: `EARLY_STOP`, `MAX_TIME`; empty: it did not.
        saved_s: when the last checkpoint was begun, by `time.monotonic`.
        spent_s: seconds of the steps since the last record.
        window: of the steps since the last record; it begins with the iteration, and may be paused between steps.
    """

    window: Window

    def __init__(self, run: TrainingRun, cursor: Cursor, stop: StopFlag, resumption: Resumption | None = None) -> None:
        """Begin at a cursor; `resumption`: where a run goes on whose ranks have changed (see `elastic.py`)."""
        self.status = "completed"
        self._resumption = resumption
        self.history: deque[tuple[int, StepResult]] = deque(maxlen=2 * MOST_STEPS)
        self._commit: Commit | None = None
        self._noted: Noted | None = None  # what is newer than the commit
        self._made = False  # the step too that began then
        self._begun: Commit | None = None  # of an agreement on its way
        self._agreed_at = -1
        self.recorded, self.spent_s = cursor.step, 0.0
        self._run, self._cursor, self._stop = run, cursor, stop
        self._slow = SlowSteps(run.progress.record)
        self._due, self.saved_s = False, time.monotonic()
        self._kept = KeptDraws(run.parts.local_model, not cursor.draws_by_part) if run.survives else None
        # Asked once: a protocol's check takes long. Ranks of split replicas agree in each step.
        self._regroups = regroupable(run) if run.survives and run.parts.split is None else None
        self._trained = False
        self.reason = EARLY_STOP if self._is_stagnant else ""  # so it was saved
        if resumption is not None:  # before this rank meets the others again, of whom some may be lost then
            self._take_up(resumption)
        self._time = TimeLimit(run.settings.ends_s if run.world.leads else math.inf, len(run.eval_loader))

    def __iter__(self) -> Iterator[Batch]:
        """Give batches until the run is over, or a window's end says that it is to stop."""
        run, cursor = self._run, self._cursor
        with GarbageClock(freezes=not run.survives, thaws=_may_go_on(run)) as garbage:
            self.window = Window(run.world, run.clock, garbage)
            owes = self._resume() or self._stands_in_last_epoch
            if self.status == "stopped":
                self._save("stop", last=True)
                return
            while owes or (cursor.epoch < run.settings.epochs and not self._reached):
                run.clock.enter(Phase.DATA)
                for batch in self._epoch() if not self._reached else ():
                    run.schedule.set_step(
                        run.train_loader.steps_at_present_size(cursor.epoch, cursor.batch, cursor.step)
                    )
                    run.world.notes.at_step(cursor.step + 1)
                    self.note(between=True)
                    if cursor.draws_by_part:
                        seed_layers(run.settings.draws_seed, cursor.step, run.world)
                    yield batch
                    if self.status == "stopped":
                        self._save("stop", last=True)
                        return
                    if self._reached:
                        break
                    run.clock.enter(Phase.DATA)
                self._end_epoch()
                owes = False
                if not self._reached:
                    self._retune()
            if self._is_whole:
                self.reason = ""
            self._save("end", last=True)

    def step_done(self, result: StepResult) -> None:
        """Add a step to the window; close it when it is full, and save where that is due."""
        cursor, window = self._cursor, self.window
        cursor.step, cursor.batch = cursor.step + 1, cursor.batch + 1
        is_new = cursor.step > self.recorded  # else it is trained again, and the record tells of the first time
        if is_new:
            window.add(result)
        self.note(between=False)
        if self._kept is not None:
            self.history.append((cursor.step, result))
        stops = window.stops(bool(self._stop) or self._time.is_up(time.monotonic()))
        if is_new:
            window.end_step()
            self.spent_s = window.spent_s
        if self._run.balance is not None:
            self._deal(self._run.balance.planned(cursor.step))
        if (profiler := self._run.profiler) is not None and profiler.step_done():
            with self._pause(RECORDING):
                profiler.switch()
        self._between_steps(stops)

    def _between_steps(self, stops: bool) -> None:
        """Close the window where it is full, or `stops`, and do what else is due after a step."""
        cursor, window = self._cursor, self.window
        every = self._run.settings.checkpoint.steps
        self._due = self._due or (every is not None and cursor.step % every == 0)
        epoch_ends = cursor.batch == self._run.train_loader.batches_in(cursor.epoch) or self._reached
        evaluates = self._run.saver.owes_evaluation and not epoch_ends and self._steps_to_agreement == 0
        if not window.steps or not (window.full or self._saves or evaluates or epoch_ends or stops):
            return
        closed = self._close_window()
        self._slow.look(closed, window.watch)
        if self._run.balance is not None:
            self._deal(self._run.balance.look(closed.steps))
        window.go_on()
        self._tell_callbacks()
        if closed.stop:
            self.status = "stopped"
            return
        if closed.time_is_up:
            self.reason = MAX_TIME
        self._due = self._due or closed.checkpoint_due
        if self._is_stagnant:  # as was found before the last round was trained again
            self.reason = self.reason or EARLY_STOP
        if evaluates and not self.reason:
            self._judge(cursor.epoch - 1, self._evaluate(cursor.epoch - 1), counts=True)
        if self._saves and not (epoch_ends or self.reason):  # at an epoch's end it comes after the evaluation
            self._save("interval")

    def _epoch(self) -> Iterator[Batch]:
        run, cursor = self._run, self._cursor
        return run.train_loader.epoch(cursor.epoch, cursor.batch, run.step.begin_count if run.step.asks_units else None)

    def note(self, between: bool) -> None:
        """Note what is done, where other ranks may have to be told of it (see `Commit`)."""
        if self._kept is None:
            return
        regroups = self._regroups
        if regroups is None or (agreement := regroups.agreement) is Agreement.REACHED:
            step = self._agreed_at = self._cursor.step
            begun = self._noted
            if begun is not None and begun.between and not between and begun.step == step - 1:
                self._made = True  # nothing else has changed since it was begun
                return
            self._noted, self._made = Noted.of(self._run, self._cursor, self.reason, between, self._kept), False
        elif agreement is Agreement.BEGUN and between:
            self._begun = Commit.begun(self._run, self._cursor, self.reason)
        elif agreement is Agreement.LANDED and self._begun is not None:
            self.commit, self._begun = self._begun.landed(self._run), None
            self._agreed_at = self._cursor.step

    @property
    def commit(self) -> Commit | None:
        """How far this rank is, where others may have to be told of it; None: they are not, or have yet to agree."""
        if self._noted is not None:
            commit, self._noted = self._noted.commit(), None
            self._commit = commit.made() if self._made else commit
        return self._commit

    @commit.setter
    def commit(self, commit: Commit) -> None:
        """Take over what was agreed on."""
        self._commit, self._noted = commit, None

    def update_made(self, result: StepResult) -> None:
        """Count a step whose update was made after others had been lost; nothing else is done between it and others."""
        self._cursor.step, self._cursor.batch = self._cursor.step + 1, self._cursor.batch + 1
        self.note(between=False)
        self.history.append((self._cursor.step, result))

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank's part of a full batch, in force; empty: they are equal."""
        return self._cursor.shares

    @property
    def draws_by_part(self) -> bool:
        """Whether what layers draw depends on the part of a batch alone."""
        return self._cursor.draws_by_part

    @property
    def agreed(self) -> bool:
        """Whether all have just agreed, so that this rank may go, or another one come, and the least is trained again.

        Nothing is but, where agreements travel behind the computation, the steps since the last one was begun.
        """
        return self._agreed_at == self._cursor.step

    def _take_up(self, resumption: Resumption) -> None:
        self.saved_s, self.spent_s = resumption.saved_s, resumption.spent_s
        self.commit, self.recorded, self.reason = resumption.commit, resumption.recorded, resumption.commit.reason
        self._agreed_at = resumption.commit.step
        self.history.extend(enumerate(resumption.results, resumption.commit.step - len(resumption.results) + 1))

    def _resume(self) -> bool:
        """Go on where ranks have changed: with the steps that no record has, and what is due after the last one.

        Returns:
            Whether that was not done yet; then the epoch may end here.
        """
        resumption, self._resumption = self._resumption, None
        if resumption is None:
            return False
        if resumption.results:
            self.window.take_over(resumption.results, resumption.spent_s)
        self._trained = bool(resumption.results)
        if resumption.commit.between:
            return False
        self._between_steps(stops=True)
        return True

    def _deal(self, deal: Deal | None) -> None:
        """Divide batches otherwise from the next one on, on all ranks after the same step."""
        if deal is None:
            return
        run, cursor = self._run, self._cursor
        cursor.shares = deal.sizes
        run.train_loader.deal(replace(run.train_loader.shard, weights=deal.sizes))
        run.progress.happened(deal.event(cursor.step))

    @property
    def _reached(self) -> bool:
        return self._is_whole or bool(self.reason)

    @property
    def _saves(self) -> bool:
        """Whether a checkpoint is due, and nothing on its way would have to be waited for."""
        return self._due and not self._run.parts.sync.in_flight

    @property
    def _steps_to_agreement(self) -> int | None:
        """Steps until what is evaluated is known to all replicas; None: it never is without an exchange for it."""
        return self._run.parts.sync.steps_to_agreement(averages=self._run.parts.ema is not None)

    @property
    def _is_whole(self) -> bool:
        settings, cursor = self._run.settings, self._cursor
        return cursor.epoch >= settings.epochs or 0 < settings.max_steps <= cursor.step

    @property
    def _stands_in_last_epoch(self) -> bool:
        """Whether all steps are made, and the evaluation that ends the run is not: it was stopped just before."""
        return self._is_whole and self._cursor.epoch < self._run.settings.epochs

    @property
    def _is_stagnant(self) -> bool:
        return 0 < self._run.settings.early_stop <= self._run.saver.stagnation.evaluations

    def _close_window(self) -> ClosedWindow:
        run, cursor = self._run, self._cursor
        if run.step.guard is not None:
            run.step.guard.settle()
        self._trained = True
        every_s = run.settings.checkpoint.seconds
        now_s = time.monotonic()
        due = (every_s is not None and now_s - self.saved_s >= every_s) or run.saver.is_due()
        wishes = Wishes(bool(self._stop), due, self._time.is_up(now_s))
        sync = run.parts.sync
        sent, others = run.traffic.since_last(sync.bytes_sent(), run.other_bytes_sent)
        end = WindowEnd(cursor.epoch, cursor.step, run.schedule.lr, sync.density())
        closed = self.window.close(end, WindowTraffic(sent, others), sync.reduce_times(), wishes)
        self._time.step_s = closed.steps.seconds / closed.steps.count
        self._time.took("write", run.saver.write_s)
        self.recorded, self.spent_s = cursor.step, 0.0
        run.progress.window(closed.steps, closed.resources)
        for switch in run.parts.switches:
            if isinstance(switch, PeriodChange):
                text = f"the period is {switch.new} instead of {switch.old} from step {switch.step} on: {switch.reason}"
                run.progress.record.write(PeriodChanged(text, switch.step, switch.old, switch.new, switch.reason))
                continue
            text = f"{switch.vector}: {switch.new} instead of {switch.old} by step {cursor.step}: {switch.reason}"
            run.progress.record.write(
                CodecSwitched(text, cursor.step, switch.vector, switch.old, switch.new, switch.reason)
            )
        run.parts.switches.clear()
        record_pipeline(run.progress.record, run.parts.split, cursor.step)
        return closed

    def _end_epoch(self) -> None:
        """Evaluate where it is due, keep the best, move the cursor to the next epoch, and save where that is due.

        Replicas that differ are evaluated where they have just agreed: some steps later, unless none follow. What was
        evaluated before a round is trained again is not evaluated again, as its steps are not recorded again.
        """
        run, cursor = self._run, self._cursor
        is_complete = cursor.batch >= run.train_loader.batches_in(cursor.epoch)
        is_judged = cursor.epoch < run.saver.evaluated_epochs  # and ranks had to go back to before that
        if is_judged and self._is_stagnant and cursor.step >= self.recorded:
            self.reason = self.reason or EARLY_STOP
        last = self._reached or cursor.epoch + 1 >= run.settings.epochs
        every = run.settings.eval_every
        is_due = is_complete and every > 0 and (cursor.epoch + 1) % every == 0
        scheduled = not is_judged and (is_due or run.saver.owes_evaluation)
        waits = scheduled and not last and bool(self._steps_to_agreement)
        run.saver.owes_evaluation = waits
        epoch = cursor.epoch
        report = self._evaluate(epoch) if last or (scheduled and not waits) else None
        coded = run.parts.sync.entropy_coded()
        if coded:
            run.progress.record.write(EntropyCoding(cursor.step, **coded))
        if is_complete:
            cursor.epoch, cursor.batch = cursor.epoch + 1, 0
        if last or not (waits or is_judged):  # else the epoch's line comes, or came, with its evaluation
            self._judge(epoch, report, scheduled, last)
        self._tell_callbacks()
        if self._saves:
            self._save("interval")

    def _retune(self) -> None:
        """Begin to train more of the model where that is due, from a checkpoint of this moment."""
        run, epoch = self._run, self._cursor.epoch
        if run.retuning is None or not run.retuning.is_due(epoch):
            return
        self._save("unfreeze", last=True)
        with self._pause("checkpoint"):
            run.saver.settle()
            run.retune(epoch)

    def _judge(self, epoch: int, report: EvaluationReport | None, counts: bool, last: bool = False) -> None:
        """Keep what was evaluated if it is the best, and tell of the epoch.

        Args:
            report: of the evaluation after it; None: there was none.
            counts: it was due, not just made at the end.
            last: no more steps follow.
        """
        run = self._run
        if report is not None:
            if counts:
                run.saver.count_evaluation(report, run.task, run.settings.early_stop_delta)
                self.reason = self.reason or (EARLY_STOP if self._is_stagnant else "")
            with self._pause("checkpoint"):
                run.saver.consider_best(self._cursor, report, run.task, last)
        if self._trained or report is not None:  # of a resume, an evaluation may be all that was left
            with self.window.pause(RECORDING):
                run.progress.epoch_ended(epoch, report)
                self.window.meet()
        if report is not None and counts:
            self._note_evaluated(epoch)

    def _note_evaluated(self, epoch: int) -> None:
        """Note that an epoch's evaluation is made, where ranks may have to go back to before it."""
        saver = self._run.saver
        saver.evaluated_epochs = epoch + 1
        if self._kept is None:
            return
        if (commit := self.commit) is not None:
            self.commit = commit.evaluated(saver)
        if self._begun is not None:
            self._begun = self._begun.evaluated(saver)

    def _tell_callbacks(self) -> None:
        """Let callbacks of the leading rank hear what has happened, while all wait for them."""
        if self._run.settings.callbacks:
            with self._pause(CALLBACKS):
                self._run.progress.listeners.deliver()

    def _evaluate(self, epoch: int) -> EvaluationReport:
        with self._pause("evaluation"):
            report = evaluate_agreed(self._run)
            self._run.progress.evaluated(epoch, self._cursor.step, report)
        self._run.saver.owes_evaluation = False
        return report

    def _save(self, reason: str, last: bool = False) -> None:
        with self._pause("checkpoint"), self._run.progress.display.bar("checkpoint: gathering"):
            self._run.saver.save(self._cursor, reason, last=last)
        self.saved_s, self._due = time.monotonic(), False

    @contextmanager
    def _pause(self, name: str) -> Iterator[None]:
        """Record how long something between steps took, for the slowest rank."""
        with self.window.pause(name) as pause:
            yield
            self.window.meet()
        self._run.progress.paused(name, self._cursor.step, pause.seconds)
        self._time.took(name, pause.seconds)


def _may_go_on(run: TrainingRun) -> bool:
    """Whether this process may go on after the run: it is the caller's own, or a launcher of the user's started it."""
    return run.world.group is None or multiprocessing.parent_process() is None
