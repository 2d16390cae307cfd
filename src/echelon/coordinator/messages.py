"""What members and coordinator say to each other, and the launcher to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from echelon.messages.framing import Content, vocabulary
from echelon.messages.plain import AnyFloat

SETUP_TASK = 2**50
"""The number of the setup; those of evaluations begin at `EVALUATION_TASKS`, those of batches at 0."""

EVALUATION_TASKS = 2**40


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
        loss: sum over samples, divided by the samples of the whole batch.
        score: the task's score, summed over samples; None: it has none.
        phases: seconds by phase; `gc_s`: of them in garbage collections.
        density: share of elements that its last message carried; None without a sparse codec.
        entropy_coded: what entropy coding did since the worker began.
        resources: a row of `observe.resources`; empty where nothing new was sampled.
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


# To the coordinator


@dataclass(frozen=True, slots=True)
class JoinWorker(Content):
    """A worker takes part.

    Attributes:
        fingerprint: of model and data: workers of another one are sent away.
        holding: tasks that it works on already, or has done without word that it was heard.
        machine: the number of its machine; 0: the first one.
        host, affinity: where it runs, for the record.
    """

    kind: ClassVar[int] = 20
    fingerprint: str
    holding: list[int] = field(default_factory=list)
    machine: int = 0
    pid: int = 0
    host: str = ""
    affinity: str = ""


@dataclass(frozen=True, slots=True)
class JoinServer(Content):
    """A server takes part, or is in another state than it said before.

    Attributes:
        ready: it has all that it is to hold.
        restored: it came back with what an earlier process of its name saved.
        empty: it has nothing.
    """

    kind: ClassVar[int] = 21
    index: int
    address: str
    pid: int
    ready: bool
    standby: bool
    restored: bool
    empty: bool


@dataclass(frozen=True, slots=True)
class WorkerBeat(Content):
    """A worker lives: the seconds that it waited, by cause, and its bytes, since it began."""

    kind: ClassVar[int] = 22
    waited_s: dict[str, float]
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class ServerBeat(Content):
    """A server lives; what it did in its present life, for the record (see `records.kinds.ServerWindow`)."""

    kind: ClassVar[int] = 33
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


@dataclass(frozen=True, slots=True)
class AskTask(Content):
    """A worker wants a task."""

    kind: ClassVar[int] = 23


@dataclass(frozen=True, slots=True)
class TaskDone(Content):
    """A lease is done; `late`: it came when its step was complete without it."""

    kind: ClassVar[int] = 24
    task: int
    late: bool
    report: TaskReport
    moved: MovedBytes


@dataclass(frozen=True, slots=True)
class SetupDone(Content):
    """The servers hold what the run begins with: all steps below `done_below` are in it, and those of `done_beyond`.

    Attributes:
        done_beyond: first, last, first, last, ... of runs of steps.
        best: the best result of the checkpoint that is resumed.
        about: the record's line of the run's start (`records.kinds.Start`), as plain values.
        notes: what a user has to know of this run, each with the name of its event before it.
    """

    kind: ClassVar[int] = 25
    task: int
    fingerprint: str
    steps_per_epoch: int
    done_below: int
    done_beyond: list[int]
    best: AnyFloat | None = None
    resumed: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[list[str]] = field(default_factory=list)
    moved: MovedBytes = MovedBytes()


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What the evaluation of a copy gave: the mean loss per unit, metrics by name, and after which step."""

    loss: AnyFloat
    metrics: dict[str, AnyFloat | None]
    seconds: float
    samples: int
    step: int


@dataclass(frozen=True, slots=True)
class EvaluationDone(Content):
    """A copy is evaluated and saved.

    Attributes:
        lost: a server died before its copy was read: nothing is done.
        best: the result, if it is the best so far.
        evaluation: None where the copy was only saved.
    """

    kind: ClassVar[int] = 26
    task: int
    lost: bool = False
    best: AnyFloat | None = None
    evaluation: CopyResult | None = None
    moved: MovedBytes = MovedBytes()


@dataclass(frozen=True, slots=True)
class CopyKept(Content):
    """A server keeps the copy that was asked for."""

    kind: ClassVar[int] = 27
    tag: int
    index: int


@dataclass(frozen=True, slots=True)
class ServerHolds(Content):
    """A server came back: what it holds after everyone has told it again what it may have lost.

    Attributes:
        watermark: it holds all tasks (where steps have shares: all steps) below it.
        tasks: those beyond, as first, last, first, last, ...
        life: the server's session, so that the same word is taken once.
    """

    kind: ClassVar[int] = 28
    index: int
    watermark: int
    tasks: list[int]
    life: int


