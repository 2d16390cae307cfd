"""What members and coordinator say to each other, and the launcher to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from echelon.core.task import Stagnation
from echelon.messages.framing import Content, content, vocabulary
from echelon.messages.plain import AnyFloat

SETUP_TASK = 2**50
"""The number of the setup; those of evaluations begin at `EVALUATION_TASKS`, those of batches at 0."""

EVALUATION_TASKS = 2**40

UNFREEZE = "unfreeze"
"""Why the last copy of a launch is saved whose run goes on in another, in which more of the model is trained."""

LAST_REASONS = ("end", "stop", UNFREEZE)
"""Why copies are saved after which a launch is over."""


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Bytes that a worker moved since its last report: for training by direction, and copies that it gave or read."""

    sent: int = 0
    received: int = 0
    other: int = 0


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What a worker measured while it did a task.

    Attributes:
        loss: sum over units (samples, tokens), divided by those of the whole batch.
        score: the task's score, summed over samples; None: it has none.
        phases: seconds by phase; `gc_s`: of them in garbage collections.
        density: share of elements that its last message carried; None without a sparse codec.
        entropy_coded: what entropy coding did since the worker began.
        resources: a row of `observe.resources`; empty where nothing new was sampled.
        pauses: seconds of what the worker did since its last report that belongs to no step, by name: evaluation.
        share: of the whole batch's units.
    """

    loss: AnyFloat
    score: AnyFloat | None
    samples: int
    lr: float
    phases: list[float]
    memory_bytes: int
    density: float | None = None
    entropy_coded: dict[str, float] = field(default_factory=dict)
    resources: list[AnyFloat] = field(default_factory=list)
    gc_s: float = 0.0
    pauses: dict[str, float] = field(default_factory=dict)
    share: float = 1.0


# To the coordinator


@content(20)
class JoinWorker(Content):
    """A worker takes part.

    Attributes:
        fingerprint: of model and data: workers of another one are sent away.
        holding: tasks that it works on already, or has done without word that it was heard.
        machine: the number of its machine; 0: the first one.
        host, affinity: where it runs, for the record.
        pids: of all its processes, where it is split over several.
    """

    fingerprint: str
    holding: list[int] = field(default_factory=list)
    machine: int = 0
    pid: int = 0
    host: str = ""
    affinity: str = ""
    pids: list[int] = field(default_factory=list)


@content(21)
class JoinServer(Content):
    """A server takes part, or is in another state than it said before.

    Attributes:
        ready: it has all that it is to hold.
        restored: it came back with what an earlier process of its name saved.
        empty: it has nothing.
        membership: in which a standby took what it has (see `ServerEntry`); 0: in none.
    """

    index: int
    address: str
    pid: int
    ready: bool
    standby: bool
    restored: bool
    empty: bool
    membership: int = 0


@content(22)
class WorkerBeat(Content):
    """A worker lives: the seconds that it waited, by cause, and its bytes, since it began.

    Attributes:
        overlapped_s: of its forward passes, in which values still came; counted with order=priority.
    """

    waited_s: dict[str, float]
    sent_bytes: int
    received_bytes: int
    overlapped_s: float = 0.0


@content(33)
class ServerBeat(Content):
    """A server lives; what it did in its present life, for the record (see `records.kinds.ServerWindow`)."""

    index: int
    life: int
    address: str
    ready: bool
    standby: bool
    attached: bool
    updates: int
    duplicates: int
    late: int
    busy_s: float
    staleness: dict[str, int]
    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    refused: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


@content(23)
class AskTask(Content):
    """A worker wants a task."""


@content(24)
class TaskDone(Content):
    """A lease is done; `late`: it came when its step was complete without it."""

    task: int
    late: bool
    report: TaskReport
    moved: MovedBytes


@content(25)
class SetupDone(Content):
    """The servers hold what the run begins with: all leases below `done_below` are in it, and those of `done_beyond`.

    Attributes:
        done_below, done_beyond: leases where workers do not wait for each other, `parts` of them in a step; else steps.
            What is beyond is first, last, first, last, ... of runs.
        best, best_loss: the best result of the checkpoint that is resumed.
        about: the record's line of the run's start (`records.kinds.Start`), as plain values.
        notes: what a user has to know of this run, each with the name of its event before it.
        passed_over: what is wrong with newer checkpoints than the one that is resumed.
        stagnation: of the checkpoint's evaluations.
        parts: leases that a step is cut into from the run's beginning on, where workers do not wait for each other.
    """

    task: int
    fingerprint: str
    steps_per_epoch: int
    done_below: int
    done_beyond: list[int]
    best: AnyFloat | None = None
    best_loss: AnyFloat | None = None
    resumed: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[list[str]] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    stagnation: Stagnation = Stagnation()
    moved: MovedBytes = MovedBytes()
    parts: int = 1


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What the evaluation of a copy gave: the mean loss per unit, metrics by name, and after which step.

    Attributes:
        test_loss: of the test set, where there is one beside them and this is the best result so far.
        test_metrics: likewise; empty: it was not evaluated.
        test_samples: that these are of.
        test_seconds: that this took.
    """

    loss: AnyFloat
    metrics: dict[str, AnyFloat | None]
    seconds: float
    samples: int
    step: int
    test_loss: AnyFloat = 0.0
    test_metrics: dict[str, AnyFloat | None] = field(default_factory=dict)
    test_samples: int = 0
    test_seconds: float = 0.0


