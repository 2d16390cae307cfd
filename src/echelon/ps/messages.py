"""What workers, servers and standbys say to each other about keys of the parameters."""

from __future__ import annotations

from dataclasses import field

from echelon.messages.framing import ANY_FRAMES, MAX_FRAMES, Content, content, vocabulary

BUFFERS_KEY = 2**31
"""The key number under which statistics that are no parameters (BatchNorm) are put, pulled and saved."""


# To a server


@content(1, (1, 1))
class SetTable(Content):
    """The table of keys, which is the frame."""


@content(2, ANY_FRAMES)
class PutState(Content):
    """The state of one key, value only or whole: `meta` describes the frames (see `blob`)."""

    key: int
    meta: bytes


@content(4, (1, MAX_FRAMES))
class PushGradient(Content):
    """A gradient of one key, in the frames.

    Attributes:
        task, step, share, shares: the lease that it is from.
        units: of the loss, that it is a sum over; `batch`: of the whole step.
        base: version of the parameters that it was computed on.
        number: rises with each push of a worker to a server; it survives the server's restart.
        pull: the key's next value is wanted too.
        absent: parts of the key that got no gradient, by number; the frames have zeros there, and where these are all
            parts, nothing.
        place: of the key in the next forward pass: what has a lower one is needed sooner.

    Of a key of a table the frames are the numbers of the rows that have a gradient, ascending, and their values (see
    `coding.RowCoding`).
    """

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
    absent: list[int] = field(default_factory=list)
    place: int = 0

    def pull_behind(self, aggregates: bool) -> Pull:
        """Return the pull that a push with `pull` stands for: one message less for each key.

        Where gradients are aggregated it is exactly the version that the push is part of, else whatever is newest.
        """
        return Pull(self.key, self.step + 1 if aggregates else 0, aggregates, False, 0, self.place)


@content(6)
class Pull(Content):
    """Wants a key's value.

    Attributes:
        version: where gradients are aggregated, the least that will do; `exact`: no later one either.
        full: the value itself, not the difference to what was sent last.
        tag: of the copy `tag`; 0: as it is now.
        place: of the key in the next forward pass; 0: it is waited for.
    """

    key: int
    version: int
    exact: bool
    full: bool
    tag: int
    place: int = 0


@content(9)
class ReadState(Content):
    """Wants a key's whole state in a copy; of rows that are made one by one, how many exist, and what there is of each.

    Attributes:
        place: of 32 hexadecimal digits, the folder among the run's `copies` where the state's tensors go if the server
            sees it, so that nothing of them travels; empty: they are sent.
    """

    key: int
    tag: int
    place: str = ""


@content(11)
class Repushed(Content):
    """After a server's restart: everything that was not durable is pushed again."""

    life: int


@content(13)
class OperationDone(Content):
    """A standby holds all operations up to a number."""

    number: int


@content(14)
class Attach(Content):
    """A standby wants the server's state, then every operation, for as long as its membership lasts."""

    membership: int


@content(15, (1, 1))
class SendBuffers(Content):
    """A worker's statistics that are no parameters, 1-D float32, in the frame."""

    task: int


@content(19, (1, 1))
class PullRows(Content):
    """Wants rows of a table's key, whose numbers within the key are the frame.

    Attributes:
        task: that looks them up.
        number: rises with each such request of a worker; the answer has it.
        tag: of the copy `tag`; 0: as they are now.
        version: where gradients are aggregated, the one that they are of, or a later one where that is over.
    """

    key: int
    task: int
    number: int
    tag: int = 0
    version: int = 0


@content(35, ANY_FRAMES)
class PutRows(Content):
    """More rows of a key whose state was put: of those that exist it may hold a part (see `made_rows`)."""

    key: int
    meta: bytes


@content(36)
class ReadRows(Content):
    """Wants a part of what a copy has of rows that exist; the answer is a `StateOf`, which has it as `part`.

    Attributes:
        name: of what it is (see `made_rows`).
        first, count: of the rows that exist, in ascending order.
    """

    key: int
    tag: int
    name: str
    first: int
    count: int


@content(37)
class ValueTaken(Content):
    """A key's value came, which the server counts as on its way (see `flight`)."""

    key: int


# To a worker


@content(3)
class PutDone(Content):
    """A key's state was taken."""

    key: int


@content(5)
class PushAck(Content):
    """What became of a push (`outcome` of `keystore.PushOutcome`); `life`: the server's session."""

    key: int
    task: int
    number: int
    outcome: int
    version: int
    life: int


@content(7, (1, MAX_FRAMES))
class KeyValue(Content):
    """A key's value, or with `delta` the difference to what was sent last, in the frames.

    `acks`: what became of the peer's pushes: number, outcome, number, outcome, ...
    """

    key: int
    version: int
    delta: bool
    tag: int
    life: int
    acks: list[int]


@content(12, (1, 1))
class RowValues(Content):
    """The values of the rows that a `PullRows` of this number wanted, in its order, are the frame; `acks` as above."""

    key: int
    number: int
    life: int
    acks: list[int]


@content(8)
class Durable(Content):
    """Pushes up to a number survive the server's death."""

    number: int
    life: int


@content(10, ANY_FRAMES)
class StateOf(Content):
    """A key's whole state in a copy; `filed`: its tensors are in a file, as `ReadState` wanted it."""

    key: int
    tag: int
    meta: bytes
    filed: bool = False


@content(38)
class CopyGone(Content):
    """The server has no such copy any more."""

    tag: int


# From a server to its standby, which does the same


@content(16, (1, MAX_FRAMES))
class ReplicatedPush(Content):
    """A gradient was counted with a factor of its learning rate; the frames are the worker's."""

    number: int
    worker: str
    push: PushGradient
    scale: float


@content(17)
class ReplicatedPull(Content):
    """A worker was given a key's value: later updates depend on when."""

    number: int
    worker: str
    key: int


@content(18, (1, 1))
class ReplicatedBuffers(Content):
    """A worker sent statistics; the frame is the worker's."""

    number: int
    worker: str


TO_PS_SERVER = vocabulary(
    SetTable, PutState, PutRows, PushGradient, Pull, PullRows, ReadState, ReadRows, Repushed, OperationDone, Attach,
    SendBuffers, ValueTaken,
)  # fmt: skip
TO_PS_WORKER = vocabulary(PutDone, PushAck, KeyValue, RowValues, Durable, StateOf, CopyGone)
TO_STANDBY = vocabulary(SetTable, PutState, ReplicatedPush, ReplicatedPull, ReplicatedBuffers)
