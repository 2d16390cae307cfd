"""A server's state: it counts gradients into its keys, and gives out their values.

`handle`, `from_scheduler`, `from_primary` and `tick` change it and return what is to be done, in order. Nothing here
touches a socket, a file or a clock: time comes in as an argument, effects go out as values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from echelon.coordinator.messages import (
    BecomeStandby,
    CatchUp,
    CopyKept,
    DropCopy,
    JoinAgain,
    JoinServer,
    KeepCopy,
    Members,
    Promote,
    RunEnded,
    ServerBeat,
    ServerEntry,
    ServerHolds,
    ServerLacked,
)
from echelon.coordinator.runs import to_runs
from echelon.core.state_tree import StateTree, StateView
from echelon.messages.framing import Content, Message
from echelon.messages.plain import Malformed
from echelon.ps.blob import as_frame, message_of, pack_state, read_frame, unpack_state
from echelon.ps.coding import References, RowCoding, downward, upward
from echelon.ps.durability import Durability, ReplicationLog, held_by_all
from echelon.ps.flight import OwedValues
from echelon.ps.keystore import KeyStore, Push, PushOutcome
from echelon.ps.made_rows import EXIST, values_of, without_rows
from echelon.ps.messages import (
    BUFFERS_KEY,
    Attach,
    CopyGone,
    Durable,
    KeyValue,
    OperationDone,
    Pull,
    PullRows,
    PushAck,
    PushGradient,
    PutDone,
    PutRows,
    PutState,
    ReadRows,
    ReadState,
    ReplicatedBuffers,
    ReplicatedPull,
    ReplicatedPush,
    Repushed,
    RowValues,
    SendBuffers,
    SetTable,
    StateOf,
    ValueTaken,
)
from echelon.ps.rows import read_rows, row_gradient, value_frame
from echelon.ps.serving import (
    Effect,
    FileState,
    Follow,
    Reply,
    SaveSnapshot,
    ServerConfig,
    ServerCounters,
    TellPrimary,
    TellScheduler,
)
from echelon.ps.table import KeyTable, table_from_bytes

ACKS = 4  # sent together, so that a worker's window of pushes never runs dry
UNSOUND = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What the use of frames raises that hold no table, state or gradient of this server."""