@content(26)
class EvaluationDone(Content):
    """A copy is evaluated and saved.

    Attributes:
        lost: a server died before its copy was read: nothing is done.
        best, best_loss: the result, if it is the best so far.
        evaluation: None where the copy was only saved.
        stagnation: with it.
    """

    task: int
    lost: bool = False
    best: AnyFloat | None = None
    best_loss: AnyFloat | None = None
    evaluation: CopyResult | None = None
    stagnation: Stagnation = Stagnation()
    moved: MovedBytes = MovedBytes()


@content(27)
class CopyKept(Content):
    """A server keeps the copy that was asked for."""

    tag: int
    index: int


@content(28)
class ServerHolds(Content):
    """A server came back: what it holds after everyone has told it again what it may have lost.

    Attributes:
        watermark: it holds all tasks (where steps have shares: all steps) below it.
        tasks: those beyond, as first, last, first, last, ...
        life: the server's session, so that the same word is taken once.
    """

    index: int
    watermark: int
    tasks: list[int]
    life: int


@content(29)
class ServerLacked(Content):
    """A server went on without shares that nobody has any more: so many steps lacked some."""

    index: int
    lacking: int


@content(30)
class LeaveRun(Content):
    """A worker goes; the bytes that it has not told yet."""

    moved: MovedBytes


@content(31)
class Died(Content):
    """A launcher's word: a process of its machine ended. `pid` 0: whichever has that name."""

    name: str
    how: str = "died"
    pid: int = 0


@content(32)
class Stop(Content):
    """A launcher's word: end the run early, after a checkpoint."""

    reason: str


@content(34)
class Drain(Content):
    """A launcher's word: workers of these names finish what they work on, and leave; the others go on."""

    workers: list[str]


# To members


@content(40)
class Welcome(Content):
    """The answer to `JoinWorker`: whether the servers are set up."""

    set_up: bool


@content(41)
class JoinAgain(Content):
    """The coordinator does not know this member: it is new, or thought the member dead."""


@content(42)
class BecomeStandby(Content):
    """To a server: another one has taken its place."""


@content(43)
class SetupTask(Content):
    """To a worker: give the servers what the run begins with."""

    task: int = SETUP_TASK


@content(44)
class TrainTask(Content):
    """To a worker: a lease, which is share `share` of `shares` of one step.

    Attributes:
        step: number of the step in the run.
        epoch, batch: where its samples are.
    """

    task: int
    step: int
    epoch: int
    batch: int
    share: int = 0
    shares: int = 1


@content(45)
class EvaluateTask(Content):
    """To a worker: read the servers' copies `tag`, evaluate them, save them.

    Attributes:
        reason: why the copy is saved; empty: only if it is the best.
        best, best_loss: the best result so far.
        stagnation: evaluations without a better one.
        counts: whether it is one of those that count for that: the last one of a run does not.
        takes_over: another worker had the last one, and may hold what only one can have at a time.
    """

    task: int
    tag: int
    epoch: int
    step: int
    evaluate: bool
    reason: str
    best: AnyFloat | None = None
    best_loss: AnyFloat | None = None
    stagnation: Stagnation = Stagnation()
    counts: bool = True
    takes_over: bool = False


@content(46)
class TaskHeard(Content):
    """To a worker: its report of a task was heard."""

    task: int


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """Who serves an index: where, in which session (`life`), and its standby's name; empty words: nobody.

    `membership` is the number of the standby's stay among the members: another one whenever it was taken for gone in
    between, for the primary did not wait for it then. 0: nobody stands by.
    """

    address: str
    life: int
    ready: bool
    standby: str
    empty: bool
    membership: int = 0


@content(47)
class Members(Content):
    """Who takes part: servers in order of their index, workers by name. All tasks below `watermark` are done.

    Attributes:
        parts: leases that each batch is cut into, where workers do not wait for each other.
    """

    servers: list[ServerEntry]
    workers: list[str]
    watermark: int
    parts: int = 1


@content(48)
class KeepCopy(Content):
    """To a server: keep a copy of now. `full`: all that a checkpoint needs."""

    tag: int
    full: bool


@content(49)
class DropCopy(Content):
    """To a server: a copy is not needed any more."""

    tag: int


@content(50)
class Promote(Content):
    """To a standby: you are the primary."""


@content(51)
class CatchUp(Content):
    """To a server: complete every step before this one; what nobody has is lost."""

    step: int


@content(52)
class RunEnded(Content):
    """It is over: `completed`, `stopped`, `failed`; for this member alone: `refused`, or `left`, as it was asked to."""

    status: str


@content(53)
class WithdrawTask(Content):
    """To a worker: leave a lease undone, which waits for one that nobody does. It may be given out again later."""

    task: int


Task = SetupTask | TrainTask | EvaluateTask

TO_COORDINATOR = vocabulary(
    JoinWorker, JoinServer, WorkerBeat, ServerBeat, AskTask, TaskDone, SetupDone, EvaluationDone, CopyKept, ServerHolds,
    ServerLacked, LeaveRun, Died, Stop, Drain,
)  # fmt: skip
TO_WORKER = vocabulary(
    Welcome, JoinAgain, SetupTask, TrainTask, EvaluateTask, WithdrawTask, TaskHeard, Members, RunEnded
)
TO_SERVER = vocabulary(JoinAgain, BecomeStandby, Members, KeepCopy, DropCopy, Promote, CatchUp, RunEnded)
