"""The processes that `benchmarks.server` measures: servers, echoes, and the clients that keep them busy."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from echelon.compression import read
from echelon.core.system import IMPORTED_BY_OPTIMIZERS
from echelon.launch.link import Host, enter

SECRET = b"b" * 32
NOBODY = "ipc:///nonexistent/echelon-scheduler"
START_S = 120.0
WINDOW_S = 120.0
PRELOAD = ["torch", IMPORTED_BY_OPTIMIZERS, "zmq", "echelon.ps.server", "echelon.ps.client"]


@dataclass(frozen=True)
class Case:
    """What is measured: `ps` or `echo`; bytes of parameters and of one message; over TCP with CURVE, or plain.

    Plain is a Unix socket for `ps`, as on one machine, and loopback TCP for `echo`, unless `local` puts it on a Unix
    socket too. `workers` and `servers` are network namespaces, one for each process; None: this machine's own network.
    """

    kind: str
    n_bytes: int
    chunk: int
    encrypted: bool = False
    local: bool = False
    workers: tuple[Host | None, ...] = (None,)
    servers: tuple[Host | None, ...] = (None,)


class Side:
    """One case's processes: `window` lets its workers push and pull for some seconds."""

    def __init__(self, case: Case) -> None:
        self.processes: list[Any] = []
        target = _echo_server if case.kind == "echo" else _ps_server
        servers = [self._start(target, case, i) for i in range(len(case.servers))]
        addresses = [str(_receive(pipe, START_S)) for pipe in servers]
        self._workers = [self._start(_drive, case, i, addresses) for i in range(len(case.workers))]
        for pipe in self._workers:
            _receive(pipe, START_S)

    def _start(self, target: Any, *args: Any) -> Connection:
        context = multiprocessing.get_context("forkserver")
        here, there = context.Pipe()
        process = context.Process(target=target, args=(there, *args), daemon=True)
        process.start()
        self.processes.append(process)
        return here

    def window(self, seconds: float) -> float:
        """Return the bytes per second of all workers together, both directions added."""
        for pipe in self._workers:
            pipe.send(seconds)
        return sum(float(_receive(pipe, seconds + WINDOW_S)) for pipe in self._workers)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _receive(pipe: Connection, deadline_s: float) -> Any:
    if not pipe.poll(deadline_s):
        raise TimeoutError(f"a process of the benchmark said nothing for {deadline_s:g} s")
    return pipe.recv()


def _settle(host: Host | None) -> None:
    import torch

    torch.set_num_threads(1)
    if host is not None:
        enter(host)


def _address(host: Host | None) -> str:
    return f"tcp://{host.address if host is not None else '127.0.0.1'}:0"


def _echo_server(pipe: Connection, case: Case, index: int) -> None:
    import zmq

    from echelon.messages.identity import PeerCheck, derive_keys
    from echelon.messages.sockets import Limits, has_message, listen

    _settle(case.servers[index])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = derive_keys(SECRET)
    poller = zmq.Poller()
    if case.encrypted:
        check = PeerCheck(context, keys)
        socket, where = listen(context, keys, _address(case.servers[index]), Limits(1 << 30))
        poller.register(check.socket, zmq.POLLIN)
    else:
        socket = context.socket(zmq.ROUTER)
        folder = tempfile.mkdtemp(prefix="bench-")
        socket.bind(f"ipc://{folder}/echo" if case.local else _address(case.servers[index]))
        where = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    pipe.send(where)
    poller.register(socket, zmq.POLLIN)
    while True:
        poller.poll()
        if case.encrypted:
            check.answer()
        while has_message(socket):
            socket.send_multipart(socket.recv_multipart(copy=False), copy=False)


