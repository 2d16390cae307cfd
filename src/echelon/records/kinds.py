"""One frozen dataclass for each kind of line of a run's record: the only words between what runs and what shows.

A line is a JSON object: `kind`, `t`, and the record's fields under their names. Fields without a default were in the
record from the beginning; newer ones have a default, so that lines of earlier runs are read.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any, ClassVar

from echelon.core.task import BEFORE_TASKS, TaskFacts
from echelon.records.decode import decode, left_out, nan_number, number, readable_rows

VERSION = 3
"""Of what this package writes; written in `start`. 0: of runs before versions were written.

Since 2, class weights have a mean of 1 over the training samples, and evaluations sum losses without weights and
label smoothing. Since 3, the codec sign has blocks of 256 elements where its spec says none (4096 before).
"""

TCP_HEADER_BYTES = 66  # Ethernet 14, IPv4 20, TCP with timestamps 32

COMMUNICATE = "communicate"
"""The phase in which a rank waits for the others; all other phases are work of its own."""

Number = Annotated[float, nan_number]
"""A number that may be NaN or infinite."""


@dataclass(frozen=True)
class Record:
    """One line. `t` is the moment it was written (unix seconds): the recorder sets it, a reader finds it."""

    kind: ClassVar[str] = ""
    t: float = field(default=math.nan, kw_only=True)

    def checked(self) -> Record:
        """Return the record as a reader may rely on it.

        Raises:
            ValueError: its fields contradict each other.
        """
        return self

    @property
    def rows_left_out(self) -> int:
        """How many rows of the line could not be read, where its rows are read one by one."""
        return 0


def _shell(command: Any) -> str:
    """Return a command as a shell takes it; earlier runs recorded it as a list of words."""
    return shlex.join(map(str, command)) if isinstance(command, list) else str(command)


@dataclass(frozen=True)
class Environment:
    """The machine, the versions and the command of a run."""

    python: str = ""
    torch: str = ""
    echelon: str = ""
    platform: str = ""
    cpu: str = ""
    cores: int | None = None
    gpus: Sequence[str] = ()
    command: Annotated[str, _shell] = ""


@dataclass(frozen=True)
class Start(Record):
    """An attempt begins: a group of ranks, or a run's workers, is about to train.

    Attributes:
        attempt: restarts of this launch before it.
        hosts, pids, affinity: by rank. Of workers that come and go those that it begins with (each writes a
            `WorkerJoined` too); empty where one of them was late.
        backend: what carries messages between ranks.
        layout: sizes of the mesh by axis; axes of size 1 may be left out, and `None` is of runs before layouts.
        task: what is learnt; runs of before tasks are of image classification.
        served: servers hold the parameters.
        idle: settings, as flags, that do nothing in this run.
        launched_t: when the command was given, in unix seconds.
        shares: samples of each rank's part of a full batch, as it begins; empty: they are equal.
        objects: keywords of `echelon.resume` by which the run needs objects from Python again.
        resident_bytes: of each rank's process before it had a model; empty where ranks are on GPUs.
        recovery_bytes: sent to bring ranks where the others are, after some have come or gone; they count in
            `other_wire_bytes` as well.
        order: in which gradients are summed, or travel to servers and values back, `ready` or `priority`; empty where
            there is no choice.
    """

    kind: ClassVar[str] = "start"
    attempt: int = 0
    world_size: int = 0
    hosts: Sequence[str] = ()
    pids: Sequence[int] = ()
    affinity: Sequence[str] = ()
    backend: str = ""
    device: str = ""
    threads: int | None = None
    parameters: int | None = None
    layout: Mapping[str, int] | None = None
    model: str = ""
    data: str = ""
    classes: Sequence[str] = ()
    task: TaskFacts = BEFORE_TASKS
    train_size: int | None = None
    eval_size: int | None = None
    batch_size: int | None = None
    steps_per_epoch: int = 0
    epochs: int = 0
    start_step: int = 0
    start_epoch: int = 0
    served: bool = False
    idle: Sequence[str] = ()
    environment: Environment = field(default_factory=Environment)
    launched_t: float | None = None
    version: int = VERSION
    shares: Sequence[int] = ()
    objects: Sequence[str] = ()
    resident_bytes: Sequence[int] = ()
    recovery_bytes: int = 0
    order: str = ""

    @property
    def splits_model(self) -> bool:
        """Whether a replica is spread over several ranks."""
        return bool(self.inner_axes)

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """Axes that a replica is spread over: what its ranks send each other is in no count of bytes."""
        return tuple(axis for axis, size in (self.layout or {}).items() if axis != "dp" and size != 1)

    @property
    def axes_in_passes(self) -> tuple[str, ...]:
        """Those of `inner_axes` that are `in_passes`."""
        return in_passes(self.inner_axes)


def in_passes(axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes whose messages go during forward and backward passes, and are timed as parts of these."""
    return tuple(axis for axis in axes if axis != "pp")