class ServerState:
    """The keys of one server. `life` is its session, `address` where it listens."""

    def __init__(self, config: ServerConfig, life: int, address: str, pid: int) -> None:
        self.config, self._settings = config, config.settings
        self._life, self._address, self._pid = life, address, pid
        self.table: KeyTable | None = None
        self.stores: dict[int, KeyStore] = {}
        self.load = ServerCounters()
        self.is_standby = config.name.startswith("standby")
        self.ended = False
        self._lags, self._operation = False, 0
        self._following = Follow("")
        self._buffers: dict[str, Tensor] = {}
        self._filling: dict[int, tuple[KeyStore, int]] = {}  # keys whose rows still come, and how many there are
        self._copies: dict[int, dict[int, StateTree]] = {}
        self._parked: dict[int, list[tuple[bytes, str, Pull]]] = {}
        self._parked_rows: dict[int, list[tuple[bytes, str, PullRows, Tensor]]] = {}
        self._owed: dict[bytes, OwedValues] = {}
        self._acks: list[tuple[bytes, PushAck]] = []
        self._numbers: dict[bytes, int] = {}
        self._workers: set[str] = set()
        self._watermark = 0
        self._replication = ReplicationLog()
        self._durability = Durability(config.settings.replicas == 0, config.settings.snapshot_every)
        self._effects: list[Effect] = []
        self._handlers: dict[type[Content], Callable[[bytes, Message, float], None]] = {
            PushGradient: self._push, Pull: self._pull, SetTable: self._set_table, PutState: self._put_state,
            PullRows: self._pull_rows, PutRows: self._put_rows, ReadRows: self._read_rows,
            ReadState: self._read_state, SendBuffers: self._send_buffers, Repushed: self._repushed,
            Attach: self._attach, OperationDone: self._operation_done, ValueTaken: self._value_taken,
        }  # fmt: skip

    # In and out

    def handle(self, message: Message, peer: bytes, now_s: float) -> list[Effect]:
        """Take a message of a worker, or of the standby.

        Raises:
            Malformed: it cannot be, or not now.
        """
        handler = self._handlers.get(type(message.content))
        if handler is None:
            raise Malformed("unexpected")
        try:
            handler(peer, message, now_s)
        except Malformed:
            raise
        except UNSOUND as error:
            raise Malformed("content") from error
        return self._drain()

    def from_scheduler(self, message: Message, now_s: float) -> list[Effect]:
        """Take a message of the scheduler."""
        match message.content:
            case Members() as members:
                self._take_members(members, now_s)
            case KeepCopy(tag=tag, full=full):
                if self._durability.delays_copies:  # until all that can come again has come
                    self._durability.delayed_copies[tag] = full
                else:
                    self._keep_copy(tag, full)
            case DropCopy(tag=tag):
                self._durability.delayed_copies.pop(tag, None)
                self._copies.pop(tag, None)
            case CatchUp(step=step):
                self._catch_up(step, now_s)
            case Promote():
                self._promote()
            case BecomeStandby():
                self._demote()
            case JoinAgain():
                if self.is_standby:  # who was thought dead was left out of what the primary did meanwhile
                    self._lag()
                self._join()
                self._durability.told(0.0)
            case RunEnded():
                self.ended = True
        return self._drain()

    def from_primary(self, message: Message, now_s: float) -> list[Effect]:
        """Do what the server did that this one stands by.

        Raises:
            Malformed: it cannot be.
        """
        try:
            self._replay(message, now_s)
        except Malformed:
            raise
        except UNSOUND as error:
            raise Malformed("content") from error
        return self._drain()

    def tick(self, now_s: float) -> list[Effect]:
        """Send the acknowledgements that no value took along, and do what time asks for."""
        self._flush_acks()
        durability = self._durability
        if durability.enabled and self.ready:
            if durability.due(self.load.updates, len(self.stores)):
                self._effects.append(self._snapshot(durability.begin(self.load.updates)))
            if durability.settles(now_s):
                self._tell_held(now_s)
                if not durability.behind:
                    self._keep_delayed_copies()
            elif durability.tells_again(now_s):
                self._tell_held(now_s)
        return self._drain()

    def begin(self) -> list[Effect]:
        """Join the run."""
        self._join()
        return self._drain()

    def restore(self, count: int, saved: StateView, now_s: float) -> None:
        """Begin with a snapshot of an earlier life, where this server has snapshots."""
        if not self._durability.enabled:
            return
        self.set_table(table_from_bytes(saved["table"].encode()))
        for index, state in saved["keys"].items():
            self.put(index, state, now_s)
        self._buffers = dict(saved["buffers"])
        self._durability.restore(count, len(self.stores), self._settings.aggregates, now_s)

    def snapshot_written(self, numbers: dict[bytes, int]) -> list[Effect]:
        """Tell the workers which of their pushes are durable now."""
        for peer, number in numbers.items():
            self._reply(peer, Durable(number, self._life))
        if self._durability.written():
            self._join()
        return self._drain()

    @property
    def ready(self) -> bool:
        """Whether every key is here, and is what the primary holds where this server stands by."""
        return self.table is not None and len(self.stores) == self._keys and not self._lags

    def beat(self) -> ServerBeat:
        """Return what the run's record shows of this server's work, without that of its sockets."""
        load = self.load
        staleness = {str(k): v for k, v in sorted(load.staleness.items())[:512]}
        return ServerBeat(
            self.config.index, self._life, self._address, self.ready, self.is_standby, self._replication.attached,
            load.updates, load.duplicates, load.late, load.busy_s, staleness,
        )  # fmt: skip

    def _drain(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _reply(self, peer: bytes, content: Content, frames: list[Any] | None = None) -> None:
        self._effects.append(Reply(peer, content, frames or ()))

    def _join(self) -> None:
        join = JoinServer(
            self.config.index, self._address, self._pid, self._may_serve, self.is_standby, self._durability.restored,
            not (self.stores or self.ready), self._following.membership,
        )  # fmt: skip
        self._effects.append(TellScheduler(join))

    # What it holds

    def _set_table(self, peer: bytes, message: Message, now_s: float) -> None:
        self.set_table(table_from_bytes(bytes(message.frames[0])))
        self._join_if_ready()  # a table may have fewer keys than there are servers

    @property
    def _may_serve(self) -> bool:
        return self.ready and (self._durability.safe or self.is_standby)

    def _join_if_ready(self) -> None:
        if self._may_serve:
            self._join()  # otherwise once the first snapshot is written

    def set_table(self, table: KeyTable) -> None:
        """Take the table of keys; the first one stays.

        Raises:
            ValueError: it is another one than before.
        """
        if self.table is not None:
            if self.table.fingerprint != table.fingerprint:
                raise ValueError("another table of keys")
            return
        self.table = table
        self._keys = len(table.of_server(self.config.index))
        self._coding = upward(self.config.compression, table.torch_dtype)
        self._row_coding = RowCoding(self.config.compression, table.torch_dtype)
        self._references = References(downward(self.config.compression, table.torch_dtype), self.config.seed)

    def _put_state(self, peer: bytes, message: Message, now_s: float) -> None:
        """Take a key's state; a key that is held already stays as it is: who sent it comes too late."""
        content = message.content
        assert isinstance(content, PutState)
        self.put(content.key, unpack_state(content.meta, message.frames), now_s)
        self._put_done(peer, content.key)

    def _put_done(self, peer: bytes, key: int) -> None:
        self._reply(peer, PutDone(key))
        self._join_if_ready()

    def put(self, index: int, state: StateTree, now_s: float) -> None:
        """Take a key's state where the key is not held yet.

        Raises:
            ValueError: not a key of this server, or not its state.
        """
        if index == BUFFERS_KEY:
            self._buffers.setdefault("", state["value"])
            return
        if self.table is None or index >= len(self.table.keys) or self.table.keys[index].server != self.config.index:
            raise ValueError(f"key {index} is not of this server")
        if index in self.stores:
            return
        key = self.table.keys[index]
        value = torch.zeros(0 if key.begins is not None else key.numel, dtype=self.table.torch_dtype)
        of_rows = self.config.make_row_optimizer if key.width else None
        store = KeyStore(key, value, self._settings, of_rows or self.config.make_optimizer)
        store.load_state(state, now_s)
        self._filling[index] = store, int(state.get(EXIST, 0))
        self._look_at_filling(index)

    def _look_at_filling(self, index: int) -> None:
        """Hold a key once all of its rows that exist have come."""
        store, rows = self._filling[index]
        if store.made is None or store.made.count >= rows:
            self.stores[index] = store
            del self._filling[index]

    def _put_rows(self, peer: bytes, message: Message, now_s: float) -> None:
        """Take more rows of a key that is being put; of one that is held already they come too late."""
        content = message.content
        assert isinstance(content, PutRows)
        if content.key not in self.stores:
            self._filling[content.key][0].load_made(unpack_state(content.meta, message.frames))
            self._look_at_filling(content.key)
        self._put_done(peer, content.key)

    def _store_of(self, index: int) -> KeyStore:
        if index not in self.stores:
            raise ValueError(f"key {index} is not held here")
        return self.stores[index]

    def _send_buffers(self, peer: bytes, message: Message, now_s: float) -> None:
        self._take_buffers(message.sender, message.frames[0])
        if self._replication.attached:
            number = self._replication.next_number()
            operation = ReplicatedBuffers(number, message.sender)
            self._reply(self._replication.standby, operation, list(message.frames))

    def _take_buffers(self, worker: str, frame: Any) -> None:
        values = read_frame(frame, torch.float32).clone()
        if any(len(values) != len(other) for other in self._buffers.values()) or not bool(torch.isfinite(values).all()):
            raise ValueError("not this model's statistics")
        self._buffers.pop("", None)
        self._buffers[worker] = values

    def _mean_buffers(self) -> Tensor:
        """Return the mean over workers of their statistics, 1-D; empty where there are none."""
        values = [self._buffers[worker] for worker in sorted(self._buffers)]  # the same sum whoever came first
        return torch.stack(values).mean(0) if values else torch.empty(0)

    # Pushes

    def _push(self, peer: bytes, message: Message, now_s: float) -> None:
        """Count a gradient and tell its worker what became of it, once it is held safely."""
        content = message.content
        assert isinstance(content, PushGradient)
        self._refuse_unless_serving()
        store = self._store_of(content.key)
        push = self._decoded(message, content, message.sender, 1.0)
        if not self._settings.aggregates and (scale := store.scale_of(push, now_s)) != 1.0:
            push = push._replace(scale=scale)
        stale = store.staleness_of(push)
        outcome = self._apply(store, push)
        counted = outcome in (PushOutcome.APPLIED, PushOutcome.PENDING)
        if counted:
            self.load.staleness[stale] += 1
        self._numbers[peer] = max(self._numbers.get(peer, 0), content.number)
        ack = PushAck(content.key, content.task, content.number, int(outcome), store.version, self._life)
        if counted and self._replication.attached:
            number = self._replication.next_number()
            operation = ReplicatedPush(number, message.sender, content, push.scale)
            self._reply(self._replication.standby, operation, list(message.frames))
            self._replication.owe(number, peer, ack)
        else:
            self._acks.append((peer, ack))
        if outcome is PushOutcome.APPLIED:
            self._answer_parked(store, now_s)
        if content.pull:
            self._give(peer, message.sender, store, content.pull_behind(self._settings.aggregates), now_s)
        if len(self._acks) >= ACKS:
            self._flush_acks()

    def _refuse_unless_serving(self) -> None:
        if self.is_standby or not self.ready:
            raise Malformed("not ready")

    def _decoded(self, message: Message, content: PushGradient, worker: str, scale: float) -> Push:
        key = self._store_of(content.key).key
        absent = frozenset(content.absent)
        if not absent <= set(range(len(key.parts))):
            raise ValueError(f"key {key.index} has {len(key.parts)} parts")
        nothing = bool(absent) and len(absent) == len(key.parts)
        if key.width:
            if content.pull:
                raise ValueError(f"key {key.index} is pulled by its rows")
            dtype = self._coding.dtype
            none = torch.zeros(0, dtype=torch.int64)
            gradient = (
                row_gradient(none, torch.zeros((0, key.width), dtype=dtype), key)
                if nothing
                else self._row_coding.gradient(message.frames, key)
            )
            return _push_of(content, worker, gradient, scale, absent)
        if nothing:
            zeros = torch.zeros(key.numel, dtype=self._coding.dtype)
            return _push_of(content, worker, zeros, scale, absent)
        gradient = self._coding.decode(message.frames, key)
        needed_again = self._coding.codec is not None or self._replication.attached
        memory = None if needed_again else message_of(message.frames[0], gradient)
        return _push_of(content, worker, gradient, scale, absent)._replace(memory=memory)

    def _apply(self, store: KeyStore, push: Push) -> PushOutcome:
        outcome = store.take(push)
        self.load.updates += outcome is PushOutcome.APPLIED
        self.load.duplicates += outcome is PushOutcome.DUPLICATE
        self.load.late += outcome is PushOutcome.LATE
        return outcome

    def _take_acks(self, peer: bytes) -> list[int]:
        """Return what a value's message tells its worker of its pushes; so most need no message of their own."""
        taken: list[int] = []
        others = []
        for to, ack in self._acks:
            if to == peer:
                taken += (ack.number, ack.outcome)
            else:
                others.append((to, ack))
        self._acks = others
        return taken

    def _flush_acks(self) -> None:
        for peer, ack in self._acks:
            self._reply(peer, ack)
        self._acks.clear()

    # Pulls

    def _pull(self, peer: bytes, message: Message, now_s: float) -> None:
        pull = message.content
        assert isinstance(pull, Pull)
        if self._is_copy_gone(peer, pull.tag):
            return
        if pull.tag:
            state = self._copies.get(pull.tag, {}).get(pull.key)
            if state is not None and "made" in state:
                raise ValueError(f"key {pull.key} is pulled by its rows")
            if state is not None:
                acks = self._take_acks(peer)
                value = KeyValue(pull.key, state["version"], False, pull.tag, self._life, acks)
                self._reply(peer, value, [as_frame(state["value"])])
        elif pull.key == BUFFERS_KEY:
            value = KeyValue(BUFFERS_KEY, 0, False, 0, self._life, self._take_acks(peer))
            self._reply(peer, value, [as_frame(self._mean_buffers())])
        else:
            self._refuse_unless_serving()
            store = self._store_of(pull.key)
            if store.rows is not None:
                raise ValueError(f"key {pull.key} is pulled by its rows")
            if peer in self._owed:
                self._owed[peer].forget(pull.key)
            self._give(peer, message.sender, store, pull, now_s)

    def _pull_rows(self, peer: bytes, message: Message, now_s: float) -> None:
        """Give rows of a table, of a copy or as they are."""
        pull = message.content
        assert isinstance(pull, PullRows)
        self._refuse_unless_serving()
        store = self._store_of(pull.key)
        if store.rows is None:
            raise ValueError(f"key {pull.key} is none of a table")
        rows = read_rows(message.frames[0], store.key)
        if self._is_copy_gone(peer, pull.tag):
            return
        if pull.tag:
            values = values_of(self._made_in_copy(pull.tag, pull.key), rows, store.key, store.value.dtype)
            self._answer_rows(peer, pull, values)
        else:
            self._give_rows(peer, message.sender, pull, rows)

    def _give_rows(self, peer: bytes, worker: str, pull: PullRows, rows: Tensor) -> None:
        """Answer a pull of rows, now or once the version of their key is there."""
        store = self.stores[pull.key]
        assert store.rows is not None
        if self._settings.aggregates and pull.version > store.version:
            self._parked_rows.setdefault(pull.key, []).append((peer, worker, pull, rows))
            return
        exact = self._settings.aggregates and pull.version == store.version - 1
        if worker:
            store.rows.note_pull(worker, pull.task, rows)
        self._answer_rows(peer, pull, store.row_values_before(rows) if exact else store.row_values(rows))

    def _answer_rows(self, peer: bytes, pull: PullRows, values: Tensor) -> None:
        answer = RowValues(pull.key, pull.number, self._life, self._take_acks(peer))
        self._reply(peer, answer, [value_frame(values)])

    def _made_in_copy(self, tag: int, key: int) -> Mapping[str, Tensor]:
        """Return what a copy has of the rows of a key that exist.

        Raises:
            ValueError: there is no such copy, or all rows of the key are made at once.
        """
        state = self._copies.get(tag, {}).get(key, {})
        if "made" not in state:
            raise ValueError(f"no copy {tag} of the rows of key {key}")
        made: Mapping[str, Tensor] = state["made"]
        return made

    def _read_rows(self, peer: bytes, message: Message, now_s: float) -> None:
        content = message.content
        assert isinstance(content, ReadRows)
        if self._is_copy_gone(peer, content.tag):
            return
        whole = self._made_in_copy(content.tag, content.key)[content.name]
        meta, frames = pack_state({"part": whole[content.first : content.first + content.count]})
        self._reply(peer, StateOf(content.key, content.tag, meta), frames)

    def _give(self, peer: bytes, worker: str, store: KeyStore, pull: Pull, now_s: float) -> None:
        """Answer a pull with a key's value, now or once its version is there."""
        if pull.version > store.version and self._settings.aggregates:
            self._parked.setdefault(pull.key, []).append((peer, worker, pull))
        elif pull.place and worker:  # what is waited for already has no place
            self._owed.setdefault(peer, OwedValues(worker)).owe(pull)
            self._send_owed(peer, now_s)
        else:
            self._send_value(peer, worker, store, pull, now_s)

    def _value_taken(self, peer: bytes, message: Message, now_s: float) -> None:
        """Send a worker more of what it is owed: something has arrived there."""
        content = message.content
        assert isinstance(content, ValueTaken)
        if peer in self._owed:
            self._owed[peer].window.arrived(content.key, now_s)
            self._send_owed(peer, now_s)

    def _send_owed(self, peer: bytes, now_s: float) -> None:
        """Send what a worker needs first, as far as there is room on its way."""
        owed = self._owed[peer]
        while (pull := owed.next()) is not None:
            n_bytes = self._send_value(peer, owed.worker, self._store_of(pull.key), pull, now_s)
            owed.window.leaves(pull.key, n_bytes, now_s)

    def _send_value(self, peer: bytes, worker: str, store: KeyStore, pull: Pull, now_s: float) -> int:
        """Send a key's value as it is now, as a pull wants it; returns its bytes."""
        exact = pull.exact and pull.version == store.version - 1 and store.before is not None
        value = store.before if exact and store.before is not None else store.value
        memory = store.memory if value is store.value else None
        delta, frames = self._references.encode(worker, store.key, value, pull.full, memory)
        if not worker:
            self._references.forget(worker)
        elif not exact:
            self._note_pull(worker, store, now_s)
        content = KeyValue(store.key.index, store.version - exact, delta, 0, self._life, self._take_acks(peer))
        self._reply(peer, content, frames)
        return sum(map(len, frames))

    def _note_pull(self, worker: str, store: KeyStore, now_s: float) -> None:
        """Remember what a worker has now; the standby does where later updates depend on it."""
        if not self._settings.aggregates:
            store.note_pull(worker, now_s)
        if self._replication.attached and self._settings.compensation != "none":
            operation = ReplicatedPull(self._replication.next_number(), worker, store.key.index)
            self._reply(self._replication.standby, operation)

    def _answer_parked(self, store: KeyStore, now_s: float) -> None:
        """Answer the pulls that waited for a key's version."""
        for peer, worker, pull in self._parked.pop(store.key.index, []):
            self._give(peer, worker, store, pull, now_s)
        for peer, worker, of_rows, rows in self._parked_rows.pop(store.key.index, []):
            self._give_rows(peer, worker, of_rows, rows)

    def _unname_parked(self, gone: str) -> None:
        """Answer pulls of a worker that is gone with whole values: it may live, or another one has its name by then."""
        for key, pulls in self._parked.items():
            self._parked[key] = [
                (peer, "", replace(pull, full=True)) if worker == gone else (peer, worker, pull)
                for peer, worker, pull in pulls
            ]
        for key, of_rows in self._parked_rows.items():
            self._parked_rows[key] = [
                (peer, "" if worker == gone else worker, pull, rows) for peer, worker, pull, rows in of_rows
            ]

    def _give_up_owed(self, gone: str, now_s: float) -> None:
        """Send a worker that is gone what it is owed, as whole values, like what is parked."""
        for peer in [peer for peer, owed in self._owed.items() if owed.worker == gone]:
            for pull in self._owed.pop(peer).waiting():
                self._send_value(peer, "", self._store_of(pull.key), replace(pull, full=True), now_s)

    def _read_state(self, peer: bytes, message: Message, now_s: float) -> None:
        content = message.content
        assert isinstance(content, ReadState)
        if content.place and not re.fullmatch("[0-9a-f]{32}", content.place):
            raise ValueError(f"no place: {content.place!r}")
        if self._is_copy_gone(peer, content.tag):
            return
        state = self._copies.get(content.tag, {}).get(content.key)
        if state is None:
            raise ValueError(f"no copy {content.tag} of key {content.key}")
        meta, frames = pack_state(without_rows(state))
        answer = StateOf(content.key, content.tag, meta)
        if not content.place:
            self._reply(peer, answer, frames)
        else:
            self._effects.append(FileState(peer, content.place, answer, frames))

    # Copies and snapshots

    def _is_copy_gone(self, peer: bytes, tag: int) -> bool:
        """Tell who reads a copy, 0 for none, where it is gone: another one is made, or another worker has read it."""
        is_gone = tag > 0 and tag not in self._copies
        if is_gone:
            self._reply(peer, CopyGone(tag))
        return is_gone

    def _keep_copy(self, tag: int, full: bool) -> None:
        if tag not in self._copies:
            self._copies.clear()  # one at a time: of an older one, whose end this server did not hear of, nobody reads
            copies = {index: store.state(full) for index, store in self.stores.items()}
            self._copies[tag] = {**copies, BUFFERS_KEY: {"value": self._mean_buffers(), "version": 0}}
        self._effects.append(TellScheduler(CopyKept(tag, self.config.index)))

    def _keep_delayed_copies(self) -> None:
        if self._durability.delayed_copies:  # of several the newest is waited for
            newest = next(reversed(self._durability.delayed_copies))
            full = self._durability.delayed_copies[newest]
            self._durability.delayed_copies.clear()
            self._keep_copy(newest, full)

    def _snapshot(self, count: int) -> SaveSnapshot:
        assert self.table is not None
        state = {
            "table": self.table.to_bytes().decode(),
            "keys": {index: store.whole_state() for index, store in self.stores.items()},
            "buffers": dict(self._buffers),
        }
        return SaveSnapshot(count, state, dict(self._numbers))

    def _repushed(self, peer: bytes, message: Message, now_s: float) -> None:
        self._durability.repushed(message.sender)

    def _tell_held(self, now_s: float) -> None:
        """Say what the keys hold, so that the scheduler knows what is lost."""
        self._durability.told(now_s)
        watermark, tasks = held_by_all(list(self.stores.values()))
        word = ServerHolds(self.config.index, watermark, to_runs(tasks), self._life)
        self._effects.append(TellScheduler(word))

    def _catch_up(self, step: int, now_s: float) -> None:
        """The scheduler knows what is held. Aggregating modes: complete what waits for gradients that nobody has any
        more, and say how much lacked.
        """
        self._durability.heard()
        if not self._durability.behind:
            return
        lacking = 0
        for store in self.stores.values():
            lacking = max(lacking, store.catch_up(step))
            self._answer_parked(store, now_s)
        self._effects.append(TellScheduler(ServerLacked(self.config.index, lacking)))
        self._durability.behind = False
        self._keep_delayed_copies()

    # Members

    def _take_members(self, members: Members, now_s: float) -> None:
        workers = set(members.workers)
        statistics = self._mean_buffers()
        for gone in self._workers - workers:
            for store in self.stores.values():
                store.forget(gone)
            if self.table is not None:
                self._references.forget(gone)
            self._buffers.pop(gone, None)
            self._unname_parked(gone)
            self._give_up_owed(gone, now_s)
        if len(statistics) and not self._buffers:  # until somebody sends newer ones
            self._buffers[""] = statistics
        self._workers, self._watermark = workers, members.watermark
        for store in self.stores.values():
            store.set_workers(max(1, len(workers)), members.parts)
            if not self._durability.settling:
                store.applied.raise_to(self._watermark)
        if self.config.index < len(members.servers):
            self._take_entry(members.servers[self.config.index])
        self._durability.members(workers)

    def _take_entry(self, entry: ServerEntry) -> None:
        """Follow who serves the keys where this server stands by it, else learn who stands by this one."""
        if self.is_standby:
            if entry.ready and entry.standby == self.config.name:
                self._follow(Follow(entry.address, entry.membership))
            return
        if self._replication.expect(entry.membership):
            self._detach()
        if self._replication.lets_in and not self._replication.attached and self.ready:
            self._let_in()

    def _detach(self) -> None:
        """Have no standby any more, so nothing waits for one."""
        self._replication.detach()
        for peer, ack in self._replication.release():
            self._reply(peer, ack)

    def _attach(self, peer: bytes, message: Message, now_s: float) -> None:
        """Let a new standby follow, now or once the scheduler has told of it."""
        content = message.content
        assert isinstance(content, Attach)
        self._refuse_unless_serving()
        if self._replication.ask(peer, content.membership):
            self._let_in()

    def _let_in(self) -> None:
        """Give the standby that asked to follow everything, then every operation."""
        assert self.table is not None
        self._detach()
        peer = self._replication.attach()
        self._reply(peer, SetTable(), [self.table.to_bytes()])
        for index, store in self.stores.items():
            meta, frames = pack_state(store.whole_state())
            self._reply(peer, PutState(index, meta), frames)

    def _operation_done(self, peer: bytes, message: Message, now_s: float) -> None:
        """Send the acknowledgements that waited for the standby."""
        content = message.content
        assert isinstance(content, OperationDone)
        if peer == self._replication.standby:
            for to, ack in self._replication.release(content.number):
                self._reply(to, ack)
                self._reply(to, Durable(ack.number, self._life))

    # As a standby

    def _follow(self, to: Follow) -> None:
        if not to.address or to.address == self._address or to == self._following:
            return
        self._lag()
        self._following = to
        self._effects.append(to)

    def _lag(self) -> None:
        """Take everything from the primary again: what is here may lack some of what it did. Until then it stays, for
        nobody else may have it.
        """
        self._lags, self._following = True, Follow("")

    def _replay(self, message: Message, now_s: float) -> None:
        match message.content:
            case SetTable():
                self.set_table(table_from_bytes(bytes(message.frames[0])))
                self.stores.clear()  # everything follows
                self._filling.clear()
                self._parked.clear()
                self._parked_rows.clear()
                self._lags, self._operation = False, 0
                self._join_if_ready()
            case PutState(key=key, meta=meta):
                self.put(key, unpack_state(meta, message.frames), now_s)
                self._join_if_ready()
            case ReplicatedPush() | ReplicatedPull() | ReplicatedBuffers() as operation:
                if self._is_next(operation.number):
                    self._repeat(operation, message, now_s)
                    self._operation = operation.number
                    self._effects.append(TellPrimary(OperationDone(operation.number)))

    def _is_next(self, number: int) -> bool:
        """Whether an operation follows the one before; where some are missing everything is taken again."""
        if not self._lags and self._operation and number != self._operation + 1:
            self._lag()
            self._join()
        return not self._lags

    def _repeat(
        self, operation: ReplicatedPush | ReplicatedPull | ReplicatedBuffers, message: Message, now_s: float
    ) -> None:
        match operation:
            case ReplicatedPush(worker=worker, push=push, scale=scale):
                self._apply(self._store_of(push.key), self._decoded(message, push, worker, scale))
            case ReplicatedPull(worker=worker, key=key):
                self._note_pull(worker, self._store_of(key), now_s)
            case ReplicatedBuffers(worker=worker):
                self._take_buffers(worker, message.frames[0])

    def _promote(self) -> None:
        if self.is_standby:
            # What an operation lacks that never came was not acknowledged: workers push it again.
            self.is_standby, self._following, self._lags = False, Follow(""), False
            self._effects.append(Follow(""))
            self._join()

    def _demote(self) -> None:
        """Become a standby: another server has taken over. What is here stays until that one gives what it holds."""
        if not self.is_standby:
            self.is_standby = True
            self._replication.forget()
            self._lag()


def _push_of(content: PushGradient, worker: str, gradient: Tensor, scale: float, absent: frozenset[int]) -> Push:
    """Return what the key's store counts."""
    return Push(
        worker, content.task, content.step, content.share, content.shares, content.units, content.base,
        content.lr, content.batch, gradient, scale, absent=absent,
    )  # fmt: skip
