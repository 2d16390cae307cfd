"""What workers, servers and standbys say to each other about keys of the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.messages.framing import ANY_FRAMES, MAX_FRAMES, Content, vocabulary

BUFFERS_KEY = 2**31
"""The key number under which statistics that are no parameters (BatchNorm) are put, pulled and saved."""


# To a server


@dataclass(frozen=True, slots=True)
class SetTable(Content):
    """The table of keys, which is the frame."""

    kind: ClassVar[int] = 1
    frames: ClassVar[tuple[int, int]] = (1, 1)


@dataclass(frozen=True, slots=True)
class PutState(Content):
    """The state of one key, value only or whole: `meta` describes the frames (see `blob`)."""

    kind: ClassVar[int] = 2
    frames: ClassVar[tuple[int, int]] = ANY_FRAMES
    key: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class PushGradient(Content):
    """A gradient of one key, in the frames.

    Attributes:
        task, step, share, shares: the lease that it is from.
        units: of the loss, that it is a sum over; `batch`: of the whole step.
        base: version of the parameters that it was computed on.
        number: rises with each push of a worker to a server; it survives the server's restart.
        pull: the key's next value is wanted too.
    """

    kind: ClassVar[int] = 4
    frames: ClassVar[tuple[int, int]] = (1, MAX_FRAMES)
    key: int
    task: int
    step: int
    share: int
    shares: int
    units: int
    batch: int
    base: int
    number: int
    lr: float
    pull: bool

    def pull_behind(self, aggregates: bool) -> Pull:
        """Return the pull that a push with `pull` stands for: one message less for each key.

        Where gradients are aggregated it is exactly the version that the push is part of, else whatever is newest.
        """
        return Pull(self.key, self.step + 1 if aggregates else 0, aggregates, False, 0)


@dataclass(frozen=True, slots=True)
class Pull(Content):
    """Wants a key's value.

    Attributes:
        version: where gradients are aggregated, the least that will do; `exact`: no later one either.
        full: the value itself, not the difference to what was sent last.
        tag: of the copy `tag`; 0: as it is now.
    """

    kind: ClassVar[int] = 6
    key: int
    version: int
    exact: bool
    full: bool
    tag: int


@dataclass(frozen=True, slots=True)
class ReadState(Content):
    """Wants a key's whole state in a copy."""

    kind: ClassVar[int] = 9
    key: int
    tag: int


@dataclass(frozen=True, slots=True)
class Repushed(Content):
    """After a server's restart: everything that was not durable is pushed again."""

    kind: ClassVar[int] = 11
    life: int


@dataclass(frozen=True, slots=True)
class OperationDone(Content):
    """A standby holds all operations up to a number."""

    kind: ClassVar[int] = 13
    number: int


@dataclass(frozen=True, slots=True)
class Attach(Content):
    """A standby wants the server's state, then every operation."""

    kind: ClassVar[int] = 14


@dataclass(frozen=True, slots=True)
class SendBuffers(Content):
    """A worker's statistics that are no parameters, 1-D float32, in the frame."""

    kind: ClassVar[int] = 15
    frames: ClassVar[tuple[int, int]] = (1, 1)
    task: int


# To a worker


@dataclass(frozen=True, slots=True)
class PutDone(Content):
    """A key's state was taken."""

    kind: ClassVar[int] = 3
    key: int


@dataclass(frozen=True, slots=True)
class PushAck(Content):
    """What became of a push (`outcome` of `keystore.PushOutcome`); `life`: the server's session."""

    kind: ClassVar[int] = 5
    key: int
    task: int
    number: int
    outcome: int
    version: int
    life: int


@dataclass(frozen=True, slots=True)
class KeyValue(Content):
    """A key's value, or with `delta` the difference to what was sent last, in the frames.

    `acks`: what became of the peer's pushes: number, outcome, number, outcome, ...
    """

    kind: ClassVar[int] = 7
    frames: ClassVar[tuple[int, int]] = (1, MAX_FRAMES)
    key: int
    version: int
    delta: bool
    tag: int
    life: int
    acks: list[int]


@dataclass(frozen=True, slots=True)
class Durable(Content):
    """Pushes up to a number survive the server's death."""

    kind: ClassVar[int] = 8
    number: int
    life: int


@dataclass(frozen=True, slots=True)
class StateOf(Content):
    """A key's whole state in a copy."""

    kind: ClassVar[int] = 10
    frames: ClassVar[tuple[int, int]] = ANY_FRAMES
    key: int
    tag: int
    meta: bytes


# From a server to its standby, which does the same


@dataclass(frozen=True, slots=True)
class ReplicatedPush(Content):
    """A gradient was counted with a factor of its learning rate; the frames are the worker's."""

    kind: ClassVar[int] = 16
    frames: ClassVar[tuple[int, int]] = (1, MAX_FRAMES)
    number: int
    worker: str
    push: PushGradient
    scale: float


@dataclass(frozen=True, slots=True)
class ReplicatedPull(Content):
    """A worker was given a key's value: later updates depend on when."""

    kind: ClassVar[int] = 17
    number: int
    worker: str
    key: int


@dataclass(frozen=True, slots=True)
class ReplicatedBuffers(Content):
    """A worker sent statistics; the frame is the worker's."""

    kind: ClassVar[int] = 18
    frames: ClassVar[tuple[int, int]] = (1, 1)
    number: int
    worker: str


TO_PS_SERVER = vocabulary(
    SetTable, PutState, PushGradient, Pull, ReadState, Repushed, OperationDone, Attach, SendBuffers
)
TO_PS_WORKER = vocabulary(PutDone, PushAck, KeyValue, Durable, StateOf)
TO_STANDBY = vocabulary(SetTable, PutState, ReplicatedPush, ReplicatedPull, ReplicatedBuffers)