@dataclass(frozen=True)
class Waits:
    """How long ranks waited for others in a number of steps, or of windows.

    Attributes:
        count: of them.
        total_s: of all ranks.
        least_s: of each, the least that any rank waited, added up: what is left when all are there.
        critical: in how many of them each rank waited least: the others waited for it.
    """

    count: int
    total_s: float
    least_s: float
    critical: Sequence[int]

    @staticmethod
    def of(columns: Sequence[Sequence[float]], ranks: int) -> Waits:
        """Add up waits (steps, ranks)."""
        critical, least_s = [0] * ranks, [min(column) for column in columns]
        for column, least in zip(columns, least_s, strict=True):
            critical[column.index(least)] += 1
        return Waits(len(columns), sum(map(sum, columns)), sum(least_s), critical)

    @staticmethod
    def sum(waits: Sequence[Waits]) -> Waits:
        """Add up the waits of the same ranks."""
        return Waits(
            sum(w.count for w in waits), sum(w.total_s for w in waits), sum(w.least_s for w in waits),
            [sum(column) for column in zip(*(w.critical for w in waits), strict=True)],
        )  # fmt: skip


@dataclass(frozen=True)
class Steps(Record):
    """A window: consecutive optimizer steps of all ranks (of all workers, with a parameter server) reported together.

    Sequences by rank have one entry, or one row, for each rank; they are empty where nothing was recorded.

    Attributes:
        epoch: from 0, of the last step.
        step: the last one's number, from 1.
        losses: of each step, in order.
        correct: samples whose prediction was right, or what else the task counts; None where it counts nothing.
        lr: learning rate of the last step.
        seconds: wall time, pauses left out.
        phases: (ranks, phases) seconds, summed over the window; columns are `phase_names`.
        wire_bytes: sent by all ranks so that replicas agree; `wire_bytes_by_group` holds its parts.
        other_wire_bytes: sent for anything else: checkpoints, evaluations, statistics, copies, recovery after a death.
        density: share of the encoded elements that the last message carried, where a codec is sparse.
        memory_bytes: by rank, the most so far: of the process on a CPU, of torch's allocator on a GPU.
        gc_s: by rank, in garbage collections.
        comm_busy_s: by rank, in which communication was under way during backward.
        comm_spread_s: by rank, in which it could be hidden.
        waits: (ranks, steps) seconds that each step waited for other ranks.
        pauses: (ranks, pauses) seconds since the window before; columns are `pause_names`.
    """

    kind: ClassVar[str] = "steps"
    step: int
    losses: Sequence[Number]
    seconds: float
    epoch: int = 0
    correct: float | None = None
    samples: int = 0
    lr: float | None = None
    phase_names: Sequence[str] = ()
    phases: Sequence[Sequence[float]] = ()
    wire_bytes: float = 0
    wire_bytes_by_group: Mapping[str, float] = field(default_factory=dict)
    other_wire_bytes: float = 0
    density: float | None = None
    memory_bytes: Sequence[float] = ()
    gc_s: Sequence[float] = ()
    comm_busy_s: Sequence[float] = ()
    comm_spread_s: Sequence[float] = ()
    pause_names: Sequence[str] = ()
    pauses: Sequence[Sequence[float]] = ()
    waits: Sequence[Sequence[float]] = ()

    @property
    def count(self) -> int:
        """Number of steps in the window."""
        return len(self.losses)

    @property
    def windows(self) -> int:
        """How many windows this line stands for (see `records/merged.py`)."""
        return 1

    @property
    def mean_loss(self) -> float:
        """Mean over the steps."""
        return sum(self.losses) / self.count

    @property
    def nonfinite_step(self) -> int | None:
        """The first step whose loss is not finite."""
        if math.isfinite(sum(self.losses)):
            return None
        places = (i for i, loss in enumerate(self.losses) if not math.isfinite(loss))
        return next((self.step - self.count + 1 + i for i in places), None)

    def loss_points(self) -> Iterator[tuple[int, float, int]]:
        """Yield steps, their losses, and for how many steps each stands."""
        for i, loss in enumerate(self.losses):
            yield self.step - self.count + 1 + i, loss, 1

    def step_times(self) -> list[float]:
        """Return the mean seconds of a step, for each window that this line stands for."""
        return [self.seconds / self.count]

    def slowest_ranks(self) -> Sequence[int]:
        """Return in how many windows each rank had the most work of its own."""
        work = [
            sum(s for name, s in zip(self.phase_names, row, strict=True) if name != COMMUNICATE) for row in self.phases
        ]
        slowest = max(range(len(work)), key=work.__getitem__, default=None)
        return [int(rank == slowest) for rank in range(len(work))]

    def waits_by_window(self) -> Waits | None:
        """Return the waits of the windows that this line stands for; None where no phase is waiting."""
        if COMMUNICATE not in self.phase_names or not self.phases:
            return None
        column = self.phase_names.index(COMMUNICATE)
        return Waits.of([[row[column] for row in self.phases]], len(self.phases))

    def waits_by_step(self) -> Waits | None:
        """Return the waits of the steps, where they were recorded one by one."""
        if not self.waits or len(self.waits) != len(self.phases):
            return None
        return Waits.of(list(zip(*self.waits, strict=True)), len(self.waits))

    @property
    def hidden_s(self) -> float:
        """Seconds of communication behind backward, of all ranks."""
        waits = self.waits_by_window()
        return max(0.0, sum(self.comm_busy_s) - waits.total_s) if waits else 0.0

    def mean_phases(self) -> dict[str, float]:
        """Return the seconds of each phase, the mean over the ranks."""
        sums = zip(*self.phases, strict=True)
        return {name: sum(column) / len(self.phases) for name, column in zip(self.phase_names, sums, strict=False)}

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second."""
        return self.samples / max(self.seconds, 1e-9)

    def checked(self) -> Steps:
        """Return the window without columns that do not fit its ranks.

        Raises:
            ValueError: it has no steps, or phases without names.
        """
        ranks = len(self.phases)
        if not self.losses or any(len(row) != len(self.phase_names) for row in self.phases):
            raise ValueError("not a window of steps")
        strange: dict[str, Any] = {
            name: () for name in ("gc_s", "comm_busy_s", "comm_spread_s") if len(getattr(self, name)) not in (0, ranks)
        }
        for name, width in (("waits", len(self.losses)), ("pauses", len(self.pause_names))):
            rows = getattr(self, name)
            if rows and (len(rows) != ranks or any(len(row) != width for row in rows)):
                strange[name] = ()
        return replace(self, **strange) if strange else self


def _metrics(values: Any) -> dict[str, float | None]:
    return {str(name): float(v) for name, v in values.items() if isinstance(v, int | float)}


@dataclass(frozen=True)
class Evaluation(Record):
    """One pass over the evaluation samples after `step` steps; metrics that could not be computed are left out.

    Attributes:
        test_loss: of the test set, where there is one beside them and this was the best evaluation so far.
        test_metrics: likewise; empty: it was not evaluated.
        test_samples: that these are of.
    """

    kind: ClassVar[str] = "evaluation"
    step: int
    epoch: int = 0
    loss: Number | None = None
    metrics: Annotated[Mapping[str, float | None], _metrics] = field(default_factory=dict)
    seconds: float = 0.0
    samples: int = 0
    test_loss: Number | None = None
    test_metrics: Annotated[Mapping[str, float | None], _metrics] = field(default_factory=dict)
    test_samples: int = 0


@dataclass(frozen=True)
class Checkpoint(Record):
    """A checkpoint is on the disk: training waited `blocked_s` of the `total_s` that writing took."""

    kind: ClassVar[str] = "checkpoint"
    step: int = 0
    blocked_s: float = 0.0
    total_s: float = 0.0
    n_bytes: int = 0
    path: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Pause(Record):
    """Something between steps (`name`: evaluation, checkpoint, recording), in seconds of the slowest rank."""

    kind: ClassVar[str] = "pause"
    name: str
    seconds: float
    step: int = 0


@dataclass(frozen=True)
class RankResources:
    """What one rank uses of its machine at one moment; NaN where it cannot be known.

    Attributes:
        cpu_percent: of one core, of the process and its loaders since the sample before.
        rss_bytes: resident set of the process.
        loaders_rss_bytes: resident sets of its loader processes; what they share counts for each.
        sent_per_s, received_per_s: bytes per second of the machine's (or the link's) interfaces, for all its processes.
        loopback_per_s: bytes per second within the machine.
        gpu_percent, gpu_memory_bytes, gpu_memory_total_bytes: of the rank's GPU, for all its processes.
    """

    cpu_percent: float = math.nan
    rss_bytes: float = math.nan
    loaders_rss_bytes: float = math.nan
    sent_per_s: float = math.nan
    received_per_s: float = math.nan
    loopback_per_s: float = math.nan
    gpu_percent: float = math.nan
    gpu_memory_bytes: float = math.nan
    gpu_memory_total_bytes: float = math.nan


RESOURCE_NAMES = tuple(f.name for f in fields(RankResources))


@dataclass(frozen=True)
class Resources(Record):
    """What ranks use of their machines: `ranks` has a row for each, `names` are its columns; null where unknown."""

    kind: ClassVar[str] = "resources"
    names: Sequence[str]
    ranks: Sequence[Sequence[Number | None]]
    step: int | None = None

    @staticmethod
    def of(step: int, rows: Sequence[Sequence[float]]) -> Resources:
        """Make a record of rows in the order of `RESOURCE_NAMES`; an empty row is a rank that sampled nothing new."""
        unknown = [None] * len(RESOURCE_NAMES)
        return Resources(RESOURCE_NAMES, [[_rounded(v) for v in row] or unknown for row in rows], step)

    def checked(self) -> Resources:
        """Return the record.

        Raises:
            ValueError: a row has not as many numbers as there are names.
        """
        if any(len(row) != len(self.names) for row in self.ranks):
            raise ValueError("not a sample of resources")
        return self

    def by_rank(self) -> list[RankResources]:
        """Return what each rank uses; columns that are new here are left out."""
        places = [(name, i) for i, name in enumerate(self.names) if name in RESOURCE_NAMES]
        return [RankResources(**{name: nan_number(row[i]) for name, i in places}) for row in self.ranks]


def _rounded(value: float) -> float | None:
    return round(value, 1) if math.isfinite(value) else None


@dataclass(frozen=True)
class PipelineAction:
    """One computation of a stage on a micro-batch, in seconds since the step began.

    `kind`: forward, backward, or input and weight for the two halves of a backward.
    """

    rank: int
    stage: int
    microbatch: int
    kind: str
    begin_s: float
    end_s: float

    def row(self) -> list[int | float | str]:
        """Return it as the record holds it."""
        return [self.rank, self.stage, self.microbatch, self.kind, self.begin_s, self.end_s]

    @staticmethod
    def of(row: Any) -> PipelineAction:
        """Read what the record holds.

        Raises:
            TypeError, ValueError: it is no row of this kind.
        """
        rank, stage, microbatch, kind, begin_s, end_s = row
        rank, stage, microbatch = (int(number(place)) for place in (rank, stage, microbatch))
        return PipelineAction(rank, stage, microbatch, str(kind), number(begin_s), number(end_s))


def idle_share(actions: Sequence[PipelineAction], ranks: int) -> float:
    """Return the share of a step in which ranks computed nothing, from the first computation to the last.

    >>> idle_share([PipelineAction(0, 0, 0, "forward", 0, 1), PipelineAction(1, 1, 0, "forward", 1, 2)], 2)
    0.5
    """
    length = max(a.end_s for a in actions) - min(a.begin_s for a in actions)
    return 1 - sum(a.end_s - a.begin_s for a in actions) / (ranks * length) if length > 0 else 0.0


@dataclass(frozen=True)
class PipelineStep(Record):
    """What each rank of a pipeline computed when, in one step that was timed."""

    kind: ClassVar[str] = "pipeline"
    step: int
    actions: Annotated[Sequence[PipelineAction], readable_rows(PipelineAction.of)]
    schedule: str = "?"
    microbatches: int | None = None

    @property
    def rows_left_out(self) -> int:
        """How many computations could not be read."""
        return left_out(self.actions)

    def idle_share(self) -> float:
        """Return the share of the step in which its ranks computed nothing."""
        return idle_share(self.actions, len({action.rank for action in self.actions}))


@dataclass(frozen=True)
class SlowStep(Record):
    """A step that took far longer than the median of the latest ones.

    Attributes:
        phases: (ranks, phases) seconds, by `phase_names`; None for a rank whose slowest step was another.
        gc_s: by rank, in garbage collections, or None as well.
        after: what came between it and the step before.
        waited_for: the rank that waited least in it; None where one rank steps by itself, and in earlier records.
    """

    kind: ClassVar[str] = "slow_step"
    step: int
    seconds: float
    median_s: float
    phase_names: Sequence[str] = ()
    phases: Sequence[Sequence[float] | None] = ()
    gc_s: Sequence[float | None] = ()
    after: Sequence[str] = ()
    waited_for: int | None = None

    def critical_rank(self, window: Steps) -> int | None:
        """Return the rank that waited least in the step, the last to be ready for communication, by its window."""
        if len(window.waits) < 2:
            return None
        place = self.step - (window.step - window.count) - 1
        waits = [row[place] for row in window.waits]
        return waits.index(min(waits))


@dataclass(frozen=True)
class EntropyCoding(Record):
    """What entropy coding did since the start: on rank 0, or on all workers of a parameter server.

    Attributes:
        plain_bytes, sent_bytes: of messages before and after.
        planes_coded, planes_plain: streams that were coded, and that were sent plain.
        planes_slow: of those sent plain, because coding them would have taken longer than it saved.
        coding_s: seconds to encode and decode.
        spared_s: seconds of the link that this saved.
        bytes_per_s: the link's rate as last measured; 0: it is not known.
    """

    kind: ClassVar[str] = "entropy_coding"
    step: int = 0
    plain_bytes: float = 0.0
    sent_bytes: float = 0.0
    planes_coded: float = 0.0
    planes_plain: float = 0.0
    planes_slow: float = 0.0
    coding_s: float = 0.0
    spared_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Alternative:
    """What another way to communicate would cost a rank.

    Attributes:
        settings: by dotted name.
        period, overlap: the model is sent once in so many steps, behind so many of them.
        wire_bytes, rounds: that a rank sends at a time, and in how many rounds.
        coding_s: seconds to encode and decode.
        tail: share of it that comes last, which backward cannot hide.
        network_s: seconds that its messages take, as the link was measured; 0: it was not.
        share: of the run's steps in which it is sent, those of a warm-up counted; 0: not told, one in `period`.
        sums: its messages are summed on their way; others pass from each rank to each.
        buckets: in which it is sent, each in its own rounds; 0: not told.
        fewest_messages: of a tensor in a run, for what its codec leaves out not to come too late.
        follows: its period is chosen as the run goes, `period` at most, so that messages take this share of the time;
            0: it is fixed.
    """

    settings: Mapping[str, str]
    period: int
    wire_bytes: float
    rounds: float
    coding_s: float
    tail: float
    overlap: int = 0
    network_s: float = 0.0
    share: float = 0.0
    sums: bool = False
    buckets: int = 0
    fewest_messages: int = 0
    follows: float = 0.0

    @property
    def often(self) -> float:
        """The share of steps in which it is sent; of a period that is chosen, the least."""
        return self.share or 1 / self.period

    def often_beside(self, step_s: float, message_s: float) -> float:
        """Return the share of steps in which it is sent, with the period that is chosen.

        Args:
            step_s: seconds of a step in which it is not.
            message_s: that it adds to one in which it is.
        """
        if not self.follows:
            return self.often
        most = 1 / (self.overlap + 1)
        if message_s <= 0:
            return most
        return min(most, max(self.often, self.follows / (1 - self.follows) * step_s / message_s))


@dataclass(frozen=True)
class Alternatives(Record):
    """What other ways to communicate would cost, measured at the run's end; `now` are the run's own settings."""

    kind: ClassVar[str] = "alternatives"
    now: Mapping[str, str]
    latency_s: float = 0.0
    rows: Annotated[Sequence[Alternative], readable_rows(partial(decode, Alternative))] = ()

    @property
    def rows_left_out(self) -> int:
        """How many ways could not be read."""
        return left_out(self.rows)


@dataclass(frozen=True)
class LinkCounters:
    """What the kernel counted on a host's data links since the network began; control traffic is not in it.

    `sent_bytes` and `received_bytes` include headers; `dropped` counts packets lost at either end of these links.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_packets: int = 0
    received_packets: int = 0
    dropped: int = 0

    @property
    def sent_payload_bytes(self) -> int:
        """Bytes sent without Ethernet, IP and TCP headers: what a program's own count is compared with."""
        return self.sent_bytes - TCP_HEADER_BYTES * self.sent_packets

    @property
    def received_payload_bytes(self) -> int:
        """Bytes received without Ethernet, IP and TCP headers."""
        return self.received_bytes - TCP_HEADER_BYTES * self.received_packets

    def __sub__(self, earlier: LinkCounters) -> LinkCounters:
        return LinkCounters(
            self.sent_bytes - earlier.sent_bytes,
            self.received_bytes - earlier.received_bytes,
            self.sent_packets - earlier.sent_packets,
            self.received_packets - earlier.received_packets,
            self.dropped - earlier.dropped,
        )


