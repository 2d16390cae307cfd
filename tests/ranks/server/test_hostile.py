"""A server's and the scheduler's port under fuzz, with and without the key: no crash, no change, memory flat."""

from __future__ import annotations

import os
import random
import socket as socket_module
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgpack
import psutil
import pytest
import torch
import zmq

from echelon.coordinator.config import TrainingPlan
from echelon.coordinator.messages import (
    TO_COORDINATOR,
    TO_SERVER,
    TO_WORKER,
    JoinServer,
    JoinWorker,
    LeaveRun,
    ServerBeat,
    Stop,
    TaskDone,
    Welcome,
    WorkerBeat,
)
from echelon.messages.endpoint import Channel, Listener, Sender, ask_once
from echelon.messages.framing import VERSION, Content
from echelon.messages.identity import derive_keys
from echelon.messages.plain import to_plain
from echelon.messages.sockets import Context, Limits, new_context
from echelon.ps.keystore import KeyStore
from echelon.ps.messages import TO_PS_SERVER, TO_PS_WORKER, Pull, PushGradient, PutState
from echelon.ps.server import Server
from echelon.ps.table import Cut, ParameterInfo, cut_table
from echelon.sync.ps import ServerSettings
from tests.ranks.server.roles import KEYS, Cluster
from tests.ranks.server.test_deaths import STEPS, done_tasks, gradient, model
from tests.ranks.server.test_deaths import cluster as goes

MESSAGES = 10_000
WAITING = 500
STRANGERS = ("worker5", "server7")
KINDS = sorted({*TO_COORDINATOR, *TO_WORKER, *TO_SERVER, *TO_PS_SERVER, *TO_PS_WORKER})


@pytest.fixture
def context() -> Iterator[Context]:
    context = new_context()
    yield context
    context.destroy()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Cluster, Server]]:
    """Start a server that holds one key."""
    cluster = Cluster(
        tmp_path, ServerSettings(), lambda tensors: torch.optim.SGD(tensors, lr=0.1), TrainingPlan(1, 9, 0, None, None)
    )
    cluster.start()
    server = cluster.servers[0]
    table = cut_table([ParameterInfo("w", (100,), False)], Cut(1, 4096))
    server.state.set_table(table)
    server.state.stores[0] = KeyStore(table.keys[0], torch.ones(100), cluster.settings, server.config.make_optimizer)
    yield cluster, server
    cluster.end()


def fuzz(draw: random.Random) -> list[bytes]:
    """One message: bytes at random, a header with random fields, or sound ones that say impossible things."""
    kind = draw.choice(KINDS)
    header = [VERSION, KEYS.run_id, kind, "worker0", draw.randrange(9), draw.randrange(10**6), {}]
    match draw.randrange(5):
        case 0:
            return [draw.randbytes(draw.randrange(1, 200)) for _ in range(draw.randrange(1, 5))]
        case 1:
            header[draw.randrange(7)] = draw.choice([None, -1, 2**63, "x" * 300, [[]] * 9, 1.5, b"\x00" * 9])
        case 2:
            header[6] = {"key": draw.randrange(-5, 10**9), "task": 0, "step": draw.choice([0, -1, float("nan")])}
        case 3:
            body = {
                "task": 0,
                "step": 0,
                "share": 0,
                "shares": 1,
                "samples": 1,
                "batch": 1,
                "base": 0,
                "number": 1,
                "pull": True,
            }
            header[6] = {**body, "key": draw.randrange(3), "lr": draw.choice([1.0, float("inf")])}
            header[2] = PushGradient.kind
            wrong_sizes = [n for n in range(1, 700) if n != 400]
            return [msgpack.packb(header), draw.randbytes(draw.choice(wrong_sizes))]
        case 4:
            header[6] = {"key": 0, "meta": draw.randbytes(50)}
            header[2] = PutState.kind
    raw = bytearray(msgpack.packb(header))
    for _ in range(draw.randrange(3)):
        raw[draw.randrange(len(raw))] = draw.randrange(256)
    return [bytes(raw), *(draw.randbytes(draw.randrange(100)) for _ in range(draw.randrange(3)))]


