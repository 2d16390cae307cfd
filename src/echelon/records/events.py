"""Events: what happened beside the steps, each in one sentence, with the details that readers need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from echelon.records.kinds import Record


@dataclass(frozen=True)
class Event(Record):
    """Something happened: its name and one sentence. Events with details are classes of their own.

    `more`: like it that this line stands for as well, where a run repeated itself.
    """

    kind: ClassVar[str] = "event"
    message: str = ""
    more: int = field(default=0, kw_only=True)
    name: str = field(default="event", kw_only=True)


@dataclass(frozen=True)
class DataGrew(Event):
    """New samples were taken into a run, from an epoch (from 0) on.

    Attributes:
        count: of the new ones.
        total: of all, those held out among them.
    """

    epoch: int = 0
    count: int = 0
    total: int = 0
    name: str = field(default="data_grew", kw_only=True)


@dataclass(frozen=True)
class WorkerDied(Event):
    """A process ended that should not have: of a rank, or of a role. `exit_code` is negative for a signal.

    Attributes:
        log: the name of its log, where it may be another than its rank or role says.
    """

    rank: int | None = None
    role: str | None = None
    host: str | None = None
    pid: int | None = None
    exit_code: int | None = None
    seconds: float | None = None
    lost_steps: int | None = None
    log: str = ""
    name: str = field(default="worker_died", kw_only=True)


@dataclass(frozen=True)
class Restarted(Event):
    """A group was started again after a death (recorded by earlier versions)."""

    seconds: float | None = None
    lost_steps: int | None = None
    name: str = field(default="restarted", kw_only=True)


@dataclass(frozen=True)
class RankFailed(Event):
    """A rank ended with an error, which is the message; where in the code, and after how many steps of its own."""

    rank: int | None = None
    pid: int | None = None
    role: str | None = None
    place: str = ""
    steps: int | None = None
    name: str = field(default="rank_failed", kw_only=True)


@dataclass(frozen=True)
class RoleFailed(Event):
    """A scheduler or server ended with an error; where in the code."""

    role: str = ""
    pid: int | None = None
    place: str = ""
    name: str = field(default="role_failed", kw_only=True)


@dataclass(frozen=True)
class ProcessSeen(Event):
    """A process was looked at, of a rank or a role.

    Attributes:
        activity: a phase of the step, or `start`, `evaluation`, `checkpoint`.
        seconds: it has been in it, or a step takes; 0 where that is not known.
        line: the innermost call, of the user's code where there is one.
    """

    rank: int | None = None
    role: str | None = None
    host: str | None = None
    pid: int | None = None
    activity: str = ""
    seconds: float = 0.0
    step: int = 0
    line: str = ""


@dataclass(frozen=True)
class HangSeen(ProcessSeen):
    """A process has been in one activity for long, and others wait for it, whose names are `waiting`."""

    waiting: Sequence[str] = ()
    name: str = field(default="hang", kw_only=True)


@dataclass(frozen=True)
class SlowProcess(ProcessSeen):
    """A process makes the others wait without hanging; `seconds` is what a step takes."""

    name: str = field(default="slow_process", kw_only=True)


@dataclass(frozen=True)
class MoreMicroBatches(Event):
    """For want of memory a worker's part of a batch is cut into more micro-batches from now on."""

    micro_batches: int = 0
    name: str = field(default="more_micro_batches", kw_only=True)


@dataclass(frozen=True)
class WayTried(Event):
    """Before the run, a way to train was measured by a short run of its own.

    Attributes:
        way: as one writes it.
        step_s: that were measured; `predicted_s` of them before, None where nothing predicted them.
    """

    way: str = ""
    step_s: float = 0.0
    predicted_s: float | None = None
    name: str = field(default="way_tried", kw_only=True)


