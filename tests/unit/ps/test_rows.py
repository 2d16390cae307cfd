"""Rows of tables on servers: how tables are cut, which updates a row has seen, and what a server does with rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.compression import read
from echelon.compression.base import Meta, State
from echelon.messages.framing import Content, Message
from echelon.messages.identity import derive_keys
from echelon.messages.plain import Malformed
from echelon.ps.blob import as_frame, pack_state, read_frame, unpack_state
from echelon.ps.coding import RowCoding
from echelon.ps.keystore import KeyStore
from echelon.ps.messages import Pull, PullRows, PushAck, PushGradient, PutState, RowValues, SetTable
from echelon.ps.rows import RowVersions, index_frame, row_gradient, value_frame
from echelon.ps.server_state import ServerState
from echelon.ps.serving import Reply, ServerConfig
from echelon.ps.table import Cut, ParameterInfo, cut_table, table_from_bytes
from echelon.sync.ps import ServerSettings

ROWS, WIDTH, LR = 9, 4, 0.5
TABLE = cut_table([ParameterInfo("embedding", (ROWS, WIDTH), True, by_rows=True)], Cut(1, 4096))
KEY = TABLE.keys[0]
PUSH = PushGradient(0, 0, 0, 0, 1, 1, 1, 0, 1, LR, False)


def sgd(tensors: Sequence[nn.Parameter], decay: Sequence[bool]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=LR)


def sparse_adam(tensors: Sequence[nn.Parameter], decay: Sequence[bool]) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(tensors), lr=LR)


def test_a_table_is_cut_into_rows_and_what_is_dense_stays_apart() -> None:
    infos = [
        ParameterInfo("in", (3,), False),
        ParameterInfo("embedding", (ROWS, WIDTH), True, by_rows=True),
        ParameterInfo("out", (4,), False),
    ]
    table = cut_table(infos, Cut(2, 4096))
    assert [(k.numel, k.width, k.rows) for k in table.keys] == [(3, 0, 0), (16, 4, 4), (20, 4, 5), (4, 0, 0)]
    assert sorted(k.server for k in table.keys if k.width) == [0, 1]
    assert table_from_bytes(table.to_bytes()) == table
    with pytest.raises(ValueError, match="not its rows"):
        table_from_bytes(table.to_bytes().replace(b"]], 4]", b"]], 3]"))


def test_staleness_is_a_rows_own_and_of_the_task_that_pulled_it() -> None:
    versions = RowVersions(ROWS)
    versions.note_pull("a", 7, torch.tensor([1, 5]))
    versions.updated(torch.tensor([1, 2]))
    versions.updated(torch.tensor([1]))
    versions.note_pull("a", 7, torch.tensor([2]))
    assert versions.staleness("a", 7, torch.tensor([1, 2, 5, 8])).tolist() == [2, 0, 0, 0]
    assert versions.staleness("a", 8, torch.tensor([1])).tolist() == [0]
    versions.forget("a")
    assert versions.staleness("a", 7, torch.tensor([1])).tolist() == [0]


class Serving:
    """A server with one table, and what it answers."""

    def __init__(self, optimizer: Any = sgd) -> None:
        config = ServerConfig(
            "server0", 0, ServerSettings(), derive_keys(b"k" * 32), "", "", read("none"), 0, Path(), sgd, optimizer
        )  # fmt: skip
        self.state = ServerState(config, 1, "ipc://server0", 7)
        self._said = 0
        self.say("a", SetTable(), [TABLE.to_bytes()])
        self.start = torch.arange(float(ROWS * WIDTH))
        meta, frames = pack_state({"value": self.start.clone(), "version": 0})
        self.say("a", PutState(0, meta), frames)

    def say(self, worker: str, content: Content, frames: Sequence[Any] = ()) -> list[Reply]:
        self._said += 1
        plain = [memoryview(bytearray(frame)) for frame in frames]
        effects = self.state.handle(Message(content, worker, 1, self._said, plain), worker.encode(), 0.0)
        return [effect for effect in effects if isinstance(effect, Reply)]

    def pull(self, worker: str, task: int, rows: list[int]) -> Tensor:
        (reply,) = self.say(worker, PullRows(0, task, 3), [index_frame(torch.tensor(rows), KEY)])
        assert isinstance(reply.content, RowValues) and reply.content.number == 3
        return read_frame(memoryview(bytearray(reply.frames[0])), torch.float32).view(-1, WIDTH)

    def push(self, worker: str, task: int, rows: list[int], values: Tensor) -> None:
        frames = [index_frame(torch.tensor(rows, dtype=torch.int64), KEY), value_frame(values)]
        self.say(worker, replace(PUSH, task=task, step=task), frames)


def test_rows_that_were_pushed_change_and_no_others_and_once() -> None:
    serving = Serving()
    assert torch.equal(serving.pull("a", 0, [2, 7]), serving.start.view(ROWS, WIDTH)[[2, 7]])
    serving.pull("b", 1, [7])
    serving.push("a", 0, [2, 7], torch.ones(2, WIDTH))
    serving.push("b", 0, [2, 7], torch.ones(2, WIDTH))
    wanted = serving.start.view(ROWS, WIDTH).clone()
    wanted[[2, 7]] -= LR
    assert torch.equal(serving.pull("a", 2, list(range(ROWS))), wanted)
    serving.push("b", 1, [7], torch.ones(1, WIDTH))
    load = serving.state.load
    assert load.duplicates == 1 and dict(load.staleness) == {0: 1, 1: 1}
    assert serving.state.stores[0].rows is not None
    assert serving.state.stores[0].rows.counts.tolist() == [0, 0, 1, 0, 0, 0, 0, 2, 0]


def test_a_server_follows_torchs_sparse_adam_and_a_state_goes_on_with_its_bits() -> None:
    serving = Serving(sparse_adam)
    table = nn.Parameter(serving.start.view(ROWS, WIDTH).clone())
    optimizer = torch.optim.SparseAdam([table], lr=LR)
    touched: list[list[int]] = [[1, 3], [], [3, 8]]
    for task, rows in enumerate(touched):
        values = torch.full((len(rows), WIDTH), task + 1.0)
        serving.push("a", task, rows, values)
        table.grad = row_gradient(torch.tensor(rows, dtype=torch.int64), values, KEY)
        optimizer.step()
    store = serving.state.stores[0]
    assert torch.equal(store.value, table.detach().reshape(-1))
    meta, frames = pack_state(store.state(full=True))
    again = KeyStore(KEY, torch.zeros(KEY.numel), ServerSettings(), sparse_adam)
    again.load_state(unpack_state(meta, [memoryview(bytearray(frame)) for frame in frames]), 0.0)
    assert again.rows is not None and store.rows is not None
    assert torch.equal(again.rows.counts, store.rows.counts) and torch.equal(again.value, store.value)


def test_a_table_begins_anew_without_counts_of_updates() -> None:
    store = KeyStore(KEY, torch.zeros(KEY.numel), ServerSettings(), sparse_adam)
    anew = {"version": 3, "optimizer": {}, "watermark": 3, "task_runs": [], "then": {}, "pulled": {}, "mean_square": {}}
    store.load_state({"value": torch.ones(KEY.numel), **anew}, 0.0)
    assert store.rows is not None and not store.rows.counts.any() and bool((store.value == 1).all())


def test_a_table_without_a_gradient_is_left_as_it_is_and_its_task_is_done() -> None:
    serving = Serving()
    serving.say("a", replace(PUSH, absent=[0]), [b""])
    acks = [e.content for e in serving.state.tick(0.0) if isinstance(e, Reply)]
    assert [ack.outcome for ack in acks if isinstance(ack, PushAck)] == [0]
    assert torch.equal(serving.state.stores[0].value, serving.start)


@pytest.mark.parametrize(
    ("content", "frames"),
    [
        (PUSH, [torch.tensor([ROWS], dtype=torch.int32), torch.ones(WIDTH)]),
        (PUSH, [torch.tensor([-1], dtype=torch.int32), torch.ones(WIDTH)]),
        (PUSH, [torch.tensor([3, 3], dtype=torch.int32), torch.ones(2 * WIDTH)]),
        (PUSH, [torch.tensor([3], dtype=torch.int32), torch.ones(WIDTH + 1)]),
        (PUSH, [torch.ones(ROWS * WIDTH)]),
        (replace(PUSH, pull=True), [torch.tensor([3], dtype=torch.int32), torch.ones(WIDTH)]),
        (PullRows(0, 0, 1), [torch.tensor([ROWS], dtype=torch.int32)]),
        (Pull(0, 0, False, False, 0), []),
    ],
)
def test_rows_that_cannot_be_are_dropped(content: Content, frames: list[Tensor]) -> None:
    serving = Serving()
    with pytest.raises(Malformed):
        serving.say("a", content, [as_frame(frame) for frame in frames])
    assert torch.equal(serving.state.stores[0].value, serving.start)


@pytest.mark.parametrize("codec", ["none", "int8", "fp16", "bf16", "topk(0.1)", "int8+huffman"])
def test_gradients_of_rows_go_through_a_codec_that_takes_rows(codec: str) -> None:
    coding, rows = RowCoding(read(codec), torch.float32), torch.tensor([1, 4, 8])
    values = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))

    def received(given: Tensor) -> Tensor:
        frames = [index_frame(rows, KEY), coding.encode(given, State("key0", 3, 1, numbers={"step": 5}))]
        return coding.gradient([memoryview(bytearray(frame)) for frame in frames], KEY)

    found = received(values)
    assert torch.equal(found.indices()[0], rows) and found.shape == (ROWS, WIDTH)
    wanted = values
    if coding.codec is not None:
        taken = coding.codec.compress(values, State("key0", 3, 1, numbers={"step": 5}))
        message = coding.codec.to_bytes(taken)
        assert message.numel() < values.nbytes
        wanted = coding.codec.extract(coding.codec.from_bytes(message, Meta((3, WIDTH), torch.float32)))
    assert (coding.codec is None) == (codec in ("none", "topk(0.1)"))
    assert torch.equal(found.values(), wanted)
    overflowed = values.clone()
    overflowed[0, 0] = torch.inf
    assert torch.equal(received(overflowed).values(), overflowed)
    nothing = coding.encode(values[:0], State("key0"))
    assert not len(coding.gradient([b"", nothing], KEY).indices()[0])


@pytest.mark.parametrize("codec", ["int8", "bf16", "fp16"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_rows_of_one_number_are_what_was_sent(codec: str, count: int) -> None:
    """Of some counts an encoded message is as long as the values are."""
    key = cut_table([ParameterInfo("bias", (ROWS, 1), True, by_rows=True)], Cut(1, 4096)).keys[0]
    coding, values = RowCoding(read(codec), torch.float32), torch.linspace(-1.0, 1.0, count)[:, None]
    state = coding.codec.init_state("bias", values.reshape(-1)) if coding.codec is not None else State({}, {}, {})
    frames = [index_frame(torch.arange(count), key), coding.encode(values, state)]
    got = coding.gradient(frames, key).coalesce().values()
    assert torch.allclose(got, values, atol=0.02), got


def test_a_frame_that_is_no_message_of_the_rows_codec_is_refused() -> None:
    coding, rows = RowCoding(read("int8"), torch.float32), torch.tensor([1, 4, 8])
    for size in (1, 4 * WIDTH, 3 * 4 * WIDTH + 4):
        with pytest.raises(ValueError, match=r"elements for 3 rows|no whole number"):
            coding.gradient([memoryview(bytearray(index_frame(rows, KEY))), memoryview(bytearray(size))], KEY)
