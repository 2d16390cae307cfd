"""What a worker's two threads share: configuration, a push's description, the state of keys and tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from echelon.compression import Compression
from echelon.coordinator.messages import TaskReport
from echelon.messages.identity import RunKeys
from echelon.ps.messages import Pull, PullRows
from echelon.ps.table import KeyRange
from echelon.sync.base import StepAbandoned


class ClientFailed(RuntimeError):
    """The conversation with servers or scheduler cannot go on; says why."""


class RunOver(StepAbandoned):
    """The run ended while this worker waited for a value: its task is not needed any more."""


class TaskWithdrawn(StepAbandoned):
    """The scheduler took a task back while this worker waited for a value: it waits for one that nobody does."""


class TagLost(RuntimeError):
    """A server that held a copy died before the copy was read."""


@dataclass(frozen=True)
class ClientConfig:
    """What a worker is told when it starts. `stream` is a number of its own, for codecs that draw."""

    name: str
    keys: RunKeys
    scheduler: str
    compression: Compression
    seed: int
    stream: int
    timeout_s: float
    keeps: bool = True
    aggregates: bool = False
    by_priority: bool = False


@dataclass(frozen=True)
class PushInfo:
    """The task that a gradient belongs to, and what its server must know of it.

    Attributes:
        place: of its key in the next forward pass, from 1 on; 0: keys leave in the order of the model.
    """

    task: int
    step: int
    share: int
    shares: int
    units: int
    batch: int
    lr: float
    place: int = 0


@dataclass
class CachedValue:
    """A key's newest value in this worker, which version it is, and the pull that is on its way.

    `serves` is the version that was asked for when this value came: a newer one comes for a step that is complete
    without this worker (backup workers), whose gradient will be late whatever it is computed on.
    """

    value: Tensor
    version: int = -1
    valid: bool = False
    serves: int = -1
    pull: Pull | None = None


@dataclass(frozen=True)
class RowsOf:
    """Which values of rows are wanted: for a task of a step, behind what was pushed before; of a copy with a tag."""

    task: int = 0
    step: int = 0
    tag: int = 0


@dataclass
class AwaitedRows:
    """Rows of a table's key that were asked for: the request, and their values, `(R, D)`, once they came."""

    key: KeyRange
    pull: PullRows
    frame: Any
    count: int
    values: Tensor | None = None


@dataclass
class OpenTask:
    """A task whose pushes are not all acknowledged."""

    unacked: int = 0
    report: TaskReport | None = None
    late: bool = False


@dataclass
class ClientStats:
    """Seconds that the training thread waited, by cause, and pushes by what became of them.

    Attributes:
        arrived_s: when the last value came, on the clock of `time.perf_counter`; known with order=priority alone.
        overlapped_s: of forward passes, in which values still came; likewise.
    """

    waited_s: dict[str, float] = field(default_factory=lambda: {"parameters": 0.0, "task": 0.0})
    arrived_s: float = 0.0
    overlapped_s: float = 0.0
    late: int = 0
    duplicates: int = 0
