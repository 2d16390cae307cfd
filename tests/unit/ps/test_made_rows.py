"""Rows that servers make when they are first asked for: the same as where the whole table is there from the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from echelon.compression import read
from echelon.core.state_tree import StateTree
from echelon.messages.framing import Content, Message
from echelon.messages.identity import derive_keys
from echelon.messages.plain import Malformed
from echelon.parallel.row_values import RowDraw, fill_rows
from echelon.ps.blob import pack_state, read_frame, unpack_state
from echelon.ps.keystore import KeyStore
from echelon.ps.made_rows import EXIST, ROWS, RowSlots, without_rows
from echelon.ps.messages import (
    CopyGone,
    Pull,
    PullRows,
    PushGradient,
    PutDone,
    PutRows,
    PutState,
    ReadRows,
    ReadState,
    SetTable,
    StateOf,
)
from echelon.ps.rows import index_frame, row_gradient, value_frame
from echelon.ps.server_state import ServerState
from echelon.ps.serving import Reply, ServerConfig
from echelon.ps.table import Cut, KeyTable, ParameterInfo, RowStart, cut_table, table_from_bytes
from echelon.sync.ps import ServerSettings

ROWS_OF_TABLE, WIDTH, LR = 3000, 4, 0.5
START = RowStart(RowDraw("normal", 0.0, 1.0, {7: 0.0}), 3, "embedding")
PUSH = PushGradient(0, 0, 0, 0, 1, 1, 1, 0, 1, LR, False)
Make = Callable[[Sequence[nn.Parameter], Sequence[bool]], torch.optim.Optimizer]


def table_of(servers: int = 1, start: RowStart | None = START) -> KeyTable:
    info = ParameterInfo("embedding", (ROWS_OF_TABLE, WIDTH), True, by_rows=True, begins=start)
    return cut_table([info], Cut(servers, 4096))


def sgd(tensors: Sequence[nn.Parameter], decay: Sequence[bool]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=LR)


def adagrad(tensors: Sequence[nn.Parameter], decay: Sequence[bool]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(tensors, lr=LR, initial_accumulator_value=0.5)


def sparse_adam(tensors: Sequence[nn.Parameter], decay: Sequence[bool]) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(tensors), lr=LR)


def whole_table() -> Tensor:
    values = torch.empty(ROWS_OF_TABLE, WIDTH)
    fill_rows(values, 0, START.draw, START.seed, START.name)
    return values


def rows_of(step: int) -> Tensor:
    """Return the rows of a step; those of the third are none, and later ones meet earlier ones."""
    if step == 2:
        return torch.zeros(0, dtype=torch.int64)
    draw = torch.Generator().manual_seed(step)
    return torch.randint(ROWS_OF_TABLE // 5, (200,), generator=draw).unique() * 5 + step % 2


class Serving:
    """One server of a table, and what it answers."""

    def __init__(self, optimizer: Make = sgd, states: StateTree | None = None) -> None:
        config = ServerConfig(
            "server0", 0, ServerSettings(), derive_keys(b"k" * 32), "", "", read("none"), 0, Path(), sgd, optimizer
        )  # fmt: skip
        self.state = ServerState(config, 1, "ipc://server0", 7)
        self.key = table_of().keys[0]
        self._said = 0
        self.say(SetTable(), [table_of().to_bytes()])
        self.put(states or {"version": 0})

    def put(self, state: StateTree) -> None:
        meta, frames = pack_state(state)
        (reply, *_) = self.say(PutState(0, meta), frames)
        assert isinstance(reply.content, PutDone)

    def say(self, content: Content, frames: Sequence[object] = ()) -> list[Reply]:
        self._said += 1
        plain = [memoryview(bytearray(frame)) for frame in frames]  # type: ignore[call-overload]
        effects = self.state.handle(Message(content, "a", 1, self._said, plain), b"a", 0.0)
        return [effect for effect in effects if isinstance(effect, Reply)]

    def pull(self, rows: Tensor, tag: int = 0) -> Tensor:
        (reply,) = self.say(PullRows(0, 0, 3, tag), [index_frame(rows, self.key)])
        return read_frame(memoryview(bytearray(reply.frames[0])), torch.float32).view(-1, WIDTH)

    def push(self, step: int) -> None:
        rows = rows_of(step)
        frames = [index_frame(rows, self.key), value_frame(torch.full((len(rows), WIDTH), step + 1.0))]
        self.say(replace(PUSH, task=step, step=step), frames)

    @property
    def store(self) -> KeyStore:
        return self.state.stores[0]


def trained(optimizer: Make, steps: int) -> Tensor:
    """Return the whole table after steps of torch's optimizer in one process."""
    table = nn.Parameter(whole_table())
    rule, key = optimizer([table], [True]), table_of().keys[0]
    for step in range(steps):
        rows = rows_of(step)
        table.grad = row_gradient(rows, torch.full((len(rows), WIDTH), step + 1.0), key)
        rule.step()
    return table.detach()


def test_keys_say_how_their_rows_begin() -> None:
    table = table_of(servers=2)
    assert table_from_bytes(table.to_bytes()) == table
    assert [key.begins.first for key in table.keys if key.begins is not None] == [0, 1500]
    values = [key.begins.values(torch.arange(key.rows), WIDTH, torch.float32) for key in table.keys if key.begins]
    assert torch.equal(torch.cat(values), whole_table())
    plain = table_of(servers=2, start=None)
    assert table.fingerprint != plain.fingerprint and plain.keys[0].begins is None