@dataclass(frozen=True)
class LinkTraffic(Record):
    """What went over shaped links: of ranks (or workers) in order, and of servers by name."""

    kind: ClassVar[str] = "link"
    link: str = ""
    hosts: Sequence[LinkCounters] = ()
    servers: Mapping[str, LinkCounters] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerJoined(Record):
    """A worker of a parameter server joined the run."""

    kind: ClassVar[str] = "worker"
    name: str
    host: str | None = None
    pid: int | None = None
    affinity: str | None = None


@dataclass(frozen=True)
class ProcessStarted(Record):
    """A process of a run with roles began."""

    kind: ClassVar[str] = "process"
    role: str
    pid: int
    host: str | None = None


@dataclass(frozen=True)
class WorkerWindow(Record):
    """What the workers of a parameter server did since they began, by name.

    Attributes:
        clocks: batches that each has finished.
        late: shares of steps that came too late.
        waited_s: seconds that each waited, by cause.
        sent_bytes, received_bytes: of each worker's present process.
        overlapped_s: seconds of each one's forward passes in which values still came; counted with order=priority, and
            absent where there were none.
    """

    kind: ClassVar[str] = "staleness"
    step: int = 0
    clocks: Mapping[str, float] = field(default_factory=dict)
    late: int = 0
    waited_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    received_bytes: Mapping[str, float] = field(default_factory=dict)
    overlapped_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerWindow(Record):
    """What one server of parameters, or its standby, did in its present life.

    Attributes:
        life: a number that each process of a server has of its own.
        updates, duplicates, late: pushes that were applied, came again, or came too late.
        busy_s, seconds: worked, and lived.
        refused: peers without the run's key.
        dropped: messages that were not read, by reason.
        staleness: counts of gradients by the number of updates between their parameters and their own.
        ready, standby, attached: holds all its keys; stands by; has a standby.
    """

    kind: ClassVar[str] = "server"
    name: str
    step: int = 0
    life: int | None = None
    updates: int = 0
    duplicates: int = 0
    late: int = 0
    busy_s: float = 0.0
    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    refused: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    staleness: Mapping[str, int] = field(default_factory=dict)
    index: int | None = None
    ready: bool | None = None
    standby: bool | None = None
    attached: bool | None = None
    address: str = ""


