"""A worker's connection to scheduler and servers: sockets that two threads use, one at a time.

Waking a thread costs more than a message. So the training thread sends by itself, and takes what comes while it waits;
while it computes, a thread of the connection's own does. Whoever holds `turn` may use the sockets, and before letting
go takes all that waits there: a socket's descriptor tells of what is new only.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon.compression.base import State
from echelon.coordinator.messages import (
    TO_WORKER,
    AskTask,
    EvaluateTask,
    EvaluationDone,
    JoinAgain,
    JoinWorker,
    LeaveRun,
    Members,
    MovedBytes,
    RunEnded,
    ServerEntry,
    SetupDone,
    SetupTask,
    Task,
    TaskDone,
    TaskHeard,
    TaskReport,
    TrainTask,
    Welcome,
    WithdrawTask,
    WorkerBeat,
)
from echelon.messages.endpoint import Channel, Sender, SocketTraffic
from echelon.messages.framing import Content, Message
from echelon.messages.plain import Malformed
from echelon.messages.sockets import Limits, new_context
from echelon.ps.coding import KeyCoding, RowCoding, downward, upward
from echelon.ps.keystore import PushOutcome
from echelon.ps.messages import (
    TO_PS_WORKER,
    CopyGone,
    Durable,
    KeyValue,
    Pull,
    PullRows,
    PushAck,
    PushGradient,
    PutDone,
    RowValues,
    StateOf,
    ValueTaken,
)
from echelon.ps.pushes import Outgoing, ServerTraffic
from echelon.ps.rows import index_frame, read_values
from echelon.ps.table import FRAME_BYTES, KeyRange, KeyTable
from echelon.ps.wakeups import ThreadWakeups
from echelon.ps.worker_state import (
    AwaitedRows,
    CachedValue,
    ClientConfig,
    ClientFailed,
    ClientStats,
    OpenTask,
    PushInfo,
    RowsOf,
)

BEAT_S = 0.1
_MOST_HELD = 1024
_SILENT_S = 60.0
Report = TaskDone | SetupDone | EvaluationDone


class Connection:
    """What both threads see, and what the thread with the sockets does; `do` hands it a command.

    The training thread reads `stats`, `status`, `tasks`, `welcome`, `fetched`, `changes` and `withdrawn`; all else goes
    through methods. `changes` counts servers that came, or came back; `withdrawn`: the scheduler took the task back
    that was taken last.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.stats = ClientStats()
        self.sender = Sender(config.keys, config.name)
        self.status = ""
        self.tasks: deque[Task] = deque()
        self.welcome: Welcome | None = None
        self.fetched: dict[int, Message] = {}
        self.changes = 0
        self.withdrawn = False
        self._heard_s = 0.0
        self._beat_s = 0.0
        self._context = new_context()
        self._limits = Limits(FRAME_BYTES, queued=20_000)
        self._scheduler = Channel(self._context, self.sender, config.scheduler, self._limits, TO_WORKER)
        self._links: dict[int, ServerTraffic] = {}
        self._cached: dict[int, CachedValue] = {}
        self._rows: dict[int, AwaitedRows] = {}
        self._row_pulls = 0
        self._table: KeyTable | None = None
        self._open: dict[int, OpenTask] = {}
        self._taken = -1
        self._unconfirmed: dict[int, Report] = {}
        self._holding: set[int] = set()
        self._asking = False
        self._apart = SocketTraffic()
        self._told = MovedBytes()
        self._join: JoinWorker | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._turn = threading.RLock()
        self._wakeups = ThreadWakeups()
        self._wakeups.add(self._scheduler.socket)
        self._failure: BaseException | None = None
        self._closing = self._over = False
        self._awaited: Callable[[], bool] | None = None
        self._while_waiting: Callable[[], None] | None = None
        self._while_waiting_s = self._next_call_s = math.inf
        self._thread = threading.Thread(target=self._run, name="echelon-client", daemon=True)

    def set_table(self, table: KeyTable) -> None:
        """Take the table of keys: their coding and their values, which are not there yet."""
        self._up = upward(self.config.compression, table.torch_dtype)
        self._rows_up = RowCoding(self.config.compression, table.torch_dtype)
        self._down = downward(self.config.compression, table.torch_dtype)
        self._plain = KeyCoding(None, table.torch_dtype)
        whole = [key for key in table.keys if not key.width]
        self._states = {k.index: self._up.states(k, self.config.seed, self.config.stream) for k in whole}
        self._cached = {k.index: CachedValue(torch.zeros(k.numel, dtype=table.torch_dtype)) for k in whole}
        self._table = table

    # Between the threads

    def start(self) -> None:
        """Start the connection's own thread."""
        self._thread.start()

    def close(self) -> None:
        """Leave the run, and end the thread."""
        if self._thread.is_alive():
            self.later(self._leave)
            self.later(self._stop)
            self._thread.join(5)
        elif self._thread.ident is None:
            self._context.destroy()
        self._wakeups.close()

    def _leave(self) -> None:
        self._scheduler.send(LeaveRun(self._moved()))
        self._beat_s = time.monotonic() + _SILENT_S  # who beats is asked to join again

    def call_while_waiting(self, call: Callable[[], None], every_s: float) -> None:
        """Let the training thread call something now and then while it waits."""
        self._while_waiting, self._while_waiting_s, self._next_call_s = call, every_s, 0.0

    def _stop(self) -> None:
        self._closing = True
        self._wakeups.rouse()

    def later(self, command: Callable[[], None]) -> None:
        """Hand a command to the other thread: what computes for long."""
        self._commands.append(command)
        self._wakeups.rouse()

    def do(self, command: Callable[[], None]) -> None:
        """Run a command now, behind those that wait, and take what came.

        Raises:
            ClientFailed: the connection cannot go on.
        """
        with self._turn:
            self._commands.append(command)
            self._take_turn()
        self._raise_failure()

    def _take_turn(self) -> None:
        if self._over:
            return
        try:
            self._exchange()
        except Exception as error:  # noqa: BLE001 - raised at the training thread's next word
            self._failure = self._failure or error
            self._stop()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ClientFailed(f"{self.config.name}: {self._failure}") from self._failure

    def wait_until(
        self, done: Callable[[], bool], what: str, deadline_s: float = 0.0, again: Callable[[], None] | None = None
    ) -> None:
        """Take what comes until something is done; 0: the run's own deadline.

        Args:
            again: asks anew. What others have to do first, such as an evaluation, may take as long as it likes while
                the scheduler lives, which knows who is dead.

        Raises:
            ClientFailed: it was not in time, or the connection cannot go on.
        """
        if done():
            return
        deadline_s = deadline_s or self.config.timeout_s
        ends = time.monotonic() + deadline_s
        self._awaited = lambda: done() or self._failure is not None
        with self._wakeups.by_training_thread():
            while not self._came():
                now_s = time.monotonic()
                if now_s >= ends and again is not None and now_s - self._heard_s < deadline_s / 2:
                    self.do(again)
                    ends = now_s + deadline_s
                elif now_s >= ends:
                    raise ClientFailed(f"{self.config.name} waited {deadline_s:g} s for {what}; use a longer --timeout")
                if self._while_waiting is not None and now_s >= self._next_call_s:
                    self._while_waiting()
                    self._next_call_s = now_s + self._while_waiting_s
                self._wakeups.wait(min(ends, self._next_call_s) - now_s)
        self._awaited = None
        self._raise_failure()

    def _came(self) -> bool:
        with self._turn:
            self._take_turn()
            return self._awaited is None or self._awaited()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self._failure = self._failure or error
        finally:
            with self._turn:
                self._over = True
                self._wakeups.call()
                self._scheduler.close(linger_ms=1000)  # the farewell may leave
            self._context.destroy()

    def _loop(self) -> None:
        while not self._closing or self._commands:
            with self._turn:
                self._beat()
                self._exchange()
                if self._awaited is not None and self._awaited():
                    self._wakeups.call()
            if not self._closing:
                self._wakeups.sleep(max(0.0, self._beat_s - time.monotonic()))

    def _beat(self) -> None:
        """Say that this worker lives, when that is due; with `turn` held."""
        if time.monotonic() >= self._beat_s:
            traffic = self.sender.traffic
            stats = self.stats
            beat = WorkerBeat(dict(stats.waited_s), traffic.sent_bytes, traffic.received_bytes, stats.overlapped_s)
            self._scheduler.send(beat)
            self._beat_s = time.monotonic() + BEAT_S

    def _exchange(self) -> None:
        """Run commands, and take messages until none is left; with `turn` held."""
        while self._commands:
            self._commands.popleft()()
            self._beat()  # to encode a step's gradients may take seconds
        heard = -1
        while heard:
            heard = self._scheduler.pump(self._from_scheduler)
            for link in list(self._links.values()):
                link.flush()  # before the look: a send swallows the descriptor's word on what came meanwhile
                heard += link.channel.pump(partial(self._from_server, link))

    # To the scheduler: commands

    def join(self, join: JoinWorker) -> None:
        """Join the run."""
        self._join = join
        self._send_join()

    def _send_join(self) -> None:
        if self._join is not None:
            self._scheduler.send(replace(self._join, holding=sorted(self._holding)[:_MOST_HELD]))

    def ask(self) -> None:
        """Ask for a task, unless one is there or asked for."""
        if not self.tasks and not self.status and not self._asking:
            self._asking = True
            self._scheduler.send(AskTask())

    def ask_again(self) -> None:
        """Ask anew for a task that was asked for, and did not come."""
        if self._asking:
            self._scheduler.send(AskTask())

    def take_task(self) -> list[Task]:
        """Return the next task, if one is there, and ask for one more: it travels while this one is worked on."""
        if not self.tasks:
            return []
        task = self.tasks.popleft()
        self._taken, self.withdrawn = task.task, False
        self.ask()
        return [task]

    def open_task(self, task: int, pushes: int) -> None:
        """Announce how many pushes a task will have."""
        self._open[task] = OpenTask(pushes)

    def abandon(self) -> bool:
        """Leave the task undone that was taken last, where it is still withdrawn; returns whether it is."""
        if self.withdrawn:
            self.withdrawn = False
            self._holding.discard(self._taken)
            self._open.pop(self._taken, None)
            return True
        return False

    def finish(self, task: int, report: TaskReport | None = None) -> None:
        """Report a task once all its pushes are acknowledged."""
        entry = self._open[task]
        entry.report = report or entry.report
        if entry.unacked == 0 and entry.report is not None:
            del self._open[task]
            self.report(TaskDone(task, entry.late, entry.report, MovedBytes()))

    def report(self, result: Report) -> None:
        """Report a task, with the bytes since the report before: by now all of its own are among them."""
        result = replace(result, moved=self._moved())
        self._unconfirmed[result.task] = result
        self._scheduler.send(result)

    def _moved(self) -> MovedBytes:
        """Return what went over the sockets since the last call."""
        traffic, apart, told = self.sender.traffic, self._apart, self._told
        self._told = MovedBytes(
            traffic.sent_bytes - apart.sent_bytes, traffic.received_bytes - apart.received_bytes,
            apart.sent_bytes + apart.received_bytes,
        )  # fmt: skip
        now = self._told
        return MovedBytes(now.sent - told.sent, now.received - told.received, now.other - told.other)

    # To the servers: commands

    def send_apart(self, messages: Iterable[tuple[int, Content, list[Any]]]) -> None:
        """Send what is no training's, by server: requests for a copy of the keys, or a copy."""
        before = self.sender.traffic.sent_bytes
        for server, content, frames in messages:
            self._links[server].channel.send(content, frames)
        self._apart.sent_bytes += self.sender.traffic.sent_bytes - before

    def send_if_known(self, server: int, content: Content, frames: list[Any]) -> None:
        """Send to a server, if it has been heard of."""
        if server in self._links:
            self._links[server].channel.send(content, frames)

    def queue_push(self, key: KeyRange, gradient: Tensor, info: PushInfo, absent: Sequence[int] = ()) -> None:
        """Let a 1-D gradient leave when it is its turn, and the key's next value be asked for with it.

        Args:
            absent: parts of the key without a gradient; where these are all, nothing is encoded.
        """
        link, cached = self._links[key.server], self._cached[key.index]
        nothing = len(absent) == len(key.parts)
        frames = [b""] if nothing else self._up.encode(gradient, key, self._states[key.index])
        push = PushGradient(
            key.index, info.task, info.step, info.share, info.shares, info.units, info.batch,
            max(0, cached.version), 0, info.lr, True, list(absent), info.place,
        )  # fmt: skip
        cached.pull = replace(push.pull_behind(self.config.aggregates), place=0)  # if it is asked for again
        link.queue(info.place or key.index, Outgoing(push, frames))
        link.flush()

    def queue_rows_push(self, key: KeyRange, rows: Tensor | None, values: Tensor, info: PushInfo) -> None:
        """Let the gradients of rows leave when it is their turn.

        Args:
            rows: numbers within the key, ascending, `(R,)`; None: the table has no gradient.
            values: `(R, D)`.
        """
        state = State(f"key{key.index}", self.config.seed, self.config.stream, numbers={"step": info.task})
        frames = [b""] if rows is None else [index_frame(rows, key), self._rows_up.encode(values, state)]
        push = PushGradient(
            key.index, info.task, info.step, info.share, info.shares, info.units, info.batch,
            0, 0, info.lr, False, [0] if rows is None else [],
        )  # fmt: skip
        self._links[key.server].queue(info.place or key.index, Outgoing(push, frames))
        self._links[key.server].flush()

    def ask_rows(self, key: KeyRange, rows: Tensor, of: RowsOf) -> AwaitedRows:
        """Ask for rows of a table's key, `(R,)`; returns where they will be."""
        self._row_pulls += 1
        version = of.step if self.config.aggregates else 0
        pull = PullRows(key.index, of.task, self._row_pulls, of.tag, version)
        awaited = AwaitedRows(key, pull, index_frame(rows, key), len(rows))
        self._rows[pull.number] = awaited
        if of.tag:
            self.send_apart([(key.server, pull, [awaited.frame])])
        elif key.server in self._links:
            self._links[key.server].queue_rows(pull, awaited.frame)
            self._links[key.server].flush()
        return awaited

    def forget_rows(self, asked: Iterable[AwaitedRows]) -> None:
        """Wait no more for rows."""
        for awaited in asked:
            self._rows.pop(awaited.pull.number, None)

    def invalidate(self) -> None:
        """Forget that values are here, so that newer ones are pulled; not where a version is asked for exactly."""
        for cached in self._cached.values():
            cached.valid = cached.valid and self.config.aggregates

    def want(self, key: KeyRange, version: int) -> None:
        """Ask for a version, unless it is on its way."""
        cached = self._cached[key.index]
        if cached.pull is not None and (cached.pull.version == version or not self.config.aggregates):
            return
        if self.has(key, version):
            return
        cached.pull = Pull(key.index, version, self.config.aggregates, cached.version < 0, 0)
        if key.server in self._links:
            self._links[key.server].channel.send(cached.pull)

    # What is known

    @property
    def encodes(self) -> bool:
        """Whether what is pushed goes through a codec."""
        return self._up.codec is not None

    @property
    def servers(self) -> list[int]:
        """The servers that have been heard of."""
        return list(self._links)

    def cached(self, key: KeyRange) -> CachedValue:
        """Return the newest value of a key that is here."""
        return self._cached[key.index]

    def has(self, key: KeyRange, version: int) -> bool:
        """Whether a value is here: of exactly a version where gradients are aggregated, else the newest asked for."""
        cached = self._cached[key.index]
        return cached.valid and (version in (cached.version, cached.serves) or not self.config.aggregates)

    def sent_states(self) -> list[tuple[State, int]]:
        """Return the codec's states of what is pushed, each with its number of elements."""
        states: list[tuple[State, int]] = []
        for key in self._table.keys if self._table and self._up.codec else ():
            if key.width:
                continue
            sizes = [stop - start for start, stop, _ in self._up.pieces(key)]
            states += zip(self._states[key.index], sizes, strict=True)
        return states

    # From the scheduler

    def _from_scheduler(self, message: Message) -> None:
        self._heard_s = time.monotonic()
        match message.content:
            case Welcome() as welcome:
                self.welcome = welcome
            case JoinAgain():
                self._rejoin()
            case Members(servers=servers):
                self.meet_servers(servers)
            case SetupTask() | TrainTask() | EvaluateTask() as task:
                self._asking = False
                if task.task not in self._holding:
                    self._holding.add(task.task)
                    self.tasks.append(task)
                else:  # it is under way here, and another one may be waited for
                    if task.task == self._taken:
                        self.withdrawn = False
                    self.ask()
            case WithdrawTask(task=number):
                self._withdraw(number)
            case TaskHeard(task=number):
                self._unconfirmed.pop(number, None)
                self._holding.discard(number)
            case RunEnded(status=status):
                self.status = status

    def _withdraw(self, number: int) -> None:
        """Take back a task that was not taken; the training thread leaves one that was, if it waits for a value."""
        begun = len(self.tasks)
        self.tasks = deque(task for task in self.tasks if task.task != number)
        if len(self.tasks) < begun:
            self._holding.discard(number)
            self.ask()
        elif number == self._taken and number in self._holding:
            self.withdrawn = True

    def _rejoin(self) -> None:
        """The scheduler is new: tell it again what it may not know."""
        self._send_join()
        for report in self._unconfirmed.values():
            self._scheduler.send(report)
        if self._asking:
            self._scheduler.send(AskTask())

    def meet_servers(self, servers: Iterable[ServerEntry]) -> None:
        """Connect to the servers, in order of their index, and to those that came back."""
        for index, entry in enumerate(servers):
            link = self._links.get(index)
            if not entry.address or (link is not None and link.life == entry.life):
                continue
            if link is None:
                self._links[index] = ServerTraffic(
                    self._connect(entry.address), entry.life, self.config.keeps, self.config.by_priority
                )
            elif entry.ready or entry.empty:  # an empty one is to be set up
                self._wakeups.remove(link.channel.socket)
                link.restart(self._connect(entry.address), entry.life)
                self._pull_again(index)
            else:
                continue
            self.changes += 1

    def _connect(self, address: str) -> Channel:
        channel = Channel(self._context, self.sender, address, self._limits, TO_PS_WORKER)
        self._wakeups.add(channel.socket)
        return channel

    def pull_again(self) -> None:
        """Ask all servers anew for what has not come."""
        for index in self._links:
            self._pull_again(index)

    def _pull_again(self, server: int) -> None:
        for index, cached in self._cached.items():
            assert self._table is not None
            if self._table.keys[index].server == server and cached.pull is not None:
                cached.pull = replace(cached.pull, full=True)
                self._links[server].channel.send(cached.pull)
        for awaited in self._rows.values():
            if awaited.key.server == server and not awaited.pull.tag:
                self._links[server].queue_rows(awaited.pull, awaited.frame)
        self._links[server].flush()

    # From the servers

    def _from_server(self, link: ServerTraffic, message: Message) -> None:
        match message.content:
            case KeyValue() as value:
                self._acknowledged_with(link, value.acks)
                if value.tag or value.key not in self._cached:
                    self._take_apart(link, value.key, message)
                else:
                    self._take_value(value, message)
                    if self.config.by_priority:
                        self.stats.arrived_s = time.perf_counter()
                        link.channel.send(ValueTaken(value.key))
            case RowValues() as rows:
                self._acknowledged_with(link, rows.acks)
                self._take_rows(link, rows, message)
            case PushAck() as ack:
                self._acknowledged(link, ack.number, ack.outcome)
            case Durable(number=number):
                link.durable(number)
            case CopyGone():
                self.changes += 1  # as of a server that came back
            case PutDone(key=key) | StateOf(key=key):
                self._take_apart(link, key, message)

    def _take_apart(self, link: ServerTraffic, key: int, message: Message) -> None:
        self._apart.received_bytes += link.channel.message_bytes
        self.fetched[key] = message

    def _acknowledged_with(self, link: ServerTraffic, acks: list[int]) -> None:
        if len(acks) % 2:
            raise Malformed("content")
        for number, outcome in zip(acks[::2], acks[1::2], strict=True):
            self._acknowledged(link, number, outcome)

    def _acknowledged(self, link: ServerTraffic, number: int, outcome: int) -> None:
        push = link.acknowledged(number)
        if push is None or push.content.task not in self._open:
            return
        entry = self._open[push.content.task]
        entry.unacked -= 1
        self.stats.duplicates += outcome == PushOutcome.DUPLICATE
        if outcome == PushOutcome.LATE:
            entry.late = True
            self.stats.late += 1
        self.finish(push.content.task)

    def _take_rows(self, link: ServerTraffic, content: RowValues, message: Message) -> None:
        assert self._table is not None
        awaited = self._rows.get(content.number)
        if awaited is None or awaited.key.index != content.key:
            return  # a server that came back was asked twice
        try:
            values = read_values(message.frames[0], awaited.count, awaited.key, self._table.torch_dtype)
        except ValueError as error:
            raise Malformed("content") from error
        if awaited.pull.tag:
            self._apart.received_bytes += link.channel.message_bytes
        awaited.values = values
        del self._rows[content.number]

    def _take_value(self, content: KeyValue, message: Message) -> None:
        assert self._table is not None
        key, cached = self._table.keys[content.key], self._cached[content.key]
        coding = self._down if content.delta else self._plain
        try:
            value = coding.decode(message.frames, key)
        except ValueError as error:
            raise Malformed("content") from error
        if content.delta:
            cached.value += value
        else:
            cached.value = value
        cached.serves = -1
        if cached.pull is not None and (not self.config.aggregates or content.version >= cached.pull.version):
            cached.serves, cached.pull = cached.pull.version, None
        cached.version, cached.valid = content.version, True
