"""Rows of a table where gradients of all workers are summed before an update."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from echelon.parallel.row_values import RowDraw
from echelon.ps.blob import pack_state, unpack_state
from echelon.ps.keystore import KeyStore, Push, PushOutcome
from echelon.ps.rows import row_gradient
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