EARLY_STOP, MAX_TIME = "early_stop", "max_time"


@dataclass(frozen=True)
class End(Record):
    """A run ended: `completed`, `stopped`, `failed` or `refused`.

    Attributes:
        seconds: from the command to the end of training; None where the launcher wrote it.
        other_wire_bytes: sent after the last window.
        reason: why it completed before its last step: `EARLY_STOP`, `MAX_TIME`, `LR_FIND`; empty: it did not.
        stagnant: evaluations in a row without improvement when it stopped early.
    """

    kind: ClassVar[str] = "end"
    status: str = "unknown"
    message: str = ""
    seconds: float | None = None
    other_wire_bytes: float = 0
    reason: str = ""
    stagnant: int = 0


@dataclass(frozen=True)
class CommandEnd(Record):
    """All processes of a run, or of a study, have ended, and its command does: so many seconds after it was given."""

    kind: ClassVar[str] = "command_end"
    seconds: float


@dataclass(frozen=True)
class CommandRefused(Record):
    """A command that was to resume a run was refused before it began: its seconds are none of the run's."""

    kind: ClassVar[str] = "command_refused"
    seconds: float
    message: str = ""


@dataclass(frozen=True)
class StudyStart(Record):
    """A study's own record: a command begins it, or goes on with it; `launched_t` is when that was given."""

    kind: ClassVar[str] = "study_start"
    launched_t: float