@dataclass(frozen=True)
class WayPredicted(Event):
    """At its end, a run is compared with what a plan, or an earlier run beside it, had predicted of its way.

    Attributes:
        way: as one writes it.
        source: the earlier run, or the plan.
        step_s: that were measured; `predicted_s` of them before, and the bounds `low_s` and `high_s`; 0: not told.
        memory_bytes: of the fullest rank, that were measured; `predicted_memory_bytes` of them before; 0: not told.
    """

    way: str = ""
    source: str = ""
    step_s: float = 0.0
    predicted_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    memory_bytes: float = 0.0
    predicted_memory_bytes: float = 0.0
    name: str = field(default="way_predicted", kw_only=True)


@dataclass(frozen=True)
class SharesDealt(Event):
    """After a step, each batch is divided otherwise over the ranks.

    Attributes:
        sizes: samples of each rank's part of a full batch, in the order of the ranks that divide samples.
    """

    step: int = 0
    sizes: Sequence[int] = ()
    name: str = field(default="shares_dealt", kw_only=True)


@dataclass(frozen=True)
class Refusal(Event):
    """A user's mistake, in words, told by a rank or a role."""

    rank: int | None = None
    role: str | None = None
    name: str = field(default="refused", kw_only=True)


@dataclass(frozen=True)
class CannotGoOn(Event):
    """What ends a rank that has trained, and no restart would mend, such as a disk that stays full."""

    rank: int | None = None
    role: str | None = None
    name: str = field(default="cannot_go_on", kw_only=True)


@dataclass(frozen=True)
class CallbackError(Event):
    """A callback of the user's own raised, and the run ends, told by a rank or a role; where in the code."""

    rank: int | None = None
    role: str | None = None
    place: str = ""
    name: str = field(default="callback_failed", kw_only=True)


@dataclass(frozen=True)
class RunDiverged(Event):
    """A loss was not finite, and the run ends, told by a rank or a role."""

    rank: int | None = None
    role: str | None = None
    name: str = field(default="diverged", kw_only=True)


@dataclass(frozen=True)
class BadImageSkipped(Event):
    """A file could not be decoded; `count` of them, where one line stands for several."""

    path: str = ""
    count: int = 1
    name: str = field(default="bad_image", kw_only=True)


@dataclass(frozen=True)
class LossNotFinite(Event):
    """A rank left batches out of training, for their loss was not finite; `count` of them."""

    rank: int | None = None
    count: int = 1
    name: str = field(default="loss_not_finite", kw_only=True)


@dataclass(frozen=True)
class Resumed(Event):
    """Training goes on at a step; `lost_steps` were trained before and are trained again."""

    step: int = 0
    lost_steps: int | None = None
    name: str = field(default="resumed", kw_only=True)


@dataclass(frozen=True)
class WeightsLoaded(Event):
    """A model was given weights to start from: tensors that were taken, and the names of those that differ.

    Attributes:
        new: of the model, as initialised.
        unexpected: of the file, not used.
        reshaped: brought to the model's size, each with both shapes.
    """

    loaded: int = 0
    new: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    reshaped: Sequence[str] = ()
    name: str = field(default="weights_loaded", kw_only=True)


@dataclass(frozen=True)
class StartedOver(Event):
    """A run was told to start over: checkpoints saved before do not count."""

    name: str = field(default="started_over", kw_only=True)


@dataclass(frozen=True)
class CheckpointRejected(Event):
    """A checkpoint is damaged and was passed over."""

    path: str = ""
    reason: str = ""
    name: str = field(default="checkpoint_rejected", kw_only=True)


@dataclass(frozen=True)
class MachineLeft(Event):
    """A machine's part of a run ended, and the others go on."""

    machine: int = 0
    name: str = field(default="machine_left", kw_only=True)


@dataclass(frozen=True)
class WorkerGone(Event):
    """A worker left, died or is silent; `leases` of its work go to others."""

    worker: str = ""
    leases: int = 0
    name: str = field(default="worker_gone", kw_only=True)


