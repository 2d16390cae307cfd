"""A worker's side for the training thread: it hands over gradients, and waits for values and tasks.

Pushes leave in the order in which the next forward pass needs them, not in that in which backward makes them: they
wait in a heap, and only so many bytes per server are on their way at a time, so that a first layer's gradient passes
the later ones that came before it. After each push the key's next value is asked for at once.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.compression.base import State
from echelon.coordinator.messages import EvaluationDone, JoinWorker, SetupDone, Task, TaskReport, Welcome
from echelon.core.state_tree import StateTree
from echelon.messages.framing import Content, Message
from echelon.ps.blob import COPIES_FOLDER, as_frame, pack_state, read_frames, unpack_state
from echelon.ps.coding import upward
from echelon.ps.connection import Connection
from echelon.ps.messages import (
    BUFFERS_KEY,
    Pull,
    PutRows,
    PutState,
    ReadRows,
    ReadState,
    SendBuffers,
    SetTable,
    StateOf,
)
from echelon.ps.table import KeyRange, KeyTable
from echelon.ps.worker_state import (
    AwaitedRows,
    ClientConfig,
    ClientStats,
    PushInfo,
    RowsOf,
    RunOver,
    TagLost,
    TaskWithdrawn,
)

__all__ = ["Client", "ClientConfig", "ClientStats", "PushInfo", "RowsOf", "RunOver", "TagLost"]


class Client:
    """Start with `join`, then `set_table`; the training thread calls these methods, one at a time."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.connection = Connection(config)
        self._changes_at_put = self._changes_at_copy = 0

    @property
    def _copy_is_lost(self) -> bool:
        """Whether a server came back since the copy was read first: it has none any more."""
        return self.connection.changes != self._changes_at_copy

    @property
    def stats(self) -> ClientStats:
        """Seconds waited by cause, and pushes by what became of them."""
        return self.connection.stats

    def while_waiting(self, call: Callable[[], None], every_s: float) -> None:
        """Let the training thread call something now and then while it waits for scheduler or servers."""
        self.connection.call_while_waiting(call, every_s)

    def join(self, join: JoinWorker) -> Welcome:
        """Join the run with what the scheduler should know of this worker; returns its welcome."""
        connection = self.connection
        connection.start()
        connection.do(lambda: connection.join(join))
        connection.wait_until(lambda: connection.welcome is not None, "the scheduler's welcome")
        assert connection.welcome is not None
        return connection.welcome

    def set_table(self, table: KeyTable) -> None:
        """Take the table of keys; values are pulled when first asked for."""
        self.connection.set_table(table)

    @property
    def sends_shapes(self) -> bool:
        """Whether the codec looks at parameters as matrices, so that the table must keep them whole."""
        codec = upward(self.config.compression, torch.float32).codec
        return codec is not None and codec.shaped

    def next_task(self) -> Task | None:
        """Wait for a task; None at the end of the run (see `status`)."""
        connection, began = self.connection, time.perf_counter()
        connection.do(connection.ask)
        taken: list[Task] = []
        is_over = False
        while not taken and not is_over:
            connection.wait_until(
                lambda: bool(connection.tasks or connection.status), "a task", again=connection.ask_again
            )
            is_over = bool(connection.status)
            connection.do(lambda: taken.extend(connection.take_task()))  # another thread may withdraw it meanwhile
        self.stats.waited_s["task"] += time.perf_counter() - began
        return taken[0] if taken else None

    @property
    def status(self) -> str:
        """How the run ended; empty while it goes."""
        return self.connection.status

    def invalidate(self) -> None:
        """Pull anew before the next task: this worker did something else, and the others trained on."""
        self.connection.do(self.connection.invalidate)

    def push(self, key: KeyRange, gradient: Tensor, info: PushInfo, absent: Sequence[int] = ()) -> None:
        """Send a key's gradient, 1-D; it must not change any more. The key's next value is asked for behind it.

        Args:
            absent: parts of the key that got no gradient, where it is zero.
        """
        connection = self.connection
        cached = connection.cached(key)
        cached.valid = cached.valid and self.config.aggregates  # at once: `value` must not give what was before
        self._hand_over(lambda: connection.queue_push(key, gradient, info, absent))

    def _hand_over(self, command: Callable[[], None]) -> None:
        """Let the connection's own thread push where that encodes, else this one."""
        (self.connection.later if self.connection.encodes else self.connection.do)(command)

    def push_rows(self, key: KeyRange, rows: Tensor | None, values: Tensor, info: PushInfo) -> None:
        """Send the gradients of rows of a table's key; they must not change any more.

        Args:
            rows: numbers within the key, ascending, `(R,)`; None: the table has no gradient.
            values: `(R, D)`.
        """
        self._hand_over(lambda: self.connection.queue_rows_push(key, rows, values, info))

    def rows(self, wanted: Sequence[tuple[KeyRange, Tensor]], of: RowsOf) -> list[Tensor]:
        """Ask for rows of tables' keys, by their numbers within the key, and wait: the values of each, `(R, D)`.

        What this worker pushed before is in them; where gradients are aggregated, all of the steps before.

        Raises:
            RunOver: the run ended without this worker's task.
            TaskWithdrawn: the scheduler took it back.
            TagLost: a server that held the copy died.
        """
        connection, began = self.connection, time.perf_counter()
        asked: list[AwaitedRows] = []
        connection.do(lambda: asked.extend(connection.ask_rows(key, rows, of) for key, rows in wanted))

        def is_over() -> bool:
            """Whether nothing will come any more."""
            return self._copy_is_lost if of.tag else bool(connection.status or connection.withdrawn)

        def have_come() -> bool:
            """Whether all rows are here."""
            return all(awaited.values is not None for awaited in asked)

        while not have_come():
            came = lambda: have_come() or is_over()  # noqa: E731
            connection.wait_until(came, "rows of tables", again=None if of.tag else connection.pull_again)
            if not have_come() and (lost := self._reason_to_stop(of)):
                connection.do(lambda: connection.forget_rows(asked))
                raise lost
        self.stats.waited_s["parameters"] += 0.0 if of.tag else time.perf_counter() - began
        return [awaited.values for awaited in asked if awaited.values is not None]

    def _reason_to_stop(self, of: RowsOf) -> Exception | None:
        """Return why what is waited for will not come; None: it may after all."""
        if of.tag:
            return TagLost(f"rows of the copy {of.tag}") if self._copy_is_lost else None
        if self.connection.status:
            return RunOver(self.connection.status)
        left: list[bool] = []
        self.connection.do(lambda: left.append(self.connection.abandon()))
        return TaskWithdrawn("a task before it is not done") if left[0] else None

    def open_task(self, task: int, pushes: int) -> None:
        """Announce how many pushes a task will have."""
        self.connection.open_task(task, pushes)

    def finish_task(self, task: int, report: TaskReport) -> None:
        """Report a task once all its pushes are acknowledged."""
        self.connection.do(lambda: self.connection.finish(task, report))

    def report(self, result: SetupDone | EvaluationDone) -> None:
        """Report the result of a task that pushes nothing; the bytes that it moved are filled in."""
        self.connection.do(lambda: self.connection.report(result))

    def send_buffers(self, task: int, values: Tensor) -> None:
        """Send statistics that are no parameters, 1-D float32, to the first server."""
        frame = as_frame(values.contiguous())
        self.connection.do(lambda: self.connection.send_if_known(0, SendBuffers(task), [frame]))

    def value(self, key: KeyRange, version: int) -> Tensor:
        """Wait for a key's value, 1-D: of exactly a version where gradients are aggregated, else the newest asked for.

        Raises:
            RunOver: the run ended without this worker's task (backup workers, a stop).
            TaskWithdrawn: the scheduler took it back.
        """
        connection = self.connection
        if not connection.has(key, version):
            began = time.perf_counter()
            connection.do(lambda: connection.want(key, version))
            is_over = lambda: bool(connection.status or connection.withdrawn)  # noqa: E731
            came = lambda: connection.has(key, version) or is_over()  # noqa: E731
            while not connection.has(key, version):
                connection.wait_until(came, f"key {key.index}", again=connection.pull_again)
                if not connection.has(key, version) and (over := self._reason_to_stop(RowsOf())):
                    raise over
            self.stats.waited_s["parameters"] += time.perf_counter() - began
        return connection.cached(key).value

    def put(self, table: KeyTable, states: Mapping[int, StateTree], deadline_s: float) -> None:
        """Give the servers their keys' states (by key number): the start of a run.

        Raises:
            TagLost: a server died meanwhile.
        """

        def messages() -> Iterable[tuple[int, Content, list[Any]]]:
            """Give the table to each server, then each state to the server of its key."""
            for server in self.connection.servers:
                yield server, SetTable(), [table.to_bytes()]
            for index, state in states.items():
                meta, frames = pack_state(state)
                yield _server_of(table, index), PutState(index, meta), frames

        self._changes_at_put = self.connection.changes
        self._fetch(messages, set(states), "the servers to take their keys", deadline_s)

    def put_rows(self, key: KeyRange, rows: StateTree, deadline_s: float) -> None:
        """Give a server more of the rows that exist of a key whose state was put.

        Args:
            rows: what there is of them (see `made_rows`).

        Raises:
            TagLost: a server died meanwhile.
        """
        meta, frames = pack_state(rows)
        content = PutRows(key.index, meta)
        what, since = "a server to take rows", self._changes_at_put
        self._fetch(lambda: [(key.server, content, frames)], {key.index}, what, deadline_s, since)

    def read_rows(self, key: KeyRange, tag: int, name: str, first: int, count: int) -> Tensor:
        """Read a part of what the servers' copy `tag` has of the rows of a key that exist.

        Args:
            name: of what (see `made_rows`).
            first, count: of the rows that exist.

        Raises:
            TagLost: a server died meanwhile.
        """
        content = ReadRows(key.index, tag, name, first, count)
        what = f"rows of the copy {tag}"
        timeout_s, since = self.config.timeout_s, self._changes_at_copy
        answers = self._fetch(lambda: [(key.server, content, [])], {key.index}, what, timeout_s, since)
        answer = answers[key.index]
        assert isinstance(answer.content, StateOf)
        part: Tensor = unpack_state(answer.content.meta, answer.frames)["part"]
        return part

    def fetch_copy(self, table: KeyTable, tag: int, folder: Path) -> tuple[dict[int, StateTree], Tensor]:
        """Read the servers' copy `tag` by the disk where they see this worker's folder of the run, else by the wire.

        Returns:
            each key's whole state, and the BatchNorm statistics.

        Raises:
            TagLost: a server died meanwhile.
        """
        self._changes_at_copy = self.connection.changes
        place = folder / COPIES_FOLDER / secrets.token_hex(16)
        try:
            place.mkdir(parents=True, mode=0o700)
        except OSError:  # it is full: the servers send what they have
            return self._fetch_copy(table, tag, None)
        try:
            return self._fetch_copy(table, tag, place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _fetch_copy(self, table: KeyTable, tag: int, place: Path | None) -> tuple[dict[int, StateTree], Tensor]:
        keys = self.fetch(table, [key.index for key in table.keys], tag, True, place)
        buffers = self.fetch(table, [BUFFERS_KEY], tag, True, place)[BUFFERS_KEY]["value"]
        return keys, buffers

    def fetch(
        self, table: KeyTable, indices: list[int], tag: int, full: bool, place: Path | None = None
    ) -> dict[int, StateTree]:
        """Read keys from the servers' copy `tag`: values, or with `full` whole states, in `place` if they see it.

        Raises:
            TagLost: a server died meanwhile.
        """
        name = place.name if place is not None else ""

        def messages() -> Iterable[tuple[int, Content, list[Any]]]:
            """Give the requests: one for each key, to the key's server."""
            for index in indices:
                content = ReadState(index, tag, name) if full else Pull(index, 0, False, True, tag)
                yield _server_of(table, index), content, []

        answers = self._fetch(messages, set(indices), f"the copy {tag}", self.config.timeout_s)
        return {index: _state_in(answer, index, table, place) for index, answer in answers.items()}

    def _fetch(
        self,
        messages: Callable[[], Iterable[tuple[int, Content, list[Any]]]],
        wanted: set[int],
        what: str,
        deadline_s: float,
        since: int | None = None,
    ) -> dict[int, Message]:
        """Send messages and wait for an answer of each key; `since`: no server may have come back since so many did."""
        connection = self.connection
        changes = connection.changes if since is None else since
        connection.fetched = {}
        connection.do(lambda: connection.send_apart(messages()))
        connection.wait_until(
            lambda: wanted <= connection.fetched.keys() or connection.changes != changes, what, deadline_s
        )
        if not wanted <= connection.fetched.keys():
            raise TagLost(what)
        return connection.fetched

    def wait_for_servers(self, count: int) -> None:
        """Wait until every server is known."""
        self.connection.wait_until(lambda: len(self.connection.servers) == count, f"{count} servers")

    def sent_bytes(self) -> int:
        """Return the bytes that this worker has sent."""
        return self.connection.sender.traffic.sent_bytes

    def sent_states(self) -> list[tuple[State, int]]:
        """Return the codec's states of what is pushed, each with its number of elements."""
        return self.connection.sent_states()

    def close(self) -> None:
        """Leave, and end the thread."""
        self.connection.close()


def _server_of(table: KeyTable, index: int) -> int:
    """Return the server of a key; what is no key is on the first one."""
    return table.keys[index].server if index < len(table.keys) else 0


def _state_in(answer: Message, index: int, table: KeyTable, place: Path | None) -> StateTree:
    """Return what a server gave of a key: a whole state, or its value alone."""
    if isinstance(answer.content, StateOf):
        meta = answer.content.meta
        if answer.content.filed and place is not None:
            return unpack_state(meta, read_frames(place / str(index), meta))
        return unpack_state(meta, answer.frames)
    if not len(answer.frames[0]):  # of statistics there are none before the first worker has sent its own
        return {"value": torch.empty(0)}
    dtype = table.torch_dtype if index < len(table.keys) else torch.float32
    return {"value": torch.frombuffer(answer.frames[0], dtype=dtype)}
