"""Copies of the state that are evaluated or saved while training goes on: when they are due, and whose turn it is.

An evaluation goes: every server keeps a copy of now (`KeepCopy`, `CopyKept`) -> a worker reads the copies, evaluates,
writes the checkpoint (`EvaluateTask`) -> the copies are dropped. One at a time. Pure; time comes in as an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from echelon.coordinator.config import TrainingPlan
from echelon.coordinator.members import RunMember
from echelon.coordinator.messages import EVALUATION_TASKS, LAST_REASONS, UNFREEZE, EvaluateTask
from echelon.core.task import BestResult, Stagnation

_LEAST_S = 10.0


@dataclass(frozen=True)
class TrainingProgress:
    """Where training stands: all steps before `done_steps` are done, `steps` in all."""

    done_steps: int
    steps: int
    steps_per_epoch: int
    complete: bool

    @property
    def epochs(self) -> int:
        """Whole epochs that are done."""
        return self.done_steps // self.steps_per_epoch


@dataclass
class EvaluationJob:
    """What is to be done with a copy: evaluate it, save it (and why), after which epoch and step.

    Attributes:
        tag: names the copies; 0: it has not begun.
        missing: servers that have not kept theirs.
        worker: who does it; empty: nobody yet.
        counts: whether a result that is no better counts for an early stop.
        began_s: when a worker was given it.
        taken: how often it was taken from one that did not answer.
    """

    epoch: int
    step: int
    evaluate: bool
    reason: str
    tag: int = 0
    missing: set[int] = field(default_factory=set)
    worker: str = ""
    counts: bool = False
    began_s: float = 0.0
    taken: int = 0

    @property
    def is_last(self) -> bool:
        """Whether this launch is over after it."""
        return self.reason in LAST_REASONS

    @property
    def waits_for_worker(self) -> bool:
        """Whether every server has kept its copy, and nobody reads them."""
        return self.tag > 0 and not self.missing and not self.worker


@dataclass(frozen=True)
class LateAnswer:
    """Who has not answered, for so many seconds, what it was to evaluate or to save."""

    worker: str
    seconds: float
    job: EvaluationJob


@dataclass(frozen=True)
class Due:
    """What a look at the progress found: an epoch that is done since the last look, and whether something is due."""

    epoch: int | None = None
    asked: bool = False


class Evaluations:
    """The evaluation that goes on, those that wait, and the best result so far.

    Args:
        first_tag: a number that no coordinator of this run has used.
        home_patience_s: for how long the first machine's workers are waited for: its disk surely holds checkpoints.
    """

    def __init__(self, plan: TrainingPlan, first_tag: int, now_s: float, home_patience_s: float) -> None:
        self._plan, self._tag = plan, first_tag
        self._home_patience_s, self._home_s = home_patience_s, now_s  # when one of them was last there
        self._starting_again: set[str] = set()  # those of them that went without having been asked to
        self.present: EvaluationJob | None = None
        self._waiting: deque[EvaluationJob] = deque()
        self._last_asked = self._is_closing = False
        self._epochs_seen = self._saved_step = 0
        self._saved_s = now_s
        self.best: BestResult | None = None
        self.stagnation = Stagnation()
        self._lead = ""
        self._late = set[str]()
        self._lasted: dict[bool, deque[float]] = {evaluates: deque(maxlen=8) for evaluates in (False, True)}
        self.first_guess_s = math.inf

    def restore(self, epochs_seen: int, best: BestResult | None, saved_step: int) -> None:
        """Take up what a journal says."""
        self._epochs_seen, self.best, self._saved_step = epochs_seen, best, saved_step

    def begin_at(self, steps: int, per_epoch: int) -> None:
        """Begin at a step: what lies before it was evaluated and saved."""
        self._epochs_seen = max(self._epochs_seen, steps // per_epoch)
        self._saved_step = max(self._saved_step, steps)

    def set_up(self, best: BestResult | None, stagnation: Stagnation, now_s: float) -> None:
        """Begin with the best result of the checkpoint that the run resumes; time counts from now."""
        self.best, self.stagnation, self._saved_s = best, stagnation, now_s

    @property
    def is_stagnant(self) -> bool:
        """Whether the run is to stop early."""
        return 0 < self._plan.early_stop <= self.stagnation.evaluations

    # What is due

    def look(self, progress: TrainingProgress, now_s: float) -> Due:
        """Let what is due wait for its turn."""
        if self._last_asked:
            return Due()
        due = self._save_is_due(progress.steps, now_s)
        if progress.complete:
            self._last_asked = True
            last_epoch = max(0, progress.done_steps - 1) // progress.steps_per_epoch
            every = self._plan.eval_every
            counts = every > 0 and progress.done_steps % (every * progress.steps_per_epoch) == 0
            goes_on = self._plan.goes_on(progress.steps_per_epoch)
            evaluate, reason = (counts, UNFREEZE) if goes_on else (True, "end")
            self._ask(EvaluationJob(last_epoch, progress.steps, evaluate, reason, counts=counts), now_s)
            return Due(asked=True)
        epoch = None
        if progress.epochs > self._epochs_seen:
            seen, self._epochs_seen = self._epochs_seen, progress.epochs
            epoch, every = progress.epochs, self._plan.eval_every
            if every and epoch // every > seen // every and not self._is_closing:
                job = EvaluationJob(epoch - 1, progress.steps, True, "interval" if due else "", counts=True)
                self._ask(job, now_s)
                return Due(epoch, True)
        asked = due and self.present is None and not (self._waiting or self._is_closing)
        if asked:
            self._ask(EvaluationJob(progress.epochs, progress.steps, False, "interval"), now_s)
        return Due(epoch, asked)

    def _save_is_due(self, steps: int, now_s: float) -> bool:
        every, seconds = self._plan.save_steps, self._plan.save_s
        return (every is not None and steps // every > self._saved_step // every) or (
            seconds is not None and now_s - self._saved_s >= seconds
        )

    def _ask(self, job: EvaluationJob, now_s: float) -> None:
        if job.reason:
            self._saved_step, self._saved_s = job.step, now_s
        self._waiting.append(job)

    def begin_closing(self) -> None:
        """Let only the last evaluation come yet: the run completes before its last step."""
        self._is_closing = True
        self._waiting = deque(job for job in self._waiting if job.is_last)

    def stop_early(self, epoch: int, step: int, completed: bool) -> bool:
        """Let a last checkpoint wait for its turn, with an evaluation where the run completes; whether none did."""
        if self._last_asked:
            return False
        self._last_asked = True
        self._waiting.append(EvaluationJob(epoch, step, completed, "end" if completed else "stop"))
        return True

    # The present one

    @property
    def waiting(self) -> bool:
        """Whether one wants to begin."""
        return self.present is None and bool(self._waiting)

    @property
    def owes_result(self) -> bool:
        """Whether an epoch's evaluation is under way, or waits."""
        return any(job.counts for job in (self.present, *self._waiting) if job is not None)

    @property
    def is_next_due(self) -> bool:
        """Whether one waits for the present one to end."""
        return bool(self._waiting)

    def begin(self, servers: Iterable[int], steps: int) -> EvaluationJob:
        """Begin the next one: all servers are to keep a copy, of after so many steps: more than when it was asked for,
        where it had to wait for a step to end.
        """
        self.present = self._waiting.popleft()
        self.present.step = steps
        return self.begin_again(self.present, servers)

    def begin_again(self, job: EvaluationJob, servers: Iterable[int]) -> EvaluationJob:
        """Begin the present one anew: a copy was lost with its server."""
        self._tag += 1
        job.tag, job.missing, job.worker = self._tag, set(servers), ""
        return job

    def kept(self, tag: int, index: int) -> bool:
        """Note that a server has kept its copy; whether now all have."""
        if self.present is None or self.present.tag != tag:
            return False
        self.present.missing.discard(index)
        return not self.present.missing

    def task_for(self, member: RunMember, workers: Sequence[RunMember], now_s: float) -> EvaluateTask | None:
        """Return the present one as a task, when it waits for this worker."""
        job = self.present
        if job is None or not job.waits_for_worker or member.name != self._leader(workers, now_s):
            return None
        takes_over = self._lead not in ("", member.name)
        job.worker = self._lead = member.name
        job.began_s = now_s
        best, best_loss = BestResult.numbers(self.best)
        return EvaluateTask(
            EVALUATION_TASKS + job.tag, job.tag, job.epoch, job.step, job.evaluate, job.reason, best, best_loss,
            self.stagnation, job.counts, takes_over,
        )  # fmt: skip

    def _leader(self, workers: Sequence[RunMember], now_s: float) -> str:
        """Return the worker that evaluates: the one that did so last, else the first of the first machine.

        Empty while the first machine has none: they are being started again.
        """
        able = [m for m in workers if m.name not in self._late] or workers
        if self._waits_for_home(able, now_s):
            return ""
        names = [m.name for m in able if m.is_home] or [m.name for m in able]
        return self._lead if self._lead in names else names[0]

    def _waits_for_home(self, able: Sequence[RunMember], now_s: float) -> bool:
        return now_s - self._home_s <= self._home_patience_s and not any(m.is_home for m in able)

    def take_from_late(self, workers: Sequence[RunMember], now_s: float) -> LateAnswer | None:
        """Let another worker do what one has not answered within its deadline, where there is another.

        After ten times as long as such a task has lasted, and each time that it is taken four times that; at least
        after the patience with the first machine's workers, where it goes from there to another machine.
        """
        if any(m.is_home and m.name not in self._late for m in workers):
            self._home_s = now_s
            self._starting_again -= {m.name for m in workers}
        job = self.present
        if job is None or not job.worker:
            return None
        others = [m for m in workers if m.name not in self._late | {job.worker}]
        if not others:
            return None
        lasted = self._lasted[job.evaluate]
        allowed_s = max(_LEAST_S, 10 * max(lasted)) if lasted else self.first_guess_s
        leaves_home = self._waits_for_home(others, now_s)
        if leaves_home:
            allowed_s = max(allowed_s, self._home_patience_s)
        if now_s - job.began_s <= allowed_s * 4**job.taken:
            return None
        if leaves_home:
            self._home_s = -math.inf
        late = LateAnswer(job.worker, now_s - job.began_s, job)
        self._late.add(job.worker)
        job.worker, job.taken = "", job.taken + 1
        return late

    def answered(self, name: str) -> bool:
        """Hear an answer of a worker; whether it is of one that has the present task, or of one that had it last."""
        self._late.discard(name)
        return self.present is not None and self.present.worker in ("", name)

    def has_task(self, name: str) -> bool:
        """Whether a worker has the present task."""
        return self.present is not None and self.present.worker == name

    def worker_gone(self, member: RunMember, was_asked: bool) -> None:
        """Let another worker take the task that one had; who was asked to leave is not waited for."""
        self._late.discard(member.name)
        if member.is_home and not was_asked:
            self._starting_again.add(member.name)
        elif member.is_home and not self._starting_again:
            self._home_s = -math.inf
        if self.has_task(member.name) and self.present is not None:
            self.present.worker = ""

    def is_present(self, task: int) -> bool:
        """Whether a task is the present evaluation."""
        return self.present is not None and task == EVALUATION_TASKS + self.present.tag

    def end(self, now_s: float) -> None:
        """The present one is done."""
        if self.present is not None:
            self._lasted[self.present.evaluate].append(now_s - self.present.began_s)
        self.present = None