def test_slots_are_found_however_many_rows_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.ps.made_rows._MOST_NEW", 5)
    slots, order = RowSlots(), torch.randperm(40, generator=torch.Generator().manual_seed(0))
    for rows in order[:30].split(4):
        slots.add(rows.sort()[0])
    numbers, where = slots.in_order()
    assert numbers.tolist() == sorted(order[:30].tolist()) and where.sort()[0].tolist() == list(range(30))
    assert torch.equal(slots.find(numbers), where) and (slots.find(order[30:]) == -1).all()


@pytest.mark.parametrize("optimizer", [sgd, adagrad, sparse_adam])
def test_a_server_has_the_rows_that_were_trained_alone_with_the_bits_of_the_whole_table(optimizer: Make) -> None:
    serving = Serving(optimizer)
    everything = torch.arange(ROWS_OF_TABLE)
    assert torch.equal(serving.pull(everything), whole_table())
    assert serving.store.made is not None and serving.store.made.count == 0
    for step in range(6):
        serving.push(step)
    assert torch.equal(serving.pull(everything), trained(optimizer, 6))
    touched = torch.cat([rows_of(step) for step in range(6)]).unique()
    assert serving.store.made.count == len(touched) < ROWS_OF_TABLE
    assert serving.store.value.numel() < 1.6 * len(touched) * WIDTH


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("optimizer", [sgd, adagrad, sparse_adam])
def test_a_state_that_is_put_a_part_at_a_time_goes_on_with_its_bits(optimizer: Make, steps: int) -> None:
    before = Serving(optimizer)
    for step in range(steps):
        before.push(step)
    state = before.store.state(full=True)
    made, count = state["made"], len(state["made"][ROWS])
    assert made[ROWS].tolist() == sorted(made[ROWS].tolist())
    after = Serving(optimizer, {**without_rows(state), "made": {name: tensor[:0] for name, tensor in made.items()}})
    for first in range(0, count, 100):
        assert not after.state.ready
        meta, frames = pack_state({name: tensor[first : first + 100] for name, tensor in made.items()})
        (reply, *_) = after.say(PutRows(0, meta), frames)
        assert isinstance(reply.content, PutDone)
    assert after.state.ready
    for serving in (before, after):
        for step in range(steps, 6):
            serving.push(step)
    assert torch.equal(before.pull(torch.arange(ROWS_OF_TABLE)), after.pull(torch.arange(ROWS_OF_TABLE)))
    assert before.store.rows is not None and after.store.rows is not None
    touched = made[ROWS]
    assert torch.equal(before.store.rows.of(touched), after.store.rows.of(touched))
    meta, frames = pack_state(after.store.whole_state())  # as a standby or the next life is given it
    third = Serving(optimizer, unpack_state(meta, [memoryview(bytearray(frame)) for frame in frames]))
    assert torch.equal(third.pull(torch.arange(ROWS_OF_TABLE)), after.pull(torch.arange(ROWS_OF_TABLE)))


def test_a_copy_keeps_its_rows_and_is_read_a_part_at_a_time() -> None:
    serving = Serving(adagrad)
    serving.push(0)
    serving.state._keep_copy(5, True)
    serving.push(1)
    everything = torch.arange(ROWS_OF_TABLE)
    assert torch.equal(serving.pull(everything, tag=5), trained(adagrad, 1))
    (reply,) = serving.say(ReadState(0, 5))
    assert isinstance(reply.content, StateOf)
    about = unpack_state(reply.content.meta, [memoryview(bytearray(frame)) for frame in reply.frames])
    assert about[EXIST] == len(rows_of(0)) and about["by_row"]["optimizer.sum"] == ["float32", WIDTH]
    (reply,) = serving.say(ReadRows(0, 5, ROWS, 10, 20))
    assert isinstance(reply.content, StateOf)
    part = unpack_state(reply.content.meta, [memoryview(bytearray(frame)) for frame in reply.frames])["part"]
    assert torch.equal(part, rows_of(0)[10:30])
    for gone in (PullRows(0, 0, 1, 6), ReadRows(0, 6, ROWS, 0, 1)):
        (reply,) = serving.say(gone, [index_frame(everything, serving.key)] if isinstance(gone, PullRows) else [])
        assert reply.content == CopyGone(6)
    for wrong in (ReadRows(0, 5, "nothing", 0, 1), Pull(0, 0, False, False, 5)):
        with pytest.raises(Malformed):
            serving.say(wrong)


@pytest.mark.parametrize("rows", [[ROWS_OF_TABLE], [-1], [3, 3], [4, 2]])
def test_rows_that_cannot_be_put_are_dropped(rows: list[int]) -> None:
    serving = Serving()
    with pytest.raises(Malformed):  # nothing is being put
        serving.say(PutRows(1, b"{}"))
    store = KeyStore(serving.key, torch.zeros(0), ServerSettings(), sgd)
    with pytest.raises(ValueError, match="not rows of key 0"):
        store.load_made({ROWS: torch.tensor(rows), "value": torch.zeros(len(rows), WIDTH)})
    store.load_made({ROWS: torch.tensor([1, 2]), "value": torch.zeros(2, WIDTH)})
    with pytest.raises(ValueError, match="not rows of key 0"):
        store.load_made({ROWS: torch.tensor([2, 3]), "value": torch.zeros(2, WIDTH)})