def _ps_server(pipe: Connection, case: Case, index: int) -> None:
    import torch

    from echelon.messages.identity import derive_keys
    from echelon.ps.server import Server, ServerConfig
    from echelon.sync.ps import ServerSettings

    _settle(case.servers[index])

    def sgd(tensors: Sequence[torch.Tensor], decay: Sequence[bool]) -> torch.optim.Optimizer:
        return torch.optim.SGD(tensors, lr=1e-3, fused=True)

    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    where = _address(case.servers[index]) if case.encrypted else f"ipc://{folder}/server{index}"
    settings = ServerSettings(servers=len(case.servers), snapshot_every=10**9)
    config = ServerConfig(
        f"server{index}", index, settings, derive_keys(SECRET), NOBODY, where, read("none"), 0, folder, sgd
    )
    server = Server(config)
    pipe.send(server.listener.address)
    server.run()


def _drive(pipe: Connection, case: Case, index: int, addresses: list[str]) -> None:
    """Be a worker: run windows for as long as the pipe asks for them."""
    _settle(case.workers[index])
    stream: Any = _Echo(case, addresses[0]) if case.kind == "echo" else _PushPull(case, index, addresses)
    stream.run(0.1)
    pipe.send("ready")
    while True:
        pipe.send(stream.run(pipe.recv()))


class _Echo:
    """All messages are on their way at once; each is sent again when it has come back."""

    def __init__(self, case: Case, address: str) -> None:
        import zmq

        from echelon.messages.identity import derive_keys
        from echelon.messages.sockets import Limits, connect

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if case.encrypted:
            self.socket = connect(context, derive_keys(SECRET), address, Limits(1 << 30), b"echo")
        else:
            self.socket = context.socket(zmq.DEALER)
            self.socket.connect(address)
        self.frames = [bytearray(min(case.chunk, case.n_bytes - i)) for i in range(0, case.n_bytes, case.chunk)]

    def run(self, seconds: float) -> float:
        """Return bytes per second."""
        began, done, count = time.perf_counter(), 0, 0
        for frame in self.frames:
            self.socket.send_multipart([b"header", frame], copy=False)
        flying = len(self.frames)
        while flying:
            assert self.socket.poll(60_000), "no echo"
            done += len(self.socket.recv_multipart(copy=False)[1])
            flying -= 1
            if time.perf_counter() - began < seconds:
                self.socket.send_multipart([b"header", self.frames[count % len(self.frames)]], copy=False)
                flying += 1
            count += 1
        return 2 * done / (time.perf_counter() - began)


class _PushPull:
    """Each key's gradient is pushed, its new value pulled, and the next gradient pushed when the value has come."""

    def __init__(self, case: Case, index: int, addresses: list[str]) -> None:
        import torch

        from echelon.coordinator.messages import ServerEntry
        from echelon.messages.identity import derive_keys
        from echelon.ps.client import Client, ClientConfig
        from echelon.ps.table import Cut, ParameterInfo, cut_table

        self.table = cut_table([ParameterInfo("w", (case.n_bytes // 4,), True)], Cut(len(addresses), case.chunk))
        config = ClientConfig(f"worker{index}", derive_keys(SECRET), NOBODY, read("none"), 0, index, 60.0, keeps=False)
        self.client = Client(config)
        self.client.set_table(self.table)
        connection = self.client.connection
        connection.meet_servers([ServerEntry(a, 1, True, "", False) for a in addresses])  # its thread does not run yet
        connection.start()
        self.client.put(
            self.table, {k.index: {"value": torch.zeros(k.numel), "version": 0} for k in self.table.keys}, 60.0
        )
        self.gradient = torch.ones(case.n_bytes // 4)
        self.task = index * 10**9

    def run(self, seconds: float) -> float:
        """Return bytes per second."""
        from echelon.ps.client import PushInfo

        began, done, more = time.perf_counter(), 0, True
        first = True
        while more:
            self.task += 1
            more = time.perf_counter() - began < seconds
            info = PushInfo(self.task, self.task, 0, 1, 1, 1, 1e-3)
            for key in self.table.keys:
                if not first:
                    done += self.client.value(key, 0).nbytes
                if more:
                    self.client.push(key, self.gradient[key.start : key.stop], info)
            first = False
        return 2 * done / (time.perf_counter() - began)