@dataclass(frozen=True, slots=True)
class ServerLacked(Content):
    """A server went on without shares that nobody has any more: so many steps lacked some."""

    kind: ClassVar[int] = 29
    index: int
    lacking: int


@dataclass(frozen=True, slots=True)
class LeaveRun(Content):
    """A worker goes; the bytes that it has not told yet."""

    kind: ClassVar[int] = 30
    moved: MovedBytes


@dataclass(frozen=True, slots=True)
class Died(Content):
    """A launcher's word: a process of its machine ended. `pid` 0: whichever has that name."""

    kind: ClassVar[int] = 31
    name: str
    how: str = "died"
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Stop(Content):
    """A launcher's word: end the run early, after a checkpoint."""

    kind: ClassVar[int] = 32
    reason: str


# To members


@dataclass(frozen=True, slots=True)
class Welcome(Content):
    """The answer to `JoinWorker`: whether the servers are set up."""

    kind: ClassVar[int] = 40
    set_up: bool


@dataclass(frozen=True, slots=True)
class JoinAgain(Content):
    """The coordinator does not know this member: it is new, or thought the member dead."""

    kind: ClassVar[int] = 41


@dataclass(frozen=True, slots=True)
class BecomeStandby(Content):
    """To a server: another one has taken its place."""

    kind: ClassVar[int] = 42


@dataclass(frozen=True, slots=True)
class SetupTask(Content):
    """To a worker: give the servers what the run begins with."""

    kind: ClassVar[int] = 43
    task: int = SETUP_TASK


@dataclass(frozen=True, slots=True)
class TrainTask(Content):
    """To a worker: a lease, which is share `share` of `shares` of one step.

    Attributes:
        step: number of the step in the run.
        epoch, batch: where its samples are.
    """

    kind: ClassVar[int] = 44
    task: int
    step: int
    epoch: int
    batch: int
    share: int = 0
    shares: int = 1


@dataclass(frozen=True, slots=True)
class EvaluateTask(Content):
    """To a worker: read the servers' copies `tag`, evaluate them, save them.

    Attributes:
        reason: why the copy is saved; empty: only if it is the best.
        best: the best result so far.
    """

    kind: ClassVar[int] = 45
    task: int
    tag: int
    epoch: int
    step: int
    evaluate: bool
    reason: str
    best: AnyFloat | None = None


@dataclass(frozen=True, slots=True)
class TaskHeard(Content):
    """To a worker: its report of a task was heard."""

    kind: ClassVar[int] = 46
    task: int


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """Who serves an index: where, in which session (`life`), and its standby's name; empty words: nobody."""

    address: str
    life: int
    ready: bool
    standby: str
    empty: bool


@dataclass(frozen=True, slots=True)
class Members(Content):
    """Who takes part: servers in order of their index, workers by name. All steps below `watermark` are done."""

    kind: ClassVar[int] = 47
    servers: list[ServerEntry]
    workers: list[str]
    watermark: int


@dataclass(frozen=True, slots=True)
class KeepCopy(Content):
    """To a server: keep a copy of now. `full`: all that a checkpoint needs."""

    kind: ClassVar[int] = 48
    tag: int
    full: bool


@dataclass(frozen=True, slots=True)
class DropCopy(Content):
    """To a server: a copy is not needed any more."""

    kind: ClassVar[int] = 49
    tag: int


@dataclass(frozen=True, slots=True)
class Promote(Content):
    """To a standby: you are the primary."""

    kind: ClassVar[int] = 50


@dataclass(frozen=True, slots=True)
class CatchUp(Content):
    """To a server: complete every step before this one; what nobody has is lost."""

    kind: ClassVar[int] = 51
    step: int


@dataclass(frozen=True, slots=True)
class RunEnded(Content):
    """The run is over: `completed`, `stopped`, `failed`, or `refused` (only this member)."""

    kind: ClassVar[int] = 52
    status: str


Task = SetupTask | TrainTask | EvaluateTask

TO_COORDINATOR = vocabulary(
    JoinWorker, JoinServer, WorkerBeat, ServerBeat, AskTask, TaskDone, SetupDone, EvaluationDone, CopyKept, ServerHolds,
    ServerLacked, LeaveRun, Died, Stop,
)  # fmt: skip
TO_WORKER = vocabulary(Welcome, JoinAgain, SetupTask, TrainTask, EvaluateTask, TaskHeard, Members, RunEnded)
TO_SERVER = vocabulary(JoinAgain, BecomeStandby, Members, KeepCopy, DropCopy, Promote, CatchUp, RunEnded)