def plain_value(kind: Any, draw: random.Random, depth: int = 0) -> object:
    """Return some value of a field's type, sound or strange."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {f.name: plain_value(hints[f.name], draw, depth) for f in fields(kind)}
    kind = get_origin(kind) or kind
    names = ["index", "task", "samples", "loss", "standby", "life", "held", "fingerprint", "ready", "tasks", "empty"]
    if kind is int:
        return draw.choice([0, 1, 7, 2**40, 2**61])
    if kind is str:
        return draw.choice(["", "worker", "server", "worker0", "x" * 64, "standby", "machine"])
    if kind is list:
        return [plain_value(draw.choice([int, str, dict]), draw, depth + 1) for _ in range(draw.randrange(3))]
    if kind is float:
        return draw.choice([0.0, 0.5, 1, float("nan"), float("inf")])
    if kind is bool:
        return draw.choice([True, False, 1])
    if kind is dict and depth < 3:
        return {n: plain_value(draw.choice([int, str, list, dict]), draw, depth + 1) for n in draw.sample(names, 4)}
    return {}


def scheduler_fuzz(draw: random.Random, number: int) -> list[bytes]:
    """One message for the scheduler: as for a server, or a sound kind with strange fields from a strange sender."""
    if draw.randrange(4) == 0:
        return fuzz(draw)
    content = draw.choice([c for c in TO_COORDINATOR.values() if c is not Stop])  # with the key, stop is an order
    body = plain_value(content, draw)
    assert isinstance(body, dict)
    if body and draw.randrange(2):
        body.pop(draw.choice(sorted(body)), None)
    sender = draw.choice(["worker0", "worker7", "server0", "server1", "standby0", "scheduler", "?"])
    return [msgpack.packb([VERSION, KEYS.run_id, content.kind, sender, draw.randrange(3), 10**6 + number, body])]


def send_raw(line: Channel, content: type[Content], body: dict[str, Any]) -> None:
    """Send a content of which nobody checked what it says."""
    sender = line.sender
    sender.sequence += 1
    header = [VERSION, KEYS.run_id, content.kind, sender.name, sender.session, sender.sequence, body]
    line.socket.send_multipart([msgpack.packb(header)])


def test_with_the_key(served: tuple[Cluster, Server], context: Context) -> None:
    cluster, server = served
    draw = random.Random(1)
    line = Channel(context, Sender(KEYS, "worker0"), server.listener.address, Limits(1 << 20), {})
    before, used = server.state.stores[0].value.clone(), 0
    for i in range(MESSAGES):
        _pace(i, server.listener)
        line.socket.send_multipart(fuzz(draw))
        if i == MESSAGES // 5:
            used = psutil.Process(os.getpid()).memory_info().rss
    _until(lambda: sum(server.sender.traffic.dropped.values()) >= 0.9 * MESSAGES)
    assert torch.equal(server.state.stores[0].value, before)
    assert psutil.Process(os.getpid()).memory_info().rss - used < 32 << 20
    assert all(t.is_alive() for t in cluster.threads) and not cluster.failures
    line.close()


def test_the_scheduler_with_the_key(served: tuple[Cluster, Server], context: Context) -> None:
    cluster, server = served
    draw = random.Random(4)
    scheduler, before = cluster.scheduler, server.state.stores[0].value.clone()
    line = Channel(context, Sender(KEYS, "worker0"), scheduler.listener.address, Limits(1 << 20), {})
    line.send(JoinWorker(""))
    used = 0
    for i in range(MESSAGES):
        _pace(i, scheduler.listener)
        line.socket.send_multipart(scheduler_fuzz(draw, i))
        if i == MESSAGES // 5:
            used = psutil.Process(os.getpid()).memory_info().rss
    _until(lambda: scheduler.listener.messages >= MESSAGES)
    line.close()
    assert psutil.Process(os.getpid()).memory_info().rss - used < 32 << 20
    assert not server.state.is_standby and torch.equal(server.state.stores[0].value, before)
    assert all(t.is_alive() for t in cluster.threads) and not cluster.failures
    sound = Channel(context, Sender(KEYS, "worker9"), scheduler.listener.address, Limits(1 << 20), TO_WORKER)
    ask_once(sound, JoinWorker(""), Welcome, 5)
    sound.close()


def test_strange_reports_of_a_member_while_a_run_goes(tmp_path: Path, context: Context) -> None:
    """Counts that are infinite, maps whose keys are no words, numbers under the record's own names."""
    run = goes(tmp_path, ServerSettings("async"))
    run.start()
    run.work(0, model(), gradient, 0.01, [])
    _until(lambda: run.scheduler.state.setup is not None)
    lines = [
        Channel(context, Sender(KEYS, name), run.scheduler.listener.address, Limits(1 << 20), {}) for name in STRANGERS
    ]
    counts = dict.fromkeys(("score", "samples", "memory_bytes"), 1)
    moved = dict.fromkeys(("sent", "received", "other"), 1)
    sound = {"loss": 1.0, "lr": 0.1, "phases": [], **counts}
    before = run.scheduler.listener.messages
    for line, name in zip(lines, STRANGERS, strict=True):
        setup = run.scheduler.state.setup
        assert setup is not None
        server = JoinServer(7, "", 1, ready=True, standby=False, restored=False, empty=False)
        line.send(JoinWorker(setup.fingerprint) if name.startswith("worker") else server)
        for strange in (float("inf"), float("nan"), 2**63, -1, "x", [{}], {b"x": 1}, {"x": {1: 2}}):
            done = {"task": 2**40, "late": False, "report": sound, "moved": moved}
            beat = {"waited_s": {}, "sent_bytes": 1, "received_bytes": 1}
            of_server = to_plain(ServerBeat(0, 1, "", True, False, False, 1, 0, 0, 0.5, {}))
            more = ("density", "entropy_coded", "resources", "late", "held", "waited_s", "name", "kind", "staleness")
            for field in (*sound, *more):
                send_raw(line, TaskDone, {**done, "report": {**sound, field: strange}})
                send_raw(line, TaskDone, {**done, field: strange})
                send_raw(line, WorkerBeat, {**beat, field: strange})
                send_raw(line, ServerBeat, {**of_server, field: strange})
            for field in moved:
                send_raw(line, TaskDone, {**done, "moved": {**moved, field: strange}})
    _until(lambda: run.scheduler.listener.messages > before + 200)
    for line in lines:
        for strange in (float("inf"), "x", {}, moved["sent"]):
            send_raw(line, LeaveRun, {"moved": {**moved, "other": strange}})
    run.stop()
    assert done_tasks(tmp_path) == Counter(range(STEPS))
    for line in lines:
        line.close()