def _words(values: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()}


@dataclass(frozen=True)
class RunEnd(Record):
    """A study's own record: how one of its runs ended, why, and how long its command took.

    Attributes:
        waited_s: how long the study was occupied with it: its command, and what a process takes to start and to end.
        settings: those that the study gave it; empty: of a study before these were recorded.
    """

    kind: ClassVar[str] = "run"
    run: str
    status: str = ""
    message: str = ""
    seconds: float = 0.0
    waited_s: float = 0.0
    settings: Annotated[Mapping[str, str], _words] = field(default_factory=dict)


@dataclass(frozen=True)
class FlowStepStart(Record):
    """A step of a flow begins, in the step's own record.

    Attributes:
        fingerprint: of all that its result depends on.
        parts: what that is made of, each part's own.
        goes_on: what an earlier start left is continued.
    """

    kind: ClassVar[str] = "flow_step_start"
    fingerprint: str
    parts: Annotated[Mapping[str, str], _words] = field(default_factory=dict)
    goes_on: bool = False


@dataclass(frozen=True)
class FlowStepEnd(Record):
    """A step of a flow ended: `completed`, `stopped`, `failed` or `refused`.

    Attributes:
        outputs: the hash of each, by name.
    """

    kind: ClassVar[str] = "flow_step_end"
    fingerprint: str
    status: str = ""
    message: str = ""
    seconds: float = 0.0
    outputs: Annotated[Mapping[str, str], _words] = field(default_factory=dict)
