"""A server's state without sockets, files or sleeps: pushes, pulls, standbys, snapshots and what is sent twice."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.compression import read
from echelon.coordinator.messages import (
    BecomeStandby,
    CatchUp,
    CopyKept,
    JoinAgain,
    JoinServer,
    KeepCopy,
    Members,
    Promote,
    RunEnded,
    ServerEntry,
    ServerHolds,
)
from echelon.messages.framing import Content, Message
from echelon.messages.identity import derive_keys
from echelon.messages.plain import Malformed
from echelon.ps.blob import as_frame, pack_state, read_frames, unpack_state, write_frames
from echelon.ps.messages import (
    BUFFERS_KEY,
    Attach,
    CopyGone,
    Durable,
    KeyValue,
    OperationDone,
    Pull,
    PushAck,
    PushGradient,
    PutDone,
    PutState,
    ReadState,
    Repushed,
    SendBuffers,
    SetTable,
    StateOf,
)
from echelon.ps.server_state import ServerState
from echelon.ps.serving import Effect, FileState, Follow, Reply, SaveSnapshot, ServerConfig, TellPrimary, TellScheduler
from echelon.ps.table import Cut, ParameterInfo, cut_table
from echelon.sync.ps import ServerSettings
from tests.unit.checkpoint.states import assert_same

LR = 0.5
TABLE = cut_table([ParameterInfo("w", (6,), False)], Cut(1, 4096))
ENTRY = ServerEntry("ipc://server0", 1, ready=True, standby="", empty=False)
FOLLOWED = replace(ENTRY, standby="standby0", membership=1)


def sgd(tensors: Sequence[nn.Parameter], decay: Sequence[bool]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=LR, momentum=0.9)


@dataclass
class Role:
    """A server's state, and what it wanted done since the last look."""

    settings: ServerSettings = field(default_factory=ServerSettings)
    name: str = "server0"
    life: int = 1
    now_s: float = 0.0
    effects: list[Effect] = field(default_factory=list)
    compression: str = "none"

    def __post_init__(self) -> None:
        config = ServerConfig(
            self.name, 0, self.settings, derive_keys(b"k" * 32), "", "", read(self.compression), 0, Path(), sgd
        )  # fmt: skip
        self.state = ServerState(config, self.life, f"ipc://{self.name}", 7)
        self._numbers = count()

    def say(self, sender: str, content: Content, *tensors: Tensor) -> None:
        self.hear(sender, content, [as_frame(tensor) for tensor in tensors])

    def hear(self, sender: str, content: Content, frames: Sequence[Any], peer: str = "") -> None:
        plain = [memoryview(bytearray(frame)) for frame in frames]
        message = Message(content, sender, 1, next(self._numbers), plain)
        if sender == "scheduler":
            self.effects += self.state.from_scheduler(message, self.now_s)
        elif sender == "primary":
            self.effects += self.state.from_primary(message, self.now_s)
        else:
            self.effects += self.state.handle(message, (peer or sender).encode(), self.now_s)

    def tick(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        self.effects += self.state.tick(self.now_s)

    def sent(self, to: str, kind: type[Content]) -> list[Any]:
        """Return what was sent to a peer since the last look, and forget it."""
        wanted = [e for e in self.effects if isinstance(e, Reply) and e.peer == to.encode()]
        wanted = [e for e in wanted if isinstance(e.content, kind)]
        self.effects = [e for e in self.effects if not any(e is w for w in wanted)]
        return [e.content for e in wanted]

    def told(self, kind: type[Content]) -> list[Any]:
        tells = (e.content for e in self.effects if isinstance(e, TellScheduler))
        return [content for content in tells if isinstance(content, kind)]

    def fill(self) -> Role:
        """Set the server up with zeros."""
        self.hear("worker0", SetTable(), [TABLE.to_bytes()])
        meta, frames = pack_state({"value": torch.zeros(6), "version": 0})
        self.hear("worker0", PutState(0, meta), frames)
        return self

    def push(self, worker: str, task: int, pull: bool = False, **fields: Any) -> None:
        content = PushGradient(0, task, task, 0, 1, 1, 1, 0, task + 1, LR, pull)
        self.say(worker, replace(content, **fields), torch.ones(6))

    @property
    def value(self) -> Tensor:
        return self.state.stores[0].value


def test_it_joins_when_it_holds_all_keys_and_its_first_snapshot() -> None:
    role = Role().fill()
    assert role.sent("worker0", PutDone) == [PutDone(0)]
    assert not role.told(JoinServer)
    role.tick()
    (snapshot,) = (e for e in role.effects if isinstance(e, SaveSnapshot))
    role.effects += role.state.snapshot_written(snapshot.numbers)
    assert [join.ready for join in role.told(JoinServer)] == [True]


def test_a_push_that_comes_twice_counts_once() -> None:
    role = Role().fill()
    role.push("worker0", 3)
    before = role.value.clone()
    role.push("worker1", 3)
    role.tick()
    assert [ack.outcome for ack in (*role.sent("worker0", PushAck), *role.sent("worker1", PushAck))] == [0, 2]
    assert torch.equal(role.value, before) and role.state.load.duplicates == 1


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_a_server_remembers_does_not_grow_with_the_number_of_pushes(mode: str) -> None:
    role, counted, shares = Role(ServerSettings(mode)).fill(), 150, 1 if mode == "async" else 2

    def go_on(first: int) -> None:
        """Push, and hear now and then up to which step all is done."""
        for task in range(first, first + counted):
            step = task // shares
            role.push(f"worker{task % 2}", task, pull=True, step=step, share=task % shares, shares=shares, base=step)
            if task % 50 == 49:
                role.say("scheduler", Members([ENTRY], ["worker0", "worker1"], step))
                role.tick(1.0)
                for effect in role.effects:
                    if isinstance(effect, SaveSnapshot):
                        role.state.snapshot_written(effect.numbers)
                role.effects.clear()

    go_on(0)
    tracemalloc.start()
    try:
        go_on(counted)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        go_on(2 * counted)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 15 * counted
    finally:
        tracemalloc.stop()


def test_a_value_takes_the_acknowledgements_along() -> None:
    role = Role().fill()
    role.push("worker0", 0)
    role.push("worker0", 1, pull=True)
    (value,) = role.sent("worker0", KeyValue)
    assert value.acks == [1, 0, 2, 0] and value.version == 2
    role.tick()
    assert not role.sent("worker0", PushAck)


def test_a_pull_waits_for_its_version() -> None:
    role = Role(ServerSettings("sync")).fill()
    role.say("worker0", Pull(0, 1, exact=True, full=False, tag=0))
    role.push("worker0", 0, shares=2)
    assert not role.sent("worker0", KeyValue)
    role.push("worker1", 1, step=0, share=1, shares=2)
    assert [value.version for value in role.sent("worker0", KeyValue)] == [1]


def test_a_pull_of_a_worker_that_was_only_silent_is_answered_too() -> None:
    role = Role(ServerSettings("sync")).fill()
    role.say("worker0", Pull(0, 1, exact=True, full=False, tag=0))
    role.say("scheduler", Members([ENTRY], ["worker1"], 0))
    role.push("worker1", 0, shares=1)
    assert [value.version for value in role.sent("worker0", KeyValue)] == [1]


def test_a_new_life_of_a_worker_has_the_values_that_it_is_told_the_difference_to() -> None:
    """The pull of its former life waits still, and its answer is no reference for another one."""
    role = Role(ServerSettings("sync"), compression="int8").fill()
    role.say("worker0", Pull(0, 0, exact=True, full=True, tag=0))
    role.say("worker0", Pull(0, 1, exact=True, full=False, tag=0))
    for workers in (["worker0"], []):
        role.say("scheduler", Members([ENTRY], workers, 0))
    role.sent("worker0", KeyValue)
    role.hear("worker0", Pull(0, 0, exact=True, full=True, tag=0), [], peer="anew")
    role.hear("worker0", Pull(0, 1, exact=True, full=False, tag=0), [], peer="anew")
    role.push("worker1", 0, shares=1)
    (old,) = role.sent("worker0", KeyValue)
    first, second = role.sent("anew", KeyValue)
    assert not old.delta and not first.delta and second.delta
    (reference, _) = role.state._references._held["worker0", 0]
    assert torch.allclose(reference, role.value, atol=1e-2)


def test_statistics_stay_when_the_last_worker_goes() -> None:
    role = Role().fill()
    role.say("scheduler", Members([ENTRY], ["worker0", "worker1"], 0))
    for worker in range(2):
        role.say(f"worker{worker}", SendBuffers(0), torch.full((3,), float(worker)))
    role.say("scheduler", Members([ENTRY], [], 0))
    assert torch.equal(role.state._mean_buffers(), torch.full((3,), 0.5))
    role.say("worker2", SendBuffers(0), torch.full((3,), 4.0))
    assert torch.equal(role.state._mean_buffers(), torch.full((3,), 4.0))


def test_who_reads_a_copy_is_told_that_it_is_gone() -> None:
    role = Role().fill()
    for tag in (5, 6):
        role.say("scheduler", KeepCopy(tag, full=True))
    for content in (ReadState(0, 5), Pull(0, 0, False, True, 5)):
        role.say("worker0", content)
        assert role.sent("worker0", CopyGone) == [CopyGone(5)]
    role.say("worker0", ReadState(0, 6))
    assert role.sent("worker0", StateOf) and not role.sent("worker0", CopyGone)


def test_a_copy_stays_what_it_was() -> None:
    role = Role().fill()
    role.say("worker0", SendBuffers(0), torch.full((3,), 2.0))
    role.say("scheduler", KeepCopy(5, full=True))
    role.push("worker0", 0)
    assert role.told(CopyKept) == [CopyKept(5, 0)]
    role.say("worker0", ReadState(0, 5))
    role.say("worker0", ReadState(BUFFERS_KEY, 5))
    assert [state.key for state in role.sent("worker0", StateOf)] == [0, BUFFERS_KEY]
    assert not role.value.eq(0).any()


def test_a_copy_goes_into_a_file_where_a_worker_names_a_place_for_it(tmp_path: Path) -> None:
    role = Role().fill()
    role.say("scheduler", KeepCopy(5, full=True))
    role.say("worker0", ReadState(0, 5, "ab" * 16))
    (effect,) = [effect for effect in role.effects if isinstance(effect, FileState)]
    assert not role.sent("worker0", StateOf), "the server's shell answers, once the file is there"
    write_frames(tmp_path / "0", effect.frames)
    meta = effect.content.meta
    filed = unpack_state(meta, read_frames(tmp_path / "0", meta))
    assert_same(unpack_state(meta, effect.frames), filed)
    (tmp_path / "0").write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes"):
        read_frames(tmp_path / "0", meta)


def pair() -> tuple[Role, Role]:
    """Return a server and its standby, which follows it."""
    primary = Role(ServerSettings(replicas=1, compensation="constant")).fill()
    standby = Role(ServerSettings(replicas=1, compensation="constant"), "standby0", 2)
    members = Members([FOLLOWED], ["worker0"], 0)
    primary.say("scheduler", members)
    standby.say("scheduler", members)
    standby.say("scheduler", members)
    assert [e for e in standby.effects if isinstance(e, Follow)] == [Follow("ipc://server0", 1)]
    primary.say("standby0", Attach(1))
    return primary, standby


def replicate(primary: Role, standby: Role) -> list[int]:
    """Take to the standby what the primary sent it; returns the operations that it says it holds."""
    for effect in [e for e in primary.effects if isinstance(e, Reply) and e.peer == b"standby0"]:
        standby.hear("primary", effect.content, effect.frames)
        primary.effects.remove(effect)
    done = [e.content for e in standby.effects if isinstance(e, TellPrimary)]
    standby.effects = [e for e in standby.effects if not isinstance(e, TellPrimary)]
    return [content.number for content in done if isinstance(content, OperationDone)]


def test_a_push_is_acknowledged_when_the_standby_has_it_too() -> None:
    primary, standby = pair()
    replicate(primary, standby)
    for task in range(3):
        primary.push("worker0", task, pull=True)
    primary.tick()
    assert not primary.sent("worker0", PushAck)
    numbers = replicate(primary, standby)
    assert torch.equal(primary.value, standby.value)
    primary.say("standby0", OperationDone(numbers[-1]))
    assert [ack.number for ack in primary.sent("worker0", PushAck)] == [1, 2, 3]
    assert [durable.number for durable in primary.sent("worker0", Durable)] == [1, 2, 3]


def test_a_standby_that_is_gone_holds_nothing_back() -> None:
    primary, _ = pair()
    primary.push("worker0", 0)
    primary.say("scheduler", Members([ENTRY], ["worker0"], 0))
    assert [ack.number for ack in primary.sent("worker0", PushAck)] == [1]


def test_a_standby_takes_over_and_counts_what_it_has_once() -> None:
    primary, standby = pair()
    primary.push("worker0", 0)
    replicate(primary, standby)
    with pytest.raises(Malformed, match="not ready"):
        standby.push("worker0", 1)
    standby.say("scheduler", Promote())
    assert not standby.state.is_standby and Follow("") in standby.effects
    standby.push("worker0", 0)
    standby.push("worker0", 1)
    assert standby.state.load.duplicates == 1 and standby.state.stores[0].version == 2
    primary.say("scheduler", BecomeStandby())
    assert primary.state.is_standby and not primary.state.ready
    assert primary.state.stores[0].version == 1  # until another one gives what it holds


def test_a_standby_that_was_thought_dead_takes_everything_again() -> None:
    """What its primary did meanwhile was acknowledged without it."""
    primary, standby = pair()
    replicate(primary, standby)
    primary.say("scheduler", Members([ENTRY], ["worker0"], 0))
    primary.push("worker0", 0)
    primary.tick()
    assert primary.sent("worker0", PushAck)
    standby.effects.clear()
    standby.say("scheduler", JoinAgain())
    assert [join.ready for join in standby.told(JoinServer)] == [False]
    again = Members([replace(FOLLOWED, membership=2)], ["worker0"], 0)
    standby.say("scheduler", again)
    assert Follow("ipc://server0", 2) in standby.effects
    primary.say("standby0", Attach(2))  # before the scheduler's word
    assert not primary.sent("standby0", SetTable)
    primary.say("scheduler", again)
    replicate(primary, standby)
    assert torch.equal(primary.value, standby.value) and standby.told(JoinServer)[-1].ready


def test_older_word_of_the_scheduler_lets_no_standby_go() -> None:
    """The socket of the scheduler may be slower than that of the standby, which knows of its membership already."""
    primary = Role(ServerSettings(replicas=1)).fill()
    standby = Role(ServerSettings(replicas=1), "standby0", 2)
    standby.say("scheduler", Members([FOLLOWED], ["worker0"], 0))
    primary.say("standby0", Attach(1))
    primary.say("scheduler", Members([ENTRY], ["worker0"], 0))
    primary.say("scheduler", Members([FOLLOWED], ["worker0"], 0))
    primary.push("worker0", 0)
    replicate(primary, standby)
    assert torch.equal(primary.value, standby.value) and standby.told(JoinServer)[-1].ready
    assert standby.told(JoinServer)[-1].membership == 1


def test_a_standby_is_let_in_whichever_of_its_memberships_is_heard_of_first() -> None:
    """Each time it asks by another connection, so what it asked first may come last; that does not begin anew."""
    primary = Role(ServerSettings(replicas=1)).fill()
    primary.say("standby0", Attach(2))
    primary.say("standby0", Attach(1))
    assert not primary.sent("standby0", SetTable)
    primary.say("scheduler", Members([replace(FOLLOWED, membership=2)], ["worker0"], 0))
    assert len(primary.sent("standby0", SetTable)) == 1
    primary.say("standby0", Attach(1))
    assert not primary.sent("standby0", SetTable)


def test_a_standby_that_missed_an_operation_takes_everything_again() -> None:
    primary, standby = pair()
    primary.push("worker0", 0)
    replicate(primary, standby)
    primary.push("worker0", 1)
    primary.effects = [e for e in primary.effects if not (isinstance(e, Reply) and e.peer == b"standby0")]
    primary.push("worker0", 2)
    assert not replicate(primary, standby) and not standby.told(JoinServer)[-1].ready
    primary.push("worker0", 3)
    assert not replicate(primary, standby) and standby.state.stores[0].version == 1
    standby.say("scheduler", Members([FOLLOWED], ["worker0"], 0))
    primary.say("standby0", Attach(1))
    replicate(primary, standby)
    assert torch.equal(primary.value, standby.value) and standby.told(JoinServer)[-1].ready


def restarted(settings: ServerSettings) -> Role:
    """Return a server in its next life, with a snapshot of one push, which workers have not told of yet."""
    before = Role(settings).fill()
    before.push("worker0", 0)
    before.state.load.updates = 10**6
    before.tick()
    (snapshot,) = (e for e in before.effects if isinstance(e, SaveSnapshot))
    role = Role(settings, life=2)
    role.state.restore(snapshot.count, snapshot.state, role.now_s)
    role.effects += role.state.begin()
    role.say("scheduler", Members([ENTRY], ["worker0", "worker1"], 0))
    return role


@pytest.mark.parametrize("settings", [ServerSettings("sync"), ServerSettings(), ServerSettings(replicas=1)])
def test_a_server_without_keys_serves_and_holds_nothing_up(settings: ServerSettings) -> None:
    """A small model has fewer keys than there are servers."""
    none = cut_table([ParameterInfo("w", (6,), False)], Cut(1, 4096))
    none = replace(none, keys=tuple(replace(key, server=1) for key in none.keys), cut=Cut(2, 4096))
    snapshots: list[SaveSnapshot] = []

    def serve(role: Role) -> None:
        for _ in range(5):
            role.tick(1.0)
            written = [e for e in role.effects if isinstance(e, SaveSnapshot)]
            role.effects = [e for e in role.effects if not isinstance(e, SaveSnapshot)]
            for snapshot in written:
                role.effects += role.state.snapshot_written(snapshot.numbers)
            snapshots.extend(written)

    role = Role(settings)
    role.hear("worker0", SetTable(), [none.to_bytes()])
    serve(role)
    join = role.told(JoinServer)[-1]
    assert join.ready and not join.empty and len(snapshots) == (settings.replicas == 0)
    role.say("scheduler", KeepCopy(3, full=True))
    assert role.told(CopyKept) == [CopyKept(3, 0)]
    if settings.replicas:
        standby = Role(settings, "standby0", life=2)
        for of_pair in (standby, role):
            of_pair.say("scheduler", Members([FOLLOWED], [], 0))
        role.say("standby0", Attach(1))
        replicate(role, standby)
        assert standby.told(JoinServer)[-1].ready
        return
    again = Role(settings, life=2)
    again.state.restore(snapshots[0].count, snapshots[0].state, 0.0)
    again.effects += again.state.begin()
    serve(again)
    join = again.told(JoinServer)[-1]
    assert join.ready and not join.empty and not again.told(ServerHolds)
    again.say("scheduler", KeepCopy(4, full=True))
    assert again.told(CopyKept) == [CopyKept(4, 0)] and len(snapshots) == 1


def test_a_server_that_comes_back_waits_for_what_workers_kept() -> None:
    role = restarted(ServerSettings())
    assert role.told(JoinServer)[-1].restored
    role.say("scheduler", KeepCopy(3, full=False))
    role.say("worker0", Repushed(2))
    role.tick(1.0)
    assert not role.told(ServerHolds) and not role.told(CopyKept)
    role.push("worker1", 0)
    role.push("worker1", 1)
    role.say("worker1", Repushed(2))
    role.tick(1.0)
    assert role.told(ServerHolds) == [ServerHolds(0, 0, [0, 1], 2)] and role.told(CopyKept)
    assert role.state.load.duplicates == 1
    role.tick(2.0)
    assert len(role.told(ServerHolds)) == 2  # nobody answered
    role.say("scheduler", CatchUp(0))
    role.tick(2.0)
    assert len(role.told(ServerHolds)) == 2


def test_a_worker_that_never_comes_back_is_waited_for_only_so_long() -> None:
    role = restarted(ServerSettings())
    role.tick(19.0)
    assert not role.told(ServerHolds)
    role.tick(2.0)
    assert role.told(ServerHolds)


def test_where_gradients_are_summed_lost_versions_are_completed() -> None:
    role = restarted(ServerSettings("sync"))
    role.push("worker0", 4096, step=1, shares=2, share=0)
    for worker in ("worker0", "worker1"):
        role.say(worker, Repushed(2))
    role.tick()
    assert role.told(ServerHolds) == [ServerHolds(0, 1, [4096, 4096], 2)]
    role.say("worker0", Pull(0, 3, exact=True, full=False, tag=0))
    role.say("scheduler", CatchUp(3))
    assert role.state.stores[0].version == 3 and role.sent("worker0", KeyValue)


@pytest.mark.parametrize(
    ("content", "frames"),
    [
        (PutState(0, b"[]"), []),
        (PutState(9, b"{}"), []),
        (SetTable(), [b"{}"]),
        (SetTable(), [cut_table([ParameterInfo("v", (7,), True)], Cut(1, 4096)).to_bytes()]),
        (PushGradient(0, 0, 0, 0, 1, 1, 1, 0, 1, LR, pull=True), [b"12345"]),
        (PushGradient(4, 0, 0, 0, 1, 1, 1, 0, 1, LR, pull=True), [bytes(24)]),
        (SendBuffers(0), [b"\xff\xff\xff\xff"]),
        (ReadState(0, 5, "../elsewhere"), []),
        (Pull(4, 0, exact=False, full=False, tag=0), []),
        (RunEnded("stopped"), []),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Content) else "",
)
def test_what_cannot_be_changes_nothing(content: Content, frames: list[bytes]) -> None:
    role = Role().fill()
    role.effects.clear()
    with pytest.raises(Malformed):
        role.hear("worker0", content, frames)
    assert not role.effects and torch.equal(role.value, torch.zeros(6)) and not role.state.ended
