"""Rows of a table where gradients of all workers are summed before an update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.compression import read
from echelon.coordinator.messages import Members
from echelon.messages.framing import Content, Message
from echelon.messages.identity import derive_keys
from echelon.parallel.row_values import RowDraw
from echelon.ps.blob import pack_state, read_frame, unpack_state
from echelon.ps.keystore import KeyStore, Push, PushOutcome
from echelon.ps.messages import PullRows, PushGradient, PutState, RowValues, SetTable
from echelon.ps.rows import index_frame, row_gradient, value_frame
from echelon.ps.server_state import ServerState
from echelon.ps.serving import Reply, ServerConfig
from echelon.ps.table import Cut, ParameterInfo, RowStart, cut_table
from echelon.sync.ps import ServerSettings

ROWS, WIDTH, LR = 6, 2, 0.5
START = RowStart(RowDraw("normal", 0.0, 1.0), 3, "embedding")
ALL = torch.arange(ROWS)


def sgd(tensors: Sequence[nn.Parameter], decay: Sequence[bool]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=LR)


def store_of(start: RowStart | None, backup: int = 0) -> KeyStore:
    info = ParameterInfo("embedding", (ROWS, WIDTH), True, by_rows=True, begins=start)
    key = cut_table([info], Cut(1, 4096)).keys[0]
    settings = ServerSettings("sync", backup=backup)
    return KeyStore(key, torch.zeros(0 if start else key.numel, dtype=torch.float64), settings, sgd)


def push(store: KeyStore, rows: list[int], values: Tensor, share: int, shares: int) -> PushOutcome:
    gradient = row_gradient(torch.tensor(rows, dtype=torch.int64), values.expand(len(rows), WIDTH), store.key)
    return store.take(Push("w", share, store.version, share, shares, 1, 0, LR, shares, gradient))


@pytest.mark.parametrize("start", [None, START], ids=["given", "made"])
def test_an_update_waits_for_all_shares_and_who_computes_again_sees_what_was_before(start: RowStart | None) -> None:
    store, one = store_of(start), torch.ones(1, dtype=torch.float64)
    before = store.row_values(ALL)
    assert push(store, [1, 4], one, 1, 3) is PushOutcome.PENDING
    assert push(store, [], one, 0, 3) is PushOutcome.PENDING
    assert torch.equal(store.row_values(ALL), before) and store.version == 0
    assert push(store, [4, 5], one, 2, 3) is PushOutcome.APPLIED
    assert store.version == 1 and torch.equal(store.row_values_before(ALL), before)
    moved = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0, 1.0], dtype=torch.float64)[:, None].expand(ROWS, WIDTH)
    torch.testing.assert_close(store.row_values(ALL), before - LR * moved)
    assert store.rows is not None and store.rows.of(ALL).tolist() == [0, 1, 0, 0, 1, 1]
    assert store.made is None or store.made.count == 3


def test_the_mean_of_those_that_came_stands_for_all() -> None:
    store, one = store_of(None, backup=1), torch.ones(1, dtype=torch.float64)
    assert push(store, [2], one, 0, 2) is PushOutcome.APPLIED
    torch.testing.assert_close(store.row_values(ALL)[2], -LR * 2 * torch.ones(WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("start", [None, START], ids=["given", "made"])
def test_what_waits_for_other_shares_survives_in_a_state(start: RowStart | None) -> None:
    store, again = store_of(start), store_of(start)
    one = torch.ones(1, dtype=torch.float64)
    push(store, [2], one, 1, 3)
    push(store, [1, 3], one, 0, 3)
    meta, frames = pack_state(store.whole_state())
    again.load_state(unpack_state(meta, [bytearray(frame) for frame in frames]), 0.0)
    for each in (store, again):
        assert push(each, [2], 3 * one, 2, 3) is PushOutcome.APPLIED
    assert torch.equal(store.row_values(ALL), again.row_values(ALL))


class Summing:
    """A server of one table that sums two shares, and what it answers to pulls of rows."""

    def __init__(self) -> None:
        info = ParameterInfo("embedding", (ROWS, WIDTH), True, by_rows=True)
        self.table = cut_table([info], Cut(1, 4096))
        config = ServerConfig(
            "server0", 0, ServerSettings("sync"), derive_keys(b"k" * 32), "", "", read("none"), 0, Path(), sgd
        )
        self.state = ServerState(config, 1, "ipc://server0", 7)
        self._said = 0
        self.say("a", SetTable(), [self.table.to_bytes()])
        meta, frames = pack_state({"value": torch.zeros(ROWS * WIDTH), "version": 0})
        self.say("a", PutState(0, meta), frames)

    def say(self, worker: str, content: Content, frames: Sequence[Any] = ()) -> dict[bytes, list[float]]:
        """Return the first element of each row that is given, by who gets them."""
        self._said += 1
        plain = [memoryview(bytearray(frame)) for frame in frames]
        effects = self.state.handle(Message(content, worker, 1, self._said, plain), worker.encode(), 0.0)
        replies = [each for each in effects if isinstance(each, Reply) and isinstance(each.content, RowValues)]
        return {each.peer: self._first(each.frames[0]) for each in replies}

    def _first(self, frame: Any) -> list[float]:
        values: list[float] = read_frame(memoryview(bytearray(frame)), torch.float32).view(-1, WIDTH)[:, 0].tolist()
        return values

    def pull(self, worker: str, version: int, rows: list[int]) -> dict[bytes, list[float]]:
        frame = index_frame(torch.tensor(rows), self.table.keys[0])
        return self.say(worker, PullRows(0, version, 1, 0, version), [frame])

    def push(self, worker: str, step: int, share: int, rows: list[int]) -> dict[bytes, list[float]]:
        content = PushGradient(0, step * 2 + share, step, share, 2, 1, 2, 0, self._said, LR, False)
        frames = [index_frame(torch.tensor(rows), self.table.keys[0]), value_frame(torch.ones(len(rows), WIDTH))]
        return self.say(worker, content, frames)


def test_rows_of_a_version_wait_for_it_and_those_of_the_one_before_stay_to_be_had() -> None:
    serving = Summing()
    assert serving.pull("a", 0, [1, 2]) == {b"a": [0.0, 0.0]}
    assert serving.push("a", 0, 0, [1, 2]) == {} == serving.pull("a", 1, [1, 2]) == serving.pull("gone", 1, [1])
    for number, workers in enumerate((["a", "b", "gone"], ["a", "b"])):
        serving.state.from_scheduler(Message(Members([], workers, 0), "scheduler", 1, number, []), 0.0)
    assert serving.pull("b", 0, [2]) == {b"b": [0.0]}, "its share of the step is not done"
    assert serving.push("b", 0, 1, [2, 3]) == {b"a": [-0.5, -1.0], b"gone": [-0.5]}, "who is taken for gone may live"
    assert serving.pull("b", 0, [1, 2, 3, 4]) == {b"b": [0.0] * 4}, "computed again"
    assert serving.pull("b", 1, [1, 2, 3, 4]) == {b"b": [-0.5, -1.0, -0.5, 0.0]}