@pytest.mark.parametrize("secret", [b"x" * 32, None], ids=["other secret", "no encryption"])
@pytest.mark.parametrize("port", ["server", "scheduler"])
def test_without_the_key(served: tuple[Cluster, Server], context: Context, secret: bytes | None, port: str) -> None:
    cluster, server = served
    listener = server.listener if port == "server" else cluster.scheduler.listener
    came = listener.messages
    before = server.state.stores[0].value.clone()
    if secret is None:
        socket = context.socket(zmq.DEALER)
        monitor = socket.get_monitor_socket()  # before it connects: a refusal may come once only
        socket.connect(listener.address)
    else:
        socket = Channel(context, Sender(derive_keys(secret), "worker0"), listener.address, Limits(1 << 20), {}).socket
        monitor = socket.get_monitor_socket()
    draw = random.Random(2)
    socket.sndhwm = 100
    for _ in range(MESSAGES):
        try:
            socket.send_multipart(fuzz(draw), zmq.DONTWAIT)
        except zmq.Again:
            break
    assert monitor.poll(20_000), "the handshake was neither refused nor tried again"
    assert port == "scheduler" or listener.messages == came  # the scheduler hears its own server meanwhile
    members = cluster.scheduler.state.members
    assert {m.name for m in members.all()} <= {"server0"}
    assert torch.equal(server.state.stores[0].value, before)
    socket.disable_monitor()
    monitor.close()
    socket.close()


def test_bytes_that_are_no_zeromq(served: tuple[Cluster, Server], context: Context) -> None:
    _, server = served
    draw = random.Random(3)
    host, _, port = server.listener.address.removeprefix("tcp://").rpartition(":")
    used = psutil.Process(os.getpid()).memory_info().rss
    for _ in range(500):
        with socket_module.create_connection((host, int(port)), timeout=20) as raw:
            raw.sendall(draw.choice([b"", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"]) + draw.randbytes(300))
    assert server.listener.messages == 0
    assert psutil.Process(os.getpid()).memory_info().rss - used < 32 << 20
    line = Channel(context, Sender(KEYS, "worker0"), server.listener.address, Limits(1 << 20), {})
    line.send(Pull(0, 0, exact=False, full=True, tag=0))
    assert line.socket.poll(20_000), "the server no longer answers"
    line.close()


def _pace(sent: int, listener: Listener) -> None:
    """Let the listener keep up: what queues on the way to it is memory, too, but not its own."""
    if sent % WAITING == 0:
        _until(lambda: listener.messages >= sent - WAITING)


def _until(done: Callable[[], bool], deadline_s: float = 60) -> None:
    ends = time.monotonic() + deadline_s
    while not done():
        assert time.monotonic() < ends, "not in time"
        threading.Event().wait(0.01)