@dataclass(frozen=True)
class WorkerLeft(Event):
    """A worker left a run that goes on, between two steps, as it was asked to."""

    worker: str = ""
    host: str | None = None
    pid: int | None = None
    name: str = field(default="worker_left", kw_only=True)


@dataclass(frozen=True)
class ChangeRefused(Event):
    """A change of a run's members that was asked for was not made."""

    name: str = field(default="change_refused", kw_only=True)


@dataclass(frozen=True)
class EvaluationLate(Event):
    """A worker has not answered for long what it was to evaluate or to save; another one does it."""

    worker: str = ""
    seconds: float = 0.0
    name: str = field(default="evaluation_late", kw_only=True)


@dataclass(frozen=True)
class ServerGone(Event):
    """A server of parameters left, died or is silent."""

    server: int = 0
    name: str = field(default="server_gone", kw_only=True)


@dataclass(frozen=True)
class ServerLost(Event):
    """What a server held is lost for good."""

    server: int = 0
    name: str = field(default="server_lost", kw_only=True)


@dataclass(frozen=True)
class ServerSettled(Event):
    """A server came back: `lost` updates are gone; `tasks` are the first of them."""

    server: int = 0
    lost: int = 0
    tasks: Sequence[int] = ()
    name: str = field(default="server_settled", kw_only=True)


@dataclass(frozen=True)
class SharesAgain(Event):
    """Shares of the present step are done again, for a server lacks them."""

    shares: int = 0
    name: str = field(default="shares_again", kw_only=True)


@dataclass(frozen=True)
class SchedulerRestored(Event):
    """The scheduler came back and took up its journal at a step."""

    step: int = 0
    name: str = field(default="scheduler_restored", kw_only=True)


@dataclass(frozen=True)
class DiskFails(Event):
    """A run's folder cannot be written for now, and training goes on: what was to be written, and why it was not."""

    what: str = ""
    reason: str = ""
    name: str = field(default="disk_fails", kw_only=True)


@dataclass(frozen=True)
class DiskWorks(Event):
    """A run's folder can be written again, after some seconds; `lost` records in between were dropped."""

    what: str = ""
    reason: str = ""
    seconds: float = 0.0
    lost: int = 0
    name: str = field(default="disk_works", kw_only=True)


@dataclass(frozen=True)
class CodecSwitched(Event):
    """An adaptive codec sends a vector's next messages another way; recorded at the end of the window of steps.

    Attributes:
        step: last one of the window.
        vector: whose messages.
        old, new: codecs.
        reason: in words.
    """

    step: int = 0
    vector: str = ""
    old: str = ""
    new: str = ""
    reason: str = ""
    name: str = field(default="codec_switched", kw_only=True)


@dataclass(frozen=True)
class PeriodChanged(Event):
    """Replicas agree at another period, which was chosen as the run goes; recorded at the end of the window of steps.

    Attributes:
        step: after which it was decided, at an agreement; the next one is `new` steps later, or sooner in
            the warm-up.
        old, new: steps between agreements.
        reason: in words.
    """

    step: int = 0
    old: int = 0
    new: int = 0
    reason: str = ""
    name: str = field(default="period_changed", kw_only=True)


EVENTS: tuple[type[Event], ...] = (
    DataGrew, WorkerDied, Restarted, HangSeen, SlowProcess, RankFailed, RoleFailed, Refusal, CannotGoOn, CallbackError,
    RunDiverged, BadImageSkipped, LossNotFinite, MoreMicroBatches, WayTried, WayPredicted, Resumed, StartedOver,
    CheckpointRejected, MachineLeft, WorkerGone, WorkerLeft, ChangeRefused, ServerGone, ServerLost, ServerSettled,
    SharesAgain, SharesDealt, SchedulerRestored, DiskFails, DiskWorks, CodecSwitched,
    PeriodChanged,
)  # fmt: skip
"""Events with details, told apart by the default of `name`."""
