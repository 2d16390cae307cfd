"""Goodput of one server: push and pull with plain SGD, against a raw ZeroMQ echo of the same sizes.

    python -m benchmarks.server [--sizes 1 5 50] [--windows 5] [--seconds 2]

For each size in MB, a worker process pushes a gradient of that size and pulls the new values, again and again, as the
training does: in keys, all in flight at once. The echo is a plain pyzmq DEALER that sends the same frames to a ROUTER
in another process over loopback TCP, which sends them back. On one machine a run's roles talk over Unix sockets (first
columns); between machines over TCP with CURVE encryption, which is compared with an echo that has it too. Goodput
counts payload bytes, both directions. Windows are interleaved; medians are shown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHUNK = 1 << 20
SECRET = b"b" * 32


def _echo_server(address: Any, encrypted: bool) -> None:
    import zmq

    from echelon.sync.server.identity import PeerCheck, derive_keys
    from echelon.sync.server.sockets import Limits, listen

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = derive_keys(SECRET)
    if encrypted:
        check = PeerCheck(context, keys)
        socket, where = listen(context, keys, "tcp://127.0.0.1:0", Limits(1 << 30))
    else:
        socket = context.socket(zmq.ROUTER)
        socket.bind("tcp://127.0.0.1:0")
        where = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    address.send(where)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    if encrypted:
        poller.register(check.socket, zmq.POLLIN)
    while True:
        poller.poll()
        if encrypted:
            check.answer()
        while socket.poll(0):
            socket.send_multipart(socket.recv_multipart(copy=False), copy=False)


def _ps_server(address: Any, folder: str, encrypted: bool) -> None:
    import torch

    from echelon.sync.server.identity import derive_keys
    from echelon.sync.server.server import Server, ServerConfig
    from echelon.sync.server.settings import Settings

    torch.set_num_threads(1)

    def sgd(tensors: Sequence[torch.Tensor], decay: Sequence[bool]) -> torch.optim.Optimizer:
        return torch.optim.SGD(tensors, lr=1e-3, fused=True)

    settings = Settings(snapshot_every=10**9)
    keys = derive_keys(SECRET)
    where = "tcp://127.0.0.1:0" if encrypted else f"ipc://{folder}/server0"
    config = ServerConfig("server0", 0, settings, keys, "tcp://127.0.0.1:9", where, "none", 0,
                          Path(folder), sgd)  # fmt: skip
    server = Server(config)
    address.send(server.listener.address)
    server.run()


def _start(target: Any, *args: Any) -> tuple[Any, str]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(there, *args), daemon=True)
    process.start()
    assert here.poll(120), "the server did not start"
    return process, here.recv()


class Echo:
    """Sends frames, waits until all came back."""

    def __init__(self, encrypted: bool) -> None:
        import zmq

        from echelon.sync.server.identity import derive_keys
        from echelon.sync.server.sockets import Limits, connect

        self.process, address = _start(_echo_server, encrypted)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if encrypted:
            self.socket = connect(context, derive_keys(SECRET), address, Limits(1 << 30), b"echo")
        else:
            self.socket = context.socket(zmq.DEALER)
            self.socket.connect(address)

    def once(self, n_bytes: int) -> None:
        """Send and take back `n_bytes`."""
        frames = [bytearray(min(CHUNK, n_bytes - start)) for start in range(0, n_bytes, CHUNK)]
        for frame in frames:
            self.socket.send_multipart([b"header", frame], copy=False)
        for _ in frames:
            assert self.socket.poll(60_000), "no echo"
            self.socket.recv_multipart(copy=False)


class PushPull:
    """Pushes a gradient to a server and pulls the values, as a worker does."""

    def __init__(self, n_bytes: int, encrypted: bool) -> None:
        import torch

        from echelon.sync.server.client import Client, ClientConfig
        from echelon.sync.server.identity import derive_keys
        from echelon.sync.server.protocol import Kind
        from echelon.sync.server.table import Cut, ParameterInfo, cut_table

        self.process, address = _start(_ps_server, tempfile.mkdtemp(prefix="bench-"), encrypted)
        keys = derive_keys(SECRET)
        self.table = cut_table([ParameterInfo("w", (n_bytes // 4,), True)], Cut(1, CHUNK))
        self.client = Client(ClientConfig("worker0", keys, "tcp://127.0.0.1:9", "none", 0, 0, 60.0, keeps=False))
        self.client.set_table(self.table)
        entry = {"address": address, "life": 1, "ready": True, "standby": ""}
        self.client.talk.do(lambda: self.client.talk.members({"0": entry}))
        self.client.talk.thread.start()
        self.client.wait_for_servers(1)
        states = {k.index: {"value": torch.zeros(k.numel), "version": 0} for k in self.table.keys}
        self.client.put(self.table, states, 60.0)
        self.gradient = torch.ones(n_bytes // 4)
        self.kind, self.task = Kind.PUSH, 0
        for key in self.table.keys:
            self.client.value(key, 0)

    def once(self, n_bytes: int) -> None:
        """Push all keys, wait for all values."""
        from echelon.sync.server.client import PushInfo

        self.task += 1
        info = PushInfo(self.task, self.task, 0, 1, 1, 1, 1e-3)
        for key in self.table.keys:
            self.client.push(key, self.gradient[key.start : key.stop], info)
        for key in self.table.keys:
            self.client.value(key, 0)


def goodput(side: Echo | PushPull, n_bytes: int, seconds: float) -> float:
    """Return bytes per second, both directions, over a window."""
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        side.once(n_bytes)
        rounds += 1
    return 2 * n_bytes * rounds / (time.perf_counter() - began)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="*", default=[1, 5, 50], help="MB")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print("| MB | push+pull MB/s | echo MB/s | ratio | encrypted: push+pull | echo | ratio |")
    print("|---|---|---|---|---|---|---|")
    for size in given.sizes:
        n_bytes = int(size * 1e6) // 4 * 4
        sides: dict[str, Echo | PushPull] = {
            "ps": PushPull(n_bytes, encrypted=False), "echo": Echo(encrypted=False),
            "encrypted ps": PushPull(n_bytes, encrypted=True), "encrypted echo": Echo(encrypted=True),
        }  # fmt: skip
        seen: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():
            side.once(n_bytes)
        for _ in range(given.windows):
            for name, side in sides.items():
                seen[name].append(goodput(side, n_bytes, given.seconds))
        for side in sides.values():
            side.process.kill()
        ps, echo, hidden, curve = (statistics.median(seen[name]) / 1e6 for name in sides)
        print(f"| {size:g} | {ps:.0f} | {echo:.0f} | {ps / echo:.2f} | {hidden:.0f} | {curve:.0f} | "
              f"{hidden / curve:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
